"""Attention scores on Hopper with all of a head's k in shared memory: warpgroups that meet only where outputs are staged."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tensorlogic.ops.common.triton_scores_specialised import ROWS, larger, product


@gluon.jit
def fetch(
    qs, ks, asked, full, q_desc, k_desc,
    qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, groups,
    CONSUMERS: gl.constexpr, TILES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The loading warp: each warpgroup's rows of q, and every tile of k, once."""
    gdc_wait()
    D: gl.constexpr = q_desc.block_type.shape[1]
    BYTES: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    head = gl.program_id(0) // groups
    b, h = head // H, head % H
    for me in gl.static_range(CONSUMERS):
        first = gl.minimum((gl.program_id(0) % groups * CONSUMERS + me) * ROWS, S - ROWS)
        mbarrier.expect(asked.index(me), ROWS * D * BYTES)
        tma.async_copy_global_to_shared(
            q_desc,
            [b * qb_row + h * qh_row + first, b * qb_column + h * qh_column],
            asked.index(me),
            qs.index(me),
        )
    row, column = b * kb_row + h * kh_row, b * kb_column + h * kh_column
    for tile in gl.static_range(TILES):
        mbarrier.expect(full.index(tile), BLOCK_N * D * BYTES)
        tma.async_copy_global_to_shared(
            k_desc, [row + tile * BLOCK_N, column], full.index(tile), ks.index(tile)
        )


@gluon.jit
def begin(q, k, SUMS: gl.constexpr, BLOCK_N: gl.constexpr):
    """q kᵀ [ROWS, BLOCK_N], under way."""
    return warpgroup_mma(
        q, k.permute((1, 0)), gl.zeros([ROWS, BLOCK_N], gl.float32, SUMS), use_acc=False, is_async=True
    )  # fmt: skip


