"""A product on a CPU and the guard of its error budget in one call of the native library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.candidate import Outputs
from ..native import cpu_library
from . import formats_cpu
from .product_sites import Place

RESULTS = (torch.float32, torch.float64)  # of others elements may leave the range, or lose digits
# a native operator, which two arguments it takes, and what else
Way = tuple[Callable[..., tuple[Tensor, Tensor]], int, int, tuple[Any, ...]]


@dataclass(frozen=True)
class Fused:
    """(*dynamic) -> outputs, and whether they are within limits for certain."""

    run: Callable[..., tuple[Tensor, Tensor]]
    left: int
    right: int
    rest: tuple[Any, ...]  # that `run` takes besides
    turned: bool  # whether the left operand is its argument's transpose
    dtype: torch.dtype

    def __call__(self, *given: Any) -> tuple[Outputs, bool]:
        left, right = given[self.left], given[self.right]
        y, told = self.run(left.t() if self.turned else left, right, *self.rest)
        return (y.to(self.dtype),), told.item() == 1

    @property
    def way(self) -> Way | None:
        """What compiled calls need for the same; None where the operator's output is not all there is."""
        alone = not self.turned and self.dtype == torch.float32
        return (self.run, self.left, self.right, self.rest) if alone else None


def launcher(
    id: str, dynamic: Sequence[Any], products: Sequence[tuple[Tensor, Tensor, Tensor]],
    places: Sequence[Place], outs: Outputs, limits: Sequence[float],
) -> Fused | None:  # fmt: skip
    """What serves calls that look like the one of these arguments, products and outputs; None where one product of matrices by our own
    kernels is not all there is to do."""
    parts = formats_cpu.parts_of(id)
    if parts is None or cpu_library.available() or len(products) != 1 or len(outs) != 1:
        return None
    (left, right, out), (place,) = products[0], places
    views = [_view(dynamic[i], t) for i, t in ((place.left, left), (place.right, right))]
    if None in views or out.shape != outs[0].shape or out.dtype not in RESULTS:  # type: ignore[union-attr]
        return None
    kept = torch.tensor(limits, dtype=torch.float64, device="cpu")
    turned_left, turned_right = views
    rest, run = (parts, kept, turned_right), cpu_library.op("matmul_watched")
    return Fused(run, place.left, place.right, rest, bool(turned_left), out.dtype)


def _view(given: Tensor, operand: Tensor) -> bool | None:
    """Whether an operand is an argument's transpose; None where it is neither that nor the argument itself."""
    if operand.shape == given.shape and operand.stride() == given.stride():
        return False
    same = operand.shape == given.shape[::-1] and operand.stride() == given.stride()[::-1]
    return True if same and given.dim() == 2 else None
