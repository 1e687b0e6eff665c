"""Kernels on trial: cross-entropy by programs that stay, its loss and gradient in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from tensorlogic.ops.common.triton_cross_entropy import sum_losses, write_loss
from tensorlogic.ops.common.triton_math import follow
from tensorlogic.ops.common.triton_rows import finite_or_zero, online_step, powers


@triton.jit
def cross_entropy_stays(
    x_ptr, t_ptr, part_ptr, lse_ptr, y_ptr, share_ptr, counter_ptr, R, C, IGNORE,
    SAVE: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Mean loss of x [R, C], C >= LANES WIDTH and a multiple of WIDTH; float32. A program takes every so-manieth row, has the next
    row's first tile and target on their way while it sums this one, and leaves one sum of losses.

    Rows on their way hide a row's first latency and its reduction; as many sums as programs, not rows, are left for the
    last program. An ignored row costs its first tile.
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
        lse = peak + tl.log(tl.sum(norm * powers(m - finite_or_zero(peak)), 0))
        total += tl.where(live, lse - x_t, 0.0)
        valid += live.to(tl.int32)
        if SAVE:
            tl.store(lse_ptr + row, tl.where(live, lse, 0.0))
    tl.store(part_ptr + pid, total)
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, (valid.to(tl.int64) << 32) + 1, sem="acq_rel")
    if (before & 0xFFFFFFFF) == programs - 1:
        everything = sum_losses(part_ptr, programs, BLOCK)
        write_loss(y_ptr, share_ptr, everything, (before >> 32) + valid, True, SAVE)
        tl.store(counter_ptr, tl.full([], 0, tl.int64))


@triton.jit
def cross_entropy_both(
    x_ptr, t_ptr, loss_ptr, dx_ptr, R, C, IGNORE, share,
    EVEN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, AGAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Losses [R] and share times their gradient [R, C]: each row read once, into shared memory STAGES rows ahead, and
    written once; C <= BLOCK, EVEN: C == BLOCK.

    4 bytes an element in float16, where forward and backward apart move 6. AGAIN: exponentials are made a second time, not kept.
    """
    follow(PDL)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    zero = tl.full([], 0, tl.int64)  # the interpreter's rows are Python's integers
    t = tl.load(t_ptr + pid)
    for row in tl.range(pid, R, programs, num_stages=STAGES):
        here = x_ptr + (row + zero) * C
        to = dx_ptr + (row + zero) * C
        live = t != IGNORE
        target = t
        after = row + programs
        t = tl.load(t_ptr + after, mask=after < R, other=IGNORE)
        x_t = tl.load(here + target, mask=live, other=0.0).to(tl.float32)
        if EVEN:
            x = tl.load(here + lane)
        else:
            x = tl.load(here + lane, mask=lane < C, other=float("-inf"))
        peak = finite_or_zero(tl.max(x, 0).to(tl.float32))
        e = powers(x.to(tl.float32) - peak)
        norm = tl.sum(e, 0)
        lse = peak + tl.log(norm)
        tl.store(loss_ptr + row, tl.where(live, lse - x_t, 0.0))
        if AGAIN:
            e = powers(x.to(tl.float32) - peak)
        own = powers(x_t - lse) * share - share
        d = tl.where(lane == target, own, e * (share / norm))
        d = tl.where(live, d, 0.0).to(dx_ptr.dtype.element_ty)
        if EVEN:
            tl.store(to + lane, d)
        else:
            tl.store(to + lane, d, mask=lane < C)
