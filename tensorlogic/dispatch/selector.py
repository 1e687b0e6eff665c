"""The choice: forced > stored plan > shipped plan > nearest measured neighbour > torch.eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..autotune import background_tuning, measure_key
from ..core.candidate import BIND_ERRORS, EAGER, Candidate, Config, Launcher, Outputs
from ..core.dtypes import DTYPES
from ..core.key import Key
from ..core.op import DATA_CHOOSERS, OPS, Op
from ..core.policy import Policy
from ..measure import isolation, verification
from ..plans import open_stores
from ..plans.environment import environment
from ..plans.plan import Plan
from ..plans.store import PlanView
from ..system import capture_state, compile_pool
from . import candidate_loading, nearest_plans, self_test
from .decision import FIXED, NO_NEW_COMPILES, PLAIN, Choice, Decision, say_once
from .nearest_plans import Lent, Pick

CHECKED = ("plan", "lockfile", "fixed plan", "forced")  # on this very key, or not to be asked
CLEAR_WIN = 0.95  # what a guess must promise to replace eager unmeasured
Values = Sequence[Any]  # of all parameters, in schema order

open_stores.ON_FORGET.append(FIXED.clear)
open_stores.ON_TUNE.append(FIXED.clear)

BY_DATA = Candidate("adaptive.budget", bind=lambda key, config, device: lambda *_: None)


def decide(op: Op, key: Key, device: torch.device, policy: Policy) -> Decision:
    """Which candidates serve this key under this policy; binds and measures nothing."""
    forced = policy.forced(op.name)
    if forced is not None:
        return _forced(op, key, forced)
    if key.precision in DATA_CHOOSERS:
        return _within(op, key, device, policy)
    if policy.lockfile is not None:
        return _fixed(op, key, open_stores.lockfile(policy.lockfile), "lockfile")
    store = open_stores.current(device)
    if policy.deterministic:
        return _lasting(op, key, device, store)

    valid = functools.partial(_current, op)
    plan = store.get(key, valid)
    if plan is not None:
        captured = plan.captured, plan.captured_config
        return Decision((plan.eager, plan.eager_config), captured, "plan")
    lent = _lent(op, key, device, store, valid)
    if lent is not None:
        found = Decision(*lent)
        picks = (found.eager, found.captured)
        if all(_is_compiled(op.candidates[id], key, config, device) for id, config in picks):
            return found
    found = _guessed(op, key, device)
    return (
        replace(found, source=NO_NEW_COMPILES) if compile_pool.new_compiles_forbidden() else found
    )


def _lent(
    op: Op, key: Key, device: torch.device, store: PlanView, valid: Callable[[Plan], bool]
) -> Lent | None:
    """What neighbours lend; a model's layers ask for the same again and again, so it is found once until plans or candidates change.

    What may be otherwise in a moment is not kept: candidates that failed, and rates that could not be timed meanwhile.
    """
    memo, candidates = store.memo(), op.known
    if memo.setdefault(id(op), candidates) != candidates:
        memo.clear()
        memo[id(op)] = candidates
    known: Any = memo.get(key.text, memo)  # other threads may empty it
    if known is not memo:
        return cast(Lent | None, known)

    @functools.cache  # most plans of an op have one of few winners
    def serves(id: str) -> bool:
        return _serves(op, key, id, store)

    def lends(plan: Plan) -> bool:
        return valid(plan) and serves(plan.eager) and serves(plan.captured)

    failures, calm = nearest_plans.failures, capture_state.can_call_now(device)
    near = store.neighbours(key, op.candidates.__contains__, lends, normal=op.normal)
    found = nearest_plans.lent(op, key, near, environment(device).versions())
    if calm and nearest_plans.failures == failures and memo.get(id(op)) == candidates:
        memo[key.text] = found
    return found


def _is_compiled(candidate: Candidate, key: Key, config: Config, device: torch.device) -> bool:
    """Whether a candidate that nobody has measured on this key may serve it: in a hurry only what need not be compiled first."""
    if candidate.id == EAGER or not compile_pool.new_compiles_forbidden():
        return True
    try:
        return compile_pool.there(candidate.jobs(key, config, device))
    except BIND_ERRORS:  # it will fail by name where it is bound
        return True


def _within(op: Op, key: Key, device: torch.device, policy: Policy) -> Decision:
    """What would serve data like those met last; captured calls, whose data nobody looks at, take float64."""
    if policy.reproducible or policy.precision is None or policy.precision.rtol is None:
        return PLAIN
    rtol = policy.precision.rtol
    pick = DATA_CHOOSERS[key.precision].expected(op, key, device, rtol)
    if pick is None:
        return PLAIN
    return Decision((pick[0].id, pick[1]), PLAIN.captured, f"errors on data met before, {rtol:g}")


def _lasting(op: Op, key: Key, device: torch.device, store: PlanView) -> Decision:
    """The fixed plan that calls of these sizes first met: what other calls measure meanwhile changes no bits."""
    where = (str(device), _twins(op, unaligned(key))[0].text)
    # of what other threads decide or forget meanwhile the first stays
    found = FIXED.get(where)
    return found or FIXED.setdefault(where, _fixed(op, key, store, "fixed plan"))


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
    known = {(e.candidate, e.source, e.status) for p in found if p for e in p.evidence}
    refused = (candidate.id, candidate.source, "refused") in known
    unfit = any(candidate.unfit(unaligned(twin)) for twin in twins)
    if refused or unfit or not candidate.deterministic:
        return PLAIN
    pick = (plan.eager, plan.eager_config)
    return Decision(pick, pick, source)


def _measured(op: Op, key: Key, view: PlanView) -> Plan | None:
    """The plan of a key, however its tensors were aligned when it was measured: at 16 bytes, or at the least."""

    valid = functools.partial(_current, op)
    return view.get(_aligned(key, 16), valid) or view.get(unaligned(key), valid)


def unaligned(key: Key) -> Key:
    """The key in the weakest class of alignment, which every tensor of its dtypes meets."""
    return _aligned(key, 1)


def _aligned(key: Key, least: int) -> Key:
    size = {name: max(least, dtype.itemsize) for name, dtype in DTYPES.items()}
    specs = [t and replace(t, align=min(16, size.get(t.dtype, least))) for t in key.tensors]
    return replace(key, tensors=tuple(specs))


def _guessed(op: Op, key: Key, device: torch.device) -> Decision:
    """The cost models' choice: a trusted candidate that expects to win clearly, else eager."""
    able = [c for c in op.known if c.trusted and c.id != EAGER and c.unfit(key) is None]
    expected = [(c.guess(key), c) for c in able]
    for best, candidate in sorted(expected, key=lambda pair: pair[0]):
        if best > CLEAR_WIN:
            break
        pick = (candidate.id, candidate.configs(key)[0])
        if _is_compiled(candidate, key, pick[1], device):
            return Decision(pick, pick, "cost model")
    return PLAIN


