"""softmax over the last dimension by Triton: a row in registers, or online where rows are longer."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.row_access import contiguous as contiguous_rows
from ...kernels.softmax import rows as softmax_rows
from ...kernels.triton_runtime import device_math
from . import SOFTMAX, SOFTMAX_BACKWARD

Shape = tuple[int, int, str, tuple[int, ...], int]  # rows, columns, dtype, shape, alignment


def describe(key: Key) -> Shape | str:
    """Contiguous rows of one dtype."""
    first = key.tensors[0]
    assert first is not None
    reason = register.one_dtype(key)
    if reason is not None:
        return reason
    rows = register.rows_of(first)
    if isinstance(rows, str):
        return rows
    if key.flag("dim") != len(first.shape) - 1:
        return "not over the last dimension"
    if any(t is not None and not register.is_contiguous(t) for t in key.tensors):
        return "not contiguous"
    return (*rows, first.dtype, first.shape, register.weakest(key))


def build(shape: Shape, config: Config, device: torch.device) -> Launcher:
    """The forward launcher."""
    rows, columns, dtype, out, align = shape
    start = softmax_rows.softmax_launcher(rows, columns, dtype, dtype, dict(config), device, align)
    empty, stride, made = register.empty(device), register.contiguous(out), DTYPES[dtype]

    def launch(x: torch.Tensor) -> Any:
        y = empty(out, stride, made)
        return (y,) if start(x, y) else None

    return launch


def build_backward(shape: Shape, config: Config, device: torch.device) -> Launcher:
    """The backward launcher."""
    rows, columns, dtype, out, align = shape
    start = softmax_rows.softmax_backward_launcher(
        rows, columns, (dtype, dtype, dtype), dict(config), device, align
    )
    empty, stride, made = register.empty(device), register.contiguous(out), DTYPES[dtype]

    def launch(dy: torch.Tensor, y: torch.Tensor) -> Any:
        dx = empty(out, stride, made)
        return (dx,) if start(y, dy, dx, 1.0) else None

    return launch


_SOURCES = (softmax_rows, contiguous_rows, device_math, sys.modules[__name__])
register.described(
    SOFTMAX,
    "triton.rows",
    describe,
    lambda s: softmax_rows.softmax_configs(s[1], s[2]),
    build,
    _SOURCES,
)
register.described(
    SOFTMAX_BACKWARD,
    "triton.rows",
    describe,
    lambda s: softmax_rows.softmax_configs(s[1], s[2], True),
    build_backward,
    _SOURCES,
)
