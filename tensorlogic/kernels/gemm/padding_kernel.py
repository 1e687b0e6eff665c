"""A matrix of any strides copied into rows that lie together, with zeros where they and it end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.triton_runtime.device_math import follow
from tensorlogic.kernels.triton_runtime.launch import prepare


@triton.jit
def copy_padded(
    x_ptr, y_ptr, M, N, TALL, WIDE, stride_m, stride_n,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [TALL, WIDE] = x [M, N], and 0 beyond it."""
    follow(PDL)
    tiles_c = tl.cdiv(WIDE, BLOCK_C)
    row = (tl.program_id(0) // tiles_c).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = (tl.program_id(0) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    at = (row * stride_m)[:, None] + (col.to(tl.int64) * stride_n)[None, :]
    x = tl.load(x_ptr + at, mask=(row < M)[:, None] & (col < N)[None, :], other=0.0)
    mask = (row < TALL)[:, None] & (col < WIDE)[None, :]
    tl.store(y_ptr + (row * WIDE)[:, None] + col[None, :], x, mask=mask)


# BLOCK_R, BLOCK_C, num_warps of rows that lie together in x, and of others, which are turned
_ALONG = ((4, 256, 4), (8, 256, 4), (16, 256, 8))
_TURNED = ((32, 32, 4), (64, 32, 4), (64, 64, 8))


def copy_configs(columns: int, along: bool) -> tuple[dict[str, Any], ...]:
    """Configurations for rows of so many elements, best guess first; `along`: x's rows lie together."""
    most = max(16, triton.next_power_of_2(columns))
    return tuple(
        {"BLOCK_R": rows, "BLOCK_C": min(block, most), "num_warps": warps}
        for rows, block, warps in (_ALONG if along else _TURNED)
    )


def copy_launcher(
    shape: tuple[int, int],
    into: tuple[int, int],
    strides: tuple[int, int],
    dtype: str,
    config: dict[str, Any],
    device: torch.device,
    align: int = 16,
) -> Callable[..., bool]:
    """A callable (x, y) -> bool: contiguous y of shape `into` becomes x of `shape` and these strides, and zeros beyond."""
    (rows, columns), (tall, wide) = shape, into
    block_r, block_c = config["BLOCK_R"], config["BLOCK_C"]
    return prepare(
        copy_padded,
        grid=(triton.cdiv(tall, block_r) * triton.cdiv(wide, block_c), 1, 1),
        pointers={"x_ptr": dtype, "y_ptr": dtype},
        integers={
            "M": rows, "N": columns, "TALL": tall, "WIDE": wide, "stride_m": strides[0], "stride_n": strides[1],
        },
        constexprs={"BLOCK_R": block_r, "BLOCK_C": block_c},
        num_warps=config["num_warps"],
        device=device,
        align=align,
    )  # fmt: skip
