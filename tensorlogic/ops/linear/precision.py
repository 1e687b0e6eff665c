"""linear under a precision policy: how its products are composed, and how far off they are on the caller's data."""

from __future__ import annotations

from torch import Tensor

from ...core.activations import SMOOTH, activate, gradient
from ...core.candidate import Outputs
from ...core.key import Key
from ...kernels.register import rows
from ...mixed_precision import error_statistics, number_formats, precise_op
from ...mixed_precision.number_formats import Product
from ..common import costs
from . import LINEAR, LINEAR_BACKWARD


def composed(
    product: Product,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    save: bool,
) -> Outputs:
    """activation(x · weightᵀ + bias + residual), everything after the product in at least float32, rounded once."""
    dtype = number_formats.result_dtype(x, weight, bias, residual)
    z = product(rows(x), weight.t()).view(*x.shape[:-1], weight.shape[0])
    if bias is None and residual is None and activation == "none":
        return (z.to(dtype),)
    z = z.to(precise_op.widest(dtype))
    z = z if bias is None else z + bias
    z = z if residual is None else z + residual
    y = activate(z, activation)
    outs = (y, z) if save and activation in SMOOTH else (y,)
    return precise_op.as_result(dtype, *outs)


def composed_backward(
    product: Product,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    kept: Tensor | None,
    activation: str,
    needs: str,
) -> Outputs:
    """dx = dz · weight, dweight = dzᵀ · x, dbias and dresidual from dz; conjugates where complex."""
    dz = wide_gradient(dy, kept, activation)
    flat = rows(dz)
    dx = dw = db = None
    if needs[0] == "1":
        dx = precise_op.as_operand(product(flat, weight.conj().resolve_conj()), x)
    if needs[1] == "1":
        dw = precise_op.as_operand(product(flat.t(), rows(x).conj().resolve_conj()), weight)
    if needs[2] == "1":
        db = flat.to(precise_op.widest(dy.dtype)).sum(0).to(dy.dtype)
    return (dx, dw, db, dz.to(dy.dtype, copy=True) if needs[3] == "1" else None)


def wide_gradient(dy: Tensor, kept: Tensor | None, activation: str) -> Tensor:
    """dz, at least in float32 where there is an activation."""
    if activation == "none" or kept is None:
        return dy
    dtype = precise_op.widest(dy.dtype)
    return gradient(dy.to(dtype), kept.to(dtype), activation)


def _sizes_backward(key: Key) -> list[tuple[int, int, int]]:
    (m, n, k), needs = costs.linear_mnk(key), key.flag("needs")
    return [(m, k, n)] * (needs[0] == "1") + [(n, k, m)] * (needs[1] == "1")


def parts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    save: bool,
) -> list[error_statistics.Part]:
    """The product behind a call, with what is added to it."""
    added = None if residual is None else rows(residual)
    return [error_statistics.Part(rows(x), weight.t(), bias, added, activation)]


def parts_backward(
    dy: Tensor, x: Tensor, weight: Tensor, kept: Tensor | None, activation: str, needs: str
) -> list[error_statistics.Part | None]:
    """The products behind a backward call."""
    flat = rows(wide_gradient(dy, kept, activation))
    found: list[error_statistics.Part | None] = [None] * 4
    if needs[0] == "1":
        found[0] = error_statistics.Part(flat, weight.conj())
    if needs[1] == "1":
        found[1] = error_statistics.Part(flat.t(), rows(x).conj())
    return found


PRECISE = precise_op.precise(LINEAR, composed, lambda key: [costs.linear_mnk(key)], parts, __name__)
PRECISE_BACKWARD = precise_op.precise(
    LINEAR_BACKWARD, composed_backward, _sizes_backward, parts_backward, __name__
)
