"""Gradients of max and min by Triton, over lines in any strides; and max and min whose forward pass keeps where each line's extreme is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key, TensorSpec
from ...kernels import register
from ...kernels.reduce import extreme_grad, extreme_index
from ...kernels.row_access import strided as strided_lines
from ...kernels.row_access.strided import Lines
from ...kernels.softmax import strided, strided_split
from ...kernels.triton_runtime import launch_plan
from ..common import layouts as common_layouts
from . import EXTREME_BACKWARD, shapes
from .joint_backward import TOGETHER, both

# how x lies, dtype, dx's shape and strides, alignment
Shape = tuple[Lines, str, tuple[int, ...], tuple[int, ...], int]


def describe(key: Key) -> Shape | str:
    """One dtype; x and dx are [outer, reduced, inner] in strides of their own, incoming gradients and extremes in that order."""
    x, dims = key.present("x"), key.flag("dim")
    reason = register.one_dtype(key)
    if reason is not None or not dims or 0 in x.shape:
        return reason or "nothing to reduce"
    if not all(t is x or t is None or register.is_contiguous(t) for t in key.tensors):
        return "what comes in or the extremes are not contiguous"
    made = _made(x, dims)
    found = lines(x, made, dims)
    if isinstance(found, str):
        return found
    return found, x.dtype, x.shape, made, register.weakest(key)


def _made(x: TensorSpec, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of dx as PyTorch's comparison with the extremes lays it: dense, in x's order where x says."""
    left = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    return common_layouts.iterated((x.shape, x.stride), (left, register.contiguous(left)))[1]


def lines(x: TensorSpec, made: tuple[int, ...], dims: tuple[int, ...]) -> Lines | str:
    """Lines of x and of dx, whose strides are `made`; or why these are none."""
    kept = _steps(x, made, [d for d in range(len(x.shape)) if d not in dims], False)
    reduced = _steps(x, made, list(dims), True)
    if len(kept) > 2 or len(reduced) > 1:
        return "the dimensions lie in more than [outer, reduced, inner]"
    none: common_layouts.Dim = (1, (0, 0))
    (outer, far), (inner, near) = [*[none] * (2 - len(kept)), *kept]
    beyond = (max(1, inner * near[0]), max(1, inner * near[1]))
    length, along = reduced[0] if reduced else (1, beyond)
    if outer > 1 and far[1] < min(along[1], near[1]):
        return "neighbours in memory are of lines that no program takes together"
    return Lines(outer, length, inner, tuple(zip(far, along, near, strict=True)))


def _steps(
    x: TensorSpec, made: tuple[int, ...], dims: list[int], any_order: bool
) -> list[common_layouts.Dim]:
    """(size, steps of x and dx) of these dimensions, those that go on evenly in both taken together, in their order or in dx's."""
    shape = tuple(x.shape[d] for d in dims)
    strides = [tuple(of[d] for d in dims) for of in (x.stride, made)]
    order = strides[1] if any_order else register.contiguous(shape)
    return [found for found in common_layouts.collapsed((shape, order), strides) if found[0] > 1]


def configs(shape: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return extreme_grad.extreme_configs(shape[0], shape[1], register.cores())


def build(shape: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher with its workspace."""
    found, dtype, out, stride, align = shape
    start = extreme_grad.extreme_launcher(found, dtype, dict(config), device, align)
    space = extreme_grad.extreme_space(found, dict(config))
    empty, made = register.empty(device), DTYPES[dtype]

    def launch(dy: Tensor, x: Tensor, y: Tensor) -> Any:
        dx = empty(out, stride, made)
        count = empty((space,), (1,), torch.int32) if space else dx
        return (dx,) if start(dy, x, y, count, dx) else None

    return launch


# of the gradient; the output's shape, and whether it is the largest
PlacedShape = tuple[Shape, tuple[int, ...], bool]


def describe_placed(key: Key) -> PlacedShape | str:
    """What the gradient's kernels make of it, and what is left of x."""
    found = describe(both(key)[1][1])
    return found if isinstance(found, str) else (found, shapes.left(key), key.flag("kind") == "max")


def placed_configs(shape: PlacedShape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    (lines, dtype, *_), _, _ = shape
    return extreme_index.placed_configs(lines, dtype, register.cores())


def forward(shape: PlacedShape, config: Config, device: torch.device) -> Launcher:
    """(x) -> (y, places)."""
    (lines, dtype, _, _, align), out, largest = shape
    start = extreme_index.Placed(lines, dtype, dict(config), device, align).forward(largest)
    space, empty = extreme_index.placed_space(lines, dict(config)), register.empty(device)
    stride, made = register.contiguous(out), DTYPES[dtype]

    def shared(x: Tensor) -> Any:
        best, part = empty((space,), (1,), torch.float32), empty((space,), (1,), torch.int32)
        y, place = empty(out, stride, made), empty(out, stride, torch.int32)
        return (y, place) if start(x, best, part, y, place) else None

    def alone(x: Tensor) -> Any:
        y, place = empty(out, stride, made), empty(out, stride, torch.int32)
        return (y, place) if start(x, place, place, y, place) else None

    return shared if space else alone


class Settling:
    """(incoming gradient, x, y, places) -> the gradient."""

    def __init__(self, shape: PlacedShape, config: Config, device: torch.device) -> None:
        (lines, dtype, self.out, self.stride, align), _, _ = shape
        self.start = extreme_index.Placed(lines, dtype, dict(config), device, align).backward()
        self.empty, self.dtype = register.empty(device), DTYPES[dtype]

    def __call__(self, dy: Tensor, x: Tensor, y: Tensor, place: Tensor) -> Tensor:
        dx = self.empty(self.out, self.stride, self.dtype)
        if not self.start(dy, x, y, place, dx) and not self.start(dy.clone(), x, y, place, dx):
            raise RuntimeError(f"extreme: a gradient of {list(self.out)} could not be started")
        return dx


def build_placed(shape: PlacedShape, config: Config, device: torch.device) -> Launcher:
    """Output and gradient, one after the other."""
    ahead, settle = forward(shape, config, device), Settling(shape, config, device)

    def launch(dy: Tensor, x: Tensor) -> Any:
        outs: Any = ahead(x)
        return None if outs is None else (outs[0], settle(dy, x, *outs))

    return launch


def parts(key: Key, config: Config, device: torch.device) -> tuple[Launcher, Callable[..., Tensor]]:
    """Forward, replayed in C, and what makes the gradient of x, the output and its places."""
    shape = describe_placed(key)
    if isinstance(shape, str):
        raise ValueError(f"{key.text} is not served in one: {shape}")
    (op, ahead), _ = both(key)
    start = forward(shape, config, device)
    return launch_plan.plan(op, ahead, device, start), Settling(shape, config, device)


_SOURCES = (extreme_grad, strided, strided_lines, strided_split, common_layouts, sys.modules[__name__])  # fmt: skip
register.described(EXTREME_BACKWARD, "triton.spread", describe, configs, build, _SOURCES)
register.described(
    TOGETHER, "triton.placed", describe_placed, placed_configs, build_placed, (extreme_index, *_SOURCES), parts=parts
)  # fmt: skip
