"""Batch normalisation with ReLU by the batch's own statistics over [M, N], and its gradient: whole columns held, or passes that share them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tensorlogic.kernels.elementwise.column_passes import (
    arrive,
    backward_configs,
    column,
    gathered,
    leave,
)
from tensorlogic.kernels.triton_runtime.device_math import follow, relu


@triton.jit
def inverted(spread):
    """1 / sqrt(spread), and 0 of 0, as PyTorch has it."""
    return tl.where(spread == 0, 0.0, tl.rsqrt(spread))


@triton.jit
def remember(running_mean_ptr, running_var_ptr, col, live, mean, var, M, momentum):
    """Move the running statistics by `momentum` towards the batch's, the variance unbiased. In a plan's last launch only: before that,
    another candidate may still have to serve the call."""
    if running_mean_ptr is not None:
        before = column(running_mean_ptr, col, live, 0.0)
        after = (1 - momentum) * before + momentum * mean
        tl.store(running_mean_ptr + col, after.to(running_mean_ptr.dtype.element_ty), mask=live)
    if running_var_ptr is not None:
        before = column(running_var_ptr, col, live, 0.0)
        after = (1 - momentum) * before + momentum * (var * (M / (M - 1)))
        tl.store(running_var_ptr + col, after.to(running_var_ptr.dtype.element_ty), mask=live)


@triton.jit
def batch_norm_relu_fwd_held(
    z_ptr, running_mean_ptr, running_var_ptr, gamma_ptr, beta_ptr, y_ptr, mean_ptr, rstd_ptr, M, N, eps, momentum,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = relu((z - mean) rstd gamma + beta), mean and rstd those of z's columns, which each program holds whole: z is read once."""
    follow(PDL)
    row = tl.arange(0, BLOCK_M)
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < N
    mask = (row < M)[:, None] & live[None, :]
    at = (row * N)[:, None] + col[None, :]
    z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
    near = tl.sum(z, 0) / M
    # equal numbers are their mean
    mean = near + tl.sum(tl.where(mask, z - near[None, :], 0.0), 0) / M
    away = z - mean[None, :]
    var = tl.sum(tl.where(mask, away * away, 0.0), 0) / M  # as in `batch_statistics_columns`
    scale = inverted(var + eps)
    tl.store(mean_ptr + col, mean, mask=live)
    tl.store(rstd_ptr + col, scale, mask=live)
    remember(running_mean_ptr, running_var_ptr, col, live, mean, var, M, momentum)
    if gamma_ptr is not None:
        scale *= column(gamma_ptr, col, live, 0.0)
    y = away * scale[None, :]
    if beta_ptr is not None:
        y += column(beta_ptr, col, live, 0.0)[None, :]
    tl.store(y_ptr + at, relu(y).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def batch_statistics_columns(
    z_ptr, mean_ptr, var_ptr, rstd_ptr, space_ptr, counter_ptr, M, N, PARTS, eps,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Mean, variance and 1 / sqrt(variance + eps) of the columns of z [M, N] in float32.

    PARTS programs share a column tile, each taking every PARTS-th block of rows; distances are from the mean of a part's first
    block, and the last to arrive joins their means and squares in fixed order (Chan et al., 1979).
    """
    follow(PDL)
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    col = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < N
    lane = tl.arange(0, BLOCK_R)
    row = part * BLOCK_R + lane
    mask = (row < M)[:, None] & live[None, :]
    at = (row.to(tl.int64) * N)[:, None] + col[None, :]
    first = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
    count = tl.minimum(M - part * BLOCK_R, BLOCK_R)
    near = tl.sum(first, 0) / count
    # Sums of numbers around 0 need no shift. What is chosen comes after a product, or some lanes would have it added to what others
    # hold by one fused multiply-add, and decide otherwise than those.
    level = first - near[None, :]
    spread = tl.sum(tl.where(mask, level * level, 0.0), 0)
    near = tl.where(near * near * count < spread, 0.0, near)
    level = tl.where(mask, first - near[None, :], 0.0)
    square = level * level
    for start in range((part + PARTS) * BLOCK_R, M, PARTS * BLOCK_R):
        row = start + lane
        mask = (row < M)[:, None] & live[None, :]
        at = (row.to(tl.int64) * N)[:, None] + col[None, :]
        z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
        away = tl.where(mask, z - near[None, :], 0.0)
        level += away
        square += away * away
        count += tl.minimum(M - start, BLOCK_R)
    shift = tl.sum(level, 0) / count
    leave(space_ptr, tile, part, PARTS, near + shift, 0, 2, BLOCK_C)
    leave(space_ptr, tile, part, PARTS, tl.sum(square, 0) - shift * shift * count, 1, 2, BLOCK_C)
    last = arrive(counter_ptr, tile, PARTS)
    p = tl.arange(0, BLOCK_P)
    blocks = (tl.cdiv(M, BLOCK_R) - p + PARTS - 1) // PARTS  # of each part
    over = tl.where(p == (tl.cdiv(M, BLOCK_R) - 1) % PARTS, tl.cdiv(M, BLOCK_R) * BLOCK_R - M, 0)
    counts = tl.where(p < PARTS, blocks * BLOCK_R - over, 0).to(tl.float32)[:, None]
    there = ((p < PARTS) & last)[:, None]
    ptrs = space_ptr + ((tile * PARTS + p) * 2).to(tl.int64)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]  # fmt: skip
    means = tl.load(ptrs, mask=there, other=0.0, cache_modifier=".cg")
    squares = tl.load(ptrs + BLOCK_C, mask=there, other=0.0, cache_modifier=".cg")
    near = tl.sum(tl.where(there, counts * means, 0.0), 0) / M
    # equal means are their mean
    mean = near + tl.sum(tl.where(there, counts * (means - near[None, :]), 0.0), 0) / M
    apart = means - mean[None, :]
    total = tl.sum(squares + counts * apart * apart, 0)
    var = tl.where(total < 0, 0.0, total) / M  # NaN stays
    tl.store(mean_ptr + col, mean, mask=live & last)
    tl.store(var_ptr + col, var, mask=live & last)
    tl.store(rstd_ptr + col, inverted(var + eps), mask=live & last)


@triton.jit
def batch_norm_relu_fwd_trained(
    z_ptr, mean_ptr, var_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, gamma_ptr, beta_ptr, y_ptr, M, N, momentum,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = relu((z - mean) rstd gamma + beta); the programs of the first rows see to the running statistics."""
    follow(PDL)
    tiles_c = tl.cdiv(N, BLOCK_C)
    tile_r = tl.program_id(0) // tiles_c
    row = tile_r.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = (tl.program_id(0) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < N
    mask = (row < M)[:, None] & live[None, :]
    at = (row * N)[:, None] + col[None, :]
    z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
    mean = column(mean_ptr, col, live, 0.0)
    scale = column(rstd_ptr, col, live, 0.0)
    if gamma_ptr is not None:
        scale *= column(gamma_ptr, col, live, 0.0)
    y = (z - mean[None, :]) * scale[None, :]
    if beta_ptr is not None:
        y += column(beta_ptr, col, live, 0.0)[None, :]
    tl.store(y_ptr + at, relu(y).to(y_ptr.dtype.element_ty), mask=mask)
    var = column(var_ptr, col, live, 0.0)
    first = live & (tile_r == 0)
    remember(running_mean_ptr, running_var_ptr, col, first, mean, var, M, momentum)


@triton.jit
def left_over(sums, total, moment, M):
    """What the columns of g - (total + n moment) / M sum to, where g's sum to `total` and n's to `sums`; not finite where `total` is not."""
    return total * 0.0 - moment * (sums / M)


@triton.jit
def batch_norm_relu_bwd_held(
    dy_ptr, y_ptr, z_ptr, mean_ptr, rstd_ptr, gamma_ptr, dz_ptr, db_ptr, dgamma_ptr, dbeta_ptr, M, N,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With g = dy but 0 where y <= 0 (NaN passes) and n = (z - mean) rstd: dgamma = sum g n, dbeta = sum g over M, and
    dz = gamma rstd (g - (dbeta + n dgamma) / M), whose own sum is db: 0 but for rounding where n sums to 0. Each program holds whole
    columns."""
    follow(PDL)
    row = tl.arange(0, BLOCK_M)
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < N
    mask = (row < M)[:, None] & live[None, :]
    at = (row * N)[:, None] + col[None, :]
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
    rstd = column(rstd_ptr, col, live, 1.0)
    n = (z - column(mean_ptr, col, live, 0.0)[None, :]) * rstd[None, :]
    g = tl.where(y <= 0, 0.0, dy)
    total = tl.sum(g, 0)
    moment = tl.sum(tl.where(y <= 0, 0.0, dy * n), 0)
    scale = rstd
    if gamma_ptr is not None:
        scale = rstd * column(gamma_ptr, col, live, 0.0)
    dz = (g - (total[None, :] + n * moment[None, :]) / M) * scale[None, :]
    tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    db = left_over(tl.sum(tl.where(mask, n, 0.0), 0), total, moment, M) * scale
    tl.store(db_ptr + col, db.to(db_ptr.dtype.element_ty), mask=live)
    tl.store(dbeta_ptr + col, total.to(dbeta_ptr.dtype.element_ty), mask=live)
    tl.store(dgamma_ptr + col, moment.to(dgamma_ptr.dtype.element_ty), mask=live)


@triton.jit
def batch_norm_relu_bwd_sums(
    dy_ptr, y_ptr, z_ptr, mean_ptr, rstd_ptr, gamma_ptr, total_ptr, moment_ptr, db_ptr, dgamma_ptr, dbeta_ptr, space_ptr, counter_ptr,
    M, N, PARTS, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sums of `batch_norm_relu_bwd_held`, dbeta and dgamma in float32 as `total` and `moment`, too; shared as in
    `batch_statistics_columns`."""
    follow(PDL)
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    col = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < N
    lane = tl.arange(0, BLOCK_R)
    mean = column(mean_ptr, col, live, 0.0)
    plain = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    along = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    level = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(part * BLOCK_R, M, PARTS * BLOCK_R):
        row = start + lane
        mask = (row < M)[:, None] & live[None, :]
        at = (row.to(tl.int64) * N)[:, None] + col[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
        away = z - mean[None, :]
        plain += tl.where(y <= 0, 0.0, dy)
        along += tl.where(y <= 0, 0.0, dy * away)
        level += tl.where(mask, away, 0.0)
    leave(space_ptr, tile, part, PARTS, tl.sum(plain, 0), 0, 3, BLOCK_C)
    leave(space_ptr, tile, part, PARTS, tl.sum(along, 0), 1, 3, BLOCK_C)
    leave(space_ptr, tile, part, PARTS, tl.sum(level, 0), 2, 3, BLOCK_C)
    last = arrive(counter_ptr, tile, PARTS)
    rstd = column(rstd_ptr, col, live, 1.0)
    total = gathered(space_ptr, tile, PARTS, last, 0, 3, BLOCK_C, BLOCK_P)
    moment = gathered(space_ptr, tile, PARTS, last, 1, 3, BLOCK_C, BLOCK_P) * rstd
    sums = gathered(space_ptr, tile, PARTS, last, 2, 3, BLOCK_C, BLOCK_P) * rstd
    db = left_over(sums, total, moment, M) * rstd
    if gamma_ptr is not None:
        db *= column(gamma_ptr, col, live, 0.0)
    tl.store(total_ptr + col, total, mask=live & last)
    tl.store(moment_ptr + col, moment, mask=live & last)
    tl.store(db_ptr + col, db.to(db_ptr.dtype.element_ty), mask=live & last)
    tl.store(dbeta_ptr + col, total.to(dbeta_ptr.dtype.element_ty), mask=live & last)
    tl.store(dgamma_ptr + col, moment.to(dgamma_ptr.dtype.element_ty), mask=live & last)


@triton.jit
def batch_norm_relu_bwd_tiled(
    dy_ptr, y_ptr, z_ptr, mean_ptr, rstd_ptr, gamma_ptr, total_ptr, moment_ptr, dz_ptr, M, N,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dz of `batch_norm_relu_bwd_held` from the sums of `batch_norm_relu_bwd_sums`."""
    follow(PDL)
    tiles_c = tl.cdiv(N, BLOCK_C)
    row = (tl.program_id(0) // tiles_c).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = (tl.program_id(0) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < N
    mask = (row < M)[:, None] & live[None, :]
    at = (row * N)[:, None] + col[None, :]
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
    rstd = column(rstd_ptr, col, live, 1.0)
    n = (z - column(mean_ptr, col, live, 0.0)[None, :]) * rstd[None, :]
    g = tl.where(y <= 0, 0.0, dy)
    scale = rstd
    if gamma_ptr is not None:
        scale = rstd * column(gamma_ptr, col, live, 0.0)
    total, moment = column(total_ptr, col, live, 0.0), column(moment_ptr, col, live, 0.0)
    dz = (g - (total[None, :] + n * moment[None, :]) / M) * scale[None, :]
    tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=mask)


HELD = {"fwd": 64, "bwd": 32}  # elements that a thread has of each matrix, at most
_HELD = ((32, 8), (16, 8), (64, 8), (32, 4), (16, 4))  # BLOCK_C, num_warps


def held_configs(rows: int, columns: int, way: str) -> tuple[dict[str, Any], ...]:
    """Configurations of the kernels that hold whole columns, `way` "fwd" or "bwd", best guess first; none where they are too long."""
    block_m, widest = max(16, triton.next_power_of_2(rows)), triton.next_power_of_2(columns)
    if rows * columns >= 2**31:  # places are counted in 32 bits
        return ()
    return tuple(
        {"BLOCK_M": block_m, "BLOCK_C": block_c, "num_warps": warps}
        for block_c, warps in _HELD
        if block_c <= max(16, widest) and block_m * block_c <= warps * 32 * HELD[way]
    )


def sums_configs(rows: int, columns: int, multiprocessors: int = 132) -> tuple[dict[str, Any], ...]:
    """Configurations of the kernel with three sums a column, best guess first: half as many rows at a time as two would leave room for."""
    return tuple(
        c | {"BLOCK_R": c["BLOCK_R"] // 2} for c in backward_configs(rows, columns, multiprocessors)
    )
