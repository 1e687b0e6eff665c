"""Softmax over the last dim, forward and backward, and the row statistics that cross-entropy shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.ops.common.triton_launch import prepare
from tensorlogic.ops.common.triton_math import follow


@triton.jit
def powers(v):
    """exp(v) in two instructions: tl.exp keeps subnormal results, for three instructions more each."""
    return tl.exp2(v * 1.4426950408889634)


@triton.jit
def finite_or_zero(peak):
    """A maximum that can be subtracted: -inf - -inf would be NaN where exp(-inf) = 0 is meant."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def online_step(m, norm, x):
    """Take x [LANES, WIDTH] into each lane's running maximum m and sum of exponentials norm [LANES]."""
    peak = tl.maximum(m, tl.max(x, 1))
    safe = finite_or_zero(peak)
    norm = norm * powers(m - safe) + tl.sum(powers(x - safe[:, None]), 1)
    return peak, norm


@triton.jit
def row_statistics(
    x_ptr, C, SUM: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, scale=1.0, off=0.0
):
    """max, sum of exp(x - max) and (with SUM) sum of x * scale - off of one row, in one read.

    WIDTH elements, one 16-byte load, stay within a thread, so a tile costs no shuffle and one extra exponential
    per WIDTH. The next tile is loaded before this one is used; the ragged tile goes first, all others are
    unmasked.
    """
    at = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    TILE: tl.constexpr = LANES * WIDTH
    whole = C // TILE * TILE
    ragged = at < C - whole
    first = tl.load(x_ptr + whole + at, mask=ragged, other=float("-inf"))
    x = tl.load(x_ptr + at, mask=(at < TILE) & (whole > 0), other=float("-inf"))
    total = tl.zeros([LANES], tl.float32)
    m = tl.full([LANES], float("-inf"), tl.float32)
    m, norm = online_step(m, tl.zeros([LANES], tl.float32), first.to(tl.float32))
    if SUM:
        total += tl.sum(tl.where(ragged, first.to(tl.float32) * scale - off, 0.0), 1)
    for start in range(TILE, whole, TILE):
        ahead = tl.load(x_ptr + start + at)
        m, norm = online_step(m, norm, x.to(tl.float32))
        if SUM:
            total += tl.sum(x.to(tl.float32) * scale - off, 1)
        x = ahead
    m, norm = online_step(m, norm, x.to(tl.float32))
    if SUM:
        total += tl.sum(tl.where(whole > 0, x.to(tl.float32) * scale - off, 0.0), 1)
    peak = tl.max(m, 0)
    return peak, tl.sum(norm * powers(m - finite_or_zero(peak)), 0), tl.sum(total, 0)


@triton.jit
def row_body(row, C, WIDTH: tl.constexpr):
    """(first, length) of the part of a row of C elements that whole aligned groups of WIDTH cover."""
    first = (WIDTH - row * C % WIDTH) % WIDTH
    return first, tl.maximum(C - first, 0).to(tl.int32) // WIDTH * WIDTH


@triton.jit
def row_ends(x_ptr, C, first, length, WIDTH: tl.constexpr):
    """The elements of a row before and behind its body, [2 * WIDTH] with -inf for none, their columns, and which there are."""
    lane = tl.arange(0, 2 * WIDTH)
    at = tl.where(lane < WIDTH, lane, first + length + lane - WIDTH)
    inside = at < tl.where(lane < WIDTH, tl.minimum(first, C), C)
    return tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32), at, inside


@triton.jit
def with_ends(peak, norm, total, ends, inside, scale=1.0, off=0.0):
    """The same statistics with a row's ends, as `row_ends` returns them, taken in."""
    higher = tl.maximum(peak, tl.max(ends, 0))
    safe = finite_or_zero(higher)
    norm = norm * powers(peak - safe) + tl.sum(powers(ends - safe), 0)
    return higher, norm, total + tl.sum(tl.where(inside, ends * scale - off, 0.0), 0)


