"""In which order the ways of an adaptive key are tried: by the time that each is expected to take, what looking at its data takes included."""

from __future__ import annotations

import math

import torch

from ..core.candidate import EAGER, Candidate, Config
from ..core.key import Key
from ..core.op import Op
from ..plans import open_stores
from ..plans.plan import Plan
from .error_statistics import UNITS
from .number_formats import form_of
from .product_sites import eager_us, watchable

# what looking at a call's data takes: learned as it is done
GUARD_US = {"cpu": 100.0, "cuda": 120.0}
# what looking takes where the device itself judges, and nobody waits
WATCH_US = 10.0
# budgets that float64 keeps for any float32 data but exact opposites
RESOLVED = 1e-5
# times the cancellation that was measured, for which float64 is not looked at in every call
UNLIKELY = 1e4
REST = 15  # but in one of so many and one
# a form that brings so many times the budget on normal inputs is not tried
HOPELESS = 16.0


def order(op: Op, key: Key, device: torch.device, rtol: float) -> list[tuple[Candidate, Config]]:
    """What may serve an adaptive key, least time first, as measured or else expected; torch.eager, in float64, at the latest.

    Those that are looked at while they serve pay for it: float64 seldom, or not at all.
    """
    plan = open_stores.current(device).get(key)
    eager = op.candidates[EAGER]
    guard = WATCH_US if watchable(key) else GUARD_US.get(device.type, 100.0)
    ranked: list[tuple[float, float, Candidate, Config]] = []
    for candidate in op.known:
        if candidate is eager or candidate.unfit(key) is not None:
            continue
        if UNITS[form_of(candidate.id)] > HOPELESS * rtol:
            continue
        us, alone, config = _expected(op, candidate, key, plan)
        looks = guard * _looks(candidate, key, rtol)
        ranked.append((us + looks, alone + looks, candidate, config))
    limit = _expected(op, eager, key, plan)[0] + guard * _looks(eager, key, rtol)
    quick = sorted((r for r in ranked if r[0] <= limit), key=lambda r: r[:2])
    return [(candidate, config) for *_, candidate, config in quick] + [(eager, {})]


def _looks(candidate: Candidate, key: Key, rtol: float) -> float:
    """The share of calls whose data are looked at while a way serves ordinary ones: of float64 where results are as wide, and the
    budget leaves it room, few."""
    if form_of(candidate.id) != "f64":
        return 1.0
    if unguarded(key, rtol):
        return 0.0
    return 1 / (REST + 1) if wide(key) and UNITS["f64"] * UNLIKELY < rtol else 1.0


def wide(key: Key) -> bool:
    """Whether results have float64's digits."""
    return any(t is not None and t.dtype in ("f64", "c128") for t in key.tensors)


def unguarded(key: Key, rtol: float) -> bool:
    """Whether float64 goes unwatched: looking would make the caller wait for a GPU, and its inputs have so few digits that no sum
    of them can spoil the budget (a result below float32's range can)."""
    if key.device == "cpu" or watchable(key):
        return False
    dtypes = {t.dtype for t in key.tensors if t is not None}
    # whose results may be too small for it
    narrow = dtypes <= {"f16", "bf16", "f32", "c64"} and dtypes != {"f16"}
    return narrow and rtol >= RESOLVED


def _expected(
    op: Op, candidate: Candidate, key: Key, plan: Plan | None
) -> tuple[float, float, Config]:
    """Microseconds of a call, those of the device alone, and configuration, by the plan's evidence where it has any; infinite where
    it was refused."""
    if plan is not None:
        for e in plan.evidence:
            if (e.candidate, e.source) == (candidate.id, candidate.source):
                if e.status == "refused":
                    return math.inf, math.inf, {}
                return plan.waited_us(e), e.device_us, e.config
    share = 1.0 if candidate.id == EAGER else candidate.guess(key)
    us = share * eager_us(key, op.flops(key))
    return us, us, candidate.configs(key)[0]
