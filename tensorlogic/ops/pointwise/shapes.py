"""How element-wise kernels see their operands: one [rows, columns] view and a mode for each operand."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ...arguments import broadcast
from ...plans import Key, TensorSpec
from ..common import wiring


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
    out = broadcast(*(t.shape for t in operands))
    if 0 in out:
        return "empty"
    first, align = operands[0], wiring.weakest(key)
    if all(t.shape == out and t.stride == first.stride for t in operands) and _dense(first):
        return Shape(
            kind, first.dtype, 1, prod(out), ("full",) * len(operands), out, first.stride, align
        )
    found = [_mode(t, out) for t in operands]
    modes = [m for m in found if m is not None]
    wanted = {c for _, c in modes if c}
    if len(modes) < len(found) or len(wanted) > 1:
        return "operands are strided or broadcast in several ways"
    columns = wanted.pop() if wanted else out[-1] if out else 1
    return Shape(
        kind,
        first.dtype,
        prod(out) // columns,
        columns,
        tuple(m for m, _ in modes),
        out,
        wiring.contiguous(out),
        align,
    )


def kind_of(key: Key) -> str:
    """The kernels' name of a forward op."""
    return "gelu_tanh" if key.op == "gelu" and key.flag("approximate") == "tanh" else key.op


def forward_shape(key: Key) -> Shape | str:
    """The launch behind a forward key."""
    return shape_of(kind_of(key), key, tuple(t for t in key.tensors if t is not None))


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


def backward_shape(key: Key) -> tuple[str, Shape] | str:
    """(kind of op, launch) behind a backward key: all operands of one shape."""
    if key.flag("kind") not in BACKWARD:
        return "its gradient is the incoming one"
    kernel, reads, _ = BACKWARD[key.flag("kind")]
    operands = [key.spec(name) for name in reads]
    dy = key.spec("dy")
    assert dy is not None
    if any(t is None for t in operands) or any(
        t is not None and t.shape != dy.shape for t in key.tensors
    ):
        return "an operand is broadcast"
    found = shape_of(kernel, key, tuple(t for t in operands if t is not None))
    return found if isinstance(found, str) else (key.flag("kind"), found)
