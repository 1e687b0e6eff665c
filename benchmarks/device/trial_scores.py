"""On trial: attention scores of short rows made once and held until their row's sum is known; of long ones with fewer
exponentials by the special units."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tensorlogic.ops.common.triton_scores_specialised import ROWS, product, recount, stream

ALL = gl.constexpr(tl.PropagateNan.ALL)


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
                held = held + (e.to(y_desc.dtype),)  # noqa: RUF005  (Triton has no stars)
            else:
                if piece == KEPT:
                    tma.store_wait(0)
                staged.index(me * TILES + piece).store(e.to(y_desc.dtype))
        if gl.min(((norm > LEAST) & (norm < MOST)).to(gl.int32), 0) == 0:
            tma.store_wait(0)
            row = head // H * kb_row + head % H * kh_row
            column = head // H * kb_column + head % H * kh_column
            there = asked.index(me)
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
    holds are made again from their maximum.
    """
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[1]
    gl.static_assert(CONSUMERS == 2)
    qs = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, D], q_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    staged = gl.allocate_shared_memory(
        y_desc.dtype, [TILES * CONSUMERS, ROWS, BLOCK_N], y_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(asked.index(i), count=1)
    fence_async_shared()
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


@gluon.jit
def power(x):
    """2**x by a polynomial of degree 4 (relative error 8e-6) and the exponent's bits, so without the special units: above 1e38
    from x = 127.5 up, and where x is NaN."""
    x = gl.minimum(gl.maximum(x, -126.0, ALL), 127.5, ALL)
    shifted = x + 12582912.0  # 1.5 * 2**23: the sum's last bits are x rounded to an integer
    r = x - (shifted - 12582912.0)
    p = 0.00967076 * r + 0.05587550
    p = p * r + 0.24022212
    p = p * r + 0.69312727
    p = p * r + 1.0
    bits = p.to(gl.int32, bitcast=True) + (shifted.to(gl.int32, bitcast=True) << 23)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def soften_mixed(
    me, place, qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
    qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
    LATE: gl.constexpr, ROUNDS: gl.constexpr, POLY: gl.constexpr, CONSUMERS: gl.constexpr,
    BUFFERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `soften`, with every POLY-th tile's exponentials that are only counted made by `power`, not by the special units."""
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
                at = done % STAGES
                phase = done // STAGES & 1
                s = product(q, ks.index(at), full.index(at), phase, SUMS, BLOCK_N)
                mbarrier.arrive(empty.index(at), count=1)
                done += 1
                peak = gl.max(s, 1)
                base = gl.where(peak == float("-inf"), 0.0, peak * factor)
                norm = gl.sum(gl.exp2(s * factor - base[:, None]), 1)
                for step in range(1, tiles):
                    at = done % STAGES
                    phase = done // STAGES & 1
                    s = product(q, ks.index(at), full.index(at), phase, SUMS, BLOCK_N)
                    mbarrier.arrive(empty.index(at), count=1)
                    done += 1
                    power_of = s * factor - base[:, None]
                    if step % POLY == POLY - 1:
                        norm += gl.sum(power(power_of), 1)
                    else:
                        norm += gl.sum(gl.exp2(power_of), 1)
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
                    at = done % STAGES
                    phase = done // STAGES & 1
                    s = product(q, ks.index(at), full.index(at), phase, SUMS, BLOCK_N)
                    mbarrier.arrive(empty.index(at), count=1)
                    done += 1
                    y = gl.exp2(s * factor - shift[:, None]).to(y_desc.dtype)
                    out = staged.index(me * BUFFERS + step % BUFFERS)
                    tma.store_wait(BUFFERS - 1)
                    out.store(y)
                    fence_async_shared()
                    tma.async_copy_shared_to_global(y_desc, [head * S + first, step * BLOCK_N], out)
                shift = coming
    tma.store_wait(0)


@gluon.jit
def attention_scores_mixed(
    q_desc, k_desc, y_desc,
    qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
    CONSUMERS: gl.constexpr, ROUNDS: gl.constexpr, APART: gl.constexpr, POLY: gl.constexpr, REGISTERS: gl.constexpr,
    BUFFERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `attention_scores_specialised` for k that does not stay, with `soften_mixed`."""
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[1]
    HALF: gl.constexpr = CONSUMERS // 2
    qs = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS + APART * HALF, ROWS, D], q_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    staged = gl.allocate_shared_memory(
        y_desc.dtype, [BUFFERS * CONSUMERS, ROWS, BLOCK_N], y_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(asked.index(i), count=1)
    fence_async_shared()
    gl.static_assert(CONSUMERS == 4)
    gl.warp_specialize(
        [
            (soften_mixed, (0, 0, qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
        qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
        0, ROUNDS, POLY, CONSUMERS, BUFFERS, BLOCK_N, STAGES)),
            (soften_mixed, (1, 1, qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
        qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
        0, ROUNDS, POLY, CONSUMERS, BUFFERS, BLOCK_N, STAGES)),
            (soften_mixed, (2, HALF + 0 * (1 + APART), qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
        qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
        APART, ROUNDS, POLY, CONSUMERS, BUFFERS, BLOCK_N, STAGES)),
            (soften_mixed, (3, HALF + 1 * (1 + APART), qs, ks, staged, asked, full, empty, q_desc, k_desc, y_desc,
        qb_row, qb_column, qh_row, qh_column, kb_row, kb_column, kh_row, kh_column, H, S, T, groups, units, scale,
        APART, ROUNDS, POLY, CONSUMERS, BUFFERS, BLOCK_N, STAGES)),
            (stream, (ks, full, empty, k_desc, kb_row, kb_column, kh_row, kh_column, H, T, groups, units,
        ROUNDS, 0, BLOCK_N, STAGES)),
        ],
        [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24],
    )  # fmt: skip
