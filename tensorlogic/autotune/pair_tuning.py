"""Forward and backward of one op behind one another: whether the two that are fastest alone are the fastest pair.

Kernels of ours begin while those of ours before them end; behind and before PyTorch's they wait. So two that tie with PyTorch's one by
one may win together, and one of ours beside one of PyTorch's may lose (`timer.vendor_gap_filler`).
"""

from __future__ import annotations

import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.candidate import BIND_ERRORS, EAGER, Failed, Launcher
from ..core.key import Key
from ..core.op import Op
from ..measure import isolation, timer
from ..measure.verification import InputSet
from ..plans import open_stores
from ..plans.plan import Evidence, Plan
from ..system import compile_pool

LOG = logging.getLogger("tensorlogic")
# of the time of the one chosen alone: who may win in company
NEAR = 1.1
MOST = 3  # of each direction
LONG_US = 1000.0  # of both: what overlaps is microseconds
BACKWARD = "_backward"
Met = tuple[Op, Key, torch.device]
Pair = tuple[Evidence, Evidence]


def pairs(keys: Iterable[Met]) -> list[tuple[Met, Met]]:
    """Forward and backward keys of the same call, among those met: one op's, and all that both name is the same."""
    forwards: dict[tuple[str, str], list[Met]] = defaultdict(list)
    backwards: list[Met] = []
    for met in keys:
        op, key, device = met
        if key.direction == "forward":
            forwards[str(device), op.name].append(met)
        elif op.name.endswith(BACKWARD):
            backwards.append(met)
    found: list[tuple[Met, Met]] = []
    for met in backwards:
        of = forwards[str(met[2]), met[0].name.removesuffix(BACKWARD)]
        times = Counter(f[1].text for f, _ in found)
        mine = [f for f in of if alike(f[1], met[1])]
        # several may differ in what backward does not read, a bias say: each has its turn
        if mine:
            found.append((min(mine, key=lambda f: times[f[1].text]), met))
    return found


def alike(forward: Key, backward: Key) -> bool:
    """Whether all tensors and flags that both keys have are the same, a tensor among them."""
    common = [name for name in forward.names if name in backward.names]
    flags, others = dict(forward.flags), dict(backward.flags)
    return (
        bool(common)
        and all(forward.spec(name) == backward.spec(name) for name in common)
        and all(flags[name] == others[name] for name in flags.keys() & others.keys())
    )


def settle(
    forward: Met, backward: Met, free: Container[str] | None = None, budget_s: float = 0.3
) -> list[Plan]:
    """Time the pairs of those that came near in each direction, and have CUDA graphs take the fastest, if it wins by the tolerance.

    Keys whose texts are not in `free` (if that is given) keep what is chosen for them: another pair has been settled with it. Returns
    the plans that it changed, which are in the store.
    """
    op, key, device = forward
    store = open_stores.current(device)
    plans = [store.get(met[1]) for met in (forward, backward)]
    if plans[0] is None or plans[1] is None:
        return []
    met = zip((forward, backward), plans, strict=True)
    near = [_near(m, p, free is None or p.key.text in free) for m, p in met if p is not None]
    candidates = _pairs_of(*near)
    if len(candidates) < 2 or sum(e.device_us for e in candidates[0]) > LONG_US:
        return []
    try:
        with isolation.preserved(device, op), torch.no_grad():
            best = _fastest(candidates, forward, backward, budget_s)
    except BIND_ERRORS as problem:
        LOG.info("tensorlogic: %s and its gradient were not timed together: %s", key.text, problem)
        return []
    changed = []
    for plan, e, other in zip(plans, best, ("gradient", "forward pass"), strict=True):
        assert plan is not None
        if best is not candidates[0] and e.candidate != plan.captured:
            changed.append(_captured(plan, e, f"captured with its {other}, the fastest pair; "))
            store.put(changed[-1])
    return changed


def _captured(plan: Plan, e: Evidence, note: str) -> Plan:
    """The plan with another candidate for CUDA graphs, whose evidence says why: how a reason ends is what plans are known by."""
    evidence = [replace(o, reason=note + o.reason) if o is e else o for o in plan.evidence]
    return replace(plan, captured=e.candidate, captured_config=dict(e.config), evidence=evidence)


def _near(met: Met, plan: Plan, free: bool) -> list[Evidence]:
    """Who came near the one chosen, it first; PyTorch's own in any case. Nobody where its kernels have not been compiled."""
    measured = {e.candidate: e for e in plan.evidence if e.status == "measured"}
    chosen = measured.pop(plan.captured, None)
    if chosen is None or not _ready(met, chosen):
        return []
    rest = sorted(measured.values(), key=lambda e: e.device_us) if free else []
    near = [e for e in rest if e.device_us <= NEAR * chosen.device_us and _ready(met, e)]
    found = [chosen, *near][:MOST]
    return found + [e for e in rest if e.candidate == EAGER and e not in found]


def _ready(met: Met, e: Evidence) -> bool:
    """Whether the candidate is as it was measured, and nothing of it has to be compiled."""
    op, key, device = met
    candidate = op.candidates.get(e.candidate)
    if candidate is None or candidate.source != e.source:
        return False
    return compile_pool.there(candidate.jobs(key, e.config, device))


def _pairs_of(firsts: Sequence[Evidence], seconds: Sequence[Evidence]) -> list[Pair]:
    """The pairs that there can be, those chosen alone first: PyTorch's forward is recorded by PyTorch, whose backward it brings."""
    every = ((f, s) for f in firsts for s in seconds)
    return [p for p in every if p[0].candidate != EAGER or p[1].candidate == EAGER]


def _fastest(pairs: Sequence[Pair], forward: Met, backward: Met, budget_s: float) -> Pair:
    """The first, unless another one beats it by the tolerance, and beside it alone once more."""
    device = forward[2]
    launchers: dict[tuple[bool, str], Launcher] = {}
    for pair in pairs:
        for met, e in zip((forward, backward), pair, strict=True):
            place = met is forward, e.candidate
            launchers[place] = launchers.get(place) or _bound(met, e)
    # two sets: a step finds in the cache what the one before it has left there
    sets = [[InputSet(*met, seed).fresh(met[0]) for seed in (0, 1)] for met in (forward, backward)]
    calls: dict[str, list[Callable[[], object]]] = {}
    for i, (f, s) in enumerate(pairs):
        steps = (launchers[True, f.candidate], launchers[False, s.candidate])
        both = functools.partial(_both, steps)
        calls[str(i)] = [functools.partial(both, given) for given in zip(*sets, strict=True)]
    best, names = "0", list(calls)
    for share_s in (budget_s, budget_s / 2):
        times = timer.device_samples({n: calls[n] for n in names}, device, share_s)
        best = min(names, key=times.quiet)
        if times.quiet(best) * (1 + timer.TOLERANCE[device.type]) > times.quiet("0"):
            return pairs[0]
        names = ["0", best]
    return pairs[int(best)]


def _bound(met: Met, e: Evidence) -> Launcher:
    op, key, device = met
    if e.candidate == EAGER:
        return op.plain(key, device)
    return op.candidates[e.candidate].bind(key, e.config, device)


def _both(steps: tuple[Launcher, Launcher], given: tuple[list[Any], list[Any]]) -> None:
    for launch, args in zip(steps, given, strict=True):
        if launch(*args) is None:
            raise Failed("one declined the key it was bound for")
