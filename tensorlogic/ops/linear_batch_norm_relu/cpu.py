"""linear_batch_norm_relu on CPUs, in evaluation: a float32 product, then statistics, ReLU and rounding in one pass over it."""

from __future__ import annotations

from math import prod
from typing import Any

from ...core.candidate import Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels.cpu import cost_model
from ...kernels.cpu import gemm as cpu_gemm
from ...kernels.cpu import register as cpu_register
from ...kernels.register import rows
from ...native import cpu_library
from . import LINEAR_BATCH_NORM_RELU

VECTORS = ("bias", "running_mean", "running_var", "gamma", "beta")
EAGER_US = {"f32": 10.0, "f16": 30.0, "bf16": 30.0}  # PyTorch's batch norm and ReLU of few elements


def supports(key: Key) -> str | None:
    """None in evaluation without gradients, for a product that is ours and contiguous vectors of one kernel dtype."""
    if key.flag("training") or key.flag("save"):
        return "batch statistics or the product are outputs"
    if key.spec("running_mean") is None or key.spec("running_var") is None:
        return "there are no running statistics"
    given = [name for name in VECTORS if key.spec(name) is not None]
    return cpu_register.contiguous(key, *given) or cpu_gemm.supports(key)


def guess(key: Key) -> float:
    """A product, and one pass where PyTorch makes two."""
    x, weight = key.spec("x"), key.spec("weight")
    assert x is not None and weight is not None
    m, k, n = prod(x.shape[:-1]), x.shape[-1], weight.shape[0]
    between = cost_model.pass_us(m * n)
    ours = cost_model.native_us(m, n, k, x.dtype, True) + cpu_register.call_us(key) + between
    eager = cost_model.torch_us(m, n, k, x.dtype, True) + EAGER_US[x.dtype]
    return ours / (eager + 2 * between)


def build(key: Key) -> Launcher:
    """The launcher over (x, weight, bias, running_mean, running_var, gamma, beta)."""
    product, norm = cpu_library.op("matmul_f32"), cpu_library.op("batch_norm_relu")
    dtype, eps = DTYPES[cpu_register.dtype_of(key, "x")], key.flag("eps")

    def launch(x: Any, weight: Any, bias: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> Any:
        flat = rows(x)
        y = norm(product(flat, weight, True), bias, mean, var, gamma, beta, eps, dtype)
        return (y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1]),)

    return launch


cpu_register.add(
    LINEAR_BATCH_NORM_RELU, "cpu.fused", build, supports, guess, __name__, cpu_register.PRODUCTS
)
