"""gelu_linear: the second half of a feed-forward layer, gelu(x) · weightᵀ + bias, with the GELU as the product's prologue."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import argument_checks, saved_tensors
from ...core.candidate import Outputs
from ...core.key import Key
from ...core.op import Gradient, bits
from ...dispatch import dispatcher
from ...kernels.cpu import onednn
from ...kernels.register import rows
from ..common import linear_ops, sample_inputs
from ..common.linear_ops import Needs, Values


def _gelu_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, save: bool
) -> tuple[Tensor, ...]:
    """gelu(x [..., K]) · weight [N, K]ᵀ + bias [N]."""
    return (F.linear(F.gelu(x, approximate=approximate), weight, bias),)


_gelu_linear.__name__ = "gelu_linear"


def gelu_linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, approximate: str, needs: str
) -> tuple[Tensor | None, ...]:
    """dy [..., N] -> dx = (dy · weight) gelu'(x), dweight = dyᵀ · gelu(x), dbias."""
    flat = rows(dy)
    return (
        torch.ops.aten.gelu_backward(dy @ weight, x, approximate=approximate)
        if needs[0] == "1"
        else None,
        flat.t() @ rows(F.gelu(x, approximate=approximate)) if needs[1] == "1" else None,
        flat.sum(0) if needs[2] == "1" else None,
    )


def _kept(flags: SimpleNamespace, needs: Needs, dynamic: Values, outs: Outputs) -> Values:
    x, weight, _ = dynamic
    return (saved_tensors.read(x, needs[0] or needs[1]), saved_tensors.read(weight, needs[0]))


def _backward(
    flags: SimpleNamespace, needs: Needs, saved: Values, scalars: Values, dy: Tensor
) -> Values:
    grads = backward_call(dy, *saved_tensors.from_meta(saved, dy), flags.approximate, bits(needs))
    return tuple([g if n else None for g, n in zip(grads, needs, strict=True)])


def _cases() -> Any:
    for m, k, n in ((2, 3, 5), (33, 17, 65), (64, 128, 96), (0, 4, 3)):
        for approximate in ("tanh", "none"):
            yield *linear_ops.operands(m, k, n), approximate
    yield torch.randn(16, 5).t(), torch.randn(16, 9).t(), None, "tanh"
    yield torch.randn(2, 3, 8), torch.randn(4, 8), torch.randn(4), "none"


def _direct(key: Key) -> Callable[..., Tensor]:
    approximate = key.flag("approximate")
    return lambda x, weight, bias: F.linear(F.gelu(x, approximate=approximate), weight, bias)


GELU_LINEAR = linear_ops.op(
    _gelu_linear,
    stress=sample_inputs.cancelling("x", "weight"),
    direct=_direct,
    cases=_cases,
    gradient=Gradient(_kept, _backward, again=True),
)
GELU_LINEAR_BACKWARD = linear_ops.backward_op(gelu_linear_backward, "dy", "x", outputs=3)
backward_call = dispatcher.internal(GELU_LINEAR_BACKWARD)
GELU_LINEAR.candidate("torch.eager", trusted=True)(_gelu_linear)
GELU_LINEAR_BACKWARD.candidate("torch.eager", trusted=True)(gelu_linear_backward)


@GELU_LINEAR.candidate(
    "onednn.linear", supports=onednn.onednn_f32, available=onednn.onednn_available, trusted=True
)
def onednn_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, save: bool
) -> tuple[Tensor, ...]:
    """oneDNN's product behind PyTorch's GELU."""
    return (onednn.onednn(F.gelu(x, approximate=approximate), weight, bias, "none"),)


linear_ops.add_widened(GELU_LINEAR)
linear_ops.add_widened(GELU_LINEAR_BACKWARD)


@dispatcher.public(GELU_LINEAR)
def gelu_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: Literal["none", "tanh"] = "tanh"
) -> tuple[Any, ...]:
    """gelu(x) · weightᵀ + bias in one call.

    Args:
        x: [..., K], floating. weight: [N, K], same dtype. bias: [N] or None. approximate: "tanh" or "none" (erf).

    Returns:
        [..., N] in x's dtype.

    Raises:
        TypeError: not a tensor, not floating, or dtypes differ. ValueError: shapes, devices or approximation do not fit.

    Source: Hendrycks and Gimpel, arXiv:1606.08415.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.gelu_linear(torch.zeros(2, 3), torch.ones(4, 3), torch.ones(4)).sum()
        tensor(8.)
    """
    linear_ops.checked("gelu_linear", x, weight, bias)
    argument_checks.one_of("gelu_linear", "approximate", approximate, ("tanh", "none"))
    return x, weight, bias, approximate
