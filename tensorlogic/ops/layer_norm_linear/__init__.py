"""layer_norm_linear: layer normalisation over the last dimension followed by a linear layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import dispatch, kept
from ...op import Gradient, Op, Outputs, bits
from ...plans import Key
from ..common import checks, costs, products, samples
from ..common.rows import rows


def _layer_norm_linear(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    save: bool,
) -> tuple[Tensor, ...]:
    """layer_norm(x [..., K]) · weight [N, K]ᵀ + bias [N]."""
    return (F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, eps), weight, bias),)


_layer_norm_linear.__name__ = "layer_norm_linear"


def layer_norm_linear_backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    eps: float,
    needs: str,
) -> tuple[Tensor | None, ...]:
    """dy [..., N] -> dx, dgamma, dbeta, dweight, dbias; row statistics are taken again from x."""
    flat = rows(dy)
    normal, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], gamma, beta, eps)
    dnormal = dy @ weight
    wanted = [n == "1" for n in needs[:3]]
    dx, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward(
        dnormal, x, x.shape[-1:], mean, rstd, gamma, beta, wanted
    )
    return (
        dx if wanted[0] else None,
        dgamma if wanted[1] else None,
        dbeta if wanted[2] else None,
        flat.t() @ rows(normal) if needs[3] == "1" else None,
        flat.sum(0) if needs[4] == "1" else None,
    )


def _kept(
    flags: SimpleNamespace, needs: tuple[bool, ...], dynamic: tuple[Any, ...], outs: Outputs
) -> tuple[kept.Kept, ...]:
    x, gamma, beta, weight, _ = dynamic
    inner = any(needs[:3])
    return (
        kept.read(x, inner or needs[3]),
        kept.read(gamma, needs[0] or needs[3]),
        kept.read(beta, needs[3]),
        kept.read(weight, inner),
    )


def _backward(
    flags: SimpleNamespace,
    needs: tuple[bool, ...],
    saved: tuple[Any, ...],
    scalars: tuple[Any, ...],
    dy: Tensor,
) -> tuple[Any, ...]:
    grads = backward_call(dy, *kept.stood_in(saved, dy), flags.eps, bits(needs))
    return tuple([g if n else None for g, n in zip(grads, needs, strict=True)])


def _cases() -> Any:
    for m, k, n in ((2, 3, 5), (33, 17, 65), (64, 128, 96), (0, 4, 3)):
        yield (
            torch.randn(m, k),
            1 + 0.1 * torch.randn(k),
            0.1 * torch.randn(k),
            torch.randn(n, k) * k**-0.5,
            torch.randn(n),
            1e-5,
        )
    yield torch.randn(2, 3, 8), None, None, torch.randn(4, 8), None, 1e-6
    yield (
        torch.randn(16, 5).t() + 3,
        torch.ones(16),
        None,
        torch.randn(16, 9).t(),
        torch.randn(9),
        1e-5,
    )


def _offset_rows(key: Key, values: dict[str, Any]) -> None:
    """Rows far from zero: a variance taken as E[x²] - E[x]² cancels."""
    x = values["x"]
    if x.dtype in (torch.float16, torch.bfloat16, torch.float32) and not any(
        s == 0 for s in x.stride()
    ):
        x.add_(64.0 if x.dtype == torch.float32 else 16.0)


LAYER_NORM_LINEAR = Op(
    reference=_layer_norm_linear,
    flops=costs.linear_flops,
    traffic=costs.linear_traffic,
    sample=samples.scaled({"weight": 1}),
    stress=_offset_rows,
    cases=_cases,
    gradient=Gradient(_kept, _backward),
    keyed=("eps",),
    autocast="lower",
    uncast=("x",),
)
LAYER_NORM_LINEAR_BACKWARD = Op(
    reference=layer_norm_linear_backward,
    flops=lambda key: 2 * costs.linear_flops(key),
    traffic=lambda key: 2 * costs.inputs(key),
    sample=samples.scaled({"weight": 1}),
    keyed=("eps",),
    outputs=5,
    internal=True,
)
backward_call = dispatch.internal(LAYER_NORM_LINEAR_BACKWARD)
LAYER_NORM_LINEAR.candidate("torch.eager", trusted=True)(_layer_norm_linear)
LAYER_NORM_LINEAR_BACKWARD.candidate("torch.eager", trusted=True)(layer_norm_linear_backward)


@LAYER_NORM_LINEAR.candidate(
    "onednn.linear", supports=products.onednn_f32, available=products.onednn_available, trusted=True
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
    return (products.onednn(F.layer_norm(x, x.shape[-1:], gamma, beta, eps), weight, bias, "none"),)


@LAYER_NORM_LINEAR.candidate("torch.widened", supports=products.widened, trusted=True)
def widened(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    save: bool,
) -> tuple[Tensor, ...]:
    """All of it in float32, weights widened once and kept; rounded at the end."""
    wide = [None if t is None else t.float() for t in (gamma, beta, bias)]
    normal = F.layer_norm(x.float(), x.shape[-1:], wide[0], wide[1], eps)
    return (F.linear(normal, products.wide_weight(weight), wide[2]).to(x.dtype),)


@LAYER_NORM_LINEAR_BACKWARD.candidate(
    "torch.widened", supports=lambda key: products.widened(key, "dy"), trusted=True
)
def widened_backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    eps: float,
    needs: str,
) -> tuple[Tensor | None, ...]:
    """The same in float32, rounded at the end."""
    wide = [None if t is None else t.float() for t in (gamma, beta)]
    grads = layer_norm_linear_backward(
        dy.float(), x.float(), wide[0], wide[1], weight.float(), eps, needs
    )
    return tuple(g if g is None else g.to(dy.dtype) for g in grads)


@dispatch.public(LAYER_NORM_LINEAR)
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
    checks.tensors(fn, {"x": x, "weight": weight}, {"gamma": gamma, "beta": beta, "bias": bias})
    checks.floating(
        fn, {"x": x, "gamma": gamma, "beta": beta, "weight": weight, "bias": bias}, autocast=True
    )
    checks.linear_shapes(fn, x, weight, bias)
    for name, t in (("gamma", gamma), ("beta", beta)):
        checks.shape(
            fn, name, t, (x.shape[-1],), f"one value for each of x's {x.shape[-1]} features"
        )
    return (
        x,
        gamma,
        beta,
        weight,
        bias,
        checks.number(fn, "eps", eps, 0.0, float("inf"), "of at least 0"),
    )
