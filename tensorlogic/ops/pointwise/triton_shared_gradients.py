"""Gradients of element-wise ops with operands that rows or columns share (a bias, a scale, a gate, one number): one pass that writes
and sums."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key, TensorSpec
from ..common import (
    triton_columns,
    triton_elementwise,
    triton_math,
    triton_shared_gradients,
    wiring,
)
from ..reduce.shapes import joined
from . import POINTWISE_BACKWARD

# kind -> what the gradients of a, b and c read, and whose gradient is dy itself
READS = {
    "add": ("", "", ""),
    "sub": ("", "", ""),
    "mul": ("b", "a", ""),
    "div": ("b", "ab", ""),
    "affine": ("b", "a", ""),
    "add_relu": ("y", "y", ""),
    "mul_relu": ("ab", "ab", ""),
}
HANDED_ON = {"add": "ab", "sub": "a", "affine": "c"}


@dataclass(frozen=True)
class Shape:
    """One launch: [rows, columns], whether sums are along rows, how each tensor meets them, steps between the rows of a and b, shapes of
    what is made."""

    kind: str
    dtype: str
    rows: int
    columns: int
    along: bool
    modes: tuple[tuple[str, str], ...]
    steps: tuple[int, int]
    made: tuple[tuple[str, tuple[int, ...]], ...]
    gives: tuple[str, ...]
    align: int


def _shared(t: TensorSpec, whole: tuple[int, ...]) -> tuple[int, int, bool] | None:
    """[rows, columns] of `whole`, of which contiguous `t` is one row, or, as the third says, one column; else None."""
    missing = len(whole) - len(t.shape)
    shape, count = (1,) * missing + t.shape, prod(t.shape)
    if not wiring.is_contiguous(t):
        return None
    for first in range(len(whole)):
        lead, rest = prod(whole[:first]), prod(whole[first:])
        if count > 1 and rest == count and shape[first:] == whole[first:]:
            return lead, rest, False
        if lead == count and shape[:first] == whole[:first]:
            return lead, rest, True
    return None


def _step(t: TensorSpec, rows: int, columns: int) -> int | None:
    """From one row of [rows, columns] to the next, elements of a row being neighbours; None where they are not."""
    dims = joined(list(zip(t.shape, t.stride, strict=True)))
    if dims in (((rows * columns, 1),), ()):
        return columns
    lines = dims == ((rows, dims[0][1]), (columns, 1)) if len(dims) == 2 else False
    return dims[0][1] if lines else None


def describe(key: Key) -> Shape | str:
    """The launch behind a backward key in which an operand whose gradient is asked for is shared by all rows, or by all columns."""
    kind, needs, dy = key.flag("kind"), key.flag("needs"), key.spec("dy")
    assert dy is not None
    reason = wiring.one_dtype(key)
    if kind not in READS or reason is not None:
        return reason or "it has one operand"
    if 0 in dy.shape:
        return "empty"
    given = {n: key.spec(n) for n in "abcy"}
    short = {n: t for n, t in given.items() if t is not None and t.shape != dy.shape}
    views = {_shared(t, dy.shape) for t in short.values()}
    view = views.pop() if len(views) == 1 else None
    if view is None or not any(needs["abc".index(n)] == "1" for n in short):
        return "no operand whose gradient is asked for is shared by all rows, or by all columns"
    rows, columns, along = view
    modes, steps, made, gives = dict.fromkeys(("a", "b", "y", "da", "db", "dc"), "none"), {}, [], []
    one = not any(dy.stride)
    if not one and not wiring.is_contiguous(dy):
        return "dy is not contiguous"
    for name, wanted, reads in zip("abc", needs, READS[kind], strict=True):
        if wanted == "0":
            gives.append("None")
            continue
        for other in reads:
            t = given[other]
            if t is None:
                return f"{other} was not kept"
            modes[other] = "full" if other not in short else "column" if along else "row"
        if name in short:
            modes[f"d{name}"] = "sum"
        elif name in HANDED_ON.get(kind, ""):
            gives.append("dy")
            continue
        else:
            modes[f"d{name}"] = "full"
        made.append((f"d{name}", (short.get(name) or dy).shape))
        gives.append(f"d{name}")
    for name in "aby":
        t = given[name]
        steps[name] = columns if t is None or modes[name] != "full" else _step(t, rows, columns)
        if steps[name] is None or (name == "y" and steps[name] != columns):
            return f"rows of {name} are not evenly spaced"
    modes["dy"] = "one" if one else "full"
    places = steps["a"] or 0, steps["b"] or 0
    if max(rows, columns, *places) > triton_elementwise.WIDEST:
        return "more rows or columns than the kernel counts"
    return Shape(
        kind, dy.dtype, rows, columns, along, tuple(modes.items()), places, tuple(made), tuple(gives), wiring.weakest(key)
    )  # fmt: skip


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return triton_shared_gradients.shared_gradient_configs(
        s.rows, s.columns, s.along, wiring.cores()
    )


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher over (dy, a, b, c, y)."""
    modes, chosen = dict(s.modes), dict(config)
    start = triton_shared_gradients.shared_gradient_launcher(
        s.kind, s.dtype, s.rows, s.columns, s.along, modes, s.steps, chosen, device, s.align
    )
    slots, kept = sum(modes[f"d{n}"] == "sum" for n in "abc"), s.rows if s.along else s.columns
    space, count = triton_shared_gradients.shared_gradient_space(kept, s.along, slots, chosen)
    empty, dtype = wiring.empty(device), DTYPES[s.dtype]
    places = [i for i, n in enumerate(("dy", "a", "b", "c", "y")) if modes.get(n, "none") != "none"]
    outputs = [(name, shape, wiring.contiguous(shape)) for name, shape in s.made]

    def launch(*dynamic: Any) -> Any:
        made = {name: empty(shape, stride, dtype) for name, shape, stride in outputs}
        tensors = tuple(made.values())
        partial = empty((space,), (1,), torch.float32) if space else tensors[0]
        counter = wiring.counters(device, count) if count else tensors[0]
        if not start(*[dynamic[i] for i in places], *tensors, partial, counter):
            return None
        return tuple([dynamic[0] if g == "dy" else made.get(g) for g in s.gives])

    return launch


wiring.described(
    POINTWISE_BACKWARD,
    "triton.shared",
    describe,
    configs,
    build,
    (
        triton_shared_gradients,
        triton_columns,
        triton_elementwise,
        triton_math,
        sys.modules[__name__],
    ),
)