def key_of(op: Op, args: Sequence[Any], policy: Policy, recording: bool = False) -> Key:
    """The key of op-level arguments (`save` included) under a policy."""
    saving = recording or (op.gradient is not None and bool(args[-1]))
    direction = "forward" if saving else "backward" if op.internal else "inference"
    precision = None if op.listed else policy.precision
    return op.key(args, direction, "default" if precision is None else precision.mode)


def choose(
    op: Op, key: Key, args: Values, policy: Policy, *, compiled: bool = False, whole: bool = True
) -> Choice:
    """Decide, bind, and under `tune="full"` or an observer measure; failures fall back to eager and are said once.

    Without `whole`, torch.eager is bound as users write it: what backward needs is left to PyTorch's autograd.
    """
    device = next(a.device for a in args if isinstance(a, Tensor))
    candidate_loading.ready(device.type, op)
    capturing, forced = capture_state.capturing(device), policy.forced(op.name)
    if policy.observer is not None:
        policy.observer(op, key, device)
    if policy.reproducible:
        key = unaligned(key)
    elif forced is None and policy.tune == "full" and capture_state.can_tune_now(device):
        measure_key.measured(op, key, device)
    decision = decide(op, key, device, policy)
    if _adaptive(key, policy) and not capturing:
        return _adapting(op, key, device, policy, compiled)
    if compiled or capturing:
        choice = _bind(op, key, device, decision.captured, decision.source, whole)
        choice.cacheable = False
        return choice
    choice = _bind(op, key, device, decision.eager, decision.source, whole)
    choice.cacheable = choice.cacheable and not compile_pool.new_compiles_forbidden()
    if device.type == "cuda" and decision.captured != decision.eager:
        choice.captured = _bind(op, key, device, decision.captured, decision.source, whole)
    watched = policy.tune == "auto" and policy.observer is None and not policy.reproducible
    if watched and decision.source != "plan" and forced is None:
        watch = background_tuning.watch(op, key, device)
        if watch is not None:
            choice.launch = watch.wrap(choice.launch)
            choice.direct = choice.direct and watch.direct(choice.direct)
    return choice


