"""Products of one row: each weight is read once, in whole lines, and added up in the thread that loads it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tensorlogic.kernels.gemm.tiled_kernel import (
    columnwise,
    epilogue,
    fetch_tile,
    load_vector,
    row_statistics,
    shaped,
)


@triton.jit
def load_row(ptr, at, left, EVEN: tl.constexpr):
    """ptr[at]; 0 from `left` on."""
    if EVEN:
        return tl.load(ptr + at)
    else:
        return tl.load(ptr + at, mask=at < left, other=0.0)


@triton.jit
def load_weights(ptrs, live, EVEN: tl.constexpr):
    """Weights, which nobody reads again soon; 0 where they are not `live`."""
    if EVEN:
        return tl.load(ptrs, eviction_policy="evict_first")
    else:
        return tl.load(ptrs, mask=live, other=0.0, eviction_policy="evict_first")


@triton.jit
def gemm_one_row(
    x_ptr, w_ptr, row_mean_ptr, row_rstd_ptr, gamma_ptr, beta_ptr, bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr,
    residual_ptr, y_ptr, z_ptr,
    M, N, K, stride_wn, stride_rn, stride_yn, eps,
    PROLOGUE: tl.constexpr, KIND: tl.constexpr, STATISTICS: tl.constexpr,
    ACTIVATION: tl.constexpr, OUTER: tl.constexpr, EARLY: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FETCH: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[1, N] = epilogue(prologue(x[1, K]) @ w[K, N]), K of x and of w together in memory, summed in float32.

    A thread adds up the 16 bytes that it loads at once, so that a program keeps BLOCK_N * BLOCK_K / 8 sums, and reduces
    across threads once, at its end. FETCH columns of its weights are asked into L2 before the kernels before have ended: that
    is right whatever they write, and memory is not idle while this one's first loads are under way.
    """
    if PDL:
        gdc_launch_dependents()
    INTO: tl.constexpr = w_ptr.dtype.element_ty
    LINE: tl.constexpr = 128 // INTO.primitive_bitwidth
    first = tl.program_id(0) * BLOCK_N
    rn, rk = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    w_ptr += first.to(tl.int64) * stride_wn
    if PDL:
        if FETCH > 0:
            fetch_tile(w_ptr, 0, N - first, 0, K, stride_wn, 1, BLOCK_N, FETCH, True)
        gdc_wait()
    row = tl.arange(0, 1)
    if STATISTICS > 0:
        means, rstds = row_statistics(x_ptr, row, M, K, K, 1, eps, PROLOGUE, True, 1, STATISTICS)
        mean, rstd = tl.sum(means), tl.sum(rstds)
        if row_mean_ptr is not None:
            tl.store(row_mean_ptr, mean, mask=first == 0)
        if row_rstd_ptr is not None:
            tl.store(row_rstd_ptr, rstd, mask=first == 0)
    bias, factor, summand = columnwise(
        bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr, eps, rn, N
    )
    r_at, other = 0, 0.0
    if residual_ptr is not None:
        r_at = rn.to(tl.int64) * stride_rn
        other = tl.load(residual_ptr + r_at, mask=rn < N, other=0.0)[None, :]
    w_at = tl.arange(0, BLOCK_N).to(tl.int64)[:, None] * stride_wn + rk[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_K // LINE], tl.float32)
    for begin in tl.range(0, K, BLOCK_K * UNROLL, num_stages=1):
        ws: tl.tuple = ()
        xs: tl.tuple = ()
        for step in tl.static_range(UNROLL):
            at = begin + step * BLOCK_K
            live = (rn < N)[:, None] & (rk < K - at)[None, :]
            ws += (load_weights(w_ptr + at + w_at, live, EVEN_N and EVEN_K),)
        for step in tl.static_range(UNROLL):
            at = begin + step * BLOCK_K
            xs += (load_row(x_ptr + at, rk, K - at, EVEN_K),)
        for step in tl.static_range(UNROLL):
            at = begin + step * BLOCK_K
            x = xs[step].to(tl.float32)
            if PROLOGUE == "activation":
                x = shaped(x, KIND, INTO)
            elif PROLOGUE != "none":
                x = (x - mean) * rstd
                if gamma_ptr is not None:
                    x *= load_vector(gamma_ptr + at, rk, K - at)
                if beta_ptr is not None:
                    x += load_vector(beta_ptr + at, rk, K - at)
            each = ws[step].to(tl.float32) * x[None, :]
            sums += tl.sum(tl.reshape(each, [BLOCK_N, BLOCK_K // LINE, LINE]), 2)
    epilogue(
        tl.sum(sums, 1)[None, :], other, bias, factor, summand, y_ptr, z_ptr, residual_ptr,
        (rn.to(tl.int64) * stride_yn)[None, :], r_at, row, M, rn, N, 0, 0,
        bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr, 0.0, eps,
        ACTIVATION, OUTER, KIND, EARLY, True, True, EVEN_N,
    )  # fmt: skip
