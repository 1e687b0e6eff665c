"""layer_norm_linear on CPUs: a native layer norm into float32, the product, the bias and rounding in one pass; or
PyTorch's product behind a native layer norm."""

from __future__ import annotations

from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels.cpu import gemm as cpu_gemm
from ...kernels.cpu import register as cpu_register
from ...native import cpu_library
from . import LAYER_NORM_LINEAR, LAYER_NORM_LINEAR_BACKWARD, again


def supports(key: Key) -> str | None:
    """As for the product; the native layer norm reads x, gamma and beta as they lie."""
    given = [n for n in ("gamma", "beta") if key.spec(n) is not None]
    return cpu_register.contiguous(key, *given) or cpu_gemm.supports_dense(key)


def build(key: Key, config: Config) -> Launcher:
    """The launcher over (x, gamma, beta, weight, bias)."""
    norm, eps = cpu_library.op("layer_norm"), key.flag("eps")
    plain = config["product"] == "plain"
    normed = DTYPES[cpu_register.dtype_of(key, "x")] if plain else torch.float32
    run = cpu_gemm.finished(key, config, cpu_gemm.linear_shape(key))

    def launch(x: Any, gamma: Any, beta: Any, weight: Any, bias: Any) -> Any:
        normal = norm(x, gamma, beta, eps, normed)[0]
        return (run(normal, weight, bias, None),)

    return launch


def build_backward(key: Key) -> Launcher:
    """The launcher over (dy, x, gamma, beta, weight, normal, mean, rstd); rows are normalised again unless they were kept."""
    needs, eps = key.flag("needs"), key.flag("eps")
    dtype = DTYPES[cpu_register.dtype_of(key, "x")]
    norm, gradient = cpu_library.op("layer_norm"), cpu_library.op("layer_norm_backward")
    products = cpu_gemm.gradients(("1" if "1" in needs[:3] else "0") + needs[3:])

    def launch(
        dy: Any, x: Any, gamma: Any, beta: Any, weight: Any, normal: Any, mean: Any, rstd: Any
    ) -> Any:
        if again(normal, mean, needs):
            normal, mean, rstd = norm(x, gamma, beta, eps, dtype)
        dnormal, dw, db = products(dy, normal, weight)
        grads = (None,) * 3 if dnormal is None else gradient(dnormal, x, gamma, mean, rstd)
        kept = (g if n == "1" else None for g, n in zip(grads, needs, strict=False))
        return (*kept, dw, db)

    return launch


cpu_gemm.add_backward(LAYER_NORM_LINEAR_BACKWARD, build_backward, __name__)
cpu_gemm.add(LAYER_NORM_LINEAR, "cpu.fused", build, __name__, supports)
