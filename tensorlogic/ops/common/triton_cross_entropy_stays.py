"""Softmax cross-entropy, forward, by programs that stay: each takes every so-manieth row and has the next one on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.ops.common.triton_cross_entropy import sum_losses, write_loss
from tensorlogic.ops.common.triton_launch import prepare
from tensorlogic.ops.common.triton_math import follow
from tensorlogic.ops.common.triton_rows import finite_or_zero, online_step, powers


@triton.jit
def cross_entropy_stays(
    x_ptr, t_ptr, part_ptr, lse_ptr, y_ptr, share_ptr, counter_ptr, R, C, IGNORE,
    MEAN: tl.constexpr, SAVE: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum or mean of the losses of x [R, C], C >= LANES WIDTH and a multiple of WIDTH; float32, the same bits every run.

    A program takes every so-manieth row, has the next row's first tile and target on their way while it sums this one, and
    leaves one sum of losses. An ignored row costs its first tile. An H200: 512 x 32000 in float32 18.0 us where a program a row
    takes 22.2, 16384 x 8192 in float16 74 (78); of long float16 rows a program each is better.
    """
    follow(PDL)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    TILE: tl.constexpr = LANES * WIDTH
    at = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    whole = C // TILE * TILE
    here = x_ptr + pid.to(tl.int64) * C
    t = tl.load(t_ptr + pid)
    x = tl.load(here + at)
    total = tl.full([], 0.0, tl.float32)
    valid = tl.full([], 0, tl.int32)
    for row in range(pid, R, programs):
        live = t != IGNORE
        known = (t >= 0) & (t < C)
        x_t = tl.load(here + t, mask=known & live, other=float("nan")).to(tl.float32)
        after = row + programs
        t = tl.load(t_ptr + after, mask=after < R, other=IGNORE)
        m = tl.full([LANES], float("-inf"), tl.float32)
        norm = tl.zeros([LANES], tl.float32)
        for start in range(TILE, tl.where(live, whole, 0), TILE):
            ahead = tl.load(here + start + at)
            m, norm = online_step(m, norm, x.to(tl.float32))
            x = ahead
        if RAGGED:
            last = tl.load(here + whole + at, mask=(at < C - whole) & live, other=float("-inf"))
        here = x_ptr + after.to(tl.int64) * C
        ahead = tl.load(here + at, mask=(at < TILE) & (after < R), other=0.0)
        m, norm = online_step(m, norm, x.to(tl.float32))
        if RAGGED:
            m, norm = online_step(m, norm, last.to(tl.float32))
        x = ahead
        peak = tl.max(m, 0)
        log = tl.log(tl.sum(norm * powers(m - finite_or_zero(peak)), 0))
        if SAVE:
            tl.store(lse_ptr + row, tl.where(live, peak + log, 0.0))
        if live:  # peak + log first would round a large peak
            total += (peak - x_t) + log
            valid += 1
    tl.store(part_ptr + pid, total)
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, (valid.to(tl.int64) << 32) + 1, sem="acq_rel")
    if (before & 0xFFFFFFFF) == programs - 1:
        everything = sum_losses(part_ptr, programs, BLOCK)
        write_loss(y_ptr, share_ptr, everything, (before >> 32) + valid, MEAN, SAVE)
        tl.store(counter_ptr, tl.full([], 0, tl.int64))


def stays_refusal(
    columns: int, dtype: str, reduction: str, smoothing: float, align: int
) -> str | None:
    """None, or why programs that stay cannot serve such a loss."""
    width = 16 // SIZE[dtype]
    if reduction == "none" or smoothing:
        return "a reduced loss without smoothing is required"
    if align < 16 or columns % width or columns < LEAST * width:
        return f"rows of whole groups of {width} at 16-byte addresses, at least {LEAST} of them, are required"
    return None


SIZE = {"f16": 2, "bf16": 2, "f32": 4}
LEAST = 256  # lanes of the narrowest program


def stays_configs(columns: int, dtype: str) -> list[dict[str, Any]]:
    """Configurations, best guess first: lanes, warps, programs of a multiprocessor."""
    width = 16 // SIZE[dtype]
    tiles = ((1024, 8, 4), (256, 4, 16)) if columns >= 16384 else ((256, 4, 16), (512, 8, 8))
    found = [
        {"LANES": lanes, "WIDTH": width, "per": per, "num_warps": warps}
        for lanes, warps, per in tiles
        if columns >= lanes * width
    ]
    return found or [{"LANES": LEAST, "WIDTH": width, "per": 16, "num_warps": 4}]


def stays_launcher(
    rows: int,
    columns: int,
    dtype: str,
    reduction: str,
    ignore_index: int,
    config: dict[str, Any],
    device: torch.device,
    cores: int,
    *,
    save: bool = False,
) -> Callable[..., bool]:
    """A callable (x, t, part, lse, y, share, counter) -> bool, as that of `cross_entropy_launcher` for "mean" or "sum"; `part`:
    float32 workspace of as many elements as rows. A neighbour's configuration gives way where its tile is wider than a row."""
    lanes, width = config["LANES"], config["WIDTH"]
    if columns < lanes * width:
        lanes = LEAST
    return prepare(
        cross_entropy_stays,
        grid=(min(rows, cores * config["per"]), 1, 1),
        pointers={
            "x_ptr": dtype, "t_ptr": "i64", "part_ptr": "f32", "lse_ptr": "f32", "y_ptr": dtype, "share_ptr": "f32", "counter_ptr": "i64",
        },
        integers={"R": rows, "C": columns, "IGNORE": ignore_index},
        floats=(),
        constexprs={
            "MEAN": reduction == "mean", "SAVE": save, "RAGGED": columns % (lanes * width) != 0,
            "BLOCK": 1024, "LANES": lanes, "WIDTH": width,
        },
        num_warps=config["num_warps"],
        num_stages=1,
        device=device,
    )  # fmt: skip
