"""The choice: forced > stored plan > shipped plan > nearest measured neighbour > torch.eager."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from . import adapting, background, capture_watch, compiling, registry, stores, study, vouching
from .numerics import DTYPES
from .op import EAGER, OPS, Candidate, Config, Launcher, Op, Outputs
from .plans import REACH, Evidence, Key, Plan, PlanView, environment
from .policies import Policy

LOG = logging.getLogger("tensorlogic")
CHECKED = ("plan", "lockfile", "fixed plan", "forced")  # on this very key, or not to be asked
AT_HAND = "cost model, without what must be compiled first"
CLEAR_WIN = 0.95  # a guess must promise this much before it replaces eager unmeasured
ANOTHER_WAY = (
    16.0  # between configurations for each word that differs, more than numbers and switches do
)
DERIVED = {"PART"}  # numbers that follow from what else a configuration and its key say
ASKED = 8  # neighbours at most
NOT_MUCH = 1.0  # farther than the nearest, in doublings
SLACK = 0.1  # of its time, that a neighbour's tiles may lose for each doubling between the sizes
_SAID: set[tuple[str, str]] = set()


@dataclass
class Choice:
    """A candidate bound to a key, and where the decision came from."""

    candidate: Candidate
    config: Config
    launch: Launcher
    source: str
    cacheable: bool = True
    captured: Choice | None = None  # what calls under graph capture take instead
    direct: Callable[..., Tensor] | None = (
        None  # the launcher without its tuple, where PyTorch has it so
    )


@dataclass(frozen=True)
class Decision:
    """What an eager call and a captured call take, before anything is bound."""

    eager: tuple[str, Config]
    captured: tuple[str, Config]
    source: str


FIXED: dict[tuple[str, str], Decision] = {}  # what deterministic calls of this process met
stores.ON_FORGET.append(FIXED.clear)

BY_DATA = Candidate("adaptive.budget", bind=lambda key, config, device: lambda *_: None)
PLAIN = Decision((EAGER, {}), (EAGER, {}), "eager")


def decide(op: Op, key: Key, device: torch.device, policy: Policy) -> Decision:
    """Which candidates serve this key under this policy; binds and measures nothing."""
    forced = policy.forced(op.name)
    if forced is not None:
        return _forced(op, key, forced)
    if key.precision == "adaptive":
        return _within(op, key, device, policy)
    if policy.lockfile is not None:
        return _fixed(op, key, stores.lockfile(policy.lockfile), "lockfile")
    store = stores.current(device)
    if policy.deterministic:
        return _lasting(op, key, device, store)

    def valid(plan: Plan) -> bool:
        return _current(op, plan)

    plan = store.get(key, valid)
    if plan is not None:
        return _planned(plan, "plan")

    @cache  # most plans of an op have one of few winners
    def serves(id: str) -> bool:
        return _serves(op, key, id, store)

    def lends(plan: Plan) -> bool:
        return valid(plan) and serves(plan.eager) and serves(plan.captured)

    near = store.neighbours(key, op.candidates.__contains__, lends, normal=op.normal)
    found = _lent(op, key, islice(near, ASKED), environment(device).versions())
    if found is not None:
        picks = (found.eager, found.captured)
        if all(_at_hand(op.candidates[id], key, config, device) for id, config in picks):
            return found
    found = _guessed(op, key, device)
    return replace(found, source=AT_HAND) if compiling.in_a_hurry() else found


def _lent(op: Op, key: Key, near: Iterable[Plan], here: Mapping[str, str]) -> Decision | None:
    """What the nearest plan that says anything lends this key. Where its kernel goes another way at these sizes, as rows do that no
    longer fit into registers, a plan not much farther, laid out and as even as the nearest, comes first, if what it lends goes its way.
    """
    nearest: Decision | None = None
    own, kind, within = op.normal(key), math.inf, math.inf
    for plan in near:
        where = _elsewhere(plan, here) if plan.key == key else ""
        found = _borrowed(op, key, plan, here, f"neighbour {plan.key.text}{where}")
        theirs = op.normal(plan.key)
        unlike, apart = own.laid_otherwise(theirs) + own.uneven(theirs), own.distance(theirs)
        if found is None or unlike > kind or apart > within:
            continue
        if nearest and found.captured[0] == EAGER:
            continue
        if not _another_way(plan, found):
            return found
        if nearest is None:
            nearest, kind, within = found, unlike, apart + NOT_MUCH
    return nearest


def _another_way(plan: Plan, found: Decision) -> bool:
    """Whether a candidate that a plan lends goes another way than the one it was measured on."""
    pairs = (
        ((plan.eager, plan.eager_config), found.eager),
        ((plan.captured, plan.captured_config), found.captured),
    )
    return any(
        id == other != EAGER
        and any(isinstance(word, str) and own.get(name) != word for name, word in config.items())
        for (id, config), (other, own) in pairs
    )


def _at_hand(candidate: Candidate, key: Key, config: Config, device: torch.device) -> bool:
    """Whether a candidate that nobody has measured on this key may serve it: in a hurry only what need not be compiled first."""
    if candidate.id == EAGER or not compiling.in_a_hurry():
        return True
    try:
        return compiling.there(candidate.jobs(key, config, device))
    except study.BIND_ERRORS:  # it will fail by name where it is bound
        return True


def _elsewhere(plan: Plan, here: Mapping[str, str]) -> str:
    """Where a plan of the very key was measured that is not this machine's."""
    version = plan.versions.get("torch", here["torch"])
    return " on a GPU of the same chip" if version == here["torch"] else f" under PyTorch {version}"


