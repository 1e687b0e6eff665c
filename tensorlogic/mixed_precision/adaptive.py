"""The choice under an error budget: the fastest candidate whose error on the caller's data keeps it, watched while it serves."""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..core.candidate import EAGER, Candidate, Config, Launcher, Outputs
from ..core.candidate_errors import BIND_ERRORS
from ..core.key import Key
from ..core.numeric_mode import PrecisionWarning
from ..core.op import DATA_CHOOSERS, DataChooser, Op
from ..core.precision_policy import ON_LEAVE
from ..kernels.mixed_precision import data_statistics
from ..kernels.mixed_precision.data_statistics import Statistics
from ..native import call_extension
from ..plans import open_stores
from . import error_statistics
from .candidate_order import GUARD_US, REST, UNLIKELY, order, unguarded, wide
from .error_statistics import Known
from .number_formats import form_of
from .product_sites import Place, sited, watchable

LOG = logging.getLogger("tensorlogic")
# how much worse rows that were not looked at may be than those that were
MARGIN = 1.2
# errors follow cancellation: as measured up to the former, and farther within the latter
NEARBY, BEYOND = (2.0, 3.0)
MOST_KNOWN = 64  # errors kept for one key
LAST: list[str] = []  # the candidates that served last, for those who watch
_KNOWN: dict[tuple[str, str], list[Known]] = {}


@dataclass
class Held:
    """The candidate in service, what holds for its data (the error and the statistics it was measured under), and what judges the
    next: in one object, so that a call beside another thread's choice meets all of one."""

    candidate: Candidate
    config: Config
    launch: Launcher
    error: float
    statistics: Statistics
    rtol: float
    margin: float
    drift: float = data_statistics.DRIFT  # binary exponents by which data may become smaller
    watch: Any = None  # where the device judges, and mends what it must
    places: Sequence[Place] = ()  # of the products that it judges
    quick: Launcher | None = None  # the candidate and its judge in one
    fused: Any = None  # the same on a CPU, which may leave the judging to `covers`
    rest: int = 0  # calls that float64 serves before it is looked at again

    @property
    def missed(self) -> bool:
        """Whether it may be beyond the budget."""
        return self.error * self.margin > self.rtol

    @cached_property
    def exact(self) -> bool:
        """Whether no way is more accurate."""
        return form_of(self.candidate.id) == "f64"

    @cached_property
    def unbroken(self) -> bool:
        """Whether no way is more accurate and only data that cancel thousands of times more could leave the budget."""
        return self.exact and self.error * self.margin * UNLIKELY < self.rtol

    @property
    def steady(self) -> bool:
        """Whether bounds tell of the data for which its error holds."""
        then = self.statistics
        return not self.missed and then.usable and then.cancels > 0 and not then.blank

    @property
    def room(self) -> float:
        """How many times more the data may cancel: in proportion to the error where it is little, less where it is more."""
        room = self.rtol / (self.margin * self.error) if self.error > 0 else math.inf
        return min(room, max(NEARBY, room / BEYOND))

    @property
    def limits(self) -> tuple[float, ...]:
        """The same as numbers, for `matmul_watched`: cancellation from and to, peaks from and to, and the least norm of a result."""
        then, room = self.statistics, self.room
        highest = math.inf if then.high > 1000 else 2.0 ** (then.high + data_statistics.DRIFT)
        lowest = 2.0 ** (then.low - self.drift)
        faint = data_statistics.FAINT[torch.float32]
        return (then.cancels / 64, then.cancels * room, lowest, highest, faint)

    def covers(self, now: Statistics) -> bool:
        """Whether the measured error still tells of data with these statistics."""
        then = self.statistics
        if not (now.usable and then.usable):
            return False
        grown = now.cancels / then.cancels if then.cancels > 0 else math.inf
        if then.cancels == now.cancels == 0.0:
            grown = 1.0
        room = self.room
        # already beyond the budget: what gets better may be served better
        if room < 1:
            return 0.8 <= grown <= 1.1
        near = now.low >= then.low - self.drift and now.high <= then.high + data_statistics.DRIFT
        return 1 / 64 <= grown <= room and near and now.blank == 0


