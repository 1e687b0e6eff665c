"""A product of operands of any floating dtypes on Hopper, in float64: tiles come as they are, and are widened in the registers that tensor cores read."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tensorlogic.kernels.gemm.hopper_kernel import place


@gluon.jit
def bring_both(
    xs, ws, full, empty, x_desc, w_desc, M, N, K,
    X_ACROSS: gl.constexpr, W_DOWN: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The loading warp: tiles of x and w into the ring as its stages come free."""
    gdc_wait()
    BYTES: gl.constexpr = (
        BLOCK_M * x_desc.dtype.primitive_bitwidth + BLOCK_N * w_desc.dtype.primitive_bitwidth
    ) // 8
    done = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m, tile_n = place(tile, M, N, GROUP_M, BLOCK_M, BLOCK_N)
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        for step in range(gl.cdiv(K, BLOCK_K)):
            at, k = done % STAGES, step * BLOCK_K
            mbarrier.wait(empty.index(at), (done // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(at), BYTES * BLOCK_K)
            if X_ACROSS:
                tma.async_copy_global_to_shared(x_desc, [m, k], full.index(at), xs.index(at))
            else:
                tma.async_copy_global_to_shared(x_desc, [k, m], full.index(at), xs.index(at))
            if W_DOWN:
                tma.async_copy_global_to_shared(w_desc, [n, k], full.index(at), ws.index(at))
            else:
                tma.async_copy_global_to_shared(w_desc, [k, n], full.index(at), ws.index(at))
            done += 1


@gluon.jit
def multiply_widened(
    xs, ws, full, empty, y_ptr, M, N, K, y_row, y_column,
    X_ACROSS: gl.constexpr, W_DOWN: gl.constexpr, WARPS_M: gl.constexpr, WARPS_N: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: each step's operands to float64 on their way from shared memory to tensor cores."""
    gdc_wait()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS_M, WARPS_N], instr_shape=[16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=SUMS, k_width=1)
    done = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m, tile_n = place(tile, M, N, GROUP_M, BLOCK_M, BLOCK_N)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float64, SUMS)
        for _ in range(gl.cdiv(K, BLOCK_K)):
            at = done % STAGES
            mbarrier.wait(full.index(at), done // STAGES & 1)
            x, w = xs.index(at), ws.index(at)
            if not X_ACROSS:
                x = x.permute((1, 0))
            if W_DOWN:
                w = w.permute((1, 0))
            left, right = x.load(LEFT), w.load(RIGHT)
            mbarrier.arrive(empty.index(at), count=1)
            acc = mma_v2(left.to(gl.float64), right.to(gl.float64), acc)
            done += 1
        rm = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUMS))
        rn = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SUMS))
        to = y_ptr + rm.to(gl.int64)[:, None] * y_row + rn.to(gl.int64)[None, :] * y_column
        gl.store(to, acc.to(y_ptr.dtype.element_ty), mask=(rm < M)[:, None] & (rn < N)[None, :])


@gluon.jit
def gemm_widened(
    x_desc, w_desc, y_ptr, M, N, K, y_row, y_column,
    X_ACROSS: gl.constexpr, W_DOWN: gl.constexpr, WARPS_M: gl.constexpr, WARPS_N: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """y[M, N] = x[M, K] @ w[K, N] with every product and sum in float64, x and w in any floating dtype each, y in float32 or float64."""
    gdc_launch_dependents()
    XS: gl.constexpr = [STAGES, x_desc.block_type.shape[0], x_desc.block_type.shape[1]]
    WS: gl.constexpr = [STAGES, w_desc.block_type.shape[0], w_desc.block_type.shape[1]]
    xs = gl.allocate_shared_memory(x_desc.dtype, XS, x_desc.layout)
    ws = gl.allocate_shared_memory(w_desc.dtype, WS, w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_widened, (xs, ws, full, empty, y_ptr, M, N, K, y_row, y_column,
            X_ACROSS, W_DOWN, WARPS_M, WARPS_N, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M)),
            (bring_both, (xs, ws, full, empty, x_desc, w_desc, M, N, K,
            X_ACROSS, W_DOWN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M)),
        ],
        [1], [24],
    )  # fmt: skip
