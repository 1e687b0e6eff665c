"""linear_batch_norm_relu: a linear layer, batch normalisation over its outputs, ReLU; in evaluation one product."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import argument_checks, saved_tensors
from ...core.candidate import Outputs
from ...core.key import Key, TensorSpec
from ...core.op import Gradient, bits
from ...dispatch import dispatcher
from ...kernels.register import rows
from ..common import linear_ops, sample_inputs, tensor_checks
from ..common.linear_ops import Needs, Values

HALVES = (torch.float16, torch.bfloat16)


def _linear_batch_norm_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    training: bool,
    momentum: float,
    save: bool,
) -> tuple[Tensor, ...]:
    """relu(batch_norm(z)), z = x [..., K] · weight [N, K]ᵀ + bias; outputs y, then z (save), batch mean and 1/std (training)."""
    z = F.linear(x, weight, bias)
    flat = rows(z)
    # strided, this and the statistics make PyTorch's gradients on CPUs wrong
    if gamma is not None:
        gamma = gamma.contiguous()
    if not training:
        running_mean, running_var = (
            None if t is None else t.contiguous() for t in (running_mean, running_var)
        )
        bn = F.batch_norm(flat, running_mean, running_var, gamma, beta, False, momentum, eps)
        y = torch.relu_(bn) if z.dim() == 2 else torch.relu_(bn).view(z.shape)
        return (y, z) if save else (y,)
    # an expert without tokens, say; the running statistics stay as they are
    if flat.numel() == 0:
        bn = F.batch_norm(flat, running_mean, running_var, gamma, beta, True, momentum, eps)
        none = flat.sum(0)
        return torch.relu(bn).view(z.shape), z if save else z.new_empty(0), none, none
    bn, mean, rstd = torch.native_batch_norm(
        flat, gamma, beta, running_mean, running_var, True, momentum, eps
    )
    return torch.relu(bn).view(z.shape), z if save else z.new_empty(0), mean, rstd


_linear_batch_norm_relu.__name__ = "linear_batch_norm_relu"


def linear_batch_norm_relu_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    z: Tensor,
    mean: Tensor,
    spread: Tensor,
    gamma: Tensor | None,
    training: bool,
    eps: float,
    needs: str,
) -> tuple[Tensor | None, ...]:
    """dy [..., N] -> dx, dweight, dbias, dgamma, dbeta; spread is the batch's 1/std (training) or the running variance."""
    rstd = spread
    if not training:
        rstd = torch.rsqrt(spread.to(torch.promote_types(spread.dtype, torch.float32)) + eps)
    dbn = rows(torch.where(y <= 0, 0, dy))  # NaN passes, as through PyTorch's ReLU
    wide = dbn.to(torch.promote_types(dbn.dtype, torch.float32))
    normal = (z.reshape(dbn.shape).to(wide.dtype) - mean) * rstd
    dgamma, dbeta = (wide * normal).sum(0), wide.sum(0)
    inner = wide - (dbeta + normal * dgamma) / max(dbn.shape[0], 1) if training else wide
    dz = (inner * (rstd if gamma is None else rstd * gamma)).to(dy.dtype)
    dtype = dy.dtype if gamma is None else gamma.dtype
    return (
        (dz @ weight).view(x.shape) if needs[0] == "1" else None,
        dz.t() @ rows(x) if needs[1] == "1" else None,
        dz.sum(0) if needs[2] == "1" else None,
        dgamma.to(dtype) if needs[3] == "1" else None,
        dbeta.to(dtype) if needs[4] == "1" else None,
    )


def _kept(flags: SimpleNamespace, needs: Needs, dynamic: Values, outs: Outputs) -> Values:
    x, weight, _, running_mean, running_var, gamma, _ = dynamic
    statistics = (outs[2], outs[3]) if flags.training else (running_mean, running_var)
    read = (saved_tensors.read(x, needs[1]), saved_tensors.read(weight, needs[0]))
    return (*read, outs[0], outs[1], *statistics, gamma)


