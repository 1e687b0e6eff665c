"""Gradients of max and min by Triton: lines in any strides, what is kept in at most two of them, what is reduced in one."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key, TensorSpec
from ...kernels import register
from ...kernels.reduce import extreme_grad
from ...kernels.row_access import strided as strided_lines
from ...kernels.row_access.strided import Lines
from ...kernels.softmax import strided, strided_split
from ..common import layouts as common_layouts
from . import EXTREME_BACKWARD

# how x lies, dtype, dx's shape and strides, alignment
Shape = tuple[Lines, str, tuple[int, ...], tuple[int, ...], int]


def describe(key: Key) -> Shape | str:
    """One dtype; x and dx are [outer, reduced, inner] in strides of their own, incoming gradients and extremes in that order."""
    x, dims = key.spec("x"), key.flag("dim")
    assert x is not None
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

    def launch(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        dx = empty(out, stride, made)
        count = empty((space,), (1,), torch.int32) if space else dx
        return (dx,) if start(dy, x, y, count, dx) else None

    return launch


_SOURCES = (
    extreme_grad,
    strided,
    strided_lines,
    strided_split,
    common_layouts,
    sys.modules[__name__],
)
register.described(EXTREME_BACKWARD, "triton.spread", describe, configs, build, _SOURCES)
