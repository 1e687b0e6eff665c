"""The product of a float32 operand and a float16 one on Hopper: the former is rounded in the registers that wgmma reads it from."""

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

from tensorlogic.kernels.gemm.hopper_kernel import ROWS, place


@gluon.jit
def bring(
    xs, ws, full, empty, x_desc, w_desc, M, N, K,
    X_ACROSS: gl.constexpr, W_DOWN: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The loading warp: tiles of x and w into the ring as its stages come free."""
    gdc_wait()
    steps = gl.cdiv(K, BLOCK_K)
    done = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m, tile_n = place(tile, M, N, GROUP_M, BLOCK_M, BLOCK_N)
        for step in range(steps):
            at = done % STAGES
            k = step * BLOCK_K
            mbarrier.wait(empty.index(at), (done // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(at), (4 * BLOCK_M + 2 * BLOCK_N) * BLOCK_K)
            for i in gl.static_range(CONSUMERS):
                m = tile_m * BLOCK_M + i * ROWS
                part = xs.index(at * CONSUMERS + i)
                if X_ACROSS:
                    tma.async_copy_global_to_shared(x_desc, [m, k], full.index(at), part)
                else:
                    tma.async_copy_global_to_shared(x_desc, [k, m], full.index(at), part)
            if W_DOWN:
                tma.async_copy_global_to_shared(
                    w_desc, [tile_n * BLOCK_N, k], full.index(at), ws.index(at)
                )
            else:
                tma.async_copy_global_to_shared(
                    w_desc, [k, tile_n * BLOCK_N], full.index(at), ws.index(at)
                )
            done += 1


@gluon.jit
def rows_of(xs, at, X_ACROSS: gl.constexpr, LEFT: gl.constexpr):
    """A warpgroup's rows of one tile of x, as wgmma takes them from registers."""
    x = xs.index(at)
    if not X_ACROSS:
        x = x.permute((1, 0))
    return x.load(LEFT)


@gluon.jit
def largest(x):
    """Of every row."""
    return gl.max(gl.abs(x), 1)


@gluon.jit
def fits(peak):
    """Whether float16 holds rows with these largest values as they are."""
    return (peak >= 0.0009765625) & (peak <= 65504.0)


@gluon.jit
def power(e):
    """2^e in float32, by its bits."""
    return ((e + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def slowly(
    x_ptr, w_ptr, y_ptr, at_m, at_n, M, N, K, x_row, x_column, w_row, w_column, y_row, y_column, BLOCK_N: gl.constexpr
):  # fmt: skip
    """A warpgroup's tile in float32, for rows that no scale found in their first elements brings into float16."""
    PART: gl.constexpr = 32
    HELD: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rm = at_m + gl.arange(0, ROWS, gl.SliceLayout(1, HELD))
    for part in range(BLOCK_N // PART):
        rn = at_n + part * PART + gl.arange(0, PART, gl.SliceLayout(0, HELD))
        acc = gl.zeros([ROWS, PART], gl.float32, HELD)
        x_at, w_at = x_ptr + rm.to(gl.int64) * x_row, w_ptr + rn.to(gl.int64) * w_column
        for _ in range(K):
            x = gl.load(x_at, mask=rm < M, other=0.0)
            w = gl.load(w_at, mask=rn < N, other=0.0).to(gl.float32)
            acc += x[:, None] * w[None, :]
            x_at += x_column
            w_at += w_row
        to = y_ptr + rm.to(gl.int64)[:, None] * y_row + rn.to(gl.int64)[None, :] * y_column
        gl.store(to, acc, mask=(rm < M)[:, None] & (rn < N)[None, :])


@gluon.jit
def put(y_ptr, acc, at_m, at_n, M, N, y_row, y_column, SUMS: gl.constexpr):
    """A warpgroup's tile to memory."""
    rm = at_m + gl.arange(0, acc.shape[0], gl.SliceLayout(1, SUMS))
    rn = at_n + gl.arange(0, acc.shape[1], gl.SliceLayout(0, SUMS))
    to = y_ptr + rm.to(gl.int64)[:, None] * y_row + rn.to(gl.int64)[None, :] * y_column
    gl.store(to, acc, mask=(rm < M)[:, None] & (rn < N)[None, :])


@gluon.jit
def sweep(
    me, xs, ws, full, empty, x32, factor, peak, done, steps,
    SCALED: gl.constexpr, X_ACROSS: gl.constexpr, W_DOWN: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """(sums of a tile, largest values of the scaled rows, steps done): while one step's product is under way, the next step's rows are rounded."""
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, SUMS)
    if SCALED:
        x32 *= factor
        peak = largest(x32)
    x = x32.to(ws.dtype)
    for _ in range(steps - 1):
        at = done % STAGES
        w = ws.index(at)
        if W_DOWN:
            w = w.permute((1, 0))
        under_way = warpgroup_mma(x, w, acc, is_async=True)
        done += 1
        mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
        x32 = rows_of(xs, done % STAGES * CONSUMERS + me, X_ACROSS, LEFT)
        if SCALED:
            x32 *= factor
            peak = gl.maximum(peak, largest(x32))
        following = x32.to(ws.dtype)
        acc, x = warpgroup_mma_wait(0, deps=(under_way, x))
        mbarrier.arrive(empty.index(at), count=1)
        x = following
    at = done % STAGES
    w = ws.index(at)
    if W_DOWN:
        w = w.permute((1, 0))
    under_way = warpgroup_mma(x, w, acc, is_async=True)
    acc, x = warpgroup_mma_wait(0, deps=(under_way, x))
    mbarrier.arrive(empty.index(at), count=1)
    return acc, peak, done + 1


@gluon.jit
def multiply_rounded(
    me, xs, ws, full, empty, x_ptr, w_ptr, y_ptr, M, N, K, x_row, x_column, w_row, w_column, y_row, y_column,
    X_ACROSS: gl.constexpr, W_DOWN: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup. The first BLOCK_K elements of its rows tell whether float16 holds them as they are; where not, by what
    power of two each is scaled. What the elements after them make of that is seen in the sums, or in the scaled rows."""
    gdc_wait()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    consumers: gl.constexpr = BLOCK_M // ROWS
    steps = gl.cdiv(K, BLOCK_K)
    done = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m, tile_n = place(tile, M, N, GROUP_M, BLOCK_M, BLOCK_N)
        at_m, at_n = tile_m * BLOCK_M + me * ROWS, tile_n * BLOCK_N
        mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
        x32 = rows_of(xs, done % STAGES * consumers + me, X_ACROSS, LEFT)
        peak = largest(x32)
        inside = at_m + gl.arange(0, ROWS, gl.SliceLayout(1, LEFT)) < M
        if gl.max(gl.where(fits(peak) | ~inside, 0, 1), 0) == 0:
            acc, peak, done = sweep(
                me, xs, ws, full, empty, x32, 1.0, peak, done, steps,
                False, X_ACROSS, W_DOWN, consumers, BLOCK_N, STAGES, LEFT, SUMS,
            )  # fmt: skip
            bad = gl.max(gl.max(gl.where(acc - acc == 0.0, 0, 1), 1), 0)
        else:
            e = ((peak.to(gl.int32, bitcast=True) >> 23) & 255) - 127
            e = gl.where(fits(peak) | (peak == 0.0), 0, gl.minimum(gl.maximum(e, -126), 126))
            acc, peak, done = sweep(
                me, xs, ws, full, empty, x32, power(-e)[:, None], peak, done, steps,
                True, X_ACROSS, W_DOWN, consumers, BLOCK_N, STAGES, LEFT, SUMS,
            )  # fmt: skip
            acc *= gl.convert_layout(power(e), ROW)[:, None]
            bad = gl.max(gl.where(fits(peak) | (peak == 0.0), 0, 1), 0)
        if bad > 0:
            slowly(
                x_ptr, w_ptr, y_ptr, at_m, at_n, M, N, K, x_row, x_column, w_row, w_column, y_row, y_column, BLOCK_N
            )  # fmt: skip
        else:
            put(y_ptr, acc, at_m, at_n, M, N, y_row, y_column, SUMS)


@gluon.jit
def gemm_mixed(
    x_desc, w_desc, x_ptr, w_ptr, y_ptr, M, N, K, x_row, x_column, w_row, w_column, y_row, y_column,
    X_ACROSS: gl.constexpr, W_DOWN: gl.constexpr, CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """y[M, N] = half(x[M, K]) @ w[K, N], x in float32, w and the rounded x in float16 (or bfloat16), sums in float32."""
    gdc_launch_dependents()
    XS: gl.constexpr = [STAGES * CONSUMERS, x_desc.block_type.shape[0], x_desc.block_type.shape[1]]
    WS: gl.constexpr = [STAGES, w_desc.block_type.shape[0], w_desc.block_type.shape[1]]
    xs = gl.allocate_shared_memory(x_desc.dtype, XS, x_desc.layout)
    ws = gl.allocate_shared_memory(w_desc.dtype, WS, w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (multiply_rounded, (0, xs, ws, full, empty, x_ptr, w_ptr, y_ptr, M, N, K, x_row, x_column, w_row, w_column, y_row, y_column,
            X_ACROSS, W_DOWN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M)),
                (bring, (xs, ws, full, empty, x_desc, w_desc, M, N, K,
            X_ACROSS, W_DOWN, CONSUMERS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M)),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_rounded, (0, xs, ws, full, empty, x_ptr, w_ptr, y_ptr, M, N, K, x_row, x_column, w_row, w_column, y_row, y_column,
            X_ACROSS, W_DOWN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M)),
                (multiply_rounded, (1, xs, ws, full, empty, x_ptr, w_ptr, y_ptr, M, N, K, x_row, x_column, w_row, w_column, y_row, y_column,
            X_ACROSS, W_DOWN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M)),
                (bring, (xs, ws, full, empty, x_desc, w_desc, M, N, K,
            X_ACROSS, W_DOWN, CONSUMERS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
