"""matmul under a precision policy: how its product is composed, and how far off it is on the caller's data."""

from __future__ import annotations

from torch import Tensor

from ...core.activations import SMOOTH, activate
from ...core.candidate import Outputs
from ...core.key import Key
from ...kernels.register import rows
from ...mixed_precision import error_statistics, number_formats, precise_op
from ...mixed_precision.number_formats import Product
from ..linear.precision import wide_gradient
from . import MATMUL, MATMUL_BACKWARD, mnk


def _matrices(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.unsqueeze(0) if a.dim() == 1 else a, b.unsqueeze(1) if b.dim() == 1 else b


def composed(product: Product, a: Tensor, b: Tensor, activation: str, save: bool) -> Outputs:
    """activation(a · b), vectors as matrices of one row or column."""
    left, right = _matrices(a, b)
    if right.dim() == 2 and left.dim() > 2:
        z = product(rows(left), right)
        z = z.view(*left.shape[:-1], right.shape[-1])
    else:
        z = product(left, right)
    z = z if b.dim() > 1 else z.squeeze(-1)
    z = z if a.dim() > 1 else z.squeeze(-2 if b.dim() > 1 else -1)
    dtype = number_formats.result_dtype(a, b)
    if activation == "none":
        return (z.to(dtype),)
    z = z.to(precise_op.widest(dtype))
    outs = (
        (activate(z, activation), z)
        if save and activation in SMOOTH
        else (activate(z, activation),)
    )
    return precise_op.as_result(dtype, *outs)  # fmt: skip


def composed_backward(
    product: Product,
    dy: Tensor,
    a: Tensor,
    b: Tensor,
    kept: Tensor | None,
    activation: str,
    needs: str,
) -> Outputs:
    """da = dz · bᴴ and db = aᴴ · dz, summed over broadcast batch dimensions."""
    dz = wide_gradient(dy, kept, activation)
    left, right = _matrices(a, b)
    dz = dz.unsqueeze(-1) if b.dim() == 1 else dz
    dz = dz.unsqueeze(-2) if a.dim() == 1 else dz
    da = db = None
    if needs[0] == "1" and right.dim() == 2:
        da = precise_op.as_operand(product(rows(dz), right.mH), a)
    elif needs[0] == "1":
        da = precise_op.as_operand(product(dz, right.mH).sum_to_size(left.shape), a)
    if needs[1] == "1" and right.dim() == 2:
        flat = rows(dz)
        db = precise_op.as_operand(product(rows(left).mH, flat), b)
    elif needs[1] == "1":
        db = precise_op.as_operand(product(left.mH, dz).sum_to_size(right.shape), b)
    return (da, db)


def _sizes_backward(key: Key) -> list[tuple[int, int, int]]:
    (m, n, k), needs = mnk(key), key.flag("needs")
    return [(m, k, n)] * (needs[0] == "1") + [(k, n, m)] * (needs[1] == "1")


def parts(a: Tensor, b: Tensor, activation: str, save: bool) -> list[error_statistics.Part]:
    """The product behind a call."""
    left, right = _matrices(a, b)
    return [error_statistics.Part(left, right, None, None, activation)]


def parts_backward(
    dy: Tensor, a: Tensor, b: Tensor, kept: Tensor | None, activation: str, needs: str
) -> list[error_statistics.Part | None]:
    """The products behind a backward call; one whose batch is summed is not looked at."""
    dz = wide_gradient(dy, kept, activation)
    left, right = _matrices(a, b)
    dz = dz.unsqueeze(-1) if b.dim() == 1 else dz
    dz = dz.unsqueeze(-2) if a.dim() == 1 else dz
    found: list[error_statistics.Part | None] = [None, None]
    if needs[0] == "1" and dz.shape[:-2] == left.shape[:-2]:
        found[0] = error_statistics.Part(dz, right.mH)
    if needs[1] == "1" and right.dim() == 2:
        flat = rows(dz)
        found[1] = error_statistics.Part(rows(left).mH, flat)
    elif needs[1] == "1" and dz.shape[:-2] == right.shape[:-2]:
        found[1] = error_statistics.Part(left.mH, dz)
    return found


PRECISE = precise_op.precise(MATMUL, composed, lambda key: [mnk(key)], parts, __name__)
PRECISE_BACKWARD = precise_op.precise(
    MATMUL_BACKWARD, composed_backward, _sizes_backward, parts_backward, __name__
)
