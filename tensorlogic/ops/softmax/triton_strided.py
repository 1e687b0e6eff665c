"""softmax by Triton over lines that do not lie together: another dimension than the last, padded or transposed tensors, steps."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.row_access import contiguous as contiguous_rows
from ...kernels.row_access import strided as strided_lines
from ...kernels.row_access.strided import Lines
from ...kernels.softmax import rows, strided
from ...kernels.triton_runtime import device_math
from . import SOFTMAX, SOFTMAX_BACKWARD

Shape = tuple[Lines, str, tuple[int, ...], int]  # how all tensors lie, dtype, shape, alignment


def describe(key: Key) -> Shape | str:
    """One dtype; the dimensions beside the one that sums to 1 lie in at most two steps."""
    first, reason = key.tensors[0], register.one_dtype(key)
    assert first is not None
    if reason is not None or not first.shape or 0 in first.shape:
        return reason or "empty or zero-dimensional"
    dim, shape = key.flag("dim"), first.shape
    given = [t.stride for t in key.tensors if t is not None]
    if dim == len(shape) - 1 and all(t is None or register.is_contiguous(t) for t in key.tensors):
        return "rows that lie together"
    found = lines(shape, dim, [*given, register.contiguous(shape)])
    return found if isinstance(found, str) else (found, first.dtype, shape, register.weakest(key))


def lines(shape: tuple[int, ...], dim: int, strides: list[tuple[int, ...]]) -> Lines | str:
    """Tensors of one shape and these strides as [outer, shape[dim], inner]; or why they are not that."""
    # (count, step of each tensor) of what lies evenly
    groups: list[tuple[int, tuple[int, ...]]] = []
    for d, n in enumerate(shape):
        step = tuple(s[d] for s in strides)
        if d == dim or n == 1:
            continue
        if groups and all(a == n * b for a, b in zip(groups[-1][1], step, strict=True)):
            groups[-1] = (groups[-1][0] * n, step)
        else:
            groups.append((n, step))
    if len(groups) > 2:
        return "the other dimensions lie in more than two steps"
    none = (1, (0,) * len(strides))
    (outer, far), (inner, near) = [*[none] * (2 - len(groups)), *groups]
    along = [s[dim] if shape[dim] > 1 else 1 for s in strides]
    return Lines(outer, shape[dim], inner, tuple(zip(far, along, near, strict=True)))


def configs(shape: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return strided.lines_configs(shape[0], shape[1], register.cores())


def build(shape: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher of forward, or of backward over (dy, y); what it gives is contiguous, as PyTorch's."""
    found, dtype, out, align = shape
    start = strided.lines_launcher(found, dtype, dict(config), device, align)
    empty, stride, made = register.empty(device), register.contiguous(out), DTYPES[dtype]

    def forward(x: torch.Tensor) -> Any:
        y = empty(out, stride, made)
        return (y,) if start(x, y) else None

    def backward(dy: torch.Tensor, y: torch.Tensor) -> Any:
        dx = empty(out, stride, made)
        return (dx,) if start(dy, y, dx) else None

    return forward if len(found.strides) == 2 else backward


for _op in (SOFTMAX, SOFTMAX_BACKWARD):
    register.described(
        _op, "triton.lines", describe, configs, build, (strided, strided_lines, rows, contiguous_rows, device_math, sys.modules[__name__])
    )  # fmt: skip
