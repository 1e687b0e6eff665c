"""A product on a CPU and the guard of its error budget in one call of the native library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import native
from ...judging import Place
from ...op import Outputs
from . import ways_cpu

RESULTS = (torch.float32, torch.float64)  # of others elements may leave the range, or lose digits
Fused = Callable[
    ..., tuple[Outputs, bool]
]  # outputs, and whether they are within limits for certain


def launcher(
    id: str, dynamic: Sequence[Any], products: Sequence[tuple[Tensor, Tensor, Tensor]],
    places: Sequence[Place], outs: Outputs, limits: Sequence[float],
) -> Fused | None:  # fmt: skip
    """What serves calls that look like the one of these arguments, products and outputs; None where one product of matrices by our own
    kernels is not all there is to do."""
    parts = ways_cpu.parts_of(id)
    if parts is None or native.available() or len(products) != 1 or len(outs) != 1:
        return None
    (left, right, out), (place,) = products[0], places
    views = [_view(dynamic[i], t) for i, t in ((place.left, left), (place.right, right))]
    if None in views or out.shape != outs[0].shape or out.dtype not in RESULTS:  # type: ignore[union-attr]
        return None
    run, kept = native.op("matmul_watched"), torch.tensor(limits, dtype=torch.float64, device="cpu")
    turned_left, turned_right = views
    first, second, dtype = place.left, place.right, out.dtype

    def launch(*given: Any) -> tuple[Outputs, bool]:
        a, b = given[first], given[second]
        y, told = run(a.t() if turned_left else a, b.t() if turned_right else b, parts, kept)
        return (y.to(dtype),), told.item() == 1

    return launch


def _view(given: Tensor, operand: Tensor) -> bool | None:
    """Whether an operand is an argument's transpose; None where it is neither that nor the argument itself."""
    if operand.shape == given.shape and operand.stride() == given.stride():
        return False
    same = operand.shape == given.shape[::-1] and operand.stride() == given.stride()[::-1]
    return True if same and given.dim() == 2 else None
