"""Element-wise ops by the flat and the row-wise Triton kernels: one pass over memory, computed in float32."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key, TensorSpec
from ..common import triton_elementwise, triton_math, wiring
from . import FAMILY, POINTWISE_BACKWARD


@dataclass(frozen=True)
class Shape:
    """One launch: the kernel's op, dtype, the [rows, columns] it sees, how each operand meets them, and the output."""

    kind: str
    dtype: str
    rows: int
    columns: int
    modes: tuple[str, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...]
    align: int


def _dense(t: TensorSpec) -> bool:
    """True where the elements fill their memory without gaps, in whatever order of dimensions."""
    step = 1
    for s, n in sorted((s, n) for n, s in zip(t.shape, t.stride, strict=True) if n != 1):
        if s != step:
            return False
        step *= n
    return True


def _mode(t: TensorSpec, out: tuple[int, ...]) -> tuple[str, int] | None:
    """("full" | "row" | "column" | "one", columns it wants; 0: any) of an operand, or None."""
    if prod(t.shape) == 1:
        return "one", 0
    if not wiring.is_contiguous(t):
        return None
    shape = t.shape
    while shape and shape[0] == 1:
        shape = shape[1:]
    if prod(t.shape) == prod(out):
        return "full", 0
    if shape == out[len(out) - len(shape) :]:
        return "row", prod(shape)
    if len(t.shape) == len(out) and t.shape[-1] == 1 and t.shape[:-1] == out[:-1]:
        return "column", out[-1]
    return None


def shape_of(kind: str, key: Key, operands: tuple[TensorSpec, ...]) -> Shape | str:
    """How the kernel sees these operands, or why it cannot."""
    reason = wiring.one_dtype(key)
    if reason is not None:
        return reason
    out = tuple(torch.broadcast_shapes(*(t.shape for t in operands)))
    if 0 in out:
        return "empty"
    first, align = operands[0], wiring.weakest(key)
    if all(t.shape == out and t.stride == first.stride for t in operands) and _dense(first):
        return Shape(kind, first.dtype, 1, prod(out), ("full",) * len(operands), out, first.stride, align)
    found = [_mode(t, out) for t in operands]
    modes = [m for m in found if m is not None]
    wanted = {c for _, c in modes if c}
    if len(modes) < len(found) or len(wanted) > 1:
        return "operands are strided or broadcast in several ways"
    columns = wanted.pop() if wanted else out[-1] if out else 1
    return Shape(kind, first.dtype, prod(out) // columns, columns, tuple(m for m, _ in modes), out, wiring.contiguous(out), align)


def _kind(key: Key) -> str:
    return "gelu_tanh" if key.op == "gelu" and key.flag("approximate") == "tanh" else key.op


def describe(key: Key) -> Shape | str:
    """The launch behind a forward key."""
    return shape_of(_kind(key), key, tuple(t for t in key.tensors if t is not None))


def configs(shape: Shape) -> list[dict[str, Any]]:
    """Configurations of a launch."""
    _, outputs = triton_elementwise.ELEMENTWISE[shape.kind]
    return triton_elementwise.elementwise_configs([shape.dtype] * (len(shape.modes) + outputs), shape.rows, shape.columns, shape.modes)


def _start(shape: Shape, config: Config, device: torch.device) -> Any:
    _, outputs = triton_elementwise.ELEMENTWISE[shape.kind]
    dtypes = [shape.dtype] * (len(shape.modes) + outputs)
    return triton_elementwise.elementwise_launcher(shape.kind, dtypes, shape.rows, shape.columns, shape.modes, dict(config), device, shape.align)


def build(shape: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher of one output."""
    start, empty = _start(shape, config, device), wiring.empty(device)
    out, stride, dtype = shape.out, shape.stride, DTYPES[shape.dtype]

    def one(a: torch.Tensor) -> Any:
        y = empty(out, stride, dtype)
        return (y,) if start(a, y) else None

    def two(a: torch.Tensor, b: torch.Tensor) -> Any:
        y = empty(out, stride, dtype)
        return (y,) if start(a, b, y) else None

    def three(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        y = empty(out, stride, dtype)
        return (y,) if start(a, b, c, y) else None

    return (one, two, three)[len(shape.modes) - 1]


# kind of op -> (kernel, operands it reads, which gradients its outputs are; "dy": the incoming one is the gradient)
BACKWARD: dict[str, tuple[str, tuple[str, ...], tuple[str | int, ...]]] = {
    "relu": ("relu_bwd", ("dy", "y"), (0,)),
    "add_relu": ("relu_bwd", ("dy", "y"), (0, 0)),
    "gelu": ("gelu_bwd", ("dy", "a"), (0,)),
    "gelu_tanh": ("gelu_tanh_bwd", ("dy", "a"), (0,)),
    "silu": ("silu_bwd", ("dy", "a"), (0,)),
    "mul": ("mul_bwd", ("dy", "a", "b"), (0, 1)),
    "div": ("div_bwd", ("dy", "a", "b"), (0, 1)),
    "mul_relu": ("mul_relu_bwd", ("dy", "a", "b"), (0, 1)),
    "affine": ("mul_bwd", ("dy", "a", "b"), (0, 1, "dy")),
}


def describe_backward(key: Key) -> Shape | str:
    """The launch behind a backward key: all operands of one shape."""
    if key.flag("kind") not in BACKWARD:
        return "its gradient is the incoming one"
    kernel, reads, _ = BACKWARD[key.flag("kind")]
    operands = tuple(key.spec(name) for name in reads)
    dy = key.spec("dy")
    if any(t is None or dy is None or t.shape != dy.shape for t in (*operands, *(t for t in key.tensors if t is not None))):
        return "an operand is broadcast"
    return shape_of(kernel, key, tuple(t for t in operands if t is not None))


def _build_backward() -> Any:
    """A builder of launchers over (dy, a, b, c, y)."""

    def build(described: tuple[str, Shape], config: Config, device: torch.device) -> Launcher:
        kind, shape = described
        kernel, reads, gives = BACKWARD[kind]
        start, empty, dtype = _start(shape, config, device), wiring.empty(device), DTYPES[shape.dtype]
        places = [("dy", "a", "b", "c", "y").index(name) for name in reads]
        outputs = triton_elementwise.ELEMENTWISE[kernel][1]

        def launch(*dynamic: Any) -> Any:
            made = [empty(shape.out, shape.stride, dtype) for _ in range(outputs)]
            if not start(*(dynamic[i] for i in places), *made):
                return None
            grads = [dynamic[0] if g == "dy" else made[int(g)] for g in gives]
            return (*grads, *[None] * (3 - len(grads)))

        return launch

    return build


def _described_backward(key: Key) -> tuple[str, Shape] | str:
    found = describe_backward(key)
    return found if isinstance(found, str) else (key.flag("kind"), found)


_SOURCES = (triton_elementwise, triton_math, sys.modules[__name__])
for _op in FAMILY:
    wiring.described(_op, "triton.flat", describe, configs, build, _SOURCES)
wiring.described(
    POINTWISE_BACKWARD, "triton.flat", _described_backward, lambda d: configs(d[1]), _build_backward(), _SOURCES
)
