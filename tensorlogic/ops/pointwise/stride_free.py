"""Element-wise launches for kernels that take no strides: operands that lie alike, or contiguous ones that repeat in one way."""

from __future__ import annotations

from math import prod

from ...core.key import Key, TensorSpec
from ...kernels import register
from ..common import layouts
from . import shapes
from .shapes import APART, BACKWARD, Shape, laid


def forward_shape(key: Key) -> Shape | str:
    """The launch behind a forward key."""
    found = shapes.unstrided(shapes.forward_shape(key))
    if isinstance(found, str):
        return found
    return found if _together(key.tensors, found.out) else APART


def backward_shape(key: Key) -> tuple[str, Shape] | str:
    """(kind of op, launch) behind a backward key."""
    found = shapes.backward_shape(key)
    if isinstance(found, str):
        return found
    kind, shape = found[0], shapes.unstrided(found[1])
    if isinstance(shape, str):
        return shape
    read = tuple(key.spec(name) for name in BACKWARD[kind][1])
    return (kind, shape) if _together(read, shape.out) else APART


def _together(given: tuple[TensorSpec | None, ...], out: tuple[int, ...]) -> bool:
    operands = [t for t in given if t is not None]
    first = operands[0]
    if all(t.shape == out and t.stride == first.stride for t in operands) and layouts.dense(
        laid(first)
    ):
        return True
    wanted = [_columns(t, out) for t in operands]
    return None not in wanted and len({n for n in wanted if n}) <= 1


def _columns(t: TensorSpec, out: tuple[int, ...]) -> int | None:
    """How long a row is where this operand is the same for all rows, or one number each; 0 where any length will do; None where neither."""
    if prod(t.shape) == 1:
        return 0
    if not register.is_contiguous(t):
        return None
    shape = t.shape
    while shape and shape[0] == 1:
        shape = shape[1:]
    if prod(t.shape) == prod(out):
        return 0
    if shape == out[len(out) - len(shape) :]:
        return prod(shape)
    column = len(t.shape) == len(out) and t.shape[-1] == 1 and t.shape[:-1] == out[:-1]
    return out[-1] if column else None