@triton.jit
def softmax_fwd_registers(
    x_ptr, y_ptr, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):
    """y[r, :] = exp(x - max) / sum; the row stays in registers, so memory is read once; float32."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_C)
    mask = (row < R)[:, None] & (col < C)[None, :]
    at = (row * C)[:, None] + col[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=float("-inf")).to(tl.float32)
    e = powers(x - tl.max(x, 1)[:, None])
    y = e / tl.sum(e, 1)[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_fwd_online(
    x_ptr, y_ptr, C, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    """y[r, :] = exp(x - max) / sum for rows of any length: one online pass, a second that mostly hits L2."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * C
    y_ptr += row * C
    peak, norm, _ = row_statistics(x_ptr, C, False, LANES, WIDTH)
    scale = 1.0 / norm
    lane = tl.arange(0, LANES * WIDTH)
    for start in range(0, C, LANES * WIDTH):
        mask = start + lane < C
        x = tl.load(x_ptr + start + lane, mask=mask, eviction_policy="evict_first").to(tl.float32)
        y = powers(x - peak) * scale
        tl.store(y_ptr + start + lane, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_bwd_registers(
    y_ptr,
    dy_ptr,
    dx_ptr,
    R,
    C,
    scale,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """dx[r, :] = scale * y * (dy - sum(dy * y)); both rows stay in registers; float32."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_C)
    mask = (row < R)[:, None] & (col < C)[None, :]
    at = (row * C)[:, None] + col[None, :]
    y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, 1)[:, None]) * scale
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_bwd_looped(
    y_ptr, dy_ptr, dx_ptr, C, scale, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    """dx[r, :] = scale * y * (dy - sum(dy * y)) for rows of any length, in two sweeps; float32."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * C
    dy_ptr += row * C
    dx_ptr += row * C
    lane = tl.arange(0, LANES * WIDTH)
    acc = tl.zeros([LANES * WIDTH], tl.float32)
    for start in range(0, C, LANES * WIDTH):
        mask = start + lane < C
        y = tl.load(y_ptr + start + lane, mask=mask, other=0.0).to(tl.float32)
        acc += y * tl.load(dy_ptr + start + lane, mask=mask, other=0.0).to(tl.float32)
    dot = tl.sum(acc, 0)
    for start in range(0, C, LANES * WIDTH):
        mask = start + lane < C
        y = tl.load(y_ptr + start + lane, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + start + lane, mask=mask, other=0.0).to(tl.float32)
        dx = y * (dy - dot) * scale
        tl.store(dx_ptr + start + lane, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def row_configs(columns: int, dtype: str, longest: int = 32768) -> list[dict[str, Any]]:
    """Configurations for kernels over [R, columns], best guess first: "registers" or "online"."""
    width = 4 if dtype == "f32" else 8
    block_c = triton.next_power_of_2(columns)
    held: list[dict[str, Any]] = []
    if block_c <= longest:
        for elements, warps in ((2048, 4), (1024, 4), (4096, 4), (1024, 1)):
            rows = max(1, elements // block_c)
            warps = max(warps, min(32, block_c // 1024))
            config = {
                "strategy": "registers",
                "BLOCK_R": rows,
                "BLOCK_C": block_c,
                "num_warps": warps,
            }
            if config not in held:
                held.append(config)
    online = [
        {"strategy": "online", "LANES": 32 * warps * loads, "WIDTH": width, "num_warps": warps}
        for warps, loads in ((8, 2), (4, 4), (8, 4), (4, 2), (16, 2), (32, 1))
    ]
    return (held + online)[:8] if block_c <= 8192 else (online[:5] + held)[:8]


def softmax_configs(columns: int, dtype: str, backward: bool = False) -> list[dict[str, Any]]:
    """Configurations of softmax or its backward, best guess first."""
    return row_configs(columns, dtype, 16384 if backward else 32768)


def _rows_grid(rows: int, config: dict[str, Any]) -> tuple[int, int, int]:
    return (triton.cdiv(rows, config.get("BLOCK_R", 1)), 1, 1)


def _blocks(config: dict[str, Any]) -> dict[str, int]:
    return {name: config[name] for name in config if name not in ("strategy", "num_warps")}


def softmax_launcher(
    rows: int,
    columns: int,
    dtype: str,
    out_dtype: str,
    config: dict[str, Any],
    device: torch.device,
    align: int = 16,
) -> Callable[..., bool]:
    """A callable (x, y) -> bool: softmax over the last dim of contiguous [rows, columns]."""
    held = config["strategy"] == "registers"
    return prepare(
        softmax_fwd_registers if held else softmax_fwd_online,
        grid=_rows_grid(rows, config),
        pointers={"x_ptr": dtype, "y_ptr": out_dtype},
        integers={"R": rows, "C": columns} if held else {"C": columns},
        floats=(),
        constexprs=_blocks(config),
        num_warps=config["num_warps"],
        num_stages=1,
        device=device,
        align=align,
    )


def softmax_backward_launcher(
    rows: int,
    columns: int,
    dtypes: tuple[str, str, str],
    config: dict[str, Any],
    device: torch.device,
    align: int = 16,
) -> Callable[..., bool]:
    """A callable (y, dy, dx, scale) -> bool: dx = scale * y * (dy - sum(dy * y)); dtypes of y, dy, dx."""
    held = config["strategy"] == "registers"
    return prepare(
        softmax_bwd_registers if held else softmax_bwd_looped,
        grid=_rows_grid(rows, config),
        pointers=dict(zip(("y_ptr", "dy_ptr", "dx_ptr"), dtypes, strict=True)),
        integers={"R": rows, "C": columns} if held else {"C": columns},
        floats=("scale",),
        constexprs=_blocks(config),
        num_warps=config["num_warps"],
        num_stages=1,
        device=device,
        align=align,
    )
