"""The choice: forced > stored plan > shipped plan > nearest measured neighbour > torch.eager."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import background, capture_watch, registry, stores, study
from .op import EAGER, Candidate, Config, Launcher, Op
from .plans import Key, Plan
from .policies import Policy

LOG = logging.getLogger("tensorlogic")
CLEAR_WIN = 0.8  # a guess must promise this much before it replaces eager unmeasured
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


@dataclass(frozen=True)
class Decision:
    """What an eager call and a captured call take, before anything is bound."""

    eager: tuple[str, Config]
    captured: tuple[str, Config]
    source: str


PLAIN = Decision((EAGER, {}), (EAGER, {}), "eager")


def decide(op: Op, key: Key, device: torch.device, policy: Policy) -> Decision:
    """Which candidates serve this key under this policy; binds and measures nothing."""
    forced = policy.forced(op.name)
    if forced is not None:
        return _forced(op, key, forced)
    if policy.lockfile is not None:
        plan = stores.lockfile(policy.lockfile).get(key)
        return _planned(plan, "lockfile", one=True) if plan and _current(op, plan) else PLAIN
    store = stores.current(device)

    def valid(plan: Plan) -> bool:
        return _current(op, plan)

    plan = store.get(key, valid)
    if plan is not None:
        return _planned(plan, "plan", one=policy.deterministic)
    if policy.deterministic:
        return PLAIN
    near = store.nearest(key, lambda id: id in op.candidates and op.candidates[id].trusted, valid)
    if near is not None and _serves(op, key, near):
        return _planned(near, f"neighbour {near.key.text}", one=False)
    return _guessed(op, key)


def _guessed(op: Op, key: Key) -> Decision:
    """The cost models' choice: a trusted candidate that expects to win clearly, else eager."""
    expected = [
        (c.guess(key), c)
        for c in op.candidates.values()
        if c.trusted
        and c.id != EAGER
        and c.available(key.device) is None
        and c.supports(key) is None
    ]
    if not expected:
        return PLAIN
    best, candidate = min(expected, key=lambda pair: pair[0])
    if best > CLEAR_WIN:
        return PLAIN
    pick = (candidate.id, candidate.configs(key)[0])
    return Decision(pick, pick, "cost model")


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
    registry.ready(device.type)
    capturing = capture_watch.capturing(device)
    if policy.observer is not None and not compiled:
        policy.observer(op, key, device)
    if (
        policy.tune == "full"
        and not policy.reproducible
        and not capturing
        and policy.forced(op.name) is None
    ):
        stores.measured(op, key, device)
    decision = decide(op, key, device, policy)
    if compiled or capturing:
        choice = _bind(op, key, device, decision.captured, decision.source, whole)
        choice.cacheable = False
        return choice
    choice = _bind(op, key, device, decision.eager, decision.source, whole)
    if device.type == "cuda" and decision.captured != decision.eager:
        choice.captured = _bind(op, key, device, decision.captured, decision.source, whole)
    if (
        policy.tune == "auto"
        and decision.source not in ("plan", "forced")
        and not policy.reproducible
        and policy.observer is None
    ):
        choice.launch = background.watch(op, key, device, choice.launch)
    return choice


def _forced(op: Op, key: Key, id: str) -> Decision:
    candidate = op.candidates.get(id)
    if candidate is None:
        return Decision((EAGER, {}), (EAGER, {}), f"forced: {op.name} has no {id}")
    reason = candidate.available(key.device) or candidate.supports(key)
    if reason is not None:
        say_once(
            op,
            id,
            f"tensorlogic: {id} was forced, but cannot run {key.text}: {reason}; torch.eager serves it",
        )
        return Decision((EAGER, {}), (EAGER, {}), f"forced, but {reason}")
    pick = (id, candidate.configs(key)[0])
    return Decision(pick, pick, "forced")


def _planned(plan: Plan, source: str, one: bool) -> Decision:
    eager = (plan.eager, plan.eager_config)
    return Decision(eager, eager if one else (plan.captured, plan.captured_config), source)


def _current(op: Op, plan: Plan) -> bool:
    return plan.valid({id: c.source for id, c in op.candidates.items()})


def _serves(op: Op, key: Key, near: Plan) -> bool:
    """A neighbour's winners may serve this key: trusted here, able, and never refused on it."""
    for id in {near.eager, near.captured}:
        candidate = op.candidates[id]
        if id != EAGER and (
            not candidate.trusted or candidate.available(key.device) or candidate.supports(key)
        ):
            return False
    return True


def _bind(
    op: Op,
    key: Key,
    device: torch.device,
    pick: tuple[str, Config],
    source: str,
    whole: bool = True,
) -> Choice:
    id, config = pick
    candidate = op.candidates[id]
    if id != EAGER:
        try:
            launch = candidate.bind(key, config, device)
            if not candidate.trusted and source.startswith("forced"):
                _must_be_right(op, key, device, candidate, launch)
            return Choice(candidate, config, launch, source)
        except (torch.OutOfMemoryError, *study.BIND_ERRORS) as problem:
            if isinstance(problem, Refused):
                raise
            say_once(
                op,
                id,
                f"tensorlogic: {id} failed on {key.text} ({type(problem).__name__}: {problem}); torch.eager serves it",
            )
    eager = op.candidates[EAGER]
    launch = eager.bind(key, {}, device) if whole else op.plain(key, device)
    return Choice(eager, {}, launch, source)


class Refused(RuntimeError):
    """A forced third-party candidate gave a wrong result on this key."""


def _must_be_right(
    op: Op, key: Key, device: torch.device, candidate: Candidate, launch: Launcher
) -> None:
    """A candidate from elsewhere is checked on the very key before a caller sees its result, forced or not."""
    with torch.no_grad():
        verdict = study.Checker(op, key, device).check(launch)
    if not verdict:
        raise Refused(
            f"{op.name}: candidate {candidate.id} was forced, but is refused on {key.text}: {verdict.reason}"
        )


def say_once(op: Op, id: str, text: str) -> None:
    if (op.name, id) not in _SAID:
        _SAID.add((op.name, id))
        LOG.warning(text)