@gluon.jit
def recount(
    q, ks, full, factor, SUMS: gl.constexpr, SIDE: gl.constexpr, TILES: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """Maxima, times the factor, and sums of rows whose sums leave float32 when counted from their first tile's maximum."""
    peak = gl.full([ROWS], float("-inf"), gl.float32, SIDE)
    norm = gl.zeros([ROWS], gl.float32, SIDE)
    for step in range(TILES):
        s = product(q, ks.index(step), full.index(step), 0, SUMS, BLOCK_N)
        higher = larger(peak, gl.reduce(s, 1, larger))
        base = gl.where(higher == float("-inf"), 0.0, higher * factor)
        norm = norm * gl.exp2(peak * factor - base) + gl.sum(gl.exp2(s * factor - base[:, None]), 1)
        peak = higher
    return gl.where(peak == float("-inf"), 0.0, peak * factor), norm


@gluon.jit
def soften(
    me, qs, ks, staged, asked, full, y_desc, S, groups, scale,
    CONSUMERS: gl.constexpr, TILES: gl.constexpr, BUFFERS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """A warpgroup: one sweep over k for the sums of ROWS rows, one that writes them, by two tiles at a time."""
    gdc_wait()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    SIDE: gl.constexpr = gl.SliceLayout(1, SUMS)
    factor = scale * 1.4426950408889634
    head = gl.program_id(0) // groups
    first = gl.minimum((gl.program_id(0) % groups * CONSUMERS + me) * ROWS, S - ROWS)
    q = qs.index(me)
    mbarrier.wait(asked.index(me), 0)
    base = gl.zeros([ROWS], gl.float32, SIDE)
    norm = gl.zeros([ROWS], gl.float32, SIDE)
    for tile in range(0, TILES, 2):
        mbarrier.wait(full.index(tile), 0)
        mbarrier.wait(full.index(tile + 1), 0)
        left = begin(q, ks.index(tile), SUMS, BLOCK_N)
        right = begin(q, ks.index(tile + 1), SUMS, BLOCK_N)
        s = warpgroup_mma_wait(1, deps=(left,))
        if tile == 0:
            peak = gl.max(s, 1)
            base = gl.where(peak == float("-inf"), 0.0, peak * factor)
        norm += gl.sum(gl.exp2(s * factor - base[:, None]), 1)
        s = warpgroup_mma_wait(0, deps=(right,))
        norm += gl.sum(gl.exp2(s * factor - base[:, None]), 1)
    if gl.min(((norm > 1e-30) & (norm < 1e38)).to(gl.int32), 0) == 0:
        base, norm = recount(q, ks, full, factor, SUMS, SIDE, TILES, BLOCK_N)
    shift = base + gl.log2(norm)
    for step in range(0, TILES, 2):
        left = begin(q, ks.index(step), SUMS, BLOCK_N)
        right = begin(q, ks.index(step + 1), SUMS, BLOCK_N)
        near, far = (
            staged.index(me * BUFFERS + step % BUFFERS),
            staged.index(me * BUFFERS + step % BUFFERS + 1),
        )
        s = warpgroup_mma_wait(1, deps=(left,))
        y = gl.exp2(s * factor - shift[:, None]).to(y_desc.dtype)
        tma.store_wait(BUFFERS - 2)
        near.store(y)
        s = warpgroup_mma_wait(0, deps=(right,))
        far.store(gl.exp2(s * factor - shift[:, None]).to(y_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [head * S + first, step * BLOCK_N], near)
        tma.async_copy_shared_to_global(y_desc, [head * S + first, (step + 1) * BLOCK_N], far)
    tma.store_wait(0)


@gluon.jit
def attention_scores_resident(
    q_desc, k_desc, y_desc,
    qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, groups, scale,
    CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr, TILES: gl.constexpr, BUFFERS: gl.constexpr, BLOCK_N: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """y[b, h, s, :] = softmax over t of scale * q[b, h, s] . k[b, h, t], scale > 0, for T = TILES BLOCK_N; products and sums in float32.

    As `attention_scores_specialised` where k stays in shared memory, in fewer barriers: k is waited for in the first sweep
    alone and never given back, since a program takes CONSUMERS times 64 rows and ends, and two tiles at a time are
    multiplied, the second under way while the exponentials of the first are taken, and staged. Compiled for sm_90; not yet timed.
    """
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[1]
    qs = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, D], q_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [TILES, BLOCK_N, D], k_desc.layout)
    staged = gl.allocate_shared_memory(
        y_desc.dtype, [BUFFERS * CONSUMERS, ROWS, BLOCK_N], y_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TILES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(asked.index(i), count=1)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (soften, (0, qs, ks, staged, asked, full, y_desc, S, groups, scale, CONSUMERS, TILES, BUFFERS, BLOCK_N)),
                (soften, (1, qs, ks, staged, asked, full, y_desc, S, groups, scale, CONSUMERS, TILES, BUFFERS, BLOCK_N)),
                (fetch, (qs, ks, asked, full, q_desc, k_desc,
            qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, groups, CONSUMERS, TILES, BLOCK_N)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 4)
        gl.warp_specialize(
            [
                (soften, (0, qs, ks, staged, asked, full, y_desc, S, groups, scale, CONSUMERS, TILES, BUFFERS, BLOCK_N)),
                (soften, (1, qs, ks, staged, asked, full, y_desc, S, groups, scale, CONSUMERS, TILES, BUFFERS, BLOCK_N)),
                (soften, (2, qs, ks, staged, asked, full, y_desc, S, groups, scale, CONSUMERS, TILES, BUFFERS, BLOCK_N)),
                (soften, (3, qs, ks, staged, asked, full, y_desc, S, groups, scale, CONSUMERS, TILES, BUFFERS, BLOCK_N)),
                (fetch, (qs, ks, asked, full, q_desc, k_desc,
            qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, groups, CONSUMERS, TILES, BLOCK_N)),
            ],
            [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24],
        )  # fmt: skip