class Adaptive:
    """The launcher of an adaptive key: runs what is held, looks at the data, and chooses again when they have changed."""

    def __init__(self, op: Op, key: Key, device: torch.device, rtol: float) -> None:
        self.op, self.key, self.device, self.rtol = op, key, device, rtol
        self.order = order(op, key, device, rtol)
        self.certain = unguarded(key, rtol)
        self.held: Held | None = None
        self.wide = wide(key)
        # the same in C where that can be, and asks here where it cannot
        self.guarded: Any = None

    def __call__(self, *dynamic: Any) -> Outputs | None:
        held = self.held
        watch = None if held is None else held.watch
        if held is not None and held.rest > 0:
            held.rest -= 1
            if (outs := held.launch(*dynamic)) is not None:
                _note(held)
                return outs
        elif held is not None and self.wide and held.unbroken:
            held.rest = REST
        if held is not None and watch is not None:
            passed = watch.passed()
            if not passed and held.quick is not None and (outs := held.quick(*dynamic)) is not None:
                watch.begun()
                _OPEN.adaptives.add(self)
                _note(held)
                return outs
            outs = None if passed else held.launch(*dynamic)
            if outs is not None and (products := _watched(held, dynamic, outs)) is not None:
                watch.over(products)
                _OPEN.adaptives.add(self)
                _note(held)
                return outs
        elif held is not None:
            fused, known = held.fused, False
            if fused is None:
                outs = held.launch(*dynamic)
            else:
                outs, known = fused(*dynamic)
            known = known or (self.certain and held.exact)
            if self._kept(held, dynamic, outs, known):
                return outs
        outs = self._choose(dynamic)
        assert self.held is not None
        _note(self.held)
        self.hear(watch)
        return outs

    def _kept(self, held: Held, dynamic: Sequence[Any], outs: Outputs | None, known: bool) -> bool:
        """Whether what was held when these outputs were computed serves them."""
        if outs is None or not (known or held.covers(self._look(dynamic, outs))):
            return False
        if held.missed:
            self._warn(held)
        _note(held)
        return True

    def direct(self) -> Any:
        """The same past Python's layers, (*dynamic) -> the output; None where calls are not compiled or another device judges them."""
        module = None if self.device.type != "cpu" or self.op.internal else call_extension.module()
        if module is None:
            return None
        if self.guarded is None:
            self.guarded = module.Guarded(self._asked)
        return self.guarded

    def _asked(self, held: Held | None, out: Tensor | None, *dynamic: Any) -> Any:
        """One output, of what C has computed with what was held then, and is not certain of; or of what it leaves to us."""
        if held is not None and out is not None and self._kept(held, dynamic, (out,), False):
            return out
        outs = self(*dynamic) if out is None else self._choose(dynamic)
        if out is not None:
            assert self.held is not None
            _note(self.held)
        assert outs is not None
        return outs[0]

    def hear(self, watch: Any) -> None:
        """Say what a GPU has noted of products since, now that it has come to them."""
        if watch is not None and watch.beyond():
            warnings.warn(
                f"precision: a product of {self.key.text} may be beyond rtol={self.rtol:g}, although float64 computed it: its result "
                f"is near the end of its dtype's range, or its sums cancel too far",
                PrecisionWarning,
                stacklevel=4,
            )

    def _parts(self, dynamic: Sequence[Any]) -> Any:
        assert self.op.measure is not None
        return self.op.measure(*self.op.full(self.key, dynamic))

    @torch.no_grad()
    def _look(self, dynamic: Sequence[Any], outs: Outputs) -> Statistics:
        begin = time.perf_counter()
        found = error_statistics.statistics(self._parts(dynamic), outs)
        if self.device.type == "cpu":  # elsewhere it waits for the product, too
            taken, usual = (time.perf_counter() - begin) * 1e6, GUARD_US["cpu"]
            # one interruption teaches little
            GUARD_US["cpu"] += 0.05 * (min(taken, 4 * usual) - usual)
        return found

    def _choose(self, dynamic: Sequence[Any]) -> Outputs:
        """Try the candidates, fastest first, until one keeps the budget; the best one, with a warning, where none does."""
        best: tuple[Held, Outputs] | None = None
        for candidate, config in self.order:
            tried = self._try(candidate, config, dynamic)
            if tried is None:
                continue
            if best is None or tried[0].error < best[0].error:
                best = tried
            if not tried[0].missed:
                break
        # torch.eager is always tried last, and its failure is the caller's
        assert best is not None
        held, outs = best
        held.watch = self._watch(held, dynamic, outs)
        held.fused = self._fuse(held, dynamic, outs)
        held.rest = REST if self.wide and held.unbroken else 0
        self.held = held
        if self.guarded is not None:
            way = held.fused.way if held.fused is not None else None
            self.guarded.way = None if way is None else (held, *way, LAST, held.candidate.id)
        if held.missed:
            self._warn(held)
        return outs

    def _watch(self, held: Held, dynamic: Sequence[Any], outs: Outputs) -> Any:
        """What has the device judge the next calls; None where the host must."""
        if not watchable(self.key) or (self.certain and held.exact) or not held.steady:
            return None
        if (found := sited(self.op, self.key, dynamic, outs)) is None:
            return None
        products, held.places = found
        from ..kernels.mixed_precision.guard_recompute import Seen, Watch, works
        from . import guarded_cuda  # needs Triton, as looking does

        if not works(self.device):
            return None
        seen = [Seen.of(*product) for product in products]
        watch = Watch(held.statistics, held.room, seen, self.device, self.rtol, held.drift)
        way = (held.candidate.id, held.config)
        about = (products, held.places, outs, watch)
        held.quick = guarded_cuda.launcher(self.op, self.key, self.device, way, *about)
        return watch

    def _fuse(self, held: Held, dynamic: Sequence[Any], outs: Outputs) -> Any:
        """What computes and looks at the next calls in one; None where that is two things."""
        if self.device.type != "cpu" or not held.steady:
            return None
        if (found := sited(self.op, self.key, dynamic, outs)) is None:
            return None
        from . import guarded_cpu

        return guarded_cpu.launcher(held.candidate.id, dynamic, *found, outs, held.limits)

    def _warn(self, held: Held) -> None:
        times = held.error / self.rtol
        beyond = f"{times:.3g} times the budget" if times > 1 else "less than the margin below it"
        warnings.warn(
            f"precision: no way to compute {self.key.text} keeps rtol={self.rtol:g} on these data; the most accurate, "
            f"{held.candidate.id}, has a relative error of {held.error:.2e}, {beyond}",
            PrecisionWarning,
            stacklevel=4,
        )

    def _try(
        self, candidate: Candidate, config: Config, dynamic: Sequence[Any]
    ) -> tuple[Held, Outputs] | None:
        """Run one candidate on the caller's data and see how far it is off, unless that is known of such data."""
        try:
            launch = candidate.bind(self.key, config, self.device)
            outs = launch(*dynamic)
        except BIND_ERRORS as problem:
            if candidate.id == EAGER:
                raise
            LOG.info("tensorlogic: %s failed on %s: %s", candidate.id, self.key.text, problem)
            return None
        if outs is None:
            return None
        with torch.no_grad():
            parts = self._parts(dynamic)
            now = error_statistics.statistics(parts, outs)
            if not now.usable and candidate.id != EAGER:
                return None
            drift = error_statistics.drift(outs)
            found = self._remembered(candidate, now) if drift == data_statistics.DRIFT else None
            if found is not None:
                error = found.error * max(1.0, now.cancels / max(found.statistics.cancels, 1e-30))
                now = replace(now, cancels=min(now.cancels, found.statistics.cancels))
            else:
                error, cancels = error_statistics.error(parts, outs)
                # what float64, which it was measured against, may be off; and no luck with the
                # digits
                if now.usable:
                    ordinary = error_statistics.likely(form_of(candidate.id), parts, outs, cancels)
                    error = max(error, 2.0**-53 * max(1.0, cancels), ordinary)
                    now = replace(now, cancels=min(now.cancels, scatter(outs) * cancels))
                remember(self.key, self.device, Known(candidate.id, candidate.source, error, now))
        margin = margin_of(outs)
        return Held(candidate, config, launch, error, now, self.rtol, margin, drift), outs

    def _remembered(self, candidate: Candidate, now: Statistics) -> Known | None:
        for known in reversed(recall(self.key, self.device)):
            same = (known.candidate, known.source) == (candidate.id, candidate.source)
            if same and now.like(known.statistics):
                return known
        return None


