"""layer_norm_linear: layer normalisation over the last dimension followed by a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import saved_tensors
from ...core.candidate import Outputs
from ...core.key import Key
from ...core.op import Gradient, bits
from ...dispatch import dispatcher
from ...kernels.cpu import onednn
from ...kernels.register import rows
from ..common import linear_ops, tensor_checks
from ..common.linear_ops import Needs, Values


def _layer_norm_linear(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    save: bool,
) -> tuple[Tensor, ...]:
    """layer_norm(x [..., K]) · weight [N, K]ᵀ + bias [N]; with save on a CUDA device also the normalised rows [..., K], and
    their mean and 1/std [rows], which a pass of its own would make again there; CPUs and Macs make them again for less."""
    if not (save and x.is_cuda):
        return (F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, eps), weight, bias),)
    normal, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], gamma, beta, eps)
    return F.linear(normal, weight, bias), normal, mean.flatten(), rstd.flatten()


_layer_norm_linear.__name__ = "layer_norm_linear"


def saves(key: Key) -> bool:
    """Whether the normalised rows and their statistics are among the outputs of a key."""
    return bool(key.flag("save")) and key.device == "cuda"


def layer_norm_linear_backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    normal: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    needs: str,
) -> tuple[Tensor | None, ...]:
    """dy [..., N] -> dx, dgamma, dbeta, dweight, dbias; what forward kept of the norm is taken from x again where it is None."""
    flat = rows(dy)
    wanted = [n == "1" for n in needs[:3]]
    if again(normal, mean, needs):
        normal, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], gamma, beta, eps)
    # PyTorch's norm takes them in x's dtype there
    elif mean is not None and rstd is not None and not x.is_cuda:
        mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)
    dx = dgamma = dbeta = None
    if any(wanted):
        dx, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward(
            dy @ weight, x, x.shape[-1:], mean, rstd, gamma, beta, wanted
        )
    return (
        dx if wanted[0] else None,
        dgamma if wanted[1] else None,
        dbeta if wanted[2] else None,
        flat.t() @ rows(normal) if needs[3] == "1" and normal is not None else None,
        flat.sum(0) if needs[4] == "1" else None,
    )


def again(normal: Any, mean: Any, needs: str) -> bool:
    """Whether backward has to normalise x again: something it reads was not kept."""
    return (needs[3] == "1" and normal is None) or ("1" in needs[:3] and mean is None)


def _kept(flags: SimpleNamespace, needs: Needs, dynamic: Values, outs: Outputs) -> Values:
    x, gamma, beta, weight, _ = dynamic
    inner, weighted = any(needs[:3]), needs[3]
    normal, mean, rstd = _made(x, outs)
    anew = normal is None
    return (
        saved_tensors.read(x, inner or (weighted and anew)),
        saved_tensors.read(gamma, needs[0] or (weighted and anew)),
        saved_tensors.read(beta, weighted and anew),
        saved_tensors.read(weight, inner),
        normal if weighted else None,
        mean if inner else None,
        rstd if inner else None,
    )


def _made(x: Tensor, outs: Outputs) -> Sequence[Tensor | None]:
    """What forward made of the norm; a registered op gives empty tensors in its place."""
    made = outs[1:]
    if len(made) == 3 and made[0] is not None and made[0].numel() == x.numel():
        return made
    return None, None, None


def _backward(
    flags: SimpleNamespace, needs: Needs, saved: Values, scalars: Values, dy: Tensor
) -> Values:
    grads = backward_call(dy, *saved_tensors.from_meta(saved, dy), flags.eps, bits(needs))
    return tuple([g if n else None for g, n in zip(grads, needs, strict=True)])


def _cases() -> Any:
    for m, k, n in ((2, 3, 5), (33, 17, 65), (64, 128, 96), (0, 4, 3)):
        x, weight, bias = linear_ops.operands(m, k, n)
        yield x, 1 + 0.1 * torch.randn(k), 0.1 * torch.randn(k), weight, bias, 1e-5
    yield torch.randn(2, 3, 8), None, None, torch.randn(4, 8), None, 1e-6
    x, weight = torch.randn(16, 5).t() + 3, torch.randn(16, 9).t()
    yield x, torch.ones(16), None, weight, torch.randn(9), 1e-5


def _agreeing(key: Key, values: dict[str, Any]) -> None:
    """What forward kept is what it made of x."""
    if values["mean"] is None and values["normal"] is None:
        return
    x, gamma, beta = values["x"], values["gamma"], values["beta"]
    made = torch.native_layer_norm(x, x.shape[-1:], gamma, beta, key.flag("eps"))
    for name, value in zip(("normal", "mean", "rstd"), made, strict=True):
        if values[name] is not None:
            values[name].copy_(value.reshape(values[name].shape))


def _offset_rows(key: Key, values: dict[str, Any]) -> None:
    """Rows far from zero: a variance taken as E[x²] - E[x]² cancels."""
    x = values["x"]
    if x.dtype in (torch.float16, torch.bfloat16, torch.float32) and not any(
        s == 0 for s in x.stride()
    ):
        x.add_(64.0 if x.dtype == torch.float32 else 16.0)


LAYER_NORM_LINEAR = linear_ops.op(
    _layer_norm_linear,
    stress=_offset_rows,
    cases=_cases,
    gradient=Gradient(_kept, _backward, again=True),
    keyed=("eps",),
    uncast=("x",),
    outputs=4,
)
LAYER_NORM_LINEAR_BACKWARD = linear_ops.backward_op(
    layer_norm_linear_backward, "dy", "x", "normal", prepare=_agreeing, keyed=("eps",), outputs=5
)
backward_call = dispatcher.internal(LAYER_NORM_LINEAR_BACKWARD)
LAYER_NORM_LINEAR.candidate("torch.eager", trusted=True)(_layer_norm_linear)
LAYER_NORM_LINEAR_BACKWARD.candidate("torch.eager", trusted=True)(layer_norm_linear_backward)


@LAYER_NORM_LINEAR.candidate(
    "onednn.linear", supports=onednn.onednn_f32, available=onednn.onednn_available, trusted=True
)
def onednn_linear(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    save: bool,
) -> tuple[Tensor, ...]:
    """oneDNN's product behind PyTorch's layer norm."""
    return (onednn.onednn(F.layer_norm(x, x.shape[-1:], gamma, beta, eps), weight, bias, "none"),)


linear_ops.add_widened(LAYER_NORM_LINEAR)
linear_ops.add_widened(LAYER_NORM_LINEAR_BACKWARD)


@dispatcher.public(LAYER_NORM_LINEAR)
def layer_norm_linear(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-5,
) -> tuple[Any, ...]:
    """layer_norm(x) · weightᵀ + bias in one call; the statistics are taken over x's last dimension in float32.

    Args:
        x: [..., K], floating. gamma, beta: [K] or None. weight: [N, K]. bias: [N] or None. eps: added to the variance, >= 0.

    Returns:
        [..., N] in x's dtype.

    Raises:
        TypeError: not a tensor, not floating, or dtypes differ. ValueError: shapes, devices or eps do not fit.

    Source: Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450.

    Example:
        >>> import torch, tensorlogic
        >>> x = torch.tensor([[1.0, 3.0]])
        >>> tensorlogic.layer_norm_linear(x, None, None, torch.eye(2), None)
        tensor([[-1.0000,  1.0000]])
    """
    fn = "layer_norm_linear"
    tensor_checks.tensors(
        fn, {"x": x, "weight": weight}, {"gamma": gamma, "beta": beta, "bias": bias}
    )
    tensor_checks.floating(
        fn, {"x": x, "gamma": gamma, "beta": beta, "weight": weight, "bias": bias}, autocast=True
    )
    tensor_checks.linear_shapes(fn, x, weight, bias)
    for name, t in (("gamma", gamma), ("beta", beta)):
        tensor_checks.shape(
            fn, name, t, (x.shape[-1],), f"one value for each of x's {x.shape[-1]} features"
        )
    eps = tensor_checks.number(fn, "eps", eps, 0.0, float("inf"), "of at least 0")
    return x, gamma, beta, weight, bias, eps
