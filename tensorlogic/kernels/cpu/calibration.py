"""How long large products take on this machine beside what the cost models were fitted to, measured once where nobody fitted them."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...measure import isolation as measure_isolation
from ...measure import timer
from ...plans import open_stores
from ...plans.machine_notes import Notes
from ...system import capture_state

if sys.platform != "win32":
    import resource

# of the products that are timed; both have room for two threads
SIDES = (128, 448)
# so many times longer at the first side, and so long, needs no second look
CLEAR, LONG_US = (8.0, 500.0)
# at least and at most, of which the two fastest must agree within
ROUNDS = (6, 18)
AGREE = 1.1
# times longer than what was fitted, that our blocks take on no processor
SLOWEST = 300.0
TRIES = 3  # of a process, where they do not
# within it of what was expected, the machine is one that was fitted
CLOSE = 1.3
# a measured factor is rounded to a power of 2^(1/4): a noisy clock changes no choice
STEPS = 4
CPU = torch.device("cpu")

_NOTES = Notes(".rates")
_TRIED: dict[str, int] = {}
open_stores.ON_FORGET += [_NOTES.forget, _TRIED.clear]


@dataclass(frozen=True)
class Product:
    """A way to multiply two matrices, maybe into a third, and what a cost model says of n × n: microseconds of its
    multiply-adds, after those of all else."""

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    parts: Callable[[int], tuple[float, float]]


def factors(name: str, dtype: torch.dtype, products: Sequence[Product]) -> tuple[float, ...]:
    """What to multiply the time of each product's multiply-adds by; 1.0 on machines like those that were fitted, and where nothing can
    be timed now.

    Measured once a machine, number of threads and PyTorch (3 to 25 ms), whatever the policy: what comes of it
    is a guess for keys that nobody has measured. On a machine too busy to tell, the fitted times hold, and it is tried again.
    """
    path = _NOTES.look(CPU)
    known = _NOTES.known.get(name)
    if known is None:  # not met in this process, but maybe on disk
        line = next((n for n in _NOTES.known if n.startswith(f"{name} = ")), None)
        if line is None:
            if open_stores.distributed() or not capture_state.can_call_now(CPU):
                return (1.0,) * len(products)
            found = None
            if _TRIED.setdefault(name, 0) < TRIES:
                _TRIED[name] += 1
                found = _measured(dtype, products)
            if found is None:
                return (1.0,) * len(products)
            line = f"{name} = {' '.join(f'{f:.3f}' for f in found)}"
            _NOTES.append(path, line)
        known = _NOTES.known[name] = line.rpartition(" = ")[2]
    return _numbers(known, len(products))


def _numbers(text: str, count: int) -> tuple[float, ...]:
    """What a line says, unless somebody edited it."""
    try:
        found = tuple(float(part) for part in text.split())
    except ValueError:
        found = ()
    sound = len(found) == count and all(1e-3 < f < 1e6 for f in found) and found[-1] < SLOWEST
    return found if sound else (1.0,) * count


def _measured(dtype: torch.dtype, products: Sequence[Product]) -> list[float] | None:
    """Each product's factor, all in turns: what slows the machine down meanwhile slows all of them down; None where
    their times do not settle.

    Each is rounded beside the last one's, so that rounding alone never decides between two.
    """
    ratios = dict.fromkeys(products, 1.0)
    left = list(products)
    with measure_isolation.preserved(CPU), torch.no_grad():
        for side in SIDES:
            abc = [torch.full((side, side), 0.5, dtype=dtype, device=CPU) for _ in range(3)]
            took = _fastest({p: functools.partial(p.run, *abc) for p in left})
            if took is None:
                return None
            for p in left:
                rest, work = p.parts(side)
                ratios[p] = max(took[p] - rest, work / CLEAR) / work
            left = [p for p in left if ratios[p] < CLEAR or took[p] < LONG_US]
            if not left:
                break
    last = ratios[products[-1]]
    if last >= SLOWEST:
        return None
    return [_rounded(ratios[p] / last) * _rounded(last) for p in products]


def _fastest(calls: Mapping[Product, timer.Call]) -> dict[Product, float] | None:
    """Microseconds of each call, once its two fastest rounds agree.

    Not of calls during which a thread lost its core to another process: beside a third busy thread two
    that wait for each other by spinning take a time slice of the system a call, again and again the same time.
    """
    times: dict[Product, list[float]] = {p: [] for p in calls}
    for _ in range(ROUNDS[1]):
        for p, call in calls.items():
            before = _preempted()
            took = timer.once(call, CPU)
            if _preempted() == before:
                times[p] = sorted([*times[p], took])
        done = min(map(len, times.values()))
        settled = done > 1 and all(t[1] < AGREE * t[0] for t in times.values())
        if settled and (
            done >= ROUNDS[0] or sum(t[0] for t in times.values()) > LONG_US * ROUNDS[1]
        ):
            return {p: t[0] for p, t in times.items()}
    return None


def _preempted() -> int:
    """How often a thread of this process has lost its core to another; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _rounded(ratio: float) -> float:
    close = 1 / CLOSE < ratio < CLOSE
    return 1.0 if close else float(2 ** (round(STEPS * math.log2(ratio)) / STEPS))