class _Open(threading.local):
    """Of one thread: whose products a GPU may not have judged yet."""

    def __init__(self) -> None:
        self.adaptives: set[Adaptive] = set()


_OPEN = _Open()


def settle() -> None:
    """Wait until GPUs have judged what this thread had computed within budgets, and warn of what is beyond them."""
    while _OPEN.adaptives:
        adaptive = _OPEN.adaptives.pop()
        if adaptive.held is not None and (watch := adaptive.held.watch) is not None:
            watch.wait()
            adaptive.hear(watch)


ON_LEAVE.append(settle)


def _watched(held: Held, dynamic: Sequence[Any], outs: Outputs) -> list[Any] | None:
    """(left, right, out) of every product that the device judges, as arguments and outputs lie."""
    found = []
    for place in held.places:
        out = outs[place.out]
        if out is None or not out.is_contiguous():
            return None
        found.append((dynamic[place.left], dynamic[place.right], out))
    return found


def _note(held: Held) -> None:
    LAST[:] = [held.candidate.id]


def margin_of(outs: Outputs) -> float:
    """How much worse rows that were not looked at may be: short ones scatter more."""
    sides = [n for out in outs if out is not None for n in out.shape[-2:]]
    return MARGIN * (1 + 4 / math.sqrt(max(min(sides, default=1), 1)))


