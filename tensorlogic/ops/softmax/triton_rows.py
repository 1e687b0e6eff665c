"""softmax over the last dimension by Triton: a row in registers, or online where rows are longer."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ..common import triton_rows, wiring
from . import SOFTMAX, SOFTMAX_BACKWARD

Shape = tuple[int, int, str, tuple[int, ...], int]  # rows, columns, dtype, shape, alignment


def describe(key: Key) -> Shape | str:
    """Contiguous rows of one dtype."""
    first = key.tensors[0]
    assert first is not None
    reason = wiring.one_dtype(key)
    if reason is not None:
        return reason
    rows = wiring.rows_of(first)
    if isinstance(rows, str):
        return rows
    if key.flag("dim") != len(first.shape) - 1:
        return "not over the last dimension"
    if any(t is not None and not wiring.is_contiguous(t) for t in key.tensors):
        return "not contiguous"
    return (*rows, first.dtype, first.shape, wiring.weakest(key))


def build(shape: Shape, config: Config, device: torch.device) -> Launcher:
    """The forward launcher."""
    rows, columns, dtype, out, align = shape
    start = triton_rows.softmax_launcher(rows, columns, dtype, dtype, dict(config), device, align)
    empty, stride, made = wiring.empty(device), wiring.contiguous(out), DTYPES[dtype]

    def launch(x: torch.Tensor) -> Any:
        y = empty(out, stride, made)
        return (y,) if start(x, y) else None

    return launch


def build_backward(shape: Shape, config: Config, device: torch.device) -> Launcher:
    """The backward launcher."""
    rows, columns, dtype, out, align = shape
    start = triton_rows.softmax_backward_launcher(
        rows, columns, (dtype, dtype, dtype), dict(config), device, align
    )
    empty, stride, made = wiring.empty(device), wiring.contiguous(out), DTYPES[dtype]

    def launch(dy: torch.Tensor, y: torch.Tensor) -> Any:
        dx = empty(out, stride, made)
        return (dx,) if start(y, dy, dx, 1.0) else None

    return launch


_SOURCES = (triton_rows, sys.modules[__name__])
wiring.described(
    SOFTMAX,
    "triton.rows",
    describe,
    lambda s: triton_rows.softmax_configs(s[1], s[2]),
    build,
    _SOURCES,
)
wiring.described(
    SOFTMAX_BACKWARD,
    "triton.rows",
    describe,
    lambda s: triton_rows.softmax_configs(s[1], s[2], True),
    build_backward,
    _SOURCES,
)
