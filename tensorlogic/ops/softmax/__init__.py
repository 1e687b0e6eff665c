"""softmax over one dimension, computed in float32 and written once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...core import argument_checks
from ...core.candidate import Outputs
from ...core.key import Key
from ...core.op import Args, Gradient, Kept, Needs, Op
from ...dispatch import dispatcher
from ..common import canonical_keys, costs, sample_inputs, tensor_checks


def _softmax(x: Tensor, dim: int, save: bool) -> tuple[Tensor, ...]:
    """exp(x - max) / sum(exp(x - max)) over dim."""
    return (torch.softmax(x, dim),)


_softmax.__name__ = "softmax"


def softmax_backward(dy: Tensor, y: Tensor, dim: int) -> tuple[Tensor, ...]:
    """dx = y * (dy - sum(dy * y))."""
    return (torch.ops.aten._softmax_backward_data(dy, y, dim, y.dtype),)


def _kept(flags: SimpleNamespace, needs: Needs, dynamic: Args, outs: Outputs) -> Kept:
    return (outs[0],)


def _backward(flags: SimpleNamespace, needs: Needs, saved: Args, scalars: Args, dy: Tensor) -> Args:
    return backward_call(dy, saved[0], flags.dim)


def _wide_logits(key: Key, values: dict[str, Any]) -> None:
    """Values up to hundreds: careless exponentials overflow."""
    sample_inputs.multiply(values["x"], 100)


def _cases() -> Any:
    for shape, dim in (
        ((7,), 0),
        ((33, 65), 1),
        ((33, 65), 0),
        ((2, 3, 5), 1),
        ((4, 3000), 1),
        ((0, 4), 1),
        ((5, 1), 1),
    ):
        yield torch.randn(shape), dim
    yield torch.randn(9, 8).t(), 1


def _direct(key: Key) -> Callable[..., Tensor]:
    dim = key.flag("dim")
    return lambda x: torch.softmax(x, dim)


SOFTMAX = Op(
    normal=canonical_keys.one_dimension,
    reference=_softmax,
    flops=lambda key: 5.0 * costs.size(key.tensors[0]),
    traffic=costs.pointwise_traffic,
    cases=_cases,
    stress=_wide_logits,
    direct=_direct,
    gradient=Gradient(_kept, _backward, again=True, light=True),
    autocast="composition",
)
SOFTMAX_BACKWARD = Op(
    normal=canonical_keys.one_dimension,
    reference=softmax_backward,
    flops=lambda key: 4.0 * costs.size(key.tensors[0]),
    traffic=costs.pointwise_traffic,
    internal=True,
)
SOFTMAX.candidate("torch.eager", trusted=True)(_softmax)
SOFTMAX_BACKWARD.candidate("torch.eager", trusted=True)(softmax_backward)
backward_call = dispatcher.internal(SOFTMAX_BACKWARD)


@dispatcher.public(SOFTMAX)
def _float_softmax(x: Tensor, dim: int) -> tuple[Any, ...]:
    tensor_checks.tensors("softmax", {"x": x})
    return x, dim


def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """exp(x) / sum(exp(x)) over one dimension, safe for large values.

    Args:
        x: any shape, floating. dim: the dimension that sums to 1. dtype: cast x to it first, as torch.softmax.

    Returns:
        x's shape, in dtype or x's.

    Raises:
        TypeError: not a tensor, not floating, or dtype is none. ValueError: dim out of range.

    Source: torch.softmax.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.softmax(torch.zeros(2, 4), dim=1)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500, 0.2500]])
    """
    # Where there is nothing to say; the checks below cost a microsecond.
    dims = x.dim() if type(x) is Tensor and type(dim) is int and dtype is None else 0
    if dims > 0 and -dims <= dim < dims and x.is_floating_point():
        return _float_softmax(x, dim % dims)
    tensor_checks.tensors("softmax", {"x": x})
    if dtype is not None:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"softmax: dtype is {argument_checks.describe(dtype)}; a torch.dtype such as torch.float32, or None, is required"
            )
        if not dtype.is_floating_point:
            raise TypeError(f"softmax: dtype is {dtype}; a floating dtype is required")
        x = x.to(dtype)
    if not x.is_floating_point():
        raise TypeError(
            f"softmax: x is {argument_checks.describe(x)}; a floating dtype is required: pass dtype=torch.float32 or convert with x.float()"
        )
    place = argument_checks.index(dim)
    if place is None or not -(x.dim() or 1) <= place < (x.dim() or 1):
        raise ValueError(
            f"softmax: dim is {dim!r}, but x is {argument_checks.describe(x)}; a dimension from {-x.dim()} to {x.dim() - 1} is required"
        )
    return _float_softmax(x, place % (x.dim() or 1))
