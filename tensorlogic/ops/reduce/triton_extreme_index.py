"""max and min whose forward pass keeps where each line's extreme is for the gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.reduce import extreme_grad, extreme_index
from ...kernels.row_access import strided as strided_lines
from ...kernels.softmax import strided, strided_split
from ...kernels.triton_runtime import launch_plan
from ..common import layouts as common_layouts
from . import triton_extreme as gradients
from .joint_backward import TOGETHER, both, rest

# of the gradient; the output's shape, and whether it is the largest
Shape = tuple[gradients.Shape, tuple[int, ...], bool]


def describe(key: Key) -> Shape | str:
    """What the gradient's kernels make of it, and what is left of x."""
    found = gradients.describe(both(key)[1][1])
    return found if isinstance(found, str) else (found, rest(key), key.flag("kind") == "max")


def configs(shape: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    (lines, dtype, *_), _, _ = shape
    return extreme_index.placed_configs(lines, dtype, register.cores())


def forward(shape: Shape, config: Config, device: torch.device) -> Launcher:
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

    def __init__(self, shape: Shape, config: Config, device: torch.device) -> None:
        (lines, dtype, self.out, self.stride, align), _, _ = shape
        self.start = extreme_index.Placed(lines, dtype, dict(config), device, align).backward()
        self.empty, self.dtype = register.empty(device), DTYPES[dtype]

    def __call__(self, dy: Tensor, x: Tensor, y: Tensor, place: Tensor) -> Tensor:
        dx = self.empty(self.out, self.stride, self.dtype)
        if not self.start(dy, x, y, place, dx) and not self.start(dy.clone(), x, y, place, dx):
            raise RuntimeError(f"extreme: a gradient of {list(self.out)} could not be started")
        return dx


def build(shape: Shape, config: Config, device: torch.device) -> Launcher:
    """Output and gradient, one after the other."""
    ahead, settle = forward(shape, config, device), Settling(shape, config, device)

    def launch(dy: Tensor, x: Tensor) -> Any:
        outs: Any = ahead(x)
        return None if outs is None else (outs[0], settle(dy, x, *outs))

    return launch


def parts(key: Key, config: Config, device: torch.device) -> tuple[Launcher, Callable[..., Tensor]]:
    """Forward, replayed in C, and what makes the gradient of x, the output and its places."""
    shape = describe(key)
    if isinstance(shape, str):
        raise ValueError(f"{key.text} is not served in one: {shape}")
    (op, ahead), _ = both(key)
    start = forward(shape, config, device)
    return launch_plan.plan(op, ahead, device, start), Settling(shape, config, device)


_SOURCES = (extreme_index, extreme_grad, strided, strided_lines, strided_split, common_layouts, gradients, sys.modules[__name__])  # fmt: skip
register.described(TOGETHER, "triton.placed", describe, configs, build, _SOURCES, parts=parts)
