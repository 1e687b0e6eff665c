"""Element-wise passes over [M, N] that know columns: batch normalisation with ReLU, and gradients with their column sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.elementwise.elementwise import combine
from tensorlogic.kernels.triton_runtime.device_math import follow, relu
from tensorlogic.kernels.triton_runtime.launch import prepare


@triton.jit
def column(ptr, col, live, other):
    """ptr[col] in float32, `other` beyond the edge."""
    return tl.load(ptr + col, mask=live, other=other).to(tl.float32)


@triton.jit
def batch_norm_relu_fwd_tiled(
    z_ptr, bias_ptr, mean_ptr, var_ptr, gamma_ptr, beta_ptr, y_ptr, kept_ptr, M, N, eps,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = relu((z + bias - mean) / sqrt(var + eps) * gamma + beta), [M, N] with [N] vectors; float32, rounded once. `kept` takes z + bias and
    may be z itself."""
    follow(PDL)
    tiles_c = tl.cdiv(N, BLOCK_C)
    row = (tl.program_id(0) // tiles_c).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = (tl.program_id(0) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < N
    mask = (row < M)[:, None] & live[None, :]
    at = (row * N)[:, None] + col[None, :]
    z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        z += column(bias_ptr, col, live, 0.0)[None, :]
    if kept_ptr is not None:
        tl.store(kept_ptr + at, z.to(kept_ptr.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(column(var_ptr, col, live, 1.0) + eps)
    if gamma_ptr is not None:
        scale *= column(gamma_ptr, col, live, 0.0)
    y = (z - column(mean_ptr, col, live, 0.0)[None, :]) * scale[None, :]
    if beta_ptr is not None:
        y += column(beta_ptr, col, live, 0.0)[None, :]
    tl.store(y_ptr + at, relu(y).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def leave(
    space_ptr,
    tile,
    part,
    PARTS,
    sums,
    SLOT: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Put one of SLOTS column sums [BLOCK_C] of this part where the finishing program finds it."""
    at = ((tile * PARTS + part) * SLOTS + SLOT).to(tl.int64) * BLOCK_C
    tl.store(space_ptr + at + tl.arange(0, BLOCK_C), sums)


@triton.jit
def arrive(counter_ptr, tile, PARTS):
    """Whether this program is the last of its column tile; the counter is left at 0."""
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == PARTS - 1
    tl.store(counter_ptr + tile, 0, mask=last)
    return last


@triton.jit
def gathered(
    space_ptr, tile, PARTS, last, SLOT: tl.constexpr, SLOTS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """The sum [BLOCK_C] of what all parts left in SLOT, in fixed order; nothing is read unless `last`."""
    p = tl.arange(0, BLOCK_P)
    at = ((tile * PARTS + p) * SLOTS + SLOT).to(tl.int64) * BLOCK_C
    there = ((p < PARTS) & last)[:, None]
    ptrs = space_ptr + at[:, None] + tl.arange(0, BLOCK_C)[None, :]
    return tl.sum(tl.load(ptrs, mask=there, other=0.0, cache_modifier=".cg"), 0)


@triton.jit
def activation_bwd_columns(
    dy_ptr, kept_ptr, dz_ptr, db_ptr, space_ptr, counter_ptr, M, N, PARTS,
    OP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dz = dy act'(kept), OP its element-wise name, and db = the column sums of dz; [M, N], sums in float32.

    dy and kept are read once. PARTS programs share a column tile; the last to arrive adds their sums in fixed
    order: one launch, the same bits every run.
    """
    follow(PDL)
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    col = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < N
    lane = tl.arange(0, BLOCK_R)
    sums = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(part * BLOCK_R, M, PARTS * BLOCK_R):
        row = start + lane
        mask = (row < M)[:, None] & live[None, :]
        at = (row.to(tl.int64) * N)[:, None] + col[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        kept = tl.load(kept_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dz, _ = combine(OP, dz_ptr.dtype.element_ty, dy, kept, kept)
        tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        sums += dz
    leave(space_ptr, tile, part, PARTS, tl.sum(sums, 0), 0, 1, BLOCK_C)
    last = arrive(counter_ptr, tile, PARTS)
    total = gathered(space_ptr, tile, PARTS, last, 0, 1, BLOCK_C, BLOCK_P)
    tl.store(db_ptr + col, total.to(db_ptr.dtype.element_ty), mask=live & last)


@triton.jit
def batch_norm_relu_bwd_columns(
    dy_ptr, y_ptr, z_ptr, mean_ptr, var_ptr, gamma_ptr, dz_ptr, db_ptr, dgamma_ptr, dbeta_ptr, space_ptr, counter_ptr,
    M, N, PARTS, eps, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With g = dy but 0 where y <= 0 (NaN passes): dz = g s, db = s sum g, dbeta = sum g, dgamma = sum g (z - mean) / sqrt(var + eps);
    s = gamma / sqrt(var + eps), the statistics constants (evaluation). [M, N], sums over M in float32.

    dy, y and z are read once; the sums are shared as in `activation_bwd_columns`.
    """
    follow(PDL)
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
        g = tl.where(y <= 0, 0.0, dy)
        tl.store(dz_ptr + at, (g * scale[None, :]).to(dz_ptr.dtype.element_ty), mask=mask)
        plain += g
        along += tl.where(y <= 0, 0.0, dy * (z - mean[None, :]))
    leave(space_ptr, tile, part, PARTS, tl.sum(plain, 0), 0, 2, BLOCK_C)
    leave(space_ptr, tile, part, PARTS, tl.sum(along, 0), 1, 2, BLOCK_C)
    last = arrive(counter_ptr, tile, PARTS)
    total = gathered(space_ptr, tile, PARTS, last, 0, 2, BLOCK_C, BLOCK_P)
    moment = gathered(space_ptr, tile, PARTS, last, 1, 2, BLOCK_C, BLOCK_P)
    tl.store(db_ptr + col, (total * scale).to(db_ptr.dtype.element_ty), mask=live & last)
    tl.store(dbeta_ptr + col, total.to(dbeta_ptr.dtype.element_ty), mask=live & last)
    tl.store(dgamma_ptr + col, (moment * rstd).to(dgamma_ptr.dtype.element_ty), mask=live & last)


def apply_configs(rows: int, columns: int) -> tuple[dict[str, Any], ...]:
    """Configurations of the forward kernel, best guess first."""
    del rows
    block_c = min(512, triton.next_power_of_2(columns))
    return tuple(
        {"BLOCK_R": max(1, size // block_c), "BLOCK_C": block_c, "num_warps": warps}
        for size, warps in ((2048, 4), (4096, 4), (1024, 4), (8192, 8))
    )


def launcher(
    kernel: Any, rows: int, columns: int, dtypes: dict[str, str | None], config: dict[str, Any], device: torch.device, align: int,
    floats: tuple[str, ...] = (), named: dict[str, Any] | None = None, strides: dict[str, int] | None = None,
) -> Callable[..., bool]:  # fmt: skip
    """A callable over what `kernel`, a pass over [rows, columns], takes in its order: the tensors of `dtypes` (None: absent), space and
    counter where `parts` programs share columns (see `backward_space`), then `floats` by name. `named`: what it is compiled for.

    False where a pointer is less aligned than `align` bytes; raises CompileFailure.
    """
    integers = {"M": rows, "N": columns, **(strides or {})}
    pointers = {f"{name}_ptr": dtype for name, dtype in dtypes.items() if dtype is not None}
    constexprs = {name: value for name, value in config.items() if name.startswith("BLOCK")}
    tiles = triton.cdiv(columns, config["BLOCK_C"])
    if "parts" in config:
        pointers |= {"space_ptr": "f32", "counter_ptr": "i32"}
        integers["PARTS"] = config["parts"]
        constexprs["BLOCK_P"] = triton.next_power_of_2(config["parts"])
        tiles *= config["parts"]
    elif "BLOCK_R" in config:
        tiles *= triton.cdiv(rows, config["BLOCK_R"])
    return prepare(
        kernel, grid=(tiles, 1, 1), pointers=pointers, integers=integers, floats=floats, constexprs={**(named or {}), **constexprs},
        num_warps=config["num_warps"], num_stages=1, device=device, align=align,
    )  # fmt: skip


def apply_launcher(
    rows: int, columns: int, dtypes: dict[str, str | None], config: dict[str, Any], device: torch.device, align: int
) -> Callable[..., bool]:  # fmt: skip
    """A callable (z[, bias], mean, var[, gamma][, beta], y[, kept], eps) -> bool over contiguous [rows, columns].

    `dtypes`: names of z, bias, mean, var, gamma, beta, y and kept, in this order; None: absent.
    """
    how = (dtypes, config, device, align)
    return launcher(batch_norm_relu_fwd_tiled, rows, columns, *how, ("eps",))


def backward_configs(
    rows: int, columns: int, multiprocessors: int = 132
) -> tuple[dict[str, Any], ...]:
    """Configurations of the kernels with column sums, best guess first."""
    found: list[dict[str, Any]] = []
    for block_c, block_r, per, warps in (
        (64, 32, 4, 4),
        (128, 32, 2, 8),
        (64, 16, 8, 4),
        (128, 64, 2, 8),
        (32, 16, 4, 4),
    ):
        block_c = min(block_c, max(16, triton.next_power_of_2(columns)))
        tiles = triton.cdiv(columns, block_c)
        parts = max(1, min(triton.cdiv(rows, block_r), multiprocessors * per // tiles, 128))
        config = {"BLOCK_R": block_r, "BLOCK_C": block_c, "parts": parts, "num_warps": warps}
        if config not in found:
            found.append(config)
    return tuple(found)


def backward_space(columns: int, slots: int, config: dict[str, Any]) -> tuple[int, int]:
    """Elements of float32 scratch for `slots` sums a column, and of int32 counters that are zero between launches."""
    tiles = triton.cdiv(columns, config["BLOCK_C"])
    return tiles * config["parts"] * slots * config["BLOCK_C"], tiles


def activation_backward_launcher(
    kind: str, rows: int, columns: int, dtype: str, config: dict[str, Any], device: torch.device, align: int
) -> Callable[..., bool]:  # fmt: skip
    """A callable (dy, kept, dz, db, space, counter) -> bool over contiguous [rows, columns]; `kind`: "relu_bwd", ..."""
    dtypes: dict[str, str | None] = dict.fromkeys(("dy", "kept", "dz", "db"), dtype)
    how = (dtypes, config, device, align)
    return launcher(activation_bwd_columns, rows, columns, *how, named={"OP": kind})


def backward_launcher(
    rows: int, columns: int, dtypes: dict[str, str | None], config: dict[str, Any], device: torch.device, align: int
) -> Callable[..., bool]:  # fmt: skip
    """A callable (dy, y, z, mean, var[, gamma], dz, db, dgamma, dbeta, space, counter, eps) -> bool, all contiguous.

    `dtypes`: of all of these up to dbeta; None: absent.
    """
    how = (dtypes, config, device, align)
    return launcher(batch_norm_relu_bwd_columns, rows, columns, *how, ("eps",))
