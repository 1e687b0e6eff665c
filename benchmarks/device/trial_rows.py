"""Kernels on trial: cross-entropy by programs that stay, its loss and gradient in one pass, a sum without a barrier while it waits."""

from __future__ import annotations

import triton
import triton.language as tl

from tensorlogic.ops.common.triton_cross_entropy import sum_losses, write_loss
from tensorlogic.ops.common.triton_math import follow
from tensorlogic.ops.common.triton_reduce import finish, fold
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
    x_ptr, t_ptr, loss_ptr, dx_ptr, R, C, IGNORE, share, BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Losses [R] and share times their gradient [R, C]: each row read once, into shared memory STAGES rows ahead, and
    written once; C <= BLOCK.

    4 bytes an element in float16, where forward and backward apart move 6.
    """
    follow(PDL)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    zero = tl.full([], 0, tl.int64)  # the interpreter's rows are Python's integers
    t = tl.load(t_ptr + pid)
    for row in tl.range(pid, R, programs, num_stages=STAGES):
        here = x_ptr + (row + zero) * C
        live = t != IGNORE
        target = t
        after = row + programs
        t = tl.load(t_ptr + after, mask=after < R, other=IGNORE)
        x_t = tl.load(here + target, mask=live, other=0.0).to(tl.float32)
        x = tl.load(here + lane, mask=lane < C, other=float("-inf"))
        peak = finite_or_zero(tl.max(x, 0).to(tl.float32))
        norm = tl.sum(powers(x.to(tl.float32) - peak), 0)
        lse = peak + tl.log(norm)
        tl.store(loss_ptr + row, tl.where(live, lse - x_t, 0.0))
        d = powers(x.to(tl.float32) - lse) * share
        d = tl.where(lane == target, d - share, d)
        to = dx_ptr + (row + zero) * C + lane
        tl.store(to, tl.where(live, d, 0.0).to(dx_ptr.dtype.element_ty), mask=lane < C)


@triton.jit
def spin(ptrs, launch, live):
    """The lower half of each 64-bit cell once its upper half is `launch`; 0 where not live. Each thread waits for its own."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p, q; .reg .b64 c; .reg .b32 lo, hi; setp.ne.s32 q, $3, 0; mov.b32 lo, 0; mov.b32 hi, $2;\n"
        "SPIN: @q ld.relaxed.gpu.global.b64 c, [$1]; @q mov.b64 {lo, hi}, c; setp.ne.u32 p, hi, $2; @p bra SPIN;\n"
        "mov.b32 $0, lo; }",
        "=r,l,r,r",
        [ptrs.to(tl.int64), launch, live.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def sum_spins(
    x_ptr, y_ptr, cell_ptr, PARTS, IDLE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """y = sum of x [BLOCK parts], as `reduce_polled`, but without loops, masks, or a barrier in the wait; with IDLE the last of
    PARTS programs only collects."""
    follow(PDL)
    part = tl.program_id(0)
    launch = (tl.load(cell_ptr) + 1).to(tl.int32)
    value = tl.full([], 0.0, tl.float32)
    if (not IDLE) | (part < PARTS - 1):
        value = fold(tl.load(x_ptr + part * BLOCK + tl.arange(0, BLOCK)).to(tl.float32), 0, "sum")
    bits = value.to(tl.uint32, bitcast=True).to(tl.int64)
    if part < PARTS - 1:
        tl.store(cell_ptr + 1 + part, (launch.to(tl.int64) << 32) | bits)
    else:
        p = tl.arange(0, BLOCK_P)
        others = p < PARTS - 1
        found = spin(cell_ptr + 1 + p, launch, others).to(tl.float32, bitcast=True)
        every = tl.where(others, found, tl.where(p == PARTS - 1, value, 0.0))
        tl.store(y_ptr, finish(fold(every, 0, "sum"), 1, "sum").to(y_ptr.dtype.element_ty))
        tl.store(cell_ptr, launch.to(tl.int64))
