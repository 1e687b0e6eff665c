"""On trial: cross-entropy and its gradient in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from tensorlogic.kernels.row_access.contiguous import row_statistics
from tensorlogic.kernels.triton_runtime.device_math import finite_or_zero, follow, powers


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
        tl.store(loss_ptr + row, tl.where(live, peak - x_t + tl.log(norm), 0.0))
        if AGAIN:
            e = powers(x.to(tl.float32) - peak)
        own = powers(x_t - peak) * (share / norm) - share
        d = tl.where(lane == target, own, e * (share / norm))
        d = tl.where(live, d, 0.0).to(dx_ptr.dtype.element_ty)
        if EVEN:
            tl.store(to + lane, d)
        else:
            tl.store(to + lane, d, mask=lane < C)


@triton.jit
def cross_entropy_swept(
    x_ptr, t_ptr, loss_ptr, dx_ptr, R, C, IGNORE, share, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """As `cross_entropy_both` for rows of any length: a program's second sweep over its row finds it in L2; C a multiple of WIDTH."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    here, to = x_ptr + row * C, dx_ptr + row * C
    t = tl.load(t_ptr + row)
    live = t != IGNORE
    x_t = tl.load(here + t, mask=live, other=0.0).to(tl.float32)
    peak, norm, _ = row_statistics(here, C, False, LANES, WIDTH)
    tl.store(loss_ptr + row, tl.where(live, peak - x_t + tl.log(norm), 0.0))
    factor = tl.where(live, share / norm, 0.0)
    lane = tl.arange(0, LANES * WIDTH)
    for start in range(0, C, LANES * WIDTH):
        col = start + lane
        x = tl.load(here + col, mask=col < C, eviction_policy="evict_first").to(tl.float32)
        d = powers(x - peak) * factor
        d = tl.where((col == t) & live, d - share, d)
        tl.store(to + col, d.to(dx_ptr.dtype.element_ty), mask=col < C, cache_modifier=".cs")
