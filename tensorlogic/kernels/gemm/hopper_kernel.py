"""The matrix product on Hopper's bulk copies: one warp loads, warpgroups multiply, each with a program of its own."""

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

from tensorlogic.kernels.gemm.tiled_kernel import columnwise, shaped, slope

ROWS = gl.constexpr(64)  # of x that one warpgroup multiplies: those of one wgmma
FEW = gl.constexpr(8)  # rows that threads move at a time


@gluon.jit
def place(tile, M, N, GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(row, column) of a tile; GROUP_M rows of tiles are walked together, sharing L2."""
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    group = tile // (GROUP_M * tiles_n)
    height = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + within % height, within // height


@gluon.jit
def lines(m, at_n, M, N, stride, BLOCK_N: gl.constexpr):
    """(offsets from row m, mask) of FEW rows [BLOCK_N] of a matrix whose rows begin anywhere, `stride` apart: a warp along each."""
    ALONG: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, FEW, gl.SliceLayout(1, ALONG))
    column = at_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ALONG))
    at = (row * stride)[:, None] + column[None, :]
    return at, (m + row < M)[:, None] & (column < N)[None, :]


@gluon.jit
def fetch(mine, ptr, at_m, at_n, M, N, stride, BLOCK_N: gl.constexpr):
    """A tile from `ptr` on into shared memory `mine`, by threads, zeros beyond the edges."""
    for i in gl.static_range(ROWS // FEW):
        m = at_m + i * FEW
        at, mask = lines(m, at_n, M, N, stride, BLOCK_N)
        tile = gl.load(ptr + m.to(gl.int64) * stride + at, mask=mask, other=0.0)
        mine.slice(i * FEW, FEW).store(tile)


@gluon.jit
def put(mine, tile, desc, ptr, at_m, at_n, M, N, stride, BLOCK_N: gl.constexpr):
    """Store a tile through shared memory `mine`: by a bulk copy, which is still to be waited for, or from `ptr` on by threads."""
    mine.store(tile)
    if ptr is None:
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [at_m, at_n], mine)
    else:
        ALONG: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        for i in gl.static_range(ROWS // FEW):
            m = at_m + i * FEW
            at, mask = lines(m, at_n, M, N, stride, BLOCK_N)
            tile = mine.slice(i * FEW, FEW).load(ALONG)
            gl.store(ptr + m.to(gl.int64) * stride + at, tile, mask=mask)


@gluon.jit
def parts(tile, PARTS: gl.constexpr):
    """The columns of a tile as a tuple of PARTS tiles; PARTS is a power of two."""
    if PARTS == 1:
        return (tile,)
    else:
        halved = tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).permute((0, 2, 1))
        first, second = gl.split(halved)
        return parts(first, PARTS // 2) + parts(second, PARTS // 2)


@gluon.jit
def load(
    xs, ws, staged, full, empty, ready, free, x_desc, w_desc, residual_desc, M, N, K,
    X_ACROSS: gl.constexpr, W_DOWN: gl.constexpr, OTHER: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """The loading warp: tiles of x and w into the ring as its stages come free; the residual's tile halfway through."""
    gdc_wait()
    steps = gl.cdiv(K, BLOCK_K)
    done = 0
    turn = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m, tile_n = place(tile, M, N, GROUP_M, BLOCK_M, BLOCK_N)
        for step in range(steps):
            at = done % STAGES
            k = step * BLOCK_K
            mbarrier.wait(empty.index(at), (done // STAGES & 1) ^ 1)
            mbarrier.expect(
                full.index(at), (BLOCK_M + BLOCK_N) * BLOCK_K * (x_desc.dtype.primitive_bitwidth // 8)
            )  # fmt: skip
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
            if OTHER:  # noqa: SIM102  (settled by the compiler; the inner one at run time)
                if step == steps // 2:
                    mbarrier.wait(free, (turn & 1) ^ 1)
                    mbarrier.expect(
                        ready, BLOCK_M * BLOCK_N * (residual_desc.dtype.primitive_bitwidth // 8)
                    )
                    PARTS: gl.constexpr = BLOCK_N // PART
                    for i in gl.static_range(CONSUMERS):
                        for j in gl.static_range(PARTS):
                            tma.async_copy_global_to_shared(
                                residual_desc, [tile_m * BLOCK_M + i * ROWS, tile_n * BLOCK_N + j * PART], ready,
                                staged.index(i * PARTS + j),
                            )  # fmt: skip
        turn += 1  # noqa: SIM113  (Triton has no enumerate)


@gluon.jit
def multiply(
    me, xs, ws, staged, full, empty, ready, free, y_desc, z_desc, bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr,
    residual_ptr, y_ptr, z_ptr, M, N, K, stride_r, stride_y, eps,
    ACTIVATION: gl.constexpr, OUTER: gl.constexpr, KIND: gl.constexpr, KEPT: gl.constexpr, EARLY: gl.constexpr,
    X_ACROSS: gl.constexpr, W_DOWN: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup: its ROWS rows of each tile, summed in float32, finished and stored from shared memory."""
    gdc_wait()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    PIECE: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART, 16]
    )
    PARTS: gl.constexpr = BLOCK_N // PART
    steps = gl.cdiv(K, BLOCK_K)
    consumers: gl.constexpr = BLOCK_M // ROWS
    done = 0
    turn = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m, tile_n = place(tile, M, N, GROUP_M, BLOCK_M, BLOCK_N)
        at_m, at_n = tile_m * BLOCK_M + me * ROWS, tile_n * BLOCK_N
        rn = at_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SUMS))
        bias, factor, summand = columnwise(
            bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr, eps, rn, N
        )
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, SUMS)
        for step in range(steps):
            at = done % STAGES
            mbarrier.wait(full.index(at), done // STAGES & 1)
            x = xs.index(at * consumers + me)
            w = ws.index(at)
            if not X_ACROSS:
                x = x.permute((1, 0))
            if W_DOWN:
                w = w.permute((1, 0))
            under_way = warpgroup_mma(x, w, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(under_way,))
            mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1, pred=step > 0)
            done += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1)
        INTO: gl.constexpr = xs.dtype
        first = staged.index(me * PARTS)
        if bias_ptr is not None:
            acc += bias[None, :]
        if OUTER == "none":
            tma.store_wait(0)
        elif residual_ptr is None:
            mbarrier.wait(ready, turn & 1)
        else:
            tma.store_wait(0)
            fetch(first, residual_ptr, at_m, at_n, M, N, stride_r, BLOCK_N)
        if KEPT and EARLY:
            early = parts(acc, PARTS)
            for i in gl.static_range(PARTS):
                z = gl.convert_layout(early[i], PIECE, assert_trivial=True).to(INTO)
                put(staged.index(me * PARTS + i), z, z_desc, z_ptr, at_m, at_n + i * PART, M, N, stride_y, PART)  # fmt: skip
        if var_ptr is not None or scale_ptr is not None:
            acc *= factor[None, :]
        if mean_ptr is not None or shift_ptr is not None:
            acc += summand[None, :]
        pieces = parts(acc, PARTS)
        late = ()
        for i in gl.static_range(PARTS):  # one leaves while the next is finished
            mine = staged.index(me * PARTS + i)
            y = gl.convert_layout(pieces[i], PIECE, assert_trivial=True)
            if OUTER == "residual":
                y += mine.load(PIECE).to(gl.float32)
            elif OUTER == "gradient":
                y = slope(y, mine.load(PIECE).to(gl.float32), KIND, INTO)
            if KEPT:
                late = late + (y,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no starred tuples)
            if KEPT and not EARLY:
                put(mine, y.to(INTO), z_desc, z_ptr, at_m, at_n + i * PART, M, N, stride_y, PART)
            elif not KEPT:
                y = shaped(y, ACTIVATION, INTO).to(INTO)
                put(mine, y, y_desc, y_ptr, at_m, at_n + i * PART, M, N, stride_y, PART)
        if KEPT:
            for i in gl.static_range(PARTS):
                mine = staged.index(me * PARTS + i)
                # z's part has left: as many are under way as came after it
                tma.store_wait(PARTS - 1)
                y = shaped(late[i], ACTIVATION, INTO).to(INTO)
                put(mine, y, y_desc, y_ptr, at_m, at_n + i * PART, M, N, stride_y, PART)
        if OUTER != "none" and residual_ptr is None:
            tma.store_wait(0)
            mbarrier.arrive(free, count=1)
        turn += 1  # noqa: SIM113  (Triton has no enumerate)
    tma.store_wait(0)


@gluon.jit
def gemm_specialised(
    x_desc, w_desc, residual_desc, y_desc, z_desc,
    bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr, residual_ptr, y_ptr, z_ptr, M, N, K, stride_r, stride_y, eps,
    ACTIVATION: gl.constexpr, OUTER: gl.constexpr, KIND: gl.constexpr, KEPT: gl.constexpr, EARLY: gl.constexpr,
    X_ACROSS: gl.constexpr, W_DOWN: gl.constexpr, CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    PART: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[M, N] = epilogue(x[M, K] @ w[K, N]) as `gemm_tiled` without a prologue, 16-bit operands, float32 sums.

    One warp fills a ring of STAGES tiles by bulk copies, CONSUMERS warpgroups empty it with one product always under
    way, and neither waits for the other's barriers; programs stay for all their tiles. A tile is finished PART columns at a time:
    one part leaves while the next is finished. A residual and outputs whose rows begin at odd places come and go by threads
    (`residual_ptr`, `y_ptr`, `z_ptr` in place of descriptors), and then PART is BLOCK_N. H100, f16, with bias, residual and ReLU,
    over cuBLAS's plain product, whole and in parts: 1024 1.17, 1.16 (cuBLASLt's epilogue 1.26), 2048 1.09, 1.07 (1.18), 4096 1.05,
    1.04 (1.08).
    """
    gl.static_assert(BLOCK_N % PART == 0)
    gdc_launch_dependents()
    XS: gl.constexpr = [STAGES * CONSUMERS, x_desc.block_type.shape[0], x_desc.block_type.shape[1]]
    WS: gl.constexpr = [STAGES, w_desc.block_type.shape[0], w_desc.block_type.shape[1]]
    xs = gl.allocate_shared_memory(x_desc.dtype, XS, x_desc.layout)
    ws = gl.allocate_shared_memory(w_desc.dtype, WS, w_desc.layout)
    STAGED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, PART], x_desc.dtype)
    staged = gl.allocate_shared_memory(
        x_desc.dtype, [CONSUMERS * (BLOCK_N // PART), ROWS, PART], STAGED
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    mbarrier.init(ready, count=1)
    mbarrier.init(free, count=CONSUMERS)
    fence_async_shared()
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (multiply, (0, xs, ws, staged, full, empty, ready, free, y_desc, z_desc, bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr,
            residual_ptr, y_ptr, z_ptr, M, N, K, stride_r, stride_y, eps, ACTIVATION, OUTER, KIND, KEPT, EARLY, X_ACROSS, W_DOWN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, PART)),
                (load, (xs, ws, staged, full, empty, ready, free, x_desc, w_desc, residual_desc, M, N, K,
            X_ACROSS, W_DOWN, residual_desc is not None, CONSUMERS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, PART)),
            ],
            [1], [24],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (multiply, (0, xs, ws, staged, full, empty, ready, free, y_desc, z_desc, bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr,
            residual_ptr, y_ptr, z_ptr, M, N, K, stride_r, stride_y, eps, ACTIVATION, OUTER, KIND, KEPT, EARLY, X_ACROSS, W_DOWN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, PART)),
                (multiply, (1, xs, ws, staged, full, empty, ready, free, y_desc, z_desc, bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr,
            residual_ptr, y_ptr, z_ptr, M, N, K, stride_r, stride_y, eps, ACTIVATION, OUTER, KIND, KEPT, EARLY, X_ACROSS, W_DOWN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, PART)),
                (load, (xs, ws, staged, full, empty, ready, free, x_desc, w_desc, residual_desc, M, N, K,
            X_ACROSS, W_DOWN, residual_desc is not None, CONSUMERS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, PART)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (0, xs, ws, staged, full, empty, ready, free, y_desc, z_desc, bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr,
            residual_ptr, y_ptr, z_ptr, M, N, K, stride_r, stride_y, eps, ACTIVATION, OUTER, KIND, KEPT, EARLY, X_ACROSS, W_DOWN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, PART)),
                (multiply, (1, xs, ws, staged, full, empty, ready, free, y_desc, z_desc, bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr,
            residual_ptr, y_ptr, z_ptr, M, N, K, stride_r, stride_y, eps, ACTIVATION, OUTER, KIND, KEPT, EARLY, X_ACROSS, W_DOWN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, PART)),
                (multiply, (2, xs, ws, staged, full, empty, ready, free, y_desc, z_desc, bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr,
            residual_ptr, y_ptr, z_ptr, M, N, K, stride_r, stride_y, eps, ACTIVATION, OUTER, KIND, KEPT, EARLY, X_ACROSS, W_DOWN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, PART)),
                (load, (xs, ws, staged, full, empty, ready, free, x_desc, w_desc, residual_desc, M, N, K,
            X_ACROSS, W_DOWN, residual_desc is not None, CONSUMERS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, PART)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
