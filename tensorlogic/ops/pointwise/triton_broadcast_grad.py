"""Gradients of element-wise ops with operands that rows or columns share (a bias, a scale, a gate, one number): one pass that writes
and sums."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key, TensorSpec
from ...kernels import register
from ...kernels.elementwise import broadcast_grad, column_passes, elementwise
from ...kernels.triton_runtime import device_math, scratch
from ..reduce.shapes import joined
from .definitions import POINTWISE_BACKWARD

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
    """One launch: [rows, columns], whether sums are along rows, how each tensor meets them, the steps of a and b from row to row and
    from column to column, shapes and strides of what is made."""

    kind: str
    dtype: str
    rows: int
    columns: int
    along: bool
    modes: tuple[tuple[str, str], ...]
    steps: tuple[tuple[int, int], tuple[int, int]]
    made: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    gives: tuple[str, ...]
    align: int


def _turned(t: TensorSpec, order: list[int]) -> TensorSpec:
    """The tensor with as many dimensions as `order` has, and in that order."""
    missing = len(order) - len(t.shape)
    shape, stride = (1,) * missing + t.shape, (0,) * missing + t.stride
    return replace(t, shape=tuple(shape[d] for d in order), stride=tuple(stride[d] for d in order))


def _shared(t: TensorSpec, whole: tuple[int, ...]) -> tuple[int, int, bool] | None:
    """[rows, columns] of `whole`, of which contiguous `t` is one row, or, as the third says, one column; else None."""
    count = prod(t.shape)
    if not register.is_contiguous(t):
        return None
    for first in range(len(whole)):
        lead, rest = prod(whole[:first]), prod(whole[first:])
        if count > 1 and rest == count and t.shape[first:] == whole[first:]:
            return lead, rest, False
        if lead == count and t.shape[:first] == whole[:first]:
            return lead, rest, True
    return None


def _steps(t: TensorSpec, rows: int, columns: int) -> tuple[int, int] | None:
    """From one row of [rows, columns] to the next and from one column to the next; None where they are not even."""
    dims = joined(list(zip(t.shape, t.stride, strict=True)))
    if len(dims) < 2:
        step = dims[0][1] if dims else 1
        return columns * step, step
    if len(dims) == 2 and (dims[0][0], dims[1][0]) == (rows, columns):
        return dims[0][1], dims[1][1]
    return None


def describe(key: Key) -> Shape | str:
    """The launch behind a backward key in which an operand whose gradient is asked for is shared by all rows, or by all columns."""
    kind, needs, dy = key.flag("kind"), key.flag("needs"), key.present("dy")
    reason = register.one_dtype(key)
    if kind not in READS or reason is not None:
        return reason or "it has one operand"
    if 0 in dy.shape:
        return "empty"
    order = sorted(range(len(dy.shape)), key=lambda d: (dy.shape[d] != 1, -dy.stride[d]))
    one = not any(dy.stride)
    if not one and not register.is_contiguous(_turned(dy, order)):
        return "dy has gaps"
    whole = _turned(dy, order).shape
    named = {n: key.spec(n) for n in "abcy"}
    given = {n: t and _turned(t, order) for n, t in named.items()}
    short = {n: t for n, t in named.items() if t is not None and t.shape != dy.shape}
    views = {_shared(_turned(t, order), whole) for t in short.values()}
    view = views.pop() if len(views) == 1 else None
    if order != sorted(order) and any(sum(n > 1 for n in t.shape) > 1 for t in short.values()):
        return "an operand of several dimensions, which lie in another order in what comes in"
    if view is None or not any(needs["abc".index(n)] == "1" for n in short):
        return "no operand whose gradient is asked for is shared by all rows, or by all columns"
    rows, columns, along = view
    modes, steps, made, gives = dict.fromkeys(("a", "b", "y", "da", "db", "dc"), "none"), {}, [], []
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
        shape = (short.get(name) or dy).shape
        own = name in short or one  # what is whole lies as what comes in
        made.append((f"d{name}", shape, register.contiguous(shape) if own else dy.stride))
        gives.append(f"d{name}")
    for name in "aby":
        t, even = given[name], (columns, 1)
        found = _steps(t, rows, columns) if t is not None and modes[name] == "full" else even
        if found is None or (name == "y" and found != even):
            return f"{name} does not lie in even rows"
        steps[name] = found
    modes["dy"] = "one" if one else "full"
    places = steps["a"], steps["b"]
    if max(rows, columns, *places[0], *places[1]) > elementwise.WIDEST:
        return "more rows or columns than the kernel counts"
    return Shape(
        kind, dy.dtype, rows, columns, along, tuple(modes.items()), places, tuple(made), tuple(gives), register.weakest(key)
    )  # fmt: skip


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return broadcast_grad.shared_gradient_configs(s.rows, s.columns, s.along, register.cores())


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher over (dy, a, b, c, y)."""
    modes, chosen = dict(s.modes), dict(config)
    start = broadcast_grad.shared_gradient_launcher(
        s.kind, s.dtype, s.rows, s.columns, s.along, modes, s.steps, chosen, device, s.align
    )
    slots, kept = sum(modes[f"d{n}"] == "sum" for n in "abc"), s.rows if s.along else s.columns
    space, count = broadcast_grad.shared_gradient_space(kept, s.along, slots, chosen)
    empty, dtype = register.empty(device), DTYPES[s.dtype]
    places = [i for i, n in enumerate(("dy", "a", "b", "c", "y")) if modes.get(n, "none") != "none"]

    def launch(*dynamic: Any) -> Any:
        made = {name: empty(shape, stride, dtype) for name, shape, stride in s.made}
        tensors = tuple(made.values())
        partial = empty((space,), (1,), torch.float32) if space else tensors[0]
        counter = scratch.counters(device, count) if count else tensors[0]
        if not start(*[dynamic[i] for i in places], *tensors, partial, counter):
            return None
        return tuple([dynamic[0] if g == "dy" else made.get(g) for g in s.gives])

    return launch


_SOURCES = (broadcast_grad, column_passes, elementwise, device_math, sys.modules[__name__])
register.described(POINTWISE_BACKWARD, "triton.shared", describe, configs, build, _SOURCES)
