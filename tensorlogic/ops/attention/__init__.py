"""Attention as one step of a graph: PyTorch's scaled_dot_product_attention, and ways around what it does badly."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.rewrite_rule import Composite, Way


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool
) -> Tensor:  # fmt: skip
    """softmax(scale · q kᵀ + mask) v: q [..., S, D], k and v [..., T, D]."""
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa)


def widened(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *how: Any) -> Tensor:
    """The same in float32, rounded at the end."""
    wide = mask.float() if mask is not None and mask.is_floating_point() else mask
    return attention(q.float(), k.float(), v.float(), wide, *how).to(q.dtype)


def _half_on_cpu(args: tuple[Any, ...]) -> str | None:
    q = args[0]
    if q.device.type == "cpu" and q.dtype in (torch.float16, torch.bfloat16):
        return None
    return "halves on a CPU only"


WAY = Way("torch.widened", _half_on_cpu, lambda emit, args: emit(widened, *args))
ATTENTION = Composite("attention", attention, (WAY,))