def _alike(plan: Plan, here: Mapping[str, str]) -> bool:
    """Whether the software beneath a plan is today's, whatever the driver: libraries number their algorithms as they like."""
    return {**plan.versions, "driver": ""} == {**here, "driver": ""}


def _borrowed(
    op: Op, key: Key, near: Plan, here: Mapping[str, str], source: str
) -> Decision | None:
    """What won on a neighbour, where its gain there outweighs what its configuration may cost at these sizes; else torch.eager, or None
    where it is too far away for that to say anything.

    Tiles of products are the choosiest: on an H200 those of 384 x 384 x 1536, a tenth faster than PyTorch's product there, take 1.5
    times its time at 640 x 512 x 2048; behind an epilogue that PyTorch runs apart they win all the same.
    """
    apart = op.normal(key).distance(op.normal(near.key))
    times = {e.candidate: e for e in near.evidence if e.status == "measured"}
    usual = times.get(EAGER)

    def sure(id: str, config: Config, took: Callable[[Evidence], float]) -> tuple[str, Config]:
        found = times.get(id)
        if id == EAGER:
            return id, config
        own = closest(op.candidates[id], key, config, same=apart == 0.0 and _alike(near, here))
        if usual is None or found is None or not took(usual):
            return id, own
        slack = SLACK if "products" in config else SLACK / 5
        likely = took(found) / took(usual) * (1.0 + slack * apart)
        return (id, own) if likely < 1.0 else (EAGER, {})

    eager = sure(near.eager, near.eager_config, lambda e: max(e.device_us, e.host_us))
    captured = sure(near.captured, near.captured_config, lambda e: e.device_us)
    if apart > REACH and eager[0] == captured[0] == EAGER:
        return None
    return Decision(eager, captured, source)


def closest(candidate: Candidate, key: Key, config: Config, same: bool = False) -> Config:
    """Of the configurations that the key would try itself the closest to one that another key's measurement chose, its best guess
    where none is like it; `same`: sizes and versions are, so that a library's ranks are, too."""
    try:
        own = list(candidate.configs(key))
    except study.BIND_ERRORS as problem:
        LOG.debug("tensorlogic: %s lists nothing for %s: %s", candidate.id, key.text, problem)
        own = []
    if not own or (same and dict(config) in [dict(c) for c in own]):
        return config
    nearest = min(own, key=lambda c: _apart(c, config) + _fuller(c, config))
    return nearest if _apart(nearest, config) < ANOTHER_WAY else own[0]


def _within(op: Op, key: Key, device: torch.device, policy: Policy) -> Decision:
    """What would serve data like those met last; captured calls, whose data nobody looks at, take float64."""
    if policy.reproducible or policy.precision is None or policy.precision.rtol is None:
        return PLAIN
    rtol = policy.precision.rtol
    pick = adapting.expected(op, key, device, rtol)
    if pick is None:
        return PLAIN
    return Decision((pick[0].id, pick[1]), PLAIN.captured, f"errors on data met before, {rtol:g}")


def _lasting(op: Op, key: Key, device: torch.device, store: PlanView) -> Decision:
    """The fixed plan that calls of these sizes first met: what other calls measure meanwhile changes no bits."""
    where = (str(device), _twins(op, unaligned(key))[0].text)
    if where not in FIXED:
        FIXED[where] = _fixed(op, key, store, "fixed plan")
    return FIXED[where]


