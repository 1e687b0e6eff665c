"""dropout_linear on CPUs: the mask is drawn in one pass over x, and drawn again in backward; none is stored."""

from __future__ import annotations

from typing import Any

from ...core.candidate import Config, Launcher
from ...core.key import Key
from ...kernels.cpu import gemm as cpu_gemm
from ...native import cpu_library
from . import DROPOUT_LINEAR, DROPOUT_LINEAR_BACKWARD


def supports(key: Key) -> str | None:
    """None for contiguous operands and a seed given as numbers."""
    return "the seed is a tensor" if key.spec("state") is not None else cpu_gemm.supports_dense(key)


def build(key: Key, config: Config) -> Launcher:
    """The launcher over (x, weight, bias, p, seed, offset, state)."""
    drop, save = cpu_library.op("dropout"), key.flag("save")
    run = cpu_gemm.finished(key, config, cpu_gemm.linear_shape(key))

    def launch(x: Any, weight: Any, bias: Any, p: float, seed: int, offset: int, state: Any) -> Any:
        dropped = drop(cpu_gemm.prepared(config, x), p, seed, offset)
        y = run(dropped, weight, bias, None)
        return (y, None) if save else (y,)

    return launch


def supports_backward(key: Key) -> str | None:
    """None for contiguous operands, a seed given as numbers and no stored mask."""
    if key.spec("mask") is not None or key.spec("state") is not None:
        return "forward kept a mask, or the seed is a tensor"
    return cpu_gemm.supports_backward(key)


def build_backward(key: Key) -> Launcher:
    """The launcher over (dy, x, weight, mask, p, seed, offset, state)."""
    drop, needs = cpu_library.op("dropout"), key.flag("needs")
    products = cpu_gemm.gradients(needs)

    def launch(
        dy: Any, x: Any, weight: Any, mask: Any, p: float, seed: int, offset: int, state: Any
    ) -> Any:
        dropped = drop(x, p, seed, offset) if needs[1] == "1" else None
        dx, dw, db = products(dy, dropped, weight)
        return None if dx is None else drop(dx, p, seed, offset), dw, db

    return launch


cpu_gemm.add_backward(DROPOUT_LINEAR_BACKWARD, build_backward, __name__, supports_backward)
cpu_gemm.add(DROPOUT_LINEAR, "cpu.fused", build, __name__, supports)
