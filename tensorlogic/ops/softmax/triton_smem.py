"""softmax and its gradient over long rows by Triton on Hopper GPUs: read once, held in shared memory and registers."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.cross_entropy import fused_backward, fused_backward_smem, fused_backward_smem_kernel
from ...kernels.row_access import contiguous as contiguous_rows
from ...kernels.row_access import shared_memory
from ...kernels.softmax import rows as softmax_rows
from ...kernels.softmax import smem, smem_kernel
from ...kernels.triton_runtime import device_math, exact_exp
from . import SOFTMAX, SOFTMAX_BACKWARD
from . import triton as softmax_triton
from .triton import Shape

TILES = 19  # of a row at most: kernels of more have no registers left


def describe(key: Key) -> Shape | str:
    """Long rows of tensors at 16-byte addresses, as many as there are programs for."""
    found = softmax_triton.describe(key)
    if isinstance(found, str):
        return found
    rows, columns, _, _, align = found
    if align < 16:
        return "tensors at 16-byte addresses are required"
    if rows < register.cores():
        return "fewer rows than multiprocessors"
    if not configs(found, len(key.tensors)):
        return f"no program holds rows of {columns}, or two do"
    return found


def configs(shape: Shape, tensors: int) -> list[dict[str, Any]]:
    """Configurations, best guess first, for rows of so many tensors; none on other than Hopper GPUs."""
    columns, dtype = shape[1], shape[2]
    found = (
        fused_backward_smem.held_configs(columns, dtype, tensors) if register.bulk_copies() else []
    )
    return [c for c in found if shared_memory.tiles(columns, dtype, c, tensors)[0] <= TILES]


def build(shape: Shape, config: Config, device: torch.device, backward: bool) -> Launcher:
    """The launcher of forward, or of backward over (dy, y)."""
    rows, columns, dtype, out, _ = shape
    what = (rows, columns, dtype, config, device, register.cores())
    start = smem.softmax_held_launcher(*what, backward=backward)
    empty, stride, made = register.empty(device), register.contiguous(out), DTYPES[dtype]

    def forward(x: torch.Tensor) -> Any:
        y = empty(out, stride, made)
        return (y,) if start(x, y) else None

    def gradient(dy: torch.Tensor, y: torch.Tensor) -> Any:
        dx = empty(out, stride, made)
        return (dx,) if start(y, dy, dx) else None

    return gradient if backward else forward


_SOURCES = (
    smem_kernel, smem, fused_backward_smem, fused_backward_smem_kernel, fused_backward, exact_exp, shared_memory, softmax_rows, contiguous_rows, device_math, softmax_triton,
    sys.modules[__name__],
)  # fmt: skip
for _op, _backward in ((SOFTMAX, False), (SOFTMAX_BACKWARD, True)):
    register.described(
        _op,
        "triton.held",
        describe,
        partial(configs, tensors=1 + _backward),
        partial(build, backward=_backward),
        _SOURCES,
    )