def _twins(op: Op, key: Key) -> list[Key]:
    """The key without and with gradients recorded."""
    if op.gradient is None:
        return [key]
    ways = (("inference", False), ("forward", True))
    return [replace(key, direction=d, flags=(*key.flags[:-1], ("save", s))) for d, s in ways]


def _fixed(op: Op, key: Key, view: PlanView, source: str) -> Decision:
    """One candidate for every call of these sizes: eager or captured, recorded or not, however aligned; torch.eager in doubt."""
    twins = _twins(op, key)
    found = [_measured(op, twin, view) for twin in twins]
    plan = next((p for p in found if p is not None), None)
    if plan is None:
        return PLAIN
    candidate = op.candidates[plan.eager]
    refused = any(
        (e.candidate, e.source, e.status) == (candidate.id, candidate.source, "refused")
        for p in found
        for e in (p.evidence if p else ())
    )
    if refused or not candidate.deterministic:
        return PLAIN
    if any(candidate.unfit(unaligned(twin)) for twin in twins):
        return PLAIN
    pick = (plan.eager, plan.eager_config)
    return Decision(pick, pick, source)


def _measured(op: Op, key: Key, view: PlanView) -> Plan | None:
    """The plan of a key, however its tensors were aligned when it was measured: at 16 bytes, or at the least."""

    def valid(plan: Plan) -> bool:
        return _current(op, plan)

    return view.get(_aligned(key, 16), valid) or view.get(unaligned(key), valid)


def unaligned(key: Key) -> Key:
    """The key in the weakest class of alignment, which every tensor of its dtypes meets."""
    return _aligned(key, 1)


def _itemsize(dtype: str) -> int:
    return DTYPES[dtype].itemsize if dtype in DTYPES else 1


def _aligned(key: Key, least: int) -> Key:
    specs = [
        spec and replace(spec, align=min(16, max(least, _itemsize(spec.dtype))))
        for spec in key.tensors
    ]
    return replace(key, tensors=tuple(specs))


def _guessed(op: Op, key: Key, device: torch.device) -> Decision:
    """The cost models' choice: a trusted candidate that expects to win clearly, else eager."""
    expected = [
        (c.guess(key), c)
        for c in op.candidates.values()
        if c.trusted and c.id != EAGER and c.unfit(key) is None
    ]
    for best, candidate in sorted(expected, key=lambda pair: pair[0]):
        if best > CLEAR_WIN:
            break
        pick = (candidate.id, candidate.configs(key)[0])
        if _at_hand(candidate, key, pick[1], device):
            return Decision(pick, pick, "cost model")
    return PLAIN


def choose(
    op: Op,
    key: Key,
    args: Sequence[Any],
    policy: Policy,
    *,
    compiled: bool = False,
    whole: bool = True,
) -> Choice:
    """Decide, bind, and under `tune="full"` or an observer measure; failures fall back to eager and are said once.

    Without `whole`, torch.eager is bound as users write it: what backward needs is left to PyTorch's autograd.
    """
    device = next(a.device for a in args if isinstance(a, Tensor))
    registry.ready(device.type, op)
    capturing = capture_watch.capturing(device)
    if policy.observer is not None:
        policy.observer(op, key, device)
    if policy.reproducible:
        key = unaligned(key)
    elif policy.tune == "full" and policy.forced(op.name) is None:
        _measure(op, key, device)
    decision = decide(op, key, device, policy)
    if _adaptive(key, policy) and not capturing:
        return _adapting(op, key, device, policy, compiled)
    if compiled or capturing:
        choice = _bind(op, key, device, decision.captured, decision.source, whole)
        choice.cacheable = False
        return choice
    choice = _bind(op, key, device, decision.eager, decision.source, whole)
    choice.cacheable = choice.cacheable and not compiling.in_a_hurry()
    if device.type == "cuda" and decision.captured != decision.eager:
        choice.captured = _bind(op, key, device, decision.captured, decision.source, whole)
    if (
        policy.tune == "auto"
        and decision.source != "plan"
        and policy.forced(op.name) is None
        and not policy.reproducible
        and policy.observer is None
    ):
        watch = background.watch(op, key, device)
        if watch is not None:
            choice.launch = watch.wrap(choice.launch)
            choice.direct = choice.direct and watch.direct(choice.direct)
    return choice


