"""Attention scores on Hopper's bulk copies: one warp streams k through a ring, warpgroups make rows of scores and write them."""

from __future__ import annotations

import triton.language as tl
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

ROWS = gl.constexpr(64)  # of q that one warpgroup takes at a time: those of one wgmma


@gluon.jit
def stream(
    ks, full, empty, k_desc, kb_row, kb_column, kh_row, kh_column, H, T, groups, units,
    ROUNDS: gl.constexpr, RESIDENT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: a head's k tile by tile, once for every sweep, or once in all where the ring holds it whole."""
    gdc_wait()
    tiles = T // BLOCK_N
    steps = tiles if RESIDENT else tiles * 2 * ROUNDS
    done = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        head = unit // groups
        row = head // H * kb_row + head % H * kh_row
        column = head // H * kb_column + head % H * kh_column
        for step in range(steps):
            at = done % STAGES
            mbarrier.wait(empty.index(at), (done // STAGES & 1) ^ 1)
            mbarrier.expect(
                full.index(at), BLOCK_N * k_desc.block_type.shape[1] * (k_desc.dtype.primitive_bitwidth // 8)
            )  # fmt: skip
            tma.async_copy_global_to_shared(
                k_desc, [row + step % tiles * BLOCK_N, column], full.index(at), ks.index(at)
            )
            done += 1


@gluon.jit
def barriers(CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Those of the ring of k, full and empty, and of each consumer's q."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(asked.index(i), count=1)
    fence_async_shared()
    return full, empty, asked


@gluon.jit
def larger(a, b):
    """The larger, or NaN: a row with one becomes NaN, as in torch.softmax."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def product(q, k, there, phase, SUMS: gl.constexpr, BLOCK_N: gl.constexpr):
    """q kᵀ [ROWS, BLOCK_N], once the tile of k is there."""
    mbarrier.wait(there, phase)
    under_way = warpgroup_mma(
        q, k.permute((1, 0)), gl.zeros([ROWS, BLOCK_N], gl.float32, SUMS), use_acc=False, is_async=True
    )  # fmt: skip
    return warpgroup_mma_wait(0, deps=(under_way,))


@gluon.jit
def recount(
    q, spare, there, k_desc, row, column, tiles, turn, factor, SUMS: gl.constexpr, SIDE: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """Maxima, times the factor, and sums of rows whose sums leave the range of float32 when counted from their first
    tile's maximum: with the maximum so far, and k once more, by copies of one's own."""
    peak = gl.full([ROWS], float("-inf"), gl.float32, SIDE)
    norm = gl.zeros([ROWS], gl.float32, SIDE)
    for step in range(tiles):
        mbarrier.expect(
            there, BLOCK_N * k_desc.block_type.shape[1] * (k_desc.dtype.primitive_bitwidth // 8)
        )  # fmt: skip
        tma.async_copy_global_to_shared(k_desc, [row + step * BLOCK_N, column], there, spare)
        s = product(q, spare, there, turn & 1, SUMS, BLOCK_N)
        turn += 1
        higher = larger(peak, gl.reduce(s, 1, larger))
        base = gl.where(higher == float("-inf"), 0.0, higher * factor)
        norm = norm * gl.exp2(peak * factor - base) + gl.sum(gl.exp2(s * factor - base[:, None]), 1)
        peak = higher
    return gl.where(peak == float("-inf"), 0.0, peak * factor), norm, turn


@gluon.jit
def soften(
    me, place, qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
    qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
    LATE: gl.constexpr, ROUNDS: gl.constexpr, RESIDENT: gl.constexpr, CONSUMERS: gl.constexpr,
    BUFFERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: for each of its tiles of ROWS rows one sweep over k that counts, taking maxima and sums, and one that
    writes. LATE: it counts two tiles before it writes the first, and so counts while the others write."""
    gdc_wait()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    SIDE: gl.constexpr = gl.SliceLayout(1, SUMS)
    factor = scale * 1.4426950408889634
    tiles = T // BLOCK_N
    D: gl.constexpr = q_desc.block_type.shape[1]
    FIT: gl.constexpr = BUFFERS * ROWS // D  # tiles of k in the memory of this warpgroup's outputs
    spare = staged._reinterpret(k_desc.dtype, [CONSUMERS * FIT, BLOCK_N, D], k_desc.layout).index(
        me * FIT
    )
    shift = gl.zeros([ROWS], gl.float32, SIDE)  # of the rows to be written next
    coming = gl.zeros([ROWS], gl.float32, SIDE)  # of those that were counted last
    done = 0
    turn = 0
    visit = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        head = unit // groups
        for cycle in range(2 * ROUNDS):
            counting = cycle % 2 == 0
            which = cycle // 2
            if LATE:
                counting = (cycle == 0) | ((cycle % 2 == 1) & (cycle < 2 * ROUNDS - 1))
                which = gl.where(counting, (cycle + 1) // 2, (cycle - 1) // 2)
            tile = (unit % groups * ROUNDS + which) * CONSUMERS + me
            first = gl.minimum(tile * ROWS, S - ROWS)  # past the end, the last rows once more
            q = qs.index(place + which % 2 if LATE else place)
            last = (not RESIDENT) | (cycle == 2 * ROUNDS - 1)
            if counting:
                mbarrier.expect(
                    asked.index(me), ROWS * q_desc.block_type.shape[1] * (q_desc.dtype.primitive_bitwidth // 8)
                )  # fmt: skip
                tma.async_copy_global_to_shared(
                    q_desc,
                    [
                        head // H * qb_row + head % H * qh_row + first,
                        head // H * qb_column + head % H * qh_column,
                    ],
                    asked.index(me),
                    q,
                )
                mbarrier.wait(asked.index(me), turn & 1)
                turn += 1
                at = 0 if RESIDENT else done % STAGES
                phase = visit & 1 if RESIDENT else done // STAGES & 1
                s = product(q, ks.index(at), full.index(at), phase, SUMS, BLOCK_N)
                mbarrier.arrive(empty.index(at), count=1, pred=last)
                done += 1
                peak = gl.max(s, 1)
                base = gl.where(peak == float("-inf"), 0.0, peak * factor)
                norm = gl.sum(gl.exp2(s * factor - base[:, None]), 1)
                for step in range(1, tiles):
                    at = step if RESIDENT else done % STAGES
                    phase = visit & 1 if RESIDENT else done // STAGES & 1
                    s = product(q, ks.index(at), full.index(at), phase, SUMS, BLOCK_N)
                    mbarrier.arrive(empty.index(at), count=1, pred=last)
                    done += 1
                    norm += gl.sum(gl.exp2(s * factor - base[:, None]), 1)
                if gl.min(((norm > 1e-30) & (norm < 1e38)).to(gl.int32), 0) == 0:
                    tma.store_wait(0)
                    row, column = (
                        head // H * kb_row + head % H * kh_row,
                        head // H * kb_column + head % H * kh_column,
                    )
                    base, norm, turn = recount(
                        q,
                        spare,
                        asked.index(me),
                        k_desc,
                        row,
                        column,
                        tiles,
                        turn,
                        factor,
                        SUMS,
                        SIDE,
                        BLOCK_N,
                    )
                coming = base + gl.log2(norm)
                if (not LATE) | (cycle == 0):
                    shift = coming
            else:
                for step in range(tiles):
                    at = step if RESIDENT else done % STAGES
                    phase = visit & 1 if RESIDENT else done // STAGES & 1
                    s = product(q, ks.index(at), full.index(at), phase, SUMS, BLOCK_N)
                    mbarrier.arrive(empty.index(at), count=1, pred=last)
                    done += 1
                    y = gl.exp2(s * factor - shift[:, None]).to(y_desc.dtype)
                    out = staged.index(me * BUFFERS + step % BUFFERS)
                    tma.store_wait(BUFFERS - 1)
                    out.store(y)
                    fence_async_shared()
                    tma.async_copy_shared_to_global(y_desc, [head * S + first, step * BLOCK_N], out)
                shift = coming
        visit += 1  # noqa: SIM113  (Triton has no enumerate)
    tma.store_wait(0)


@gluon.jit
def attention_scores_specialised(
    q_desc, k_desc, y_desc,
    qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
    CONSUMERS: gl.constexpr, ROUNDS: gl.constexpr, APART: gl.constexpr, RESIDENT: gl.constexpr, REGISTERS: gl.constexpr,
    BUFFERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[b, h, s, :] = softmax over t of scale * q[b, h, s] . k[b, h, t], scale > 0; products and sums in float32.

    A unit of work is ROUNDS tiles of rows for each of CONSUMERS warpgroups in one head. All of them see the head's k go
    by 2 ROUNDS times: one takes maxima and sums of its rows, or writes their scores. APART: half of them count two
    tiles first, so that some write while others count. RESIDENT: k stays in shared memory for the whole unit.
    H200, 4x16 heads, D 64, over the bandwidth of one write: S 512 0.50 (the sweeps of `attention_scores_fwd` 0.49), S 2048
    0.60 (0.56), without APART 0.54.
    """
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[1]
    HALF: gl.constexpr = CONSUMERS // 2
    qs = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS + APART * HALF, ROWS, D], q_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    staged = gl.allocate_shared_memory(
        y_desc.dtype, [BUFFERS * CONSUMERS, ROWS, BLOCK_N], y_desc.layout
    )
    full, empty, asked = barriers(CONSUMERS, STAGES)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (soften, (0, 0, qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
            qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
            0, ROUNDS, RESIDENT, CONSUMERS, BUFFERS, BLOCK_N, STAGES)),
                (soften, (1, HALF + 0 * (1 + APART), qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
            qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
            APART, ROUNDS, RESIDENT, CONSUMERS, BUFFERS, BLOCK_N, STAGES)),
                (stream, (ks, full, empty, k_desc, kb_row, kb_column, kh_row, kh_column, H, T, groups, units,
            ROUNDS, RESIDENT, BLOCK_N, STAGES)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 4)
        gl.warp_specialize(
            [
                (soften, (0, 0, qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
            qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
            0, ROUNDS, RESIDENT, CONSUMERS, BUFFERS, BLOCK_N, STAGES)),
                (soften, (1, 1, qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
            qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
            0, ROUNDS, RESIDENT, CONSUMERS, BUFFERS, BLOCK_N, STAGES)),
                (soften, (2, HALF + 0 * (1 + APART), qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
            qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
            APART, ROUNDS, RESIDENT, CONSUMERS, BUFFERS, BLOCK_N, STAGES)),
                (soften, (3, HALF + 1 * (1 + APART), qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
            qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
            APART, ROUNDS, RESIDENT, CONSUMERS, BUFFERS, BLOCK_N, STAGES)),
                (stream, (ks, full, empty, k_desc, kb_row, kb_column, kh_row, kh_column, H, T, groups, units,
            ROUNDS, RESIDENT, BLOCK_N, STAGES)),
            ],
            [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24],
        )  # fmt: skip
