"""linear on CPUs: one product with a native epilogue; backward by one pass and two products."""

from __future__ import annotations

from typing import Any

from ...core.activations import SMOOTH
from ...core.candidate import Config, Launcher
from ...core.key import Key
from ...kernels import register
from ...kernels.cpu import gemm as cpu_gemm
from ...native import cpu_library
from . import LINEAR, LINEAR_BACKWARD


def build(key: Key, config: Config) -> Launcher:
    """Bias, residual and activation in the product's epilogue; the pre-activation too where backward needs it."""
    keep = key.flag("save") and key.flag("activation") in SMOOTH
    residual = key.spec("residual")
    if (
        not keep
        and config["product"] == "native"
        and (residual is None or register.is_contiguous(residual))
    ):
        return cpu_library.launcher("linear", cpu_library.ACTIVATIONS[key.flag("activation")])
    run = cpu_gemm.finished(key, config, cpu_gemm.linear_shape(key), keep=keep)
    if keep:
        return run
    return lambda x, weight, bias, residual: (run(x, weight, bias, residual),)


def build_backward(key: Key) -> Launcher:
    """The activation's gradient in one pass, then two products and the bias's sum."""
    gradient = cpu_gemm.activation_gradient(key.flag("activation"))
    needs, plain = key.flag("needs"), key.flag("activation") == "none"
    products = cpu_gemm.gradients(needs)

    def launch(dy: Any, x: Any, weight: Any, kept: Any) -> Any:
        dz = gradient(dy, kept)
        residual = None if needs[3] == "0" else dz.clone() if plain else dz
        return (*products(dz, x, weight), residual)

    return launch


cpu_gemm.add_backward(LINEAR_BACKWARD, build_backward, __name__)
cpu_gemm.add(LINEAR, "cpu.epilogue", build, __name__)
