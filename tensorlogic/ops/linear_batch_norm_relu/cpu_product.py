"""linear_batch_norm_relu on CPUs where the product is an output: our products, what is between them by PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...core.candidate import Config, Launcher
from ...core.key import Key
from ...kernels import register
from ...kernels.cpu import gemm as cpu_gemm
from ...kernels.cpu import register as cpu_register
from ...kernels.register import rows
from ...native import cpu_library
from . import LINEAR_BATCH_NORM_RELU, LINEAR_BATCH_NORM_RELU_BACKWARD


def supports(key: Key) -> str | None:
    """None in training or with gradients, for operands of one kernel dtype; statistics and affine parameters are of any."""
    if not key.flag("training") and not key.flag("save"):
        return "in evaluation without gradients all of it is one product"
    return _product(key, *(["bias"] if key.spec("bias") is not None else []))


def _product(key: Key, *contiguous: str) -> str | None:
    x, weight = key.spec("x"), key.spec("weight")
    assert x is not None and weight is not None
    if 0 in (*x.shape, *weight.shape):
        return "an operand is empty"
    dense = cpu_register.contiguous(key, *contiguous) if contiguous else None
    return dense or register.one_dtype(key, "x", "weight", *contiguous)


def build(key: Key, config: Config) -> Launcher:
    """The launcher over (x, weight, bias, running_mean, running_var, gamma, beta)."""
    run = cpu_gemm.finished(key, config, cpu_gemm.linear_shape(key))
    eps, momentum = key.flag("eps"), key.flag("momentum")
    training, save = key.flag("training"), key.flag("save")

    def launch(x: Any, weight: Any, bias: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> Any:
        z = run(x, weight, bias, None)
        flat, scale = rows(z), None if gamma is None else gamma.contiguous()
        if not training:
            bn = F.batch_norm(flat, mean, var, scale, beta, False, momentum, eps)
            return torch.relu_(bn).view(z.shape), z
        bn, *batch = torch.native_batch_norm(flat, scale, beta, mean, var, True, momentum, eps)
        return torch.relu_(bn).view(z.shape), z if save else z.new_empty(0), *batch

    return launch


def supports_backward(key: Key) -> str | None:
    """None for non-empty operands of one kernel dtype."""
    return _product(key, "dy", "y", "z")


def build_backward(key: Key) -> Launcher:
    """The launcher over (dy, x, weight, y, z, mean, spread, gamma): float32 between dy and the products."""
    training, eps, needs = key.flag("training"), key.flag("eps"), key.flag("needs")
    products, relu = cpu_gemm.gradients(needs[:3]), cpu_library.op("relu_backward")

    def launch(
        dy: Any, x: Any, weight: Any, y: Any, z: Any, mean: Any, spread: Any, gamma: Any
    ) -> Any:
        rstd = spread.float() if training else torch.rsqrt(spread.float() + eps)
        wide = rows(relu(dy, y)).float()
        normal = (z.view(wide.shape).float() - mean).mul_(rstd)
        dgamma, dbeta = (wide * normal).sum(0), wide.sum(0)
        inner = wide
        if training:
            inner = wide - normal.mul_(dgamma / len(wide)).add_(dbeta / len(wide))
        dz = (inner * (rstd if gamma is None else rstd * gamma)).to(dy.dtype)
        dx, dw, db = products(dz, x, weight)
        dtype = dy.dtype if gamma is None else gamma.dtype
        return (
            None if dx is None else dx.view(x.shape),
            dw,
            db,
            dgamma.to(dtype) if needs[3] == "1" else None,
            dbeta.to(dtype) if needs[4] == "1" else None,
        )

    return launch


cpu_gemm.add_backward(LINEAR_BATCH_NORM_RELU_BACKWARD, build_backward, __name__, supports_backward)
cpu_gemm.add(LINEAR_BATCH_NORM_RELU, "cpu.product", build, __name__, supports)
