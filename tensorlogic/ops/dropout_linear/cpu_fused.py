"""dropout_linear on CPUs: the mask is drawn while x is widened, and drawn again in backward; none is stored."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import native
from ...op import Config, Launcher
from ...plans import Key
from ..common import cpu_products, native_wiring
from . import DROPOUT_LINEAR, DROPOUT_LINEAR_BACKWARD


def supports(key: Key) -> str | None:
    """None for contiguous operands and a seed given as numbers."""
    return (
        "the seed is a tensor"
        if key.spec("state") is not None
        else cpu_products.supports_dense(key)
    )


def build(key: Key, config: Config) -> Launcher:
    """The launcher over (x, weight, bias, p, seed, offset, state)."""
    drop, save = native.op("dropout"), key.flag("save")
    run = cpu_products.finished(key, config, cpu_products.linear_shape(key))

    def launch(x: Any, weight: Any, bias: Any, p: float, seed: int, offset: int, state: Any) -> Any:
        dropped = drop(cpu_products.widened(x), p, seed, offset)
        y = run(dropped, weight, bias, None)
        return (y, None) if save else (y,)

    return launch


def supports_backward(key: Key) -> str | None:
    """None for contiguous operands, a seed given as numbers and no stored mask."""
    if key.spec("mask") is not None or key.spec("state") is not None:
        return "forward kept a mask, or the seed is a tensor"
    return native_wiring.contiguous(key, "dy", "x", "weight")


def build_backward(key: Key) -> Launcher:
    """The launcher over (dy, x, weight, mask, p, seed, offset, state), in float32 inside."""
    drop, needs, convert = native.op("dropout"), key.flag("needs"), native.op("convert")

    def rounded(t: Tensor, like: Tensor) -> Tensor:
        return t if t.dtype == like.dtype else convert(t.contiguous(), like.dtype)

    def launch(
        dy: Any, x: Any, weight: Any, mask: Any, p: float, seed: int, offset: int, state: Any
    ) -> Any:
        wide = cpu_products.widened(dy)
        flat = wide.reshape(-1, dy.shape[-1])
        dx = (
            rounded(drop(wide @ cpu_products.weight32(weight), p, seed, offset), dy)
            if needs[0] == "1"
            else None
        )
        dw = None
        if needs[1] == "1":
            dropped = drop(cpu_products.widened(x), p, seed, offset)
            dw = rounded(flat.t() @ dropped.reshape(-1, x.shape[-1]), dy)
        return dx, dw, rounded(flat.sum(0), dy) if needs[2] == "1" else None

    return launch


cpu_products.add(DROPOUT_LINEAR, "cpu.fused", build, __name__, supports)
native_wiring.add(
    DROPOUT_LINEAR_BACKWARD,
    "cpu.fused",
    build_backward,
    supports_backward,
    lambda key: 0.5,
    __name__,
)