def choose_recorded(op: Op, key: Key, args: Sequence[Any], policy: Policy) -> Choice:
    """The choice for a call whose gradients are recorded, forward and backward as one where that is measured to be faster.

    Who watches must meet the backward ops, too; else what backward needs of torch.eager is left to PyTorch's autograd.
    """
    choice = choose(op, key, args, policy, whole=policy.observer is not None)
    joint = _joint(op, key, args, policy)
    if joint is None:
        return choice
    light = op.gradient is not None and op.gradient.light
    return replace(joint, apart=choice if light else None)


def _joint(op: Op, key: Key, args: Sequence[Any], policy: Policy) -> Choice | None:
    """A recorded call's forward part where forward and backward as one are measured faster; never where one candidate must serve all."""
    found = None if policy.reproducible or policy.observer is not None else op.joined(key)
    if found is None:
        return None
    asked = policy.forced(found[0].name) is not None
    if not asked and any(policy.forced(name) is not None for name in found[0].stands_for):
        return None
    choice = choose(*found, args, policy)
    if choice.candidate.parts is None:
        return None
    device = next(a.device for a in args if isinstance(a, Tensor))
    launch, settle = choice.candidate.parts(found[1], choice.config, device)
    return replace(choice, launch=launch, captured=None, direct=None, settle=settle)


def _adaptive(key: Key, policy: Policy) -> bool:
    """Whether the caller's data decide; nothing that must repeat from run to run lets them."""
    forced = policy.forced(key.op) is not None
    return key.precision in DATA_CHOOSERS and not forced and not policy.reproducible


def _adapting(op: Op, key: Key, device: torch.device, policy: Policy, compiled: bool) -> Choice:
    """Among the candidates in the order of their times, the first that keeps the error budget, whatever data come."""
    assert policy.precision is not None and policy.precision.rtol is not None
    chooser, rtol = DATA_CHOOSERS[key.precision], policy.precision.rtol
    launch, direct = chooser.launcher(op, key, device, rtol)
    watched = policy.tune == "auto" and policy.observer is None and not compiled
    if watched and open_stores.current(device).get(key, lambda plan: _current(op, plan)) is None:
        watch = background_tuning.watch(op, key, device)
        if watch is not None:
            launch, direct = watch.wrap(launch), direct and watch.direct(direct)
    return Choice(BY_DATA, {}, launch, "errors on the caller's data", direct=direct)