def scatter(outs: Outputs) -> float:
    """How far the worst of all sketches of dense rows overstates cancellation; what more they make of sparse ones is not counted."""
    lines = max((sum(out.shape[-2:]) for out in outs if out is not None), default=1)
    return 1 + math.sqrt(2 * math.log(max(lines, 1)) / data_statistics.SKETCH)


def expected(
    op: Op, key: Key, device: torch.device, rtol: float
) -> tuple[Candidate, Config] | None:
    """The fastest candidate that kept the budget on the last data on which its error was measured."""
    last = {known.candidate: known.error for known in recall(key, device)}
    for candidate, config in order(op, key, device, rtol):
        if last.get(candidate.id, math.inf) * MARGIN <= rtol:
            return candidate, config
    return None


def launcher(op: Op, key: Key, device: torch.device, rtol: float) -> tuple[Launcher, Any]:
    """What chooses in every call, and the same past Python's layers."""
    adaptive = Adaptive(op, key, device, rtol)
    return adaptive, adaptive.direct()


DATA_CHOOSERS["adaptive"] = DataChooser(expected, launcher)


def recall(key: Key, device: torch.device) -> list[Known]:
    """Errors that were measured on callers' data of this key, here or, where the plan is stored, in other processes."""
    return _KNOWN.setdefault((device.type, key.text), _stored(key, device))


def _stored(key: Key, device: torch.device) -> list[Known]:
    plan = open_stores.current(device).get(key)
    return [Known.from_json(r) for r in plan.accuracy] if plan is not None else []


def remember(key: Key, device: torch.device, known: Known) -> None:
    """Keep one more, in the plan where there is one."""
    found = recall(key, device)
    found.append(known)
    del found[:-MOST_KNOWN]
    store = open_stores.current(device)
    plan = store.get(key)
    if plan is not None and known.finite:
        store.put(replace(plan, accuracy=[k.to_json() for k in found if k.finite]))


def forget() -> None:
    """Forget what was measured in this process."""
    _KNOWN.clear()


open_stores.ON_FORGET.append(forget)
