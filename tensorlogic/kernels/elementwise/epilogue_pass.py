"""What follows a product as a pass of its own: bias, residual and activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.elementwise.column_passes import launcher
from tensorlogic.kernels.triton_runtime.device_math import activate, follow


@triton.jit
def finish_tiled(
    z_ptr, bias_ptr, residual_ptr, y_ptr, kept_ptr, M, N, stride_rm, stride_rn,
    KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = activate(z + bias [N] + residual), [M, N]; `kept` takes what is activated; each of them may be z itself."""
    follow(PDL)
    tiles_c = tl.cdiv(N, BLOCK_C)
    row = (tl.program_id(0) // tiles_c).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = (tl.program_id(0) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (row < M)[:, None] & (col < N)[None, :]
    at = (row * N)[:, None] + col[None, :]
    z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if residual_ptr is not None:
        there = (row * stride_rm)[:, None] + (col.to(tl.int64) * stride_rn)[None, :]
        z += tl.load(residual_ptr + there, mask=mask, other=0.0).to(tl.float32)
    if kept_ptr is not None:
        kept = z.to(kept_ptr.dtype.element_ty)
        tl.store(kept_ptr + at, kept, mask=mask)
        z = kept.to(tl.float32)
    tl.store(y_ptr + at, activate(z, KIND).to(y_ptr.dtype.element_ty), mask=mask)


def finish_configs(columns: int) -> tuple[dict[str, Any], ...]:
    """Configurations for rows of so many columns, best guess first."""
    block_c = min(512, triton.next_power_of_2(columns))
    return tuple(
        {"BLOCK_R": max(1, size // block_c), "BLOCK_C": block_c, "num_warps": warps}
        for size, warps in ((1024, 4), (2048, 4), (512, 2), (4096, 8))
    )


def finish_launcher(
    rows: int, columns: int, dtypes: dict[str, str | None], residual: tuple[int, int], kind: str, config: dict[str, Any],
    device: torch.device, align: int = 16,
) -> Callable[..., bool]:  # fmt: skip
    """A callable (z[, bias][, residual], y[, kept]) -> bool over contiguous z, y and kept [rows, columns]; y is z after `kind`.

    `dtypes`: names of these, in this order; None: absent. `residual`: its strides of rows and columns.
    """
    strides = dict(zip(("stride_rm", "stride_rn"), residual, strict=True))
    how = (dtypes, config, device, align)
    return launcher(finish_tiled, rows, columns, *how, named={"KIND": kind}, strides=strides)