def _backward(
    flags: SimpleNamespace, needs: Needs, saved: Values, scalars: Values, dy: Tensor
) -> Values:
    wanted = (*needs[:3], *needs[5:7])
    read = saved_tensors.from_meta(saved, dy)
    grads = backward_call(dy, *read, flags.training, flags.eps, bits(wanted))
    dx, dw, db, dgamma, dbeta = (g if n else None for g, n in zip(grads, wanted, strict=True))
    return (dx, dw, db, None, None, dgamma, dbeta)


def _cases() -> Any:
    sizes = ((2, 3, 5, False), (33, 17, 65, False), (33, 17, 65, True), (64, 128, 96, True), (64, 128, 96, False))  # fmt: skip
    for m, k, n, training in sizes:
        mean, beta, var, gamma = 0.1 * torch.randn(4, n)
        vectors = (mean, 1 + var.abs(), 1 + gamma, beta)
        yield *linear_ops.operands(m, k, n), *vectors, 1e-5, training, 0.1
    x, weight, zeros, ones = torch.randn(2, 3, 8), torch.randn(4, 8), torch.zeros(4), torch.ones(4)
    yield x, weight, None, zeros, ones, None, None, 1e-5, False, 0.1
    yield x, weight, None, None, None, ones, zeros, 1e-3, True, 0.1


_weights = sample_inputs.scaled({"weight": 1})


def _sample(
    key: Key, name: str, spec: TensorSpec, device: torch.device, g: torch.Generator
) -> Tensor | None:
    from ...measure.verification import normal, strided

    if name in ("running_var", "spread"):
        return strided(
            spec,
            device,
            lambda n, dtype: (0.5 + torch.rand(n, device=g.device, generator=g)).to(device, dtype),
        )
    if name == "gamma":
        return strided(
            spec, device, lambda n, dtype: (1 + 0.1 * normal(n, torch.float32, device, g)).to(dtype)
        )
    return _weights(key, name, spec, device, g)


def _functional(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args[:3], None, None, *args[5:]) if args[8] else args


def _update(args: tuple[Any, ...], outs: Outputs) -> None:
    """running <- (1 - momentum) running + momentum batch, the variance unbiased, as PyTorch does it."""
    x, running_mean, running_var, eps, momentum = args[0], args[3], args[4], args[7], args[9]
    if not args[8] or running_mean is None or running_var is None:
        return
    mean, rstd = outs[2], outs[3]
    assert mean is not None and rstd is not None
    count = x.shape[:-1].numel()
    if count == 0:
        return
    with torch.no_grad():
        variance = (rstd.double().pow(-2) - eps) * (count / max(count - 1, 1))
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_(variance.to(running_var.dtype), momentum)


LINEAR_BATCH_NORM_RELU = linear_ops.op(
    _linear_batch_norm_relu,
    sample=_sample,
    cases=_cases,
    gradient=Gradient(_kept, _backward, again=True),
    keyed=("eps", "momentum"),
    autocast="composition",
    mutates=("running_mean", "running_var"),
    functional=_functional,
    update=_update,
    outputs=4,
)
LINEAR_BATCH_NORM_RELU_BACKWARD = linear_ops.backward_op(
    linear_batch_norm_relu_backward, "dy", "x", "y", "z", sample=_sample, keyed=("eps",), outputs=5
)
backward_call = dispatcher.internal(LINEAR_BATCH_NORM_RELU_BACKWARD)
LINEAR_BATCH_NORM_RELU.candidate("torch.eager", trusted=True)(_linear_batch_norm_relu)
LINEAR_BATCH_NORM_RELU_BACKWARD.candidate("torch.eager", trusted=True)(
    linear_batch_norm_relu_backward
)


