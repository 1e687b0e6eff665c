"""softmax and its gradient by Triton over few, long rows: several programs share a row, in two launches; rows may begin at odd places."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.row_access import contiguous as contiguous_rows
from ...kernels.row_access import ragged as ragged_rows
from ...kernels.row_access import split as split_rows
from ...kernels.softmax import rows as softmax_rows
from ...kernels.softmax import split
from ...kernels.triton_runtime import device_math
from . import SOFTMAX, SOFTMAX_BACKWARD
from . import triton as softmax_triton
from .triton import Shape


def describe(key: Key) -> Shape | str:
    """Few, long, contiguous rows of one dtype, of tensors that begin at a multiple of 16 bytes."""
    found = softmax_triton.describe(key)
    if isinstance(found, str):
        return found
    rows, columns, _, _, align = found
    refused = split_rows.refusal(rows, columns, align, register.cores())
    if refused or configs(found):
        return refused or found
    return "shares would be longer than sums are exact"


def configs(shape: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return split.shares_configs(*shape[:3], register.cores())


def build(shape: Shape, config: Config, device: torch.device, backward: bool) -> Launcher:
    """The launcher of forward, or of backward over (dy, y)."""
    rows, columns, dtype, out, _ = shape
    start = split.shares_launcher(rows, columns, dtype, dict(config), device, backward)
    space = (split.shares_space(rows, columns, dict(config), backward),)
    empty, stride, made = register.empty(device), register.contiguous(out), DTYPES[dtype]

    def launch(*tensors: torch.Tensor) -> Any:
        y, part = empty(out, stride, made), empty(space, (1,), torch.float32)
        return (y,) if start(*tensors, part, y) else None

    return launch


_SOURCES = (split, split_rows, ragged_rows, softmax_rows, contiguous_rows, device_math, softmax_triton, sys.modules[__name__])  # fmt: skip
for _op, _backward in ((SOFTMAX, False), (SOFTMAX_BACKWARD, True)):
    register.described(
        _op, "triton.shares", describe, configs, partial(build, backward=_backward), _SOURCES
    )
