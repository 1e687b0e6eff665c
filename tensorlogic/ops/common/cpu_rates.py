"""How long large products take on this machine beside what the cost models were fitted to, measured once where nobody fitted them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import capture_watch, measure, stores
from ...notes import Notes

SIDES = (128, 448)  # of the products that are timed; both have room for two threads
CLEAR = 8.0  # this many times longer at the first side needs no second look
ROUNDS = 6  # of which the fastest counts
CLOSE = 1.3  # within it of what was expected, the machine is one that was fitted
STEPS = 4  # a measured factor is rounded to a power of 2^(1/4): a noisy clock changes no choice
CPU = torch.device("cpu")

_NOTES = Notes(".rates")
stores.ON_FORGET.append(_NOTES.forget)


@dataclass(frozen=True)
class Product:
    """A way to multiply two matrices, and what a cost model says of n × n: microseconds of its multiply-adds, after those of all else."""

    run: Callable[[Tensor, Tensor], Tensor]
    parts: Callable[[int], tuple[float, float]]


def factors(name: str, dtype: torch.dtype, products: Sequence[Product]) -> tuple[float, ...]:
    """What to multiply the time of each product's multiply-adds by; 1.0 on machines like those that were fitted, and where nothing can
    be timed now.

    Measured at most once a machine, number of threads and PyTorch (3 to 15 ms), whatever the policy: what comes of it
    is a guess for keys that nobody has measured.
    """
    path = _NOTES.look(CPU)
    known = _NOTES.known.get(name)
    if known is None:  # not met in this process, but maybe on disk
        line = next((n for n in _NOTES.known if n.startswith(f"{name} = ")), None)
        if line is None:
            if stores.distributed() or not capture_watch.calm(CPU):
                return (1.0,) * len(products)
            line = f"{name} = {' '.join(f'{f:.3f}' for f in _measured(dtype, products))}"
            _NOTES.append(path, line)
        known = _NOTES.known[name] = line.rpartition(" = ")[2]
    return _numbers(known, len(products))


def _numbers(text: str, count: int) -> tuple[float, ...]:
    """What a line says, unless somebody edited it."""
    try:
        found = tuple(float(part) for part in text.split())
    except ValueError:
        found = ()
    return found if len(found) == count and all(1e-3 < f < 1e6 for f in found) else (1.0,) * count


def _measured(dtype: torch.dtype, products: Sequence[Product]) -> list[float]:
    """Each product's factor, all in turns: what slows the machine down meanwhile slows all of them down.

    Each is rounded beside the last one's, so that rounding alone never decides between two.
    """
    ratios = dict.fromkeys(products, 1.0)
    left = list(products)
    with stores.preserved(CPU), torch.no_grad():
        for side in SIDES:
            a, b = (torch.full((side, side), 0.5, dtype=dtype, device=CPU) for _ in range(2))
            calls = {p: functools.partial(p.run, a, b) for p in left}
            took = {p: measure.once(calls[p], CPU) for p in left}
            slow = [p for p in left if took[p] > CLEAR * sum(p.parts(side))]
            for _ in range(ROUNDS):
                for p in left if side == SIDES[-1] else slow:
                    took[p] = min(took[p], measure.once(calls[p], CPU))
            for p in left:
                rest, work = p.parts(side)
                ratios[p] = max(took[p] - rest, work / CLEAR) / work
            left = [p for p in left if ratios[p] < CLEAR]
    last = ratios[products[-1]]
    return [_rounded(ratios[p] / last) * _rounded(last) for p in products]


def _rounded(ratio: float) -> float:
    close = 1 / CLOSE < ratio < CLOSE
    return 1.0 if close else float(2 ** (round(STEPS * math.log2(ratio)) / STEPS))