@LINEAR_BATCH_NORM_RELU.candidate(
    "torch.inplace",
    supports=lambda key: "batch statistics are outputs" if key.flag("training") else None,
    trusted=True,
)
def in_place(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    training: bool,
    momentum: float,
    save: bool,
) -> tuple[Tensor, ...]:
    """The ReLU in the normalised product's own memory."""
    z = F.linear(x, weight, bias)
    flat = z.view(-1, z.shape[-1])
    y = F.batch_norm(flat, running_mean, running_var, gamma, beta, False, momentum, eps).relu_()
    return (y.view(z.shape), z) if save else (y.view(z.shape),)


linear_ops.add_widened(
    LINEAR_BATCH_NORM_RELU,
    lambda key: (
        "batch statistics must be kept" if key.flag("save") or key.flag("training") else None
    ),
)


@dispatcher.public(LINEAR_BATCH_NORM_RELU)
def linear_batch_norm_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float = 1e-5,
    training: bool = False,
    momentum: float = 0.1,
) -> tuple[Any, ...]:
    """relu(batch_norm(x · weightᵀ + bias)), normalised per output feature over all rows.

    Args:
        x: [..., K], floating. weight: [N, K], same dtype. bias: [N] or None.
        running_mean, running_var: [N]; updated in place in training (where they may be None).
        gamma, beta: [N] or None. eps: added to the variance, >= 0.
        training: normalise by the batch's own statistics. momentum: share of the batch in the running statistics, in [0, 1].

    Returns:
        [..., N] in x's dtype.

    Raises:
        TypeError: not a tensor, not floating, or dtypes differ. ValueError: shapes, devices or numbers do not fit, or one row in training.

    Source: Ioffe and Szegedy, Batch Normalization, arXiv:1502.03167.

    Example:
        >>> import torch, tensorlogic
        >>> x, w = torch.tensor([[1.0, -2.0]]), torch.eye(2)
        >>> tensorlogic.linear_batch_norm_relu(x, w, None, torch.zeros(2), torch.ones(2), None, None, eps=0.0)
        tensor([[1., 0.]])
    """
    fn = "linear_batch_norm_relu"
    stats = {"running_mean": running_mean, "running_var": running_var}
    affine = {"gamma": gamma, "beta": beta}
    tensor_checks.tensors(fn, {"x": x, "weight": weight}, {"bias": bias, **stats, **affine})
    tensor_checks.floating(fn, {"x": x, "weight": weight, "bias": bias}, autocast=True)
    shape = tensor_checks.linear_shapes(fn, x, weight, bias)
    for name, t in {**stats, **affine}.items():
        tensor_checks.shape(
            fn, name, t, (shape[-1],), f"one value for each of the {shape[-1]} output features"
        )
        if t is not None:
            tensor_checks.floating(fn, {name: t})
            fits = t.dtype == x.dtype or (t.dtype == torch.float32 and x.dtype in HALVES)
            if not fits and not tensor_checks.autocasting(x.device) and not tensor_checks.precise():
                raise TypeError(
                    f"{fn}: {name} is {argument_checks.describe(t)}, but x is {argument_checks.describe(x)}; x's dtype is required, or float32 beside halves"
                )
        if t is not None and name in stats and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{fn}: {name} requires gradients, and statistics have none: pass {name}.detach()"
            )
    if not argument_checks.flag(fn, "training", training) and (
        running_mean is None or running_var is None
    ):
        raise ValueError(f"{fn}: running_mean and running_var are required unless training=True")
    if (running_mean is None) != (running_var is None):
        raise ValueError(f"{fn}: running_mean and running_var must be given together or not at all")
    if training and x.shape[:-1].numel() == 1:
        raise ValueError(
            f"{fn}: x is {argument_checks.describe(x)}; more than one row is required in training: pass training=False or a larger batch"
        )
    eps = tensor_checks.number(fn, "eps", eps, 0.0, float("inf"), "of at least 0")
    momentum = tensor_checks.number(fn, "momentum", momentum, 0.0, 1.0 + 1e-12, "in [0, 1]")
    return x, weight, bias, running_mean, running_var, gamma, beta, eps, training, momentum
