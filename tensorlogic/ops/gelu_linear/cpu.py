"""gelu_linear on CPUs: a native GELU into float32, the product, the bias and rounding in one pass; or PyTorch's product behind a native GELU."""

from __future__ import annotations

from typing import Any

from ...core.candidate import Config, Launcher
from ...core.key import Key
from ...kernels.cpu import gemm as cpu_gemm
from ...native import cpu_library
from . import GELU_LINEAR, GELU_LINEAR_BACKWARD


def build(key: Key, config: Config) -> Launcher:
    """The launcher over (x, weight, bias)."""
    gelu, tanh = cpu_library.op("gelu"), key.flag("approximate") == "tanh"
    run = cpu_gemm.finished(key, config, cpu_gemm.linear_shape(key))

    def launch(x: Any, weight: Any, bias: Any) -> Any:
        return (run(gelu(cpu_gemm.prepared(config, x), tanh), weight, bias, None),)

    return launch


def build_backward(key: Key) -> Launcher:
    """The launcher over (dy, x, weight)."""
    tanh, needs = key.flag("approximate") == "tanh", key.flag("needs")
    gelu, gradient = cpu_library.op("gelu"), cpu_library.op("gelu_backward")
    products = cpu_gemm.gradients(needs)

    def launch(dy: Any, x: Any, weight: Any) -> Any:
        dgelu, dw, db = products(dy, gelu(x, tanh) if needs[1] == "1" else None, weight)
        return None if dgelu is None else gradient(dgelu, x, tanh), dw, db

    return launch


cpu_gemm.add_backward(GELU_LINEAR_BACKWARD, build_backward, __name__)
cpu_gemm.add(GELU_LINEAR, "cpu.fused", build, __name__, cpu_gemm.supports_dense)
