"""linear: y = activation(x · weightᵀ + bias + residual)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...core.activations import SMOOTH, activate, gradient
from ...kernels.register import rows


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, ...]:
    """x [..., K], weight [N, K], bias [N], residual [..., N] -> y [..., N], and the pre-activation where backward needs it."""
    z = F.linear(x, weight, bias)
    z = z if residual is None else z + residual
    y = activate(z, activation)
    return (y, z) if save and activation in SMOOTH else (y,)


def linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, kept: Tensor | None, activation: str, needs: str
) -> tuple[Tensor | None, ...]:
    """dy [..., N] -> dx, dweight, dbias, dresidual, those that `needs` ("1101") asks for; kept is y (relu) or z (gelu, silu)."""
    dz = gradient(dy, kept, activation)
    flat = rows(dz)
    return (
        dz @ weight if needs[0] == "1" else None,
        flat.t() @ rows(x) if needs[1] == "1" else None,
        flat.sum(0) if needs[2] == "1" else None,
        None if needs[3] == "0" else dz.clone() if dz is dy else dz,
    )
