"""Gradients of max and min by Triton: lines of dense memory in any order of its dimensions, or with gaps between them."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key, TensorSpec
from ..common import triton_extreme, triton_softmax, triton_softmax_parts, wiring
from ..common.triton_softmax import Lines
from . import EXTREME_BACKWARD, shapes

Shape = tuple[
    Lines, str, tuple[int, ...], tuple[int, ...], int
]  # how x lies, dtype, dx's shape and strides, alignment


def describe(key: Key) -> Shape | str:
    """One dtype; x is [outer, reduced, inner] in memory, gaps before the next of each but the last."""
    x, dims = key.spec("x"), key.flag("dim")
    assert x is not None
    reason = wiring.one_dtype(key)
    if reason is not None or not dims or 0 in x.shape:
        return reason or "nothing to reduce"
    if not all(t is x or t is None or wiring.is_contiguous(t) for t in key.tensors):
        return "what comes in or the extremes are not contiguous"
    every = list(zip(x.shape, x.stride, strict=True))
    kept = shapes.joined([pair for d, pair in enumerate(every) if d not in dims])
    reduced = shapes.joined(sorted((every[d] for d in dims), key=lambda pair: -pair[1]))
    found = lines(kept, reduced)
    if isinstance(found, str):
        return found
    return found, x.dtype, x.shape, _closed(x), wiring.weakest(key)


def lines(kept: shapes.Dims, reduced: shapes.Dims) -> Lines | str:
    """Lines of x and of dx, whose dimensions lie in x's order without gaps; or why these are none."""
    inner = kept[-1][0] if kept and kept[-1][1] == 1 else 1
    far = kept[:-1] if inner > 1 else kept
    if len(far) > 1 or len(reduced) > 1:
        return "the dimensions lie in more than [outer, reduced, inner]"
    outer, apart = far[0] if far else (1, 0)
    length, step = reduced[0] if reduced else (1, inner)
    if step < inner or (inner == 1 and step != 1) or (far and apart < length * step):
        return "what is reduced does not lie between outer and inner dimensions"
    if inner == 1:
        return Lines(1, length, outer, ((0, 1, apart), (0, 1, length)))
    return Lines(outer, length, inner, ((apart, step, 1), (length * inner, inner, 1)))


def _closed(x: TensorSpec) -> tuple[int, ...]:
    """Strides of a tensor whose dimensions lie in x's order, without gaps: what PyTorch's element-wise functions make."""
    order = sorted(range(len(x.shape)), key=lambda d: -x.stride[d])
    strides = wiring.contiguous([x.shape[d] for d in order])
    return tuple(strides[order.index(d)] for d in range(len(order)))


def configs(shape: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return triton_extreme.extreme_configs(shape[0], shape[1], wiring.cores())


def build(shape: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher with its workspace."""
    found, dtype, out, stride, align = shape
    start = triton_extreme.extreme_launcher(found, dtype, dict(config), device, align)
    space = triton_extreme.extreme_space(found, dict(config))
    empty, made = wiring.empty(device), DTYPES[dtype]

    def launch(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        dx = empty(out, stride, made)
        count = empty((space,), (1,), torch.int32) if space else dx
        return (dx,) if start(dy, x, y, count, dx) else None

    return launch


_SOURCES = (triton_extreme, triton_softmax, triton_softmax_parts, shapes, sys.modules[__name__])
wiring.described(EXTREME_BACKWARD, "triton.spread", describe, configs, build, _SOURCES)
