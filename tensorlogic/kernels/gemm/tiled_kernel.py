"""The matrix product family: y = epilogue(prologue(x) @ w), its options constants of one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tensorlogic.kernels.elementwise.elementwise import combine
from tensorlogic.kernels.triton_runtime.device_math import activate, activation_grad, dropout, fetch


@triton.jit
def shaped(x, KIND: tl.constexpr, INTO: tl.constexpr):
    """The activation KIND of float32 x, which is rounded to the type INTO next; for 16 bits it costs half the instructions."""
    if INTO.primitive_bitwidth == 16 and (KIND == "gelu" or KIND == "gelu_tanh" or KIND == "silu"):
        y, _ = combine(KIND, INTO, x, x, x)
        return y
    else:
        return activate(x, KIND)


@triton.jit
def slope(dy, saved, KIND: tl.constexpr, INTO: tl.constexpr):
    """dy · act'(saved) likewise."""
    if INTO.primitive_bitwidth == 16 and (KIND == "gelu" or KIND == "gelu_tanh" or KIND == "silu"):
        y, _ = combine(KIND + "_bwd", INTO, dy, saved, saved)
        return y
    else:
        return activation_grad(dy, saved, KIND)


@triton.jit
def load_tile(ptrs, rows, M, columns, N, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr):
    """A tile of [M, N] with zeros beyond the edges; an EVEN size has no edge inside a block."""
    if EVEN_M and EVEN_N:
        return tl.load(ptrs)
    elif EVEN_M:
        return tl.load(ptrs, mask=(columns < N)[None, :], other=0.0)
    elif EVEN_N:
        return tl.load(ptrs, mask=(rows < M)[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=(rows < M)[:, None] & (columns < N)[None, :], other=0.0)


@triton.jit
def load_vector(ptr, at, size):
    """ptr[at] in float32; 0 beyond size."""
    return tl.load(ptr + at, mask=at < size, other=0.0).to(tl.float32)


@triton.jit
def row_statistics(
    x_ptr, rm, M, K, stride_m, stride_k, eps,
    NORM: tl.constexpr, EVEN_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean [BLOCK_M] and 1 / sqrt(variance + eps) of whole rows; for an RMS norm the mean is 0, the variance the mean square.

    Distances from the mean of the row's first block are summed lane by lane and reduced across lanes once. That
    mean is at most sqrt(K / BLOCK) deviations off, so the subtraction costs K / BLOCK roundings at worst.
    """
    rk, step = tl.arange(0, BLOCK).to(rm.dtype), tl.full([], BLOCK, rm.dtype)
    at = rm[:, None] * stride_m + rk[None, :] * stride_k
    first = load_tile(x_ptr + at, rm, M, rk, K, EVEN_M, False).to(tl.float32)
    near = tl.zeros([BLOCK_M], tl.float32)
    if NORM == "layer_norm":  # the mean of the first block
        near = tl.sum(first, 1) / tl.minimum(K, BLOCK)
    level = tl.where((rk < K)[None, :], first - near[:, None], 0.0)
    square = level * level
    for start in range(BLOCK, K, BLOCK):
        x_ptr += step * stride_k
        x = load_tile(x_ptr + at, rm, M, rk, K - start, EVEN_M, False).to(tl.float32)
        away = tl.where((rk < K - start)[None, :], x - near[:, None], 0.0)
        level += away
        square += away * away
    shift = tl.zeros([BLOCK_M], tl.float32)
    if NORM == "layer_norm":
        shift = tl.sum(level, 1) / K
    return near + shift, tl.rsqrt(tl.maximum(tl.sum(square, 1) / K - shift * shift, 0.0) + eps)


@triton.jit
def transform(
    x, saved, rm, M, rk, K, seed, offset, mean, rstd,
    row_mean_ptr, row_rstd_ptr, gamma_ptr, beta_ptr, p,
    PROLOGUE: tl.constexpr, KIND: tl.constexpr, TRANSPOSED: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """prologue(x) of one tile [BLOCK_M, BLOCK_K] in float32.

    x has tokens for rows and features for columns; TRANSPOSED: features for rows, and row
    statistics along K.
    """
    if PROLOGUE == "activation":
        return shaped(x, KIND, INTO)
    elif PROLOGUE == "gradient":
        return slope(x, saved, KIND, INTO)
    elif PROLOGUE == "dropout":
        if TRANSPOSED:
            return dropout(x, seed, offset, rk.to(tl.int64)[None, :] * M + rm[:, None], p)
        else:
            return dropout(x, seed, offset, rm.to(tl.int64)[:, None] * K + rk[None, :], p)
    elif TRANSPOSED:
        if row_mean_ptr is not None:
            x -= load_vector(row_mean_ptr, rk, K)[None, :]
        x *= load_vector(row_rstd_ptr, rk, K)[None, :]
        if gamma_ptr is not None:
            x *= load_vector(gamma_ptr, rm, M)[:, None]
        return x + load_vector(beta_ptr, rm, M)[:, None] if beta_ptr is not None else x
    else:
        if PROLOGUE == "layer_norm":
            x -= mean[:, None]
        x *= rstd[:, None]
        if gamma_ptr is not None:
            x *= load_vector(gamma_ptr, rk, K)[None, :]
        return x + load_vector(beta_ptr, rk, K)[None, :] if beta_ptr is not None else x


@triton.jit
def columnwise(bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr, eps, rn, N):
    """(bias, factor, summand) [BLOCK_N]: ((v + bias) - mean) / sqrt(var + eps) * scale + shift is (v + bias) * factor + summand."""
    bias, factor, summand = 0.0, 1.0, 0.0
    if bias_ptr is not None:
        bias = load_vector(bias_ptr, rn, N)
    if mean_ptr is not None:
        summand = -load_vector(mean_ptr, rn, N)
    if var_ptr is not None:
        factor = tl.rsqrt(load_vector(var_ptr, rn, N) + eps)
    if scale_ptr is not None:
        factor *= load_vector(scale_ptr, rn, N)
    summand *= factor
    if shift_ptr is not None:
        summand += load_vector(shift_ptr, rn, N)
    return bias, factor, summand


@triton.jit
def epilogue(
    acc, other, bias, factor, summand, y_ptr, z_ptr, residual_ptr, y_at, r_at, rm, M, rn, N, seed, offset,
    bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr, p, eps,
    ACTIVATION: tl.constexpr, OUTER: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Finish one tile [BLOCK_M, BLOCK_N] of float32 sums and store it.

    z = (acc + bias - mean) / sqrt(var + eps) * scale + shift + residual, y = activation(z), each
    part optional; OUTER "gradient": z * act'(residual) in place of + residual, "dropout": of z.
    EARLY: what is stored as z is acc + bias. AHEAD: `other` is the residual and what `columnwise`
    gives is given, all loaded before.
    """
    if not AHEAD:
        bias, factor, summand = columnwise(
            bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr, eps, rn, N
        )
    mask = (rm < M)[:, None] & (rn < N)[None, :]
    INTO: tl.constexpr = y_ptr.dtype.element_ty
    if bias_ptr is not None:
        acc += bias[None, :]
    if z_ptr is not None and EARLY:
        tl.store(z_ptr + y_at, acc.to(z_ptr.dtype.element_ty), mask=mask)
    if var_ptr is not None or scale_ptr is not None:
        acc *= factor[None, :]
    if mean_ptr is not None or shift_ptr is not None:
        acc += summand[None, :]
    if residual_ptr is not None:
        if not AHEAD:
            other = load_tile(residual_ptr + r_at, rm, M, rn, N, EVEN_M, EVEN_N)
        if OUTER == "gradient":
            acc = slope(acc, other.to(tl.float32), KIND, INTO)
        else:
            acc += other.to(tl.float32)
    if OUTER == "dropout":
        at = rm.to(tl.int64)[:, None] * N + rn[None, :]
        acc = dropout(acc, seed, offset, at, p)
    if z_ptr is not None and not EARLY:
        tl.store(z_ptr + y_at, acc.to(z_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + y_at, shaped(acc, ACTIVATION, INTO).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gather(ptr, lanes, SPLIT: tl.constexpr, STEP: tl.constexpr):
    """Sum of SPLIT partial results, STEP apart, in fixed order; not from L1, which may be stale."""
    total = tl.load(ptr + lanes, cache_modifier=".cg")
    for part in range(1, SPLIT):
        total += tl.load(ptr + part * STEP + lanes, cache_modifier=".cg")
    return total


@triton.jit
def locate(tile, M, N, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(batch, row, column) of a tile; GROUP_M rows of tiles are walked together, sharing L2."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    local = tile % (tiles_m * tiles_n)
    group = local // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = local % (GROUP_M * tiles_n)
    return tile // (tiles_m * tiles_n), group * GROUP_M + within % height, within // height


@triton.jit
def load_weights(
    ptrs, rk, K, rn, N, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, ROWS: tl.constexpr
):
    """A tile of w; with ROWS [1, BLOCK_K, BLOCK_N], in a layout the sums keep: nothing is moved."""
    if not ROWS:
        return load_tile(ptrs, rk, K, rn, N, EVEN_K, EVEN_N)
    elif EVEN_K and EVEN_N:
        return tl.load(ptrs, eviction_policy="evict_first")
    else:
        mask = (rk < K)[None, :, None] & (rn < N)[None, None, :]
        return tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def fetch_tile(
    ptr, first_row, M, first_column, N, stride_m, stride_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """`fetch` a tile [ROWS, COLUMNS] of [M, N] line by line; ACROSS: rows lie together in memory, else columns do."""
    LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    if ACROSS:
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, (COLUMNS + LINE - 1) // LINE) * LINE
    else:
        row = first_row + tl.arange(0, (ROWS + LINE - 1) // LINE) * LINE
        column = first_column + tl.arange(0, COLUMNS)
    live = (row < M)[:, None] & (column < N)[None, :]
    fetch(ptr + row.to(tl.int64)[:, None] * stride_m + column[None, :] * stride_n, live)


@triton.jit
def multiply(x, w, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr, ROWS: tl.constexpr):
    """acc + x @ w; with ROWS products are only added lane by lane, [BLOCK_M, BLOCK_K, BLOCK_N].

    Float32 tiles are summed on their own first: a chain of K additions would lose twice what PyTorch's product loses. (Naming
    a bound on inexact sums keeps the compiler from chaining them.)
    """
    if ROWS:
        return acc + x.to(tl.float32)[:, :, None] * w.to(tl.float32)
    elif UPCAST:
        return tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
    elif x.dtype == tl.float32 and PRECISION == "ieee":
        return acc + tl.dot(x, w, input_precision="ieee", max_num_imprecise_acc=1)
    else:
        return tl.dot(x, w, acc, input_precision=PRECISION)


@triton.jit
def gemm_tiled(
    x_ptr, w_ptr, saved_ptr, seed_ptr, row_mean_ptr, row_rstd_ptr, gamma_ptr, beta_ptr,
    bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr, residual_ptr,
    y_ptr, z_ptr, x_out_ptr, row_sum_ptr, space_ptr, counter_ptr,
    M, N, K, stride_xb, stride_xm, stride_xk, stride_wb, stride_wk, stride_wn,
    stride_sb, stride_sm, stride_sk, stride_rb, stride_rm, stride_rn,
    stride_yb, stride_ym, stride_yn, p, eps, seed_value, offset_value,
    PROLOGUE: tl.constexpr, KIND: tl.constexpr, TRANSPOSED: tl.constexpr, INLINE: tl.constexpr, STATISTICS: tl.constexpr,
    ACTIVATION: tl.constexpr, OUTER: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    WIDE: tl.constexpr, BATCHED: tl.constexpr, SPLIT: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FETCH: tl.constexpr, STREAM: tl.constexpr, X_ACROSS: tl.constexpr, W_DOWN: tl.constexpr, R_ACROSS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y[M, N] = epilogue(prologue(x[M, K]) @ w[K, N]), summed in float32; a batch with BATCHED.

    SPLIT > 1: SPLIT programs share a tile's K; each leaves its sums in `space`, and the last to
    arrive adds them in fixed order, finishes the tile and sets its counter back to 0: enough
    programs for a small y, one launch, the same bits every run. FETCH: steps of K whose tiles (and the
    residual's) are asked into L2 before the kernels before have ended, STREAM: and w's that far ahead in
    the loop; 1.05 to 1.1 times as fast for few rows and up to 512. BLOCK_M < 16: products on the
    ordinary units, sums kept per lane until the end, for a few rows bound by reading w.
    `x_out` takes prologue(x) and `row_sum` its sums over K, from the first column of tiles.
    """
    if PDL:
        gdc_launch_dependents()
    ROWS: tl.constexpr = BLOCK_M < 16
    part, tile = tl.program_id(0) % SPLIT, tl.program_id(0) // SPLIT
    batch, tile_m, tile_n = locate(tile, M, N, GROUP_M, BLOCK_M, BLOCK_N)
    per = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K  # columns of x that one part covers
    rm = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rk, step = tl.arange(0, BLOCK_K), tl.full([], BLOCK_K, tl.int32)
    if WIDE:
        rm, rn, rk, step = rm.to(tl.int64), rn.to(tl.int64), rk.to(tl.int64), step.to(tl.int64)
    if BATCHED:
        batch = batch.to(tl.int64)
        x_ptr += batch * stride_xb
        w_ptr += batch * stride_wb
        y_ptr += batch * stride_yb
        if z_ptr is not None:
            z_ptr += batch * stride_yb
        if residual_ptr is not None:
            residual_ptr += batch * stride_rb
        if saved_ptr is not None:
            saved_ptr += batch * stride_sb
        if x_out_ptr is not None:
            x_out_ptr += batch * M * K

    # one moving pointer and fixed offsets an operand: moving pointer tensors take more registers
    begin = (part * per).to(tl.int64)
    x_at = rm[:, None] * stride_xm + rk[None, :] * stride_xk
    x_ptr += begin * stride_xk
    w_ptr += begin * stride_wk
    if ROWS:
        w_at = rk[None, :, None] * stride_wk + rn[None, None, :] * stride_wn
        acc = tl.zeros([BLOCK_M, BLOCK_K, BLOCK_N], tl.float32)
    else:
        w_at = rk[:, None] * stride_wk + rn[None, :] * stride_wn
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if saved_ptr is not None:
        saved_ptr += begin * stride_sk
        saved_at = rm[:, None] * stride_sm + rk[None, :] * stride_sk
    if PDL:
        # while the kernels before end: what is still to be written merely does not profit
        if FETCH > 0:
            AHEAD_K: tl.constexpr = FETCH * BLOCK_K
            fetch_tile(
                w_ptr, 0, K - begin, tile_n * BLOCK_N, N, stride_wk, stride_wn, AHEAD_K, BLOCK_N, not W_DOWN
            )  # fmt: skip
            fetch_tile(
                x_ptr, tile_m * BLOCK_M, M, 0, K - begin, stride_xm, stride_xk, BLOCK_M, AHEAD_K, X_ACROSS
            )  # fmt: skip
            if residual_ptr is not None:
                fetch_tile(
                    residual_ptr, tile_m * BLOCK_M, M, tile_n * BLOCK_N, N, stride_rm, stride_rn,
                    BLOCK_M, BLOCK_N, R_ACROSS,
                )  # fmt: skip
        gdc_wait()
    seed, offset, mean, rstd = 0, 0, 0.0, 0.0
    if seed_value is not None:
        seed, offset = seed_value.to(tl.int64), offset_value.to(tl.int64)
    elif seed_ptr is not None:
        seed, offset = tl.load(seed_ptr), tl.load(seed_ptr + 1)
    if INLINE:
        first_ptr = x_ptr - begin * stride_xk
        mean, rstd = row_statistics(
            first_ptr, rm, M, K, stride_xm, stride_xk, eps, PROLOGUE, EVEN_M, BLOCK_M, STATISTICS
        )
        once = (rm < M) & (tile_n + part == 0)
        if row_mean_ptr is not None:
            tl.store(row_mean_ptr + rm, mean, mask=once)
        if row_rstd_ptr is not None:
            tl.store(row_rstd_ptr + rm, rstd, mask=once)
    elif row_rstd_ptr is not None and not TRANSPOSED:
        rstd = load_vector(row_rstd_ptr, rm, M)
        mean = load_vector(row_mean_ptr, rm, M) if row_mean_ptr is not None else rstd

    r_at, other, bias, factor, summand = 0, 0.0, 0.0, 1.0, 0.0
    if residual_ptr is not None:
        r_at = rm[:, None] * stride_rm + rn[None, :] * stride_rn
    # what the epilogue reads comes from memory at its slowest: ask for it before the loop
    if AHEAD:
        bias, factor, summand = columnwise(
            bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr, eps, rn, N
        )
        if residual_ptr is not None:
            other = load_tile(residual_ptr + r_at, rm, M, rn, N, EVEN_M, EVEN_N)

    sums = tl.zeros([BLOCK_M], tl.float32)
    rk += part * per
    for start in range(part * per, tl.minimum(K, part * per + per), BLOCK_K):
        x = load_tile(x_ptr + x_at, rm, M, rk, K, EVEN_M, EVEN_K)
        w = load_weights(w_ptr + w_at, rk, K, rn, N, EVEN_K, EVEN_N, ROWS)
        if PROLOGUE != "none":
            saved = x
            if saved_ptr is not None:
                saved = load_tile(saved_ptr + saved_at, rm, M, rk, K, EVEN_M, EVEN_K)
                saved_ptr += step * stride_sk
            x = transform(
                x.to(tl.float32), saved.to(tl.float32), rm, M, rk, K, seed, offset, mean, rstd,
                row_mean_ptr, row_rstd_ptr, gamma_ptr, beta_ptr, p, PROLOGUE, KIND, TRANSPOSED,
                w.dtype,
            ).to(w.dtype)  # fmt: skip
        if x_out_ptr is not None:  # noqa: SIM102  (settled by the compiler; the inner one at run time)
            if tile_n == 0:
                at = rm.to(tl.int64)[:, None] * K + rk[None, :]
                tl.store(x_out_ptr + at, x, mask=(rm < M)[:, None] & (rk < K)[None, :])
        if row_sum_ptr is not None:
            sums += tl.sum(x.to(tl.float32), 1)
        acc = multiply(x, w, acc, PRECISION, UPCAST, ROWS)
        x_ptr += step * stride_xk
        w_ptr += step * stride_wk
        rk += BLOCK_K
        if PDL and STREAM:
            left = K - start - FETCH * BLOCK_K - BLOCK_K
            fetch_tile(
                w_ptr + FETCH * (step * stride_wk), 0, left, tile_n * BLOCK_N, N, stride_wk, stride_wn,
                BLOCK_K, BLOCK_N, not W_DOWN,
            )  # fmt: skip
    if ROWS:
        acc = tl.sum(acc, 1)

    mine = True
    if SPLIT > 1:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        lanes = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        row_lanes = SPLIT * SIZE + tl.arange(0, BLOCK_M)
        space_ptr += tile.to(tl.int64) * (SPLIT * (SIZE + BLOCK_M))
        tl.store(space_ptr + part * SIZE + lanes, acc)
        if row_sum_ptr is not None:
            tl.store(space_ptr + part * BLOCK_M + row_lanes, sums)
        tl.debug_barrier()
        mine = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if mine:
            tl.store(counter_ptr + tile, 0)
            acc = gather(space_ptr, lanes, SPLIT, SIZE)
            if row_sum_ptr is not None:
                sums = gather(space_ptr, row_lanes, SPLIT, BLOCK_M)
    if mine:
        y_at = rm[:, None] * stride_ym + rn[None, :] * stride_yn
        epilogue(
            acc, other, bias, factor, summand, y_ptr, z_ptr, residual_ptr, y_at, r_at, rm, M, rn, N, seed, offset,
            bias_ptr, mean_ptr, var_ptr, scale_ptr, shift_ptr, p, eps,
            ACTIVATION, OUTER, KIND, EARLY, AHEAD, EVEN_M, EVEN_N,
        )  # fmt: skip
        if row_sum_ptr is not None:
            once = (rm < M) & (tile_n == 0)
            tl.store(row_sum_ptr + rm, sums.to(row_sum_ptr.dtype.element_ty), mask=once)
