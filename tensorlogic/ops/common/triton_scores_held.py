"""Attention scores of short rows on Hopper, made once and held, in registers and shared memory, until their row's sum is known."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tensorlogic.ops.common.triton_scores_specialised import (
    ROWS,
    barriers,
    product,
    recount,
    stream,
)


@gluon.jit
def write(y, out, y_desc, row, column, BUFFERS: gl.constexpr):
    """A tile of outputs through shared memory, once the bulk copy that read there last has."""
    tma.store_wait(BUFFERS - 1)
    out.store(y)
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [row, column], out)


@gluon.jit
def hold(
    me, qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
    qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, groups, units, scale,
    CONSUMERS: gl.constexpr, TILES: gl.constexpr, KEPT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: for each of its tiles of ROWS rows one sweep over k that makes exp(score - first tile's maximum) and sums it.

    KEPT tiles of 64 columns stay in registers, rounded (5 fit beside what else is needed), the others where they will leave from.
    """
    gdc_wait()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    SIDE: gl.constexpr = gl.SliceLayout(1, SUMS)
    D: gl.constexpr = q_desc.block_type.shape[1]
    QBYTES: gl.constexpr = ROWS * D * (q_desc.dtype.primitive_bitwidth // 8)
    KBYTES: gl.constexpr = BLOCK_N * D * (k_desc.dtype.primitive_bitwidth // 8)
    LEAST: gl.constexpr = (
        0.5 if y_desc.dtype == gl.float16 else 1e-30
    )  # sums that what is held bears
    MOST: gl.constexpr = 6e4 if y_desc.dtype == gl.float16 else 1e38
    FIT: gl.constexpr = TILES * ROWS // D
    spare = staged._reinterpret(k_desc.dtype, [CONSUMERS * FIT, BLOCK_N, D], k_desc.layout).index(
        me * FIT
    )
    factor = scale * 1.4426950408889634
    done = 0
    turn = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        head = unit // groups
        first = gl.minimum((unit % groups * CONSUMERS + me) * ROWS, S - ROWS)
        q = qs.index(me)
        mbarrier.expect(asked.index(me), QBYTES)
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
        at = done % STAGES
        s = product(q, ks.index(at), full.index(at), done // STAGES & 1, SUMS, BLOCK_N)
        mbarrier.arrive(empty.index(at), count=1)
        done += 1
        peak = gl.max(s, 1)
        base = gl.where(peak == float("-inf"), 0.0, peak * factor)
        e = gl.exp2(s * factor - base[:, None])
        norm = gl.sum(e, 1)
        held = (e.to(y_desc.dtype),)
        for piece in gl.static_range(1, TILES):
            at = done % STAGES
            s = product(q, ks.index(at), full.index(at), done // STAGES & 1, SUMS, BLOCK_N)
            mbarrier.arrive(empty.index(at), count=1)
            done += 1
            e = gl.exp2(s * factor - base[:, None])
            norm += gl.sum(e, 1)
            if piece < KEPT:
                held = held + (e.to(y_desc.dtype),)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no stars)
            else:
                if piece == KEPT:
                    tma.store_wait(0)
                staged.index(me * TILES + piece).store(e.to(y_desc.dtype))
        bears = (norm > LEAST) & (norm < MOST)
        well = gl.min(gl.where((norm > 1e-30) & (norm < 1e38), gl.where(bears, 2, 1), 0), 0)
        if well < 2:  # what is held has left its type, and is made again
            tma.store_wait(0)
            row = head // H * kb_row + head % H * kh_row
            column = head // H * kb_column + head % H * kh_column
            there = asked.index(me)
            if well == 0:
                base, norm, turn = recount(
                    q, spare, there, k_desc, row, column, TILES, turn, factor, SUMS, SIDE, BLOCK_N
                )
            shift = base + gl.log2(norm)
            for step in range(TILES):
                mbarrier.expect(there, KBYTES)
                tma.async_copy_global_to_shared(
                    k_desc, [row + step * BLOCK_N, column], there, spare
                )
                s = product(q, spare, there, turn & 1, SUMS, BLOCK_N)
                turn += 1
                y = gl.exp2(s * factor - shift[:, None]).to(y_desc.dtype)
                write(
                    y,
                    staged.index(me * TILES + TILES - 1),
                    y_desc,
                    head * S + first,
                    step * BLOCK_N,
                    1,
                )
                tma.store_wait(0)
        else:
            share = 1.0 / norm
            for part in gl.static_range(TILES):
                out = staged.index(me * TILES + part)
                if part < KEPT:  # noqa: SIM108  (constants: only one of them is compiled)
                    h = held[part]
                else:
                    h = out.load(SUMS)
                y = (h.to(gl.float32) * share[:, None]).to(y_desc.dtype)
                write(y, out, y_desc, head * S + first, part * BLOCK_N, TILES)
    tma.store_wait(0)


@gluon.jit
def attention_scores_held(
    q_desc, k_desc, y_desc,
    qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
    CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr, TILES: gl.constexpr, KEPT: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[b, h, s, :] = softmax over t of scale * q[b, h, s] . k[b, h, t], scale > 0, for T = TILES BLOCK_N; sums in float32.

    One product and one exponential a score, where two sweeps take two. Rows whose sums leave what the output's type
    holds are made again, from their maximum where they leave float32. H200, 4x16 heads, D 64: S and T 256 8.2 us (two sweeps 10.6); from 512 up it loses (22.6,
    18.7): the outputs of one unit fill the shared memory, so that two warpgroups are all that a multiprocessor holds.
    """
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[1]
    gl.static_assert(CONSUMERS == 2)
    qs = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, D], q_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    staged = gl.allocate_shared_memory(
        y_desc.dtype, [TILES * CONSUMERS, ROWS, BLOCK_N], y_desc.layout
    )
    full, empty, asked = barriers(CONSUMERS, STAGES)
    gl.warp_specialize(
        [
            (hold, (0, qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
        qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, groups, units, scale,
        CONSUMERS, TILES, KEPT, BLOCK_N, STAGES)),
            (hold, (1, qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
        qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, groups, units, scale,
        CONSUMERS, TILES, KEPT, BLOCK_N, STAGES)),
            (stream, (ks, full, empty, k_desc, kb_row, kb_column, kh_row, kh_column, H, T, groups, units,
        1, 1, BLOCK_N, STAGES)),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip
