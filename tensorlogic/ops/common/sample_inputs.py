"""Sample inputs for measuring and tests: fresh random values that each op can bear."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...core.key import Key, TensorSpec

INF = float("inf")


def scaled(fan_in: dict[str, int]) -> Any:
    """A sampler that divides the named weights by the root of the size of their given dimension, so that products stay near 1."""

    def sample(
        key: Key, name: str, spec: TensorSpec, device: torch.device, g: torch.Generator
    ) -> Tensor | None:
        if name not in fan_in or 0 in spec.shape or len(spec.shape) < 2:
            return None
        from ...measure.verification import normal, strided

        scale = max(spec.shape[fan_in[name]], 1) ** -0.5
        return strided(
            spec, device, lambda n, dtype: (normal(n, torch.float32, device, g) * scale).to(dtype)
        )

    return sample


LARGEST = 4.0 * 65504.0  # partial sum
# elements that a tensor core adds to its accumulator at a time
STEP = 16


def cancelling(x: str, w: str, x_dim: int = -1, w_dim: int = -1) -> Any:
    """Stress for products: partial sums that pass f16's range although the result does not.

    The first half of K meets large positive products, the second half their negatives. What float32 loses of such a sum
    hangs on the order: parts that cancel lose next to nothing, one accumulator from which tensor cores cut the last bits
    half a spacing in each of its steps.
    """

    def stress(key: Key, values: dict[str, Any]) -> float:
        a, b = values[x], values[w]
        k = a.shape[x_dim]
        if k < 8 or a.dtype not in (torch.float16, torch.bfloat16) or _expanded(a) or _expanded(b):
            return 0.0
        half = k // 2
        height = (LARGEST / half) ** 0.5
        # what beside that height is not rounded off
        small = 0.125 if a.dtype == torch.float16 else 1.0
        a.mul_(small)
        a.narrow(x_dim, 0, half).add_(height)
        a.narrow(x_dim, half, half).sub_(height)
        b.mul_(small)
        b.narrow(max(w_dim, -b.dim()), 0, 2 * half).add_(height)  # of a vector, its only dimension
        steps = max(k / STEP, k**0.5)  # cut each time, or rounded k times, up and down
        usual = LARGEST / 2  # of the sum on its way
        return steps * usual * 2.0**-24

    return stress


def multiply(t: Tensor, by: float) -> None:
    """t *= by in place, each number in memory once where several elements share it."""
    t[tuple(slice(0, 1) if step == 0 else slice(None) for step in t.stride())].mul_(by)


def _expanded(t: Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride(), strict=True))


ROUND = 20  # the largest of the round numbers


@cache
def _landmarks(dtype: torch.dtype) -> Tensor:
    """Whole numbers up to `ROUND` of both signs, small ones first, then quarters and eighths, with neighbours; a vector of each."""
    steps = torch.arange(-ROUND * 8, ROUND * 8 + 1, dtype=torch.float32) / 8
    steps = steps[steps.abs().argsort(stable=True)]
    whole, quarters = steps[steps.frac() == 0], steps[(steps * 4).frac() == 0]
    ends = [torch.nextafter(v, torch.tensor(to)) for v in (whole, quarters) for to in (-INF, INF)]
    return torch.cat([whole, *ends[:2], quarters, *ends[2:], steps]).repeat_interleave(16).to(dtype)


def round_numbers(key: Key, values: dict[str, Any]) -> None:
    """Every floating tensor holds round numbers and their neighbours, each in a different order."""
    tensors = [v for v in values.values() if isinstance(v, Tensor) and v.is_floating_point()]
    for turn, t in enumerate(tensors):
        if not _expanded(t):
            t.copy_(_round(t.shape, t.dtype, 48 * turn))


def _round(shape: torch.Size, dtype: torch.dtype, first: int) -> Tensor:
    found = _landmarks(dtype).roll(-first)
    return found.repeat(-(-shape.numel() // len(found)))[: shape.numel()].view(shape)


def picked(x: str, w: str, transposed: bool = True) -> Any:
    """Landmarks for products: rows of `x` pick single elements of `w`, round numbers, which the activation then meets."""

    def landmarks(key: Key, values: dict[str, Any]) -> None:
        rows, weight = values[x], values[w]
        if weight.dim() != 2 or rows.dim() < 2 or _expanded(rows) or _expanded(weight):
            return
        if not rows.numel() or not weight.numel():
            return
        for t in values.values():
            if isinstance(t, Tensor) and t is not weight and not _expanded(t):
                t.zero_()
        k = rows.shape[-1]
        numbers = _round(weight.shape, weight.dtype, 0)  # [N, K], or [K, N] where not transposed
        weight.copy_(numbers.view(k, -1).t() if transposed else numbers)
        many = rows[..., 0].numel()
        spots = torch.arange(many, device=rows.device).view(rows.shape[:-1]) % k
        rows.scatter_(-1, spots.unsqueeze(-1), 1.0)

    return landmarks