def joint(
    op: Op, key: Key, args: Sequence[Any], policy: Policy
) -> tuple[Choice, Callable[..., Tensor]] | None:
    """How a recorded call is served where forward and backward as one are measured to be faster than the two chosen apart: the
    choice, whose launcher is the forward part, and what settles its gradient. Never where all calls must take one candidate."""
    found = None if policy.reproducible or policy.observer is not None else op.joined(key)
    if found is None:
        return None
    choice = choose(*found, args, policy)
    if choice.candidate.parts is None:
        return None
    device = next(a.device for a in args if isinstance(a, Tensor))
    launch, settle = choice.candidate.parts(found[1], choice.config, device)
    return replace(choice, launch=launch, captured=None, direct=None), settle


def _measure(op: Op, key: Key, device: torch.device) -> None:
    if capture_watch.measurable(device):
        stores.measured(op, key, device)


def _adaptive(key: Key, policy: Policy) -> bool:
    """Whether the caller's data decide; nothing that must repeat from run to run lets them."""
    forced = policy.forced(key.op) is not None
    return key.precision == "adaptive" and not forced and not policy.reproducible


def _adapting(op: Op, key: Key, device: torch.device, policy: Policy, compiled: bool) -> Choice:
    """Among the candidates in the order of their times, the first that keeps the error budget, whatever data come."""
    assert policy.precision is not None and policy.precision.rtol is not None
    adaptive = adapting.Adaptive(op, key, device, policy.precision.rtol)
    launch: Launcher = adaptive
    direct = adaptive.direct()
    watched = policy.tune == "auto" and policy.observer is None and not compiled
    if watched and stores.current(device).get(key, lambda plan: _current(op, plan)) is None:
        watch = background.watch(op, key, device)
        if watch is not None:
            launch, direct = watch.wrap(launch), direct and watch.direct(direct)
    return Choice(BY_DATA, {}, launch, "errors on the caller's data", direct=direct)


def _forced(op: Op, key: Key, id: str) -> Decision:
    candidate = op.candidates.get(id)
    if candidate is None:
        registry.ready(key.device)  # other ops' candidates, too
        if not any(id in other.candidates for other in OPS.values()):
            say_once(
                op,
                id,
                f"tensorlogic: {id} was forced, but no op has it here; candidates of {op.name} on {key.device} are "
                f"{', '.join(op.candidates)}; torch.eager serves it",
            )
        return Decision((EAGER, {}), (EAGER, {}), f"forced: {op.name} has no {id}")
    reason = candidate.unfit(key)
    config: Config = {}
    if reason is None:
        try:
            config = next(iter(candidate.configs(key)))
        except study.BIND_ERRORS as problem:
            reason = f"it lists no configuration: {type(problem).__name__}: {problem}"
    if reason is not None:
        say_once(
            op,
            id,
            f"tensorlogic: {id} was forced, but cannot run {key.text}: {reason}; torch.eager serves it",
        )
        return Decision((EAGER, {}), (EAGER, {}), f"forced, but {reason}")
    return Decision((id, config), (id, config), "forced")


def _planned(plan: Plan, source: str) -> Decision:
    return Decision((plan.eager, plan.eager_config), (plan.captured, plan.captured_config), source)


def _current(op: Op, plan: Plan) -> bool:
    return plan.valid({id: c.source for id, c in op.candidates.items()})


def _serves(op: Op, key: Key, id: str, store: PlanView) -> bool:
    """A neighbour's winner may serve this key: trusted here, able, and never refused on it."""
    candidate = op.candidates[id]
    return id == EAGER or (
        candidate.trusted
        and not candidate.unfit(key)
        and store.refused(key, id, candidate.source) is None
    )


def _bind(
    op: Op,
    key: Key,
    device: torch.device,
    pick: tuple[str, Config],
    source: str,
    whole: bool = True,
) -> Choice:
    id, planned = pick
    candidate = op.candidates[id]
    for config in _tries(candidate, key, planned, source) if id != EAGER else ():
        try:
            launch = candidate.bind(key, config, device)
            if candidate.vouched and source not in CHECKED:
                _must_be_vouched(op, key, device, candidate, config)
            if not candidate.trusted:
                if source != "plan":  # measured here on this very key
                    _must_be_right(op, key, device, candidate, launch)
                launch = _as_aligned(op, key, launch)
            return Choice(candidate, config, launch, source)
        except vouching.Later:
            launch = op.candidates[EAGER].bind(key, {}, device)
            return Choice(op.candidates[EAGER], {}, launch, source, cacheable=False)
        except study.BIND_ERRORS as problem:
            if isinstance(problem, Refused) and source == "forced":
                raise
            failure = f"{type(problem).__name__}: {problem}"
    if id != EAGER:
        say_once(
            op,
            id,
            f"tensorlogic: {id} failed on {key.text} ({failure}); torch.eager serves it",
        )
    eager = op.candidates[EAGER]
    launch = eager.bind(key, {}, device) if whole else op.plain(key, device)
    return Choice(eager, {}, launch, source, direct=op.direct(key))


