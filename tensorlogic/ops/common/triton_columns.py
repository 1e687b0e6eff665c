"""Batch normalisation's element-wise halves over [M, N]: scale, shift and ReLU by column, and its backward with column sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.ops.common.triton_launch import prepare
from tensorlogic.ops.common.triton_math import relu


@triton.jit
def column(ptr, col, live, other):
    """ptr[col] in float32, `other` beyond the edge."""
    return tl.load(ptr + col, mask=live, other=other).to(tl.float32)


@triton.jit
def batch_norm_relu_fwd_tiled(
    z_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, y_ptr, M, N, eps, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """y = relu((z - mean) / sqrt(var + eps) * gamma + beta), [M, N] with [N] vectors; float32, rounded once."""
    tiles_c = tl.cdiv(N, BLOCK_C)
    row = (tl.program_id(0) // tiles_c).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = (tl.program_id(0) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < N
    mask = (row < M)[:, None] & live[None, :]
    at = (row * N)[:, None] + col[None, :]
    z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(column(var_ptr, col, live, 1.0) + eps)
    if gamma_ptr is not None:
        scale *= column(gamma_ptr, col, live, 0.0)
    y = (z - column(mean_ptr, col, live, 0.0)[None, :]) * scale[None, :]
    if beta_ptr is not None:
        y += column(beta_ptr, col, live, 0.0)[None, :]
    tl.store(y_ptr + at, relu(y).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def batch_norm_relu_bwd_columns(
    dy_ptr, y_ptr, z_ptr, mean_ptr, var_ptr, gamma_ptr, dz_ptr, db_ptr, dgamma_ptr, dbeta_ptr, space_ptr, counter_ptr,
    M, N, PARTS, eps, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """With g = dy where y > 0: dz = g s, db = s sum g, dbeta = sum g, dgamma = sum g (z - mean) / sqrt(var + eps);
    s = gamma / sqrt(var + eps), the statistics constants (evaluation). [M, N], sums over M in float32.

    dy, y and z are read once. PARTS programs share a column tile; the last to arrive adds their sums in fixed order
    and leaves the counter at 0: one launch, the same bits every run.
    """
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    col = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < N
    lane = tl.arange(0, BLOCK_R)
    mean = column(mean_ptr, col, live, 0.0)
    rstd = tl.rsqrt(column(var_ptr, col, live, 1.0) + eps)
    scale = rstd
    if gamma_ptr is not None:
        scale = rstd * column(gamma_ptr, col, live, 0.0)
    plain = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    along = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(part * BLOCK_R, M, PARTS * BLOCK_R):
        row = start + lane
        mask = (row < M)[:, None] & live[None, :]
        at = (row.to(tl.int64) * N)[:, None] + col[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.where(y > 0, dy, 0.0)
        tl.store(dz_ptr + at, (g * scale[None, :]).to(dz_ptr.dtype.element_ty), mask=mask)
        plain += g
        along += tl.where(y > 0, dy * (z - mean[None, :]), 0.0)
    base = (tile * PARTS).to(tl.int64) * (2 * BLOCK_C)
    out = tl.arange(0, BLOCK_C)
    tl.store(space_ptr + base + part * (2 * BLOCK_C) + out, tl.sum(plain, 0))
    tl.store(space_ptr + base + part * (2 * BLOCK_C) + BLOCK_C + out, tl.sum(along, 0))
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == PARTS - 1:
        tl.store(counter_ptr + tile, 0)
        p = tl.arange(0, BLOCK_P)
        at = base + (p * (2 * BLOCK_C))[:, None] + out[None, :]
        there = (p < PARTS)[:, None] & live[None, :]
        total = tl.sum(tl.load(space_ptr + at, mask=there, other=0.0, cache_modifier=".cg"), 0)
        moment = tl.sum(tl.load(space_ptr + at + BLOCK_C, mask=there, other=0.0, cache_modifier=".cg"), 0)
        tl.store(db_ptr + col, (total * scale).to(db_ptr.dtype.element_ty), mask=live)
        tl.store(dbeta_ptr + col, total.to(dbeta_ptr.dtype.element_ty), mask=live)
        tl.store(dgamma_ptr + col, (moment * rstd).to(dgamma_ptr.dtype.element_ty), mask=live)


def apply_configs(rows: int, columns: int) -> tuple[dict[str, Any], ...]:
    """Configurations of the forward kernel, best guess first."""
    del rows
    block_c = min(512, triton.next_power_of_2(columns))
    return tuple(
        {"BLOCK_R": max(1, size // block_c), "BLOCK_C": block_c, "num_warps": warps}
        for size, warps in ((2048, 4), (4096, 4), (1024, 4), (8192, 8))
    )


def apply_launcher(
    rows: int, columns: int, dtypes: dict[str, str | None], config: dict[str, Any], device: torch.device, align: int
) -> Callable[..., bool]:
    """A callable (z, mean, var[, gamma][, beta], y, eps) -> bool over contiguous [rows, columns].

    `dtypes`: names of z, mean, var, gamma, beta and y; None: absent.
    """
    return prepare(
        batch_norm_relu_fwd_tiled,
        grid=(triton.cdiv(rows, config["BLOCK_R"]) * triton.cdiv(columns, config["BLOCK_C"]), 1, 1),
        pointers={f"{name}_ptr": dtype for name, dtype in dtypes.items() if dtype is not None},
        integers={"M": rows, "N": columns},
        floats=("eps",),
        constexprs={"BLOCK_R": config["BLOCK_R"], "BLOCK_C": config["BLOCK_C"]},
        num_warps=config["num_warps"],
        num_stages=1,
        device=device,
        align=align,
    )


def backward_configs(rows: int, columns: int, multiprocessors: int = 132) -> tuple[dict[str, Any], ...]:
    """Configurations of the backward kernel, best guess first."""
    found: list[dict[str, Any]] = []
    for block_c, block_r, per, warps in ((64, 32, 2, 4), (128, 32, 2, 8), (64, 16, 4, 4), (64, 64, 1, 8)):
        block_c = min(block_c, max(16, triton.next_power_of_2(columns)))
        tiles = triton.cdiv(columns, block_c)
        parts = max(1, min(triton.cdiv(rows, block_r), multiprocessors * per // tiles, 128))
        found.append({"BLOCK_R": block_r, "BLOCK_C": block_c, "parts": parts, "num_warps": warps})
    return tuple(found)


def backward_space(columns: int, config: dict[str, Any]) -> tuple[int, int]:
    """Elements of float32 scratch, and of int32 counters that are zero between launches."""
    tiles = triton.cdiv(columns, config["BLOCK_C"])
    return tiles * config["parts"] * 2 * config["BLOCK_C"], tiles


def backward_launcher(
    rows: int, columns: int, dtypes: dict[str, str | None], config: dict[str, Any], device: torch.device, align: int
) -> Callable[..., bool]:
    """A callable (dy, y, z, mean, var[, gamma], dz, db, dgamma, dbeta, space, counter, eps) -> bool, all contiguous.

    `dtypes`: of all of these up to dbeta; None: absent.
    """
    pointers = {f"{name}_ptr": dtype for name, dtype in dtypes.items() if dtype is not None}
    return prepare(
        batch_norm_relu_bwd_columns,
        grid=(triton.cdiv(columns, config["BLOCK_C"]) * config["parts"], 1, 1),
        pointers={**pointers, "space_ptr": "f32", "counter_ptr": "i32"},
        integers={"M": rows, "N": columns, "PARTS": config["parts"]},
        floats=("eps",),
        constexprs={
            "BLOCK_R": config["BLOCK_R"],
            "BLOCK_C": config["BLOCK_C"],
            "BLOCK_P": triton.next_power_of_2(config["parts"]),
        },
        num_warps=config["num_warps"],
        num_stages=1,
        device=device,
        align=align,
    )
