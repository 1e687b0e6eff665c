"""softmax by Triton over few, long lines in any strides: several programs share a line, in two launches."""

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
from ...kernels.softmax import rows, strided, strided_split
from ...kernels.triton_runtime import device_math
from . import SOFTMAX, SOFTMAX_BACKWARD, triton_strided
from .triton_strided import Shape, lines


def describe(key: Key) -> Shape | str:
    """Few, long lines of one dtype, rows that lie together among them."""
    first, reason = key.tensors[0], register.one_dtype(key)
    assert first is not None
    if reason is not None or not first.shape or 0 in first.shape:
        return reason or "empty or zero-dimensional"
    shape, given = first.shape, [t.stride for t in key.tensors if t is not None]
    found = lines(shape, key.flag("dim"), [*given, register.contiguous(shape)])
    if isinstance(found, str):
        return found
    refused = strided_split.refusal(found, first.dtype, register.cores())
    return refused or (found, first.dtype, shape, register.weakest(key))


def configs(shape: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return strided_split.parts_configs(shape[0], shape[1], register.cores())


def build(shape: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher of forward, or of backward over (dy, y); what it gives is contiguous, as PyTorch's."""
    found, dtype, out, align = shape
    start = strided_split.parts_launcher(found, dtype, dict(config), device, align)
    space = (strided_split.parts_space(found, dict(config)),)
    empty, stride, made = register.empty(device), register.contiguous(out), DTYPES[dtype]

    def forward(x: torch.Tensor) -> Any:
        y, part = empty(out, stride, made), empty(space, (1,), torch.float32)
        return (y,) if start(x, part, y) else None

    def backward(dy: torch.Tensor, y: torch.Tensor) -> Any:
        dx, part = empty(out, stride, made), empty(space, (1,), torch.float32)
        return (dx,) if start(dy, y, part, dx) else None

    return forward if len(found.strides) == 2 else backward


_SOURCES = (
    strided_split,
    strided,
    strided_lines,
    rows,
    contiguous_rows,
    device_math,
    triton_strided,
    sys.modules[__name__],
)
for _op in (SOFTMAX, SOFTMAX_BACKWARD):
    register.described(_op, "triton.parts", describe, configs, build, _SOURCES)
