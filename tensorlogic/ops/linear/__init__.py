"""linear and linear_residual_relu: the product that every model is made of, with bias, residual and activation fused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import argument_checks, saved_tensors
from ...core.activations import ACTIVATIONS, Activation, remembered
from ...core.candidate import Outputs
from ...core.key import Key
from ...core.numeric_mode import Mode
from ...core.op import Gradient, bits
from ...core.precision_policy import precision as Precision
from ...dispatch import dispatcher
from ..common import canonical_keys, linear_ops, sample_inputs, tensor_checks
from ..common.linear_ops import Needs, Values
from . import reference


def _kept(flags: SimpleNamespace, needs: Needs, dynamic: Values, outs: Outputs) -> Values:
    x, weight, _, _ = dynamic
    return (
        saved_tensors.read(x, needs[1]),
        saved_tensors.read(weight, needs[0]),
        remembered(flags.activation, outs),
    )


def _backward(
    flags: SimpleNamespace, needs: Needs, saved: Values, scalars: Values, dy: Tensor
) -> Values:
    handed_on = needs[3] and flags.activation == "none"  # the residual's gradient is dy itself
    asked = (*needs[:3], needs[3] and not handed_on)
    grads = (
        backward_call(dy, *saved_tensors.from_meta(saved, dy), flags.activation, bits(asked))
        if any(asked)
        else (None,) * 4
    )
    found = tuple([g if n else None for g, n in zip(grads, asked, strict=True)])
    return (*found[:3], dy) if handed_on else found


def _cases() -> Any:
    for m, k, n in ((2, 3, 5), (33, 17, 65), (64, 128, 96)):
        for activation in ACTIVATIONS:
            yield *linear_ops.operands(m, k, n), torch.randn(m, n), activation
    yield torch.randn(2, 7, 16), torch.randn(9, 16), None, None, "none"
    yield torch.randn(16, 5).t(), torch.randn(16, 9).t(), torch.randn(9), None, "gelu_tanh"
    yield torch.randn(0, 8), torch.randn(4, 8), torch.randn(4), torch.randn(0, 4), "relu"
    yield torch.randn(8), torch.randn(4, 8), None, torch.randn(4), "silu"


def _direct(key: Key) -> Callable[..., Tensor] | None:
    activation, alone = key.flag("activation"), key.spec("residual") is None
    if activation == "none" and alone:
        return lambda x, weight, bias, residual: F.linear(x, weight, bias)
    if activation == "relu" and not alone:
        return lambda x, weight, bias, residual: torch.relu(F.linear(x, weight, bias) + residual)
    return None


LINEAR = linear_ops.op(
    reference.linear,
    normal=canonical_keys.flat_rows("x", "residual"),
    stress=sample_inputs.cancelling("x", "weight"),
    direct=_direct,
    landmarks=sample_inputs.picked("x", "weight"),
    cases=_cases,
    gradient=Gradient(_kept, _backward, again=True),
    uncast=("residual",),
    outputs=2,
)
LINEAR_BACKWARD = linear_ops.backward_op(
    reference.linear_backward, "dy", "x", "kept", "residual", outputs=4
)
backward_call = dispatcher.internal(LINEAR_BACKWARD)


def _checked(
    fn: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
) -> tuple[Any, ...]:
    tensor_checks.tensors(fn, {"x": x, "weight": weight}, {"bias": bias, "residual": residual})
    argument_checks.one_of(fn, "activation", activation, (None, *ACTIVATIONS))
    tensor_checks.floating(
        fn, {"x": x, "weight": weight, "bias": bias, "residual": residual}, autocast=True
    )
    shape = tensor_checks.linear_shapes(fn, x, weight, bias)
    if residual is not None:
        if residual.dim() == 0 and x.dtype != torch.float64 and tensor_checks.autocasting(x.device):
            residual = residual.to(torch.get_autocast_dtype(x.device.type))  # it widens no product
        residual = tensor_checks.broadcasts(fn, "residual", residual, shape)
    return x, weight, bias, residual, activation or "none"


@dispatcher.public(LINEAR)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Activation | None = None,
    *,
    precision: Precision | Mode | None = None,
) -> tuple[Any, ...]:
    """activation(x · weightᵀ + bias + residual) in one call, accumulated in float32 and rounded once.

    Args:
        x: [..., K], floating. weight: [N, K], as in torch.nn.functional.linear, same dtype. bias: [N] or None.
        residual: broadcastable to [..., N] or None.
        activation: None, "relu", "gelu" (erf), "gelu_tanh" or "silu".
        precision: `tensorlogic.precision(...)` for this call; under it, floating dtypes may differ.

    Returns:
        [..., N] in x's dtype and on its device.

    Raises:
        TypeError: not a tensor, not floating, or dtypes differ. ValueError: shapes, devices or activation do not fit.

    Source: torch.nn.functional.linear; GELU by Hendrycks and Gimpel, arXiv:1606.08415.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.linear(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(4), activation="relu").shape
        torch.Size([2, 4])
    """
    return _checked("linear", x, weight, bias, residual, activation)


def linear_residual_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
) -> Tensor:
    """relu(x · weightᵀ + bias + residual): the tail of a residual block in one call.

    Args:
        x: [..., K]. weight: [N, K]. bias: [N] or None. residual: broadcastable to [..., N]. One floating dtype, one device.

    Returns:
        [..., N] in x's dtype.

    Raises:
        TypeError: not a tensor, not floating, or dtypes differ. ValueError: shapes or devices do not fit.

    Source: He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.linear_residual_relu(torch.ones(1, 2), torch.ones(2, 2), None, torch.tensor([[-3.0, 1.0]]))
        tensor([[0., 3.]])
    """
    if residual is None:
        tensor_checks.tensors("linear_residual_relu", {"residual": residual})
    try:
        return linear(x, weight, bias, residual, "relu")
    except (TypeError, ValueError):  # said again under this function's name
        _checked("linear_residual_relu", x, weight, bias, residual, "relu")
        raise
