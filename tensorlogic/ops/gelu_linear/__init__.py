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
from ...core.op import Gradient, Op, bits
from ...dispatch import dispatcher
from ...kernels.cpu import onednn
from ...kernels.register import rows
from ..common import canonical_keys, costs, sample_inputs, tensor_checks


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


def _kept(
    flags: SimpleNamespace, needs: tuple[bool, ...], dynamic: tuple[Any, ...], outs: Outputs
) -> tuple[saved_tensors.Kept, ...]:
    x, weight, _ = dynamic
    return (saved_tensors.read(x, needs[0] or needs[1]), saved_tensors.read(weight, needs[0]))


def _backward(
    flags: SimpleNamespace,
    needs: tuple[bool, ...],
    saved: tuple[Any, ...],
    scalars: tuple[Any, ...],
    dy: Tensor,
) -> tuple[Any, ...]:
    grads = backward_call(dy, *saved_tensors.stood_in(saved, dy), flags.approximate, bits(needs))
    return tuple([g if n else None for g, n in zip(grads, needs, strict=True)])


def _cases() -> Any:
    for m, k, n in ((2, 3, 5), (33, 17, 65), (64, 128, 96), (0, 4, 3)):
        for approximate in ("tanh", "none"):
            yield torch.randn(m, k), torch.randn(n, k) * k**-0.5, torch.randn(n), approximate
    yield torch.randn(16, 5).t(), torch.randn(16, 9).t(), None, "tanh"
    yield torch.randn(2, 3, 8), torch.randn(4, 8), torch.randn(4), "none"


def _direct(key: Key) -> Callable[..., Tensor]:
    approximate = key.flag("approximate")
    return lambda x, weight, bias: F.linear(F.gelu(x, approximate=approximate), weight, bias)


GELU_LINEAR = Op(
    normal=canonical_keys.flat_rows("x"),
    reference=_gelu_linear,
    flops=costs.linear_flops,
    traffic=costs.linear_traffic,
    sample=sample_inputs.scaled({"weight": 1}),
    stress=sample_inputs.cancelling("x", "weight"),
    direct=_direct,
    cases=_cases,
    gradient=Gradient(_kept, _backward, again=True),
    autocast="lower",
)
GELU_LINEAR_BACKWARD = Op(
    normal=canonical_keys.flat_rows("dy", "x"),
    reference=gelu_linear_backward,
    flops=lambda key: 2 * costs.linear_flops(key),
    traffic=lambda key: 2 * costs.inputs(key),
    sample=sample_inputs.scaled({"weight": 1}),
    outputs=3,
    internal=True,
)
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


@GELU_LINEAR.candidate("torch.widened", supports=onednn.widened, trusted=True)
def widened(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, save: bool
) -> tuple[Tensor, ...]:
    """All of it in float32, weights widened once and kept; rounded at the end."""
    wide = F.gelu(x.float(), approximate=approximate)
    return (
        F.linear(wide, onednn.wide_weight(weight), None if bias is None else bias.float()).to(
            x.dtype
        ),
    )


@GELU_LINEAR_BACKWARD.candidate(
    "torch.widened", supports=lambda key: onednn.widened(key, "dy"), trusted=True
)
def widened_backward(
    dy: Tensor, x: Tensor, weight: Tensor, approximate: str, needs: str
) -> tuple[Tensor | None, ...]:
    """The same in float32, rounded at the end."""
    grads = gelu_linear_backward(dy.float(), x.float(), weight.float(), approximate, needs)
    return tuple(g if g is None else g.to(dy.dtype) for g in grads)


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
    tensor_checks.tensors("gelu_linear", {"x": x, "weight": weight}, {"bias": bias})
    argument_checks.one_of("gelu_linear", "approximate", approximate, ("tanh", "none"))
    tensor_checks.floating("gelu_linear", {"x": x, "weight": weight, "bias": bias}, autocast=True)
    tensor_checks.linear_shapes("gelu_linear", x, weight, bias)
    return x, weight, bias, approximate
