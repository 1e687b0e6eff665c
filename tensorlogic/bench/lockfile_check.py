"""Is a lockfile still good here: every locked candidate present, right, and not slower than the best by more than a margin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..autotune import tuner
from ..core import tolerance
from ..core.candidate import BIND_ERRORS, EAGER, Launcher
from ..core.op import OPS, Op
from ..dispatch import candidate_loading
from ..measure import isolation, timer, verification
from ..plans import environment, lockfile
from ..plans.plan import Plan
from ..plans.store import PlanStore
from .terminal.progress import Tick

GOOD = "good"


@dataclass(frozen=True)
class Finding:
    """What became of one locked plan: "good", "missing", "wrong", "slow" or "elsewhere"."""

    key: str
    candidate: str
    state: str
    detail: str = ""

    @property
    def bad(self) -> bool:
        """True when the lockfile does not hold here."""
        return self.state in ("missing", "wrong", "slow")


def verify(path: Path, margin: float, tick: Tick = lambda done, total, text: None) -> list[Finding]:
    """Check every plan of a lockfile on this machine; ValueError and OSError say why a file is unusable."""
    locked = list(lockfile.load_lockfile(path).plans())
    found = []
    for done, plan in enumerate(locked):
        tick(done, len(locked), plan.key.op)
        found.append(_finding(plan, margin))
    tick(len(locked), len(locked), "done")
    return found


def _finding(plan: Plan, margin: float) -> Finding:
    def said(state: str, detail: str = "") -> Finding:
        return Finding(plan.key.text, plan.eager, state, detail)

    kind = plan.key.device
    gpu = kind == "cuda" and torch.cuda.is_available()
    if not (gpu or kind == "cpu" or (kind == "mps" and torch.backends.mps.is_available())):
        return said("elsewhere", f"there is no {kind} device here")
    device = torch.device(kind, torch.cuda.current_device()) if gpu else torch.device(kind)
    candidate_loading.ready(kind)
    op = OPS.get(plan.key.op)
    reason = f"there is no op {plan.key.op}" if op is None else _absent(op, plan)
    if op is None or reason is not None:
        return said("missing", reason or "")
    with isolation.preserved(device, op):
        return said(*_standing(op, plan, device, margin))


@torch.no_grad()
def _standing(op: Op, plan: Plan, device: torch.device, margin: float) -> tuple[str, str]:
    """Right, with the locked configuration? And how far from the best that can be had today?"""
    try:
        checker = verification.Checker(op, plan.key, device)
    except (torch.OutOfMemoryError, *BIND_ERRORS) as problem:
        return "wrong", f"the key cannot be measured here: {type(problem).__name__}: {problem}"
    try:
        candidate = op.candidates[plan.eager]
        launch = candidate.bind(plan.key, plan.eager_config, device)
        verdict = tolerance.Verdict(None, 0.0)
        if plan.eager != EAGER:
            verdict = checker.check(launch, coarse=candidate.coarse(plan.key))
    except (torch.OutOfMemoryError, *BIND_ERRORS) as problem:
        return "wrong", f"failed: {type(problem).__name__}: {problem}"
    if not verdict:
        return "wrong", verdict.reason or ""
    fresh = tuner.KeyTuner(op, plan.key, device, environment.environment(device)).run()
    if fresh is None or (fresh.eager, fresh.eager_config) == (plan.eager, plan.eager_config):
        return GOOD, ""
    best = op.candidates[fresh.eager].bind(plan.key, fresh.eager_config, device)
    ratio, low = _paired(launch, best, [s.fresh(op) for s in checker.cold()], device)
    name = " ".join([fresh.eager, *(f"{k}={v}" for k, v in fresh.eager_config.items())])
    if low <= 1 + margin:
        return GOOD, ""
    return "slow", f"{ratio:.2f} times {name}, at least {low:.2f} with 95 % confidence"


def _paired(
    locked: Launcher, best: Launcher, sets: list[list[Any]], device: torch.device
) -> tuple[float, float]:
    """Locked over best side by side, on the clock that a caller of the best one waits for: ratio, lower end of its interval."""
    calls: dict[str, list[timer.Call]] = {
        name: [partial(launch, *args) for args in sets]
        for name, launch in (("locked", locked), ("best", best))
    }
    timers = [timer.device_samples(calls, device, 0.5)]
    if device.type == "cuda":
        timers.append(timer.host_samples(calls, device, 0.3, rounds=15))
    ratio, low, _ = max(timers, key=lambda s: s.median("best")).ratio("locked", "best")
    return ratio, low


def lasting(plans: Iterable[Plan]) -> list[Plan]:
    """Those whose candidate is still what was measured; the others would not pass `verify`."""
    found = []
    for plan in plans:
        candidate_loading.ready(plan.key.device)
        op = OPS.get(plan.key.op)
        if op is not None and _absent(op, plan) is None:
            found.append(plan)
    return found


def _absent(op: Op, plan: Plan) -> str | None:
    """Why the locked candidate cannot be had as it was locked."""
    candidate = op.candidates.get(plan.eager)
    if candidate is None:
        return f"{op.name} has no candidate {plan.eager} here"
    reason = candidate.available(plan.key.device) or candidate.supports(plan.key)
    if reason is not None:
        return reason
    locked = [e.source for e in plan.evidence if e.candidate == plan.eager]
    if candidate.source not in locked:
        return "its source has changed since it was locked, so torch.eager would serve instead"
    return None


def adopt(
    path: Path, store: PlanStore, device: torch.device, anywhere: bool
) -> tuple[int, str | None]:
    """Put a lockfile's plans for this device into the store; how many, and why not when none may be taken."""
    lock = lockfile.load_lockfile(path)
    kind = device.type
    theirs = lock.environments.get(kind)
    if theirs is None:
        known = ", ".join(lock.environments) or "nothing"
        return 0, f"it holds no plans for {kind}, only for {known}"
    if theirs != environment.environment(device) and not anywhere:
        about = f"{theirs.device}, PyTorch {theirs.torch}, driver {theirs.driver}"
        return 0, f"it was measured elsewhere ({about})"
    taken = [p for p in lock.plans() if p.key.device == kind]
    for plan in taken:
        store.put(plan)
    if not store.flush():
        raise OSError(f"the plan store {store.path} cannot be written")
    return len(taken), None