def _tries(candidate: Candidate, key: Key, config: Config, source: str) -> Iterator[Config]:
    """The planned configuration, and, where another key's measurement chose it, this key's own first one."""
    yield config
    if source.startswith("neighbour"):
        yield from (own for own in candidate.configs(key)[:1] if own != config)


def _apart(config: Any, other: Any) -> float:
    """How far two configurations are apart: in log2 of the numbers, 1 for a switch or what one of them leaves out, and more than any
    of these where words differ."""
    if isinstance(config, dict) and isinstance(other, dict):
        # a rank is an order of the key's own, whose first is its best guess wherever another key's is
        names = {*config, *other} - DERIVED
        known = [(config.get(n), 0 if n == "rank" else other.get(n)) for n in names]
        return sum(_apart(a, b) for a, b in known)
    if isinstance(config, (list, tuple)) and isinstance(other, (list, tuple)):
        rest = abs(len(config) - len(other)) * ANOTHER_WAY
        return rest + sum(_apart(a, b) for a, b in zip(config, other, strict=False))
    if config == other:
        return 0.0
    kinds = {type(config), type(other)}
    if not kinds <= {int, float, bool, type(None)}:
        return ANOTHER_WAY
    if bool in kinds or type(None) in kinds or min(config, other) < 0:
        return 1.0
    return abs(math.log2((config + 1) / (other + 1)))


def _fuller(config: Any, other: Any) -> float:
    """How far apart what the tiles of two configurations hold is, in log2 of elements: where sizes cut one side, another makes up for it."""
    if isinstance(config, (list, tuple)) and isinstance(other, (list, tuple)):
        return sum(_fuller(a, b) for a, b in zip(config, other, strict=False))
    if not (isinstance(config, dict) and isinstance(other, dict)):
        return 0.0
    within = sum(_fuller(config[n], other[n]) for n in config.keys() & other.keys())
    held = [
        sum(
            math.log2(max(n, 1))
            for name, n in c.items()
            if name.startswith("BLOCK") and isinstance(n, int)
        )
        for c in (config, other)
    ]
    return within + abs(held[0] - held[1])


class Refused(RuntimeError):
    """A candidate gave a wrong result where it is checked before it serves."""


def _must_be_vouched(
    op: Op, key: Key, device: torch.device, candidate: Candidate, config: Config
) -> None:
    """A native kernel that nobody has measured on this key was right on small tensors of its kind, on this machine."""
    reason = vouching.refusal(op, key, candidate, config, device)
    if reason is not None:
        raise Refused(reason)


def _must_be_right(
    op: Op, key: Key, device: torch.device, candidate: Candidate, launch: Launcher
) -> None:
    """A candidate from elsewhere is checked on the very key before a caller sees its result, forced or not."""
    if not capture_watch.quiet(device):
        raise Refused(
            f"{op.name}: candidate {candidate.id} was asked for, but cannot be checked on {key.text} "
            f"while a graph is captured or traced: call it once before"
        )
    with stores.preserved(device, op), torch.no_grad():
        checker = study.Checker(op, key, device)
        verdict = checker.check(launch, coarse=candidate.coarse(key))
    if not verdict:
        raise Refused(
            f"{op.name}: candidate {candidate.id} was asked for, but is refused on {key.text}: {verdict.reason}"
        )


def _as_aligned(op: Op, key: Key, launch: Launcher) -> Launcher:
    """A third-party launcher that declines tensors less aligned than those it was checked on."""
    aligns = [key.spec(p.name) if p.is_tensor else None for p in op.dynamic]
    masks = [(i, spec.align - 1) for i, spec in enumerate(aligns) if spec is not None]

    def run(*dynamic: Any) -> Outputs | None:
        if any(dynamic[i].data_ptr() & mask for i, mask in masks):
            return None
        return launch(*dynamic)

    return run


def say_once(op: Op, id: str, text: str) -> None:
    if (op.name, id) not in _SAID:
        _SAID.add((op.name, id))
        LOG.warning(text)
