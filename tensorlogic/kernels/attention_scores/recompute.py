"""Attention scores softmax(scale * q kᵀ + mask), every score written once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.triton_runtime.device_math import follow
from tensorlogic.kernels.triton_runtime.launch import prepare

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
TINY: tl.constexpr = tl.constexpr(1e-20)  # sums above it lose nothing to underflow
HUGE: tl.constexpr = tl.constexpr(1e38)


@triton.jit
def bounded(v):
    """A mask's value within -1e17 ... 6e4, which as a score is as good as infinite, but can be divided and multiplied."""
    v = tl.maximum(v, -1e17, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(v, 6e4, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def score_tile(
    q, k_ptr, mask_ptr, start, row, local, S, T, stride_ks, stride_ms, stride_mt, scale,
    D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M, BLOCK_N] from column `start`, still to be scaled; what is hidden is infinite, -inf once scaled.

    A float mask, divided by the scale, is what a product of tensor cores is added to: so it comes to their layout, not the
    scores to the mask's, which took twice the instructions. EDGE tiles reach over the end of k or over the causal diagonal; others
    are not masked for it.
    """
    col = start + tl.arange(0, BLOCK_N).to(local.dtype)
    dim = tl.arange(0, BLOCK_D)
    at = dim[:, None] + (col * stride_ks)[None, :]
    if EDGE:
        inside = (col < T)[None, :] & (dim < D)[:, None]
        k = tl.load(k_ptr + at, mask=inside, other=0.0)
    elif D == BLOCK_D:
        k = tl.load(k_ptr + at)
    else:
        k = tl.load(k_ptr + at, mask=(dim < D)[:, None], other=0.0)
    hidden = tl.where(scale < 0, float("inf"), float("-inf"))
    if MASK == "none":
        s = tl.dot(q, k, input_precision=PRECISION)
    else:
        place = (local * stride_ms)[:, None] + (col * stride_mt)[None, :]
        seen = tl.load(mask_ptr + place, mask=(row < S)[:, None] & (col < T)[None, :], other=0)
        if MASK == "bool":
            s = tl.where(seen != 0, tl.dot(q, k, input_precision=PRECISION), hidden)
        else:
            seen = seen.to(tl.float32)
            if mask_ptr.dtype.element_ty != tl.float16:
                seen = tl.where(seen == float("-inf"), seen, bounded(seen))
            # no tensor cores, and sums that begin at a mask lose more; a plain + is made one of
            # those
            if q.dtype == tl.float32:
                s = tl.dot(q, k, input_precision=PRECISION)
                s = tl.fma(seen, 1.0 / scale, s)
            else:
                s = tl.dot(q, k, seen * (1.0 / scale), input_precision=PRECISION)
    if EDGE:
        keep = (col < T)[None, :]
        if CAUSAL:
            keep = keep & (col[None, :] <= row[:, None])
        s = tl.where(keep, s, hidden)
    return s


@triton.jit
def against(peak, factor):
    """The factor and shift that leave no exponent above 0: one instruction an element. A row of nothing but -1e16 and
    less, where float32 tells no two scores apart, becomes uniform; so rounding of the shift cannot make it anything."""
    lost = peak < -1e16
    return tl.where(lost, factor * 1e-30, factor), tl.where(lost, 0.0, peak * LOG2E)


@triton.jit
def by_thread(v, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile as [BLOCK_M, BLOCK_N // 8, 4, 2]: the tensor cores hand two neighbours of every eight columns to a thread,
    so that sums and maxima over dims 3 and 1 wait for no other thread."""
    return tl.reshape(v, [BLOCK_M, BLOCK_N // 8, 4, 2])


@triton.jit
def sweep(
    acc, q, k_ptr, mask_ptr, clear, end, row, local, S, T, stride_ks, stride_ms, stride_mt, scale, factor, shift,
    SUM: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, EDGES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Take all columns into acc [BLOCK_M, 4]: sums of 2**(s * factor - shift), or maxima of scores."""
    for start in range(0, clear, BLOCK_N):
        s = score_tile(
            q, k_ptr, mask_ptr, start, row, local, S, T, stride_ks, stride_ms, stride_mt, scale,
            D, MASK, CAUSAL, False, PRECISION, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        acc = take(acc, s, scale, factor, shift, SUM, BLOCK_M, BLOCK_N)
    if EDGES:
        for start in range(clear, end, BLOCK_N):
            s = score_tile(
                q, k_ptr, mask_ptr, start, row, local, S, T, stride_ks, stride_ms, stride_mt, scale,
                D, MASK, CAUSAL, True, PRECISION, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            acc = take(acc, s, scale, factor, shift, SUM, BLOCK_M, BLOCK_N)
    return acc


@triton.jit
def take(
    acc, s, scale, factor, shift,
    SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of `sweep`."""
    if SUM:
        e = tl.exp2(s * factor[:, None] - shift[:, None])
        return acc + tl.sum(tl.sum(by_thread(e, BLOCK_M, BLOCK_N), 3), 1)
    else:
        return tl.maximum(acc, tl.max(tl.max(by_thread(s * scale, BLOCK_M, BLOCK_N), 3), 1))


@triton.jit
def write_scores(
    y_ptr,
    y,
    start,
    row,
    local,
    S,
    T,
    EDGE: tl.constexpr,
    EVEN_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store one tile of y; `y_ptr` points at the program's first score."""
    col = start + tl.arange(0, BLOCK_N).to(local.dtype)
    at = y_ptr + (local * T)[:, None] + col[None, :]
    y = y.to(y_ptr.dtype.element_ty)
    if EDGE:
        tl.store(at, y, mask=(row < S)[:, None] & (col < T)[None, :], cache_modifier=".cs")
    elif EVEN_M:
        tl.store(at, y, cache_modifier=".cs")
    else:
        tl.store(at, y, mask=(row < S)[:, None], cache_modifier=".cs")


@triton.jit
def attention_scores_fwd(
    q_ptr, k_ptr, mask_ptr, y_ptr, S, T, H,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_mb, stride_mh, stride_ms, stride_mt, scale,
    D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, HELD: tl.constexpr,
    EDGES: tl.constexpr, EVEN_M: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[b, h, s, :] = softmax over t of scale * q[b, h, s] . k[b, h, t] + mask; products and sums in float32.

    HELD: all T scores of BLOCK_M rows fit one register tile and are computed once. Otherwise two sweeps over k,
    which stays in L2: the first sums exp(score), the second computes the scores again and writes them normalised, so
    the large [S, T] matrix crosses the memory bus once. No maximum is taken first: float32 holds exp(score) up to 88.
    Where a row's sum leaves [TINY, HUGE], the program sweeps again for maxima and once more for sums below them.
    Causal rows see columns up to their own index; tiles that need no masking run without it (EDGES: some do).
    Offsets within a program's operands are 32-bit unless WIDE: as 64-bit pointers they would spill.
    """
    follow(PDL)
    tiles_m = tl.cdiv(S, BLOCK_M)
    tile = tl.program_id(0) % tiles_m
    if CAUSAL:
        tile = tiles_m - 1 - tile
    head = tl.program_id(0) // tiles_m
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    start_m = tile * BLOCK_M
    first = start_m.to(tl.int64)
    local = tl.arange(0, BLOCK_M)
    row = start_m + local
    if WIDE:
        local = local.to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    q_ptr += b * stride_qb + h * stride_qh + first * stride_qs
    q = tl.load(
        q_ptr + (local * stride_qs)[:, None] + dim[None, :],
        mask=(row < S)[:, None] & (dim < D)[None, :],
        other=0.0,
    )
    scale = tl.where(tl.abs(scale) < 1e-20, 1e-20, scale)
    k_ptr += b * stride_kb + h * stride_kh
    mask_ptr += b * stride_mb + h * stride_mh + first * stride_ms
    y_ptr += (head.to(tl.int64) * S + first) * T
    factor = tl.zeros([BLOCK_M], tl.float32) + scale * LOG2E
    shift = tl.zeros([BLOCK_M], tl.float32)
    if HELD:
        s = score_tile(
            q, k_ptr, mask_ptr, 0, row, local, S, T, stride_ks, stride_ms, stride_mt, scale,
            D, MASK, CAUSAL, True, PRECISION, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        factor, shift = against(tl.max(s * scale, 1), factor)
        e = tl.exp2(s * factor[:, None] - shift[:, None])
        y = e * (1.0 / tl.sum(e, 1))[:, None]
        write_scores(y_ptr, y, 0, row, local, S, T, True, EVEN_M, BLOCK_N)
    else:
        clear = T // BLOCK_N * BLOCK_N
        end = T
        if CAUSAL:
            clear = tl.minimum(clear, (start_m + 1) // BLOCK_N * BLOCK_N)
            end = tl.minimum(T, start_m + BLOCK_M)
        acc = sweep(
            tl.zeros([BLOCK_M, 4], tl.float32), q, k_ptr, mask_ptr, clear, end, row, local, S, T,
            stride_ks, stride_ms, stride_mt, scale, factor, shift,
            True, D, MASK, CAUSAL, EDGES, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        norm = tl.sum(acc, 1)
        if tl.min(((norm > TINY) & (norm < HUGE)).to(tl.int32), 0) == 0:
            acc = sweep(
                tl.full([BLOCK_M, 4], float("-inf"), tl.float32), q, k_ptr, mask_ptr, clear, end, row, local, S, T,
                stride_ks, stride_ms, stride_mt, scale, factor, shift,
                False, D, MASK, CAUSAL, EDGES, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            factor, shift = against(tl.max(acc, 1), factor)
            acc = sweep(
                tl.zeros([BLOCK_M, 4], tl.float32), q, k_ptr, mask_ptr, clear, end, row, local, S, T,
                stride_ks, stride_ms, stride_mt, scale, factor, shift,
                True, D, MASK, CAUSAL, EDGES, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            norm = tl.sum(acc, 1)
        shift += tl.log2(norm)
        for start in range(0, clear, BLOCK_N):
            s = score_tile(
                q, k_ptr, mask_ptr, start, row, local, S, T, stride_ks, stride_ms, stride_mt, scale,
                D, MASK, CAUSAL, False, PRECISION, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            y = tl.exp2(s * factor[:, None] - shift[:, None])
            write_scores(y_ptr, y, start, row, local, S, T, False, EVEN_M, BLOCK_N)
        if EDGES:
            for start in range(clear, end, BLOCK_N):
                s = score_tile(
                    q, k_ptr, mask_ptr, start, row, local, S, T, stride_ks, stride_ms, stride_mt, scale,
                    D, MASK, CAUSAL, True, PRECISION, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                y = tl.exp2(s * factor[:, None] - shift[:, None])
                write_scores(y_ptr, y, start, row, local, S, T, True, EVEN_M, BLOCK_N)
        if CAUSAL:
            rest = tl.broadcast_to((0.0 / norm)[:, None], [BLOCK_M, BLOCK_N])
            for start in range(clear + tl.cdiv(end - clear, BLOCK_N) * BLOCK_N, T, BLOCK_N):
                write_scores(y_ptr, rest, start, row, local, S, T, True, EVEN_M, BLOCK_N)


def attention_scores_configs(
    s: int, t: int, d: int, dtype: str, mask: str = "none", is_causal: bool = False
) -> list[dict[str, Any]]:
    """Configurations, best guess first; "held" keeps a whole row of scores in registers, "sweeps" reads k twice."""
    plain = mask == "none" and not is_causal
    odd = t % 16 != 0  # single-element accesses: larger tiles would spill
    ragged = odd and not plain
    if dtype == "f32":
        tiles = (
            [(32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2)]
            if d <= 128 and not ragged
            else [(16, 16, 4, 2)]
        )
    elif d > 128:
        tiles = [(128, 64, 8, 3 if plain else 2), (64, 64, 4, 2), (64, 32, 4, 2)]
        tiles = tiles[2:] if ragged else tiles
    elif ragged:
        tiles = [(64, 32, 4, 3)] if d > 64 else [(64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3)]
    elif d > 64:
        tiles = [(128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3)]
        tiles = tiles if mask == "none" else [(64, 32, 4, 3), *tiles[1:3]]
    elif mask == "none":
        tiles = [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (64, 32, 4, 3), (128, 64, 8, 3)]
    else:
        tiles = [(64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 4), (64, 32, 4, 3)]
    if s <= 32 and dtype != "f32":
        tiles = (
            [(16, 128, 4, 3), (16, 64, 4, 3), (32, 64, 4, 2)]
            if d <= 128 and not ragged
            else [(16, 64, 4, 2)]
        )
    sweeps = [
        {"strategy": "sweeps", "BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
        for m, n, warps, stages in tiles
    ]
    block_n = max(16, triton.next_power_of_2(t))
    if dtype == "f32" or block_n > 1024 or block_n * d > 512 * 128:
        return sweeps
    per_thread = 128 if plain else 64
    held = [
        {"strategy": "held", "BLOCK_M": m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": 1}
        for m, warps in ((64, 4), (64, 8), (16, 4), (32, 8), (64, 16))
        if m * block_n <= warps * 32 * per_thread
        and warps * 16 <= max(64, block_n // 2)
        and not (ragged and warps == 16)
    ]
    return (held[:4] + sweeps)[:8] if t <= 256 else sweeps[:6] + held[:2]


def attention_scores_launcher(
    shape: tuple[int, int, int, int, int],
    dtype: str,
    out_dtype: str,
    strides_q: Sequence[int],
    strides_k: Sequence[int],
    mask: str,
    mask_dtype: str,
    strides_mask: Sequence[int],
    is_causal: bool,
    config: dict[str, Any],
    device: torch.device,
    *,
    precision: str = "ieee",
    align: int = 16,
) -> Callable[..., bool]:
    """A callable (q, k, mask, y, scale) -> bool; shape is (B, H, S, T, D), y contiguous [B, H, S, T].

    `strides_q` and `strides_k` are (batch, head, row), the last stride being 1. `mask` is "none", "bool" (True: seen)
    or "float" (added), `strides_mask` its four strides, 0 where it broadcasts. `precision` applies to float32 inputs:
    "ieee", "tf32" or "tf32x3". A row that sees nothing is NaN, as torch.softmax of -inf is.
    """
    b, h, s, t, d = shape
    tiles = triton.cdiv(s, config["BLOCK_M"])
    names = ("stride_qb", "stride_qh", "stride_qs", "stride_kb", "stride_kh", "stride_ks")
    mask_names = ("stride_mb", "stride_mh", "stride_ms", "stride_mt")
    block_m, ends = config["BLOCK_M"], t + config["BLOCK_N"]
    reach = max(
        block_m * max(t, strides_q[2]) + t,
        ends * strides_k[2],
        block_m * strides_mask[2] + ends * strides_mask[3],
    )
    strides = (*strides_q, *strides_k, *(strides_mask if mask != "none" else (0, 0, 0, 0)))
    return prepare(
        attention_scores_fwd,
        grid=(tiles * b * h, 1, 1),
        pointers={"q_ptr": dtype, "k_ptr": dtype, "mask_ptr": mask_dtype, "y_ptr": out_dtype},
        integers={"S": s, "T": t, "H": h, **dict(zip(names + mask_names, strides, strict=True))},
        floats=("scale",),
        constexprs={
            "D": d,
            "MASK": mask,
            "CAUSAL": is_causal,
            "PRECISION": precision,
            "HELD": config["strategy"] == "held",
            "EDGES": is_causal or t % config["BLOCK_N"] != 0,
            "EVEN_M": s % config["BLOCK_M"] == 0,
            "WIDE": reach >= 2**31,
            "BLOCK_M": config["BLOCK_M"],
            "BLOCK_N": config["BLOCK_N"],
            "BLOCK_D": max(16, triton.next_power_of_2(d)),
        },
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        device=device,
        align=align,
    )