def _forced(op: Op, key: Key, id: str) -> Decision:
    candidate = op.candidates.get(id)
    if candidate is None:
        candidate_loading.ready(key.device)  # other ops' candidates, too
        if not any(id in other.candidates for other in OPS.values()):
            has = f"candidates of {op.name} on {key.device} are {', '.join(op.candidates)}"
            said = (
                f"tensorlogic: {id} was forced, but no op has it here; {has}; torch.eager serves it"
            )
            say_once(op, id, said)
        return replace(PLAIN, source=f"forced: {op.name} has no {id}")
    reason = candidate.unfit(key)
    config: Config = {}
    if reason is None:
        try:
            config = next(iter(candidate.configs(key)))
        except BIND_ERRORS as problem:
            reason = f"it lists no configuration: {type(problem).__name__}: {problem}"
    if reason is not None:
        said = f"tensorlogic: {id} was forced, but cannot run {key.text}: {reason}; torch.eager serves it"
        say_once(op, id, said)
        return replace(PLAIN, source=f"forced, but {reason}")
    return Decision((id, config), (id, config), "forced")


def _current(op: Op, plan: Plan) -> bool:
    here = [op.candidates[id] for id in {plan.eager, plan.captured} if id in op.candidates]
    return plan.valid({c.id: c.source for c in here})


def _serves(op: Op, key: Key, id: str, store: PlanView) -> bool:
    """A neighbour's winner may serve this key: trusted here, able, and never refused on it."""
    candidate = op.candidates[id]
    able = candidate.trusted and not candidate.unfit(key)
    return id == EAGER or (able and store.refused(key, id, candidate.source) is None)


def _bind(
    op: Op, key: Key, device: torch.device, pick: Pick, source: str, whole: bool = True
) -> Choice:
    id, planned = pick
    candidate = op.candidates[id]
    for config in _tries(candidate, key, planned, source) if id != EAGER else ():
        try:
            launch = candidate.bind(key, config, device)
            if candidate.vouched and source not in CHECKED:
                reason = self_test.self_test_refusal(op, key, candidate, config, device)
                if reason is not None:  # nobody has measured it here: wrong on small tensors
                    raise Refused(reason)
            if not candidate.trusted:
                if source != "plan":  # measured here on this very key
                    _must_be_right(op, key, device, candidate, launch)
                launch = _as_aligned(op, key, launch)
            return Choice(candidate, config, launch, source)
        except self_test.CannotTestNow:
            launch = op.candidates[EAGER].bind(key, {}, device)
            return Choice(op.candidates[EAGER], {}, launch, source, cacheable=False)
        except BIND_ERRORS as problem:
            if isinstance(problem, Refused) and source == "forced":
                raise
            failure = f"{type(problem).__name__}: {problem}"
    if id != EAGER:
        said = f"tensorlogic: {id} failed on {key.text} ({failure}); torch.eager serves it"
        say_once(op, id, said)
    eager = op.candidates[EAGER]
    launch = eager.bind(key, {}, device) if whole else op.plain(key, device)
    return Choice(eager, {}, launch, source, direct=op.direct(key))


def _tries(candidate: Candidate, key: Key, config: Config, source: str) -> Iterator[Config]:
    """The planned configuration, and, where another key's measurement chose it, this key's own first one."""
    yield config
    if source.startswith("neighbour"):
        yield from (own for own in candidate.configs(key)[:1] if own != config)


class Refused(RuntimeError):
    """A candidate gave a wrong result where it is checked before it serves."""


def _must_be_right(
    op: Op, key: Key, device: torch.device, candidate: Candidate, launch: Launcher
) -> None:
    """A candidate from elsewhere is checked on the very key before a caller sees its result, forced or not."""
    if not capture_state.can_measure_now(device):
        raise Refused(
            f"{op.name}: candidate {candidate.id} was asked for, but cannot be checked on {key.text} "
            f"while a graph is captured or traced: call it once before"
        )
    with isolation.preserved(device, op), torch.no_grad():
        checker = verification.Checker(op, key, device)
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
