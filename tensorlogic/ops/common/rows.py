"""Tensors of any dimensions as the rows of a matrix."""

from __future__ import annotations

from torch import Tensor


def rows(t: Tensor) -> Tensor:
    """t [..., N] as [rows, N], of t's memory where it can be; also where N is 0, which `reshape(-1, N)` refuses."""
    if t.dim() == 2:
        return t
    if t.dim() < 2:
        return t.unsqueeze(0)
    # PyTorch has no rule for gradients of many vectors at once through `flatten`
    return t.reshape(-1, t.shape[-1]) if t.shape[-1] else t.flatten(0, -2)
