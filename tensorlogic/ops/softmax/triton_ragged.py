"""softmax and its gradient by Triton over rows that begin at odd places: in whole aligned groups of 16 bytes, and the ends apart."""

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
from ...kernels.softmax import ragged
from ...kernels.softmax import rows as softmax_rows
from ...kernels.triton_runtime import device_math
from . import SOFTMAX, SOFTMAX_BACKWARD
from . import triton as softmax_triton
from .triton import Shape


def describe(key: Key) -> Shape | str:
    """Contiguous rows of one dtype that are no multiple of 16 bytes, of tensors that begin at one."""
    found = softmax_triton.describe(key)
    if isinstance(found, str):
        return found
    _, columns, dtype, _, align = found
    return ragged_rows.refusal(columns, dtype, align) or found


def configs(shape: Shape, backward: bool) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return ragged.groups_configs(shape[1], shape[2], backward)


def build(shape: Shape, config: Config, device: torch.device, backward: bool) -> Launcher:
    """The launcher of forward, or of backward over (dy, y)."""
    rows, columns, dtype, out, _ = shape
    start = ragged.groups_launcher(rows, columns, dtype, dict(config), device, backward)
    empty, stride, made = register.empty(device), register.contiguous(out), DTYPES[dtype]

    def forward(x: torch.Tensor) -> Any:
        y = empty(out, stride, made)
        return (y,) if start(x, y) else None

    def gradient(dy: torch.Tensor, y: torch.Tensor) -> Any:
        dx = empty(out, stride, made)
        return (dx,) if start(y, dy, dx) else None

    return gradient if backward else forward


_SOURCES = (
    ragged,
    ragged_rows,
    softmax_rows,
    contiguous_rows,
    device_math,
    softmax_triton,
    sys.modules[__name__],
)
for _op, _backward in ((SOFTMAX, False), (SOFTMAX_BACKWARD, True)):
    register.described(
        _op,
        "triton.groups",
        describe,
        partial(configs, backward=_backward),
        partial(build, backward=_backward),
        _SOURCES,
    )
