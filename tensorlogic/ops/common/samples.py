"""Sample inputs for measuring and tests: fresh random values that each op can bear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...plans import Key, TensorSpec


def scaled(fan_in: dict[str, int]) -> Any:
    """A sampler that divides the named weights by the root of the size of their given dimension, so that products stay near 1."""

    def sample(
        key: Key, name: str, spec: TensorSpec, device: torch.device, g: torch.Generator
    ) -> Tensor | None:
        if name not in fan_in or 0 in spec.shape or len(spec.shape) < 2:
            return None
        from ...checking import normal, strided  # the sampler that made the other inputs

        scale = max(spec.shape[fan_in[name]], 1) ** -0.5
        return strided(
            spec, device, lambda n, dtype: (normal(n, torch.float32, device, g) * scale).to(dtype)
        )

    return sample


def cancelling(x: str, w: str, x_dim: int = -1, w_dim: int = -1) -> Any:
    """Stress for products: partial sums that pass f16's range although the result does not.

    The first half of K meets large positive products, the second half their negatives.
    """

    def stress(key: Key, values: dict[str, Any]) -> None:
        a, b = values[x], values[w]
        k = a.shape[x_dim]
        if k < 8 or a.dtype not in (torch.float16, torch.bfloat16) or _expanded(a) or _expanded(b):
            return
        half = k // 2
        height = (4.0 * 65504.0 / half) ** 0.5
        a.mul_(0.125)
        a.narrow(x_dim, 0, half).add_(height)
        a.narrow(x_dim, half, half).sub_(height)
        b.mul_(0.125)
        b.narrow(max(w_dim, -b.dim()), 0, 2 * half).add_(height)  # of a vector, its only dimension

    return stress


def _expanded(t: Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride(), strict=True))
