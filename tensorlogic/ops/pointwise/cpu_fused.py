"""Element-wise ops by the native CPU kernels: one vectorised pass, output from the pool."""

from __future__ import annotations

from typing import Any

import torch

from ... import native
from ...op import Launcher
from ...plans import Key
from ..common import native_wiring, wiring
from ..common.native_wiring import CACHE_BYTES, FRESH_BYTES
from . import FAMILY, POINTWISE_BACKWARD
from .shapes import BACKWARD, Shape, backward_shape, forward_shape

COSTLY = (
    "gelu",
    "silu",
)  # exponentials that PyTorch's half-precision code computes a few at a time
MAPPED_BYTES = 32 << 20  # outputs that glibc always takes afresh from the system
SMALL = 4096  # elements below which a call costs more than its arithmetic


def supports(key: Key) -> str | None:
    """None where the kernel sees the operands as rows and columns in memory order."""
    found = forward_shape(key)
    if isinstance(found, str):
        return found
    return (
        None
        if found.stride == wiring.contiguous(found.out)
        else "the operands are laid out in another order"
    )


def guess(key: Key) -> float:
    """Expected time over eager's: passes over memory saved, fresh pages not touched, vectorised exponentials."""
    shape = forward_shape(key)
    assert isinstance(shape, Shape)
    count, size = shape.rows * shape.columns, 2 if shape.dtype != "f32" else 4
    if count <= SMALL:
        return 1.0
    if key.op in COSTLY and size == 2:
        return 0.3
    if (
        key.op in COSTLY
    ):  # PyTorch's float32 exponentials and erf are vectorised, its tanh GELU is not
        tanh = key.op == "gelu" and key.flag("approximate") == "tanh"
        return 0.5 if tanh else 0.4 if count * size >= MAPPED_BYTES else 1.0
    if count * size >= FRESH_BYTES:
        return 0.3
    fused = key.op in ("add_relu", "mul_relu", "affine")
    return 0.6 if fused and count * size <= CACHE_BYTES else 1.0


def build(key: Key) -> Launcher:
    """The launcher of one output."""
    run = native.op(key.op)
    if key.op == "gelu":
        tanh = key.flag("approximate") == "tanh"
        return lambda x: (run(x, tanh),)
    if len(key.tensors) == 1:
        return lambda x: (run(x),)
    if len(key.tensors) == 2:
        return lambda a, b: (run(a, b),)
    return lambda x, scale, bias: (run(x, scale, bias),)


def supports_backward(key: Key) -> str | None:
    """None where all operands have one shape and lie in memory order."""
    found = backward_shape(key)
    if isinstance(found, str):
        return found
    return (
        None
        if found[1].stride == wiring.contiguous(found[1].out)
        else "the operands are laid out in another order"
    )


def guess_backward(key: Key) -> float:
    """As forward."""
    count = native_wiring.size_of(key, "dy")
    if count <= SMALL:
        return 1.0
    return (
        0.4
        if native_wiring.bytes_of(key, "dy") >= FRESH_BYTES or key.flag("kind").startswith(COSTLY)
        else 1.0
    )


def build_backward(key: Key) -> Launcher:
    """The launcher over (dy, a, b, c, y)."""
    kind = key.flag("kind")
    kernel, reads, gives = BACKWARD[kind]
    name = kernel.removesuffix("_bwd").removesuffix("_tanh") + "_backward"
    run, extra = native.op(name), (kind == "gelu_tanh",) if kind.startswith("gelu") else ()
    places = [("dy", "a", "b", "c", "y").index(n) for n in reads]

    def launch(*dynamic: Any) -> Any:
        out = run(*(dynamic[i] for i in places), *extra)
        made = (out,) if isinstance(out, torch.Tensor) else out
        grads = [dynamic[0] if g == "dy" else made[int(g)] for g in gives]
        return (*grads, *[None] * (3 - len(grads)))

    return launch


for _op in FAMILY:
    native_wiring.add(_op, "cpu.fused", build, supports, guess, __name__)
native_wiring.add(
    POINTWISE_BACKWARD, "cpu.fused", build_backward, supports_backward, guess_backward, __name__
)
