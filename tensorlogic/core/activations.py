"""The activations that products and element-wise ops share: forward, gradient, and what the gradient needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]  # as callers write it
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
# their gradient needs the pre-activation; relu's needs only the output
SMOOTH = ("gelu", "gelu_tanh", "silu")


def activate(z: Tensor, activation: str) -> Tensor:
    """The activation of z, as PyTorch computes it in z's dtype."""
    if activation == "relu":
        return torch.relu(z)
    if activation in ("gelu", "gelu_tanh"):
        if z.dtype == torch.float64 and not z.requires_grad:
            return _precise_gelu(z, activation)
        return F.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.silu(z) if activation == "silu" else z


def _precise_gelu(z: Tensor, activation: str) -> Tensor:
    """GELU in float64 as a reference has to be: PyTorch's is 0 below -8.3, where bfloat16 still has values."""
    if activation == "gelu":
        return z * (0.5 * torch.special.erfc(z * -(0.5**0.5)))
    return z * torch.sigmoid((8 / math.pi) ** 0.5 * (z + 0.044715 * z**3))


def activate_(z: Tensor, activation: str) -> Tensor:
    """The same, in z's memory where PyTorch can."""
    if activation == "relu":
        return z.relu_()
    return F.silu(z, inplace=True) if activation == "silu" else activate(z, activation)


def gradient(dy: Tensor, kept: Tensor | None, activation: str) -> Tensor:
    """dz from dy; kept is the output for relu and the pre-activation for the smooth ones."""
    if activation == "none" or kept is None:
        return dy
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dy, kept, 0)
    if activation == "silu":
        if torch.is_grad_enabled():  # aten::silu_backward has no derivative of its own
            share = torch.sigmoid(kept)
            return dy * (share * (1 + kept * (1 - share)))
        return torch.ops.aten.silu_backward(dy, kept)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(dy, kept, approximate=approximate)


def remembered(activation: str, outs: Sequence[Tensor | None]) -> Tensor | None:
    """Of a product's outputs what the activation's gradient reads: y of a ReLU, the pre-activation of a smooth one."""
    return outs[0] if activation == "relu" else outs[1] if activation in SMOOTH else None
