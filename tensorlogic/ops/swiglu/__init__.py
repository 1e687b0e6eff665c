"""The gated feed-forward of LLaMA and others as one step of a graph: two products of the same rows, one of them through SiLU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.rewrite_rule import Composite, Emit, Way
from ..linear import linear


def swiglu(x: Tensor, w: Tensor, b: Tensor | None, v: Tensor, c: Tensor | None) -> Tensor:
    """silu(x · wᵀ + b) · (x · vᵀ + c): x [..., K], w and v [N, K], b and c [N]."""
    return F.silu(F.linear(x, w, b)) * F.linear(x, v, c)


def join(w: Tensor, v: Tensor) -> Tensor:
    """Weights or biases of both products in one, [2N, ...]."""
    return torch.cat([w, v])


def gate(y: Tensor) -> Tensor:
    """silu of the first half of the columns times the second: [..., 2N] → [..., N]."""
    a, b = y.chunk(2, -1)
    return F.silu(a).mul_(b)


def _apart(emit: Emit, args: tuple[Any, ...]) -> Any:
    x, w, b, v, c = args
    gated = emit(linear, x, w, b, None, "silu")
    return emit(torch.mul, gated, emit(linear, x, v, c, None, None))


def _joined(emit: Emit, args: tuple[Any, ...]) -> Any:
    x, w, b, v, c = args
    bias = None if b is None else emit(join, b, c)
    return emit(gate, emit(linear, x, emit(join, w, v), bias, None, None))


def _both_biases(args: tuple[Any, ...]) -> str | None:
    return None if (args[2] is None) == (args[4] is None) else "one of the products has no bias"


SWIGLU = Composite(
    "swiglu",
    swiglu,
    (
        Way("tensorlogic.linear", lambda args: None, _apart, training=True),
        Way("tensorlogic.joined", _both_biases, _joined),
    ),
)
