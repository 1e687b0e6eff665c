"""Attention scores on Hopper, stored straight from the registers that the tensor cores leave them in: k is permuted on its way in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tensorlogic.kernels.triton_runtime import launch

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def wide(warps: int, columns: int) -> gl.DistributedLinearLayout:
    """[16 warps, columns] by eight neighbours of a row a thread, four threads to a row: how outputs are stored."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    registers += [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    threads = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    rows = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, threads, rows, [], [16 * warps, columns])


@gluon.constexpr_function
def product_layout(warps: int, columns: int) -> gl.NVMMADistributedLayout:
    """Where wgmma leaves a product: of every eight columns, two neighbours to each of four threads."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def fetch(there, ptr, stride, ROWS: gl.constexpr, D: gl.constexpr, PERMUTED: gl.constexpr):
    """Begin to copy ROWS rows into shared memory. PERMUTED: of every 32 in such an order that the columns which wgmma
    gives to one thread, two by two, are eight neighbours."""
    LAY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAY))
    column = gl.arange(0, D, gl.SliceLayout(0, LAY))
    if PERMUTED:  # bits 43210 of a row's number come from 21430
        row = (row & -32) | ((row & 6) << 2) | ((row & 24) >> 2) | (row & 1)
    async_copy.async_copy_global_to_shared(there, ptr + (row * stride)[:, None] + column[None, :])


@gluon.jit
def begin(q, k, N: gl.constexpr):
    """q kᵀ [16 warps, N], under way."""
    M: gl.constexpr = 16 * gl.num_warps()
    zero = gl.zeros([M, N], gl.float32, product_layout(gl.num_warps(), N))
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def based(peak, factor):
    """The exponent that is counted from."""
    return gl.where(peak == float("-inf"), 0.0, peak * factor)


@gluon.jit
def by_thread(e, N: gl.constexpr):
    """Sums [16 warps, 4] of what each of a row's four threads holds: no thread waits for another."""
    return gl.sum(gl.sum(e.reshape([16 * gl.num_warps(), N // 8, 4, 2]), 3), 1)


@gluon.jit
def scores(s, factor, shift, dtype: gl.constexpr, N: gl.constexpr):
    """2**(s * factor - shift) [16 warps, N], columns back in their order by naming registers anew."""
    M: gl.constexpr = 16 * gl.num_warps()
    y = gl.exp2(s * factor - shift[:, None]).to(dtype)
    return y.reshape([M, N // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, N])


@gluon.jit
def put(ptr, at, near, far, N: gl.constexpr):
    """Store two neighbouring tiles at ptr + at [16 warps, 2 N], from the registers that they are in."""
    both = gl.join(near, far).permute((0, 2, 1)).reshape([16 * gl.num_warps(), 2 * N])
    both = gl.convert_layout(both, wide(gl.num_warps(), 2 * N))
    gl.store(ptr + at, both, cache_modifier=".cs")


@gluon.jit
def larger(a, b):
    """The larger, or NaN: a row with one becomes NaN, as in torch.softmax."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def recount(
    q, ks, k_ptr, stride_ks, steps, factor, STAYS: gl.constexpr, D: gl.constexpr, N: gl.constexpr
):
    """Log-sums of rows counted with the maximum so far, where the first tile's is too far from a later one."""
    M: gl.constexpr = 16 * gl.num_warps()
    SIDE: gl.constexpr = gl.SliceLayout(1, product_layout(gl.num_warps(), N))
    peak = gl.full([M], float("-inf"), gl.float32, SIDE)
    norm = gl.zeros([M], gl.float32, SIDE)
    for step in range(steps):
        k = arrived(ks, k_ptr, stride_ks, step, STAYS, D, N)
        for half in gl.static_range(2):
            s = warpgroup_mma_wait(0, deps=(begin(q, k.slice(half * N, N), N),))
            higher = larger(peak, gl.reduce(s, 1, larger))
            base = based(higher, factor)
            norm = norm * gl.exp2(peak * factor - base)
            norm += gl.sum(gl.exp2(s * factor - base[:, None]), 1)
            peak = higher
    return based(peak, factor) + gl.log2(norm)


@gluon.jit
def arrived(ks, k_ptr, stride_ks, step, STAYS: gl.constexpr, D: gl.constexpr, N: gl.constexpr):
    """The step's 2 N rows of k, waited for where they do not stay in shared memory."""
    k = ks.index(step if STAYS else 0)
    if not STAYS:
        fetch(k, k_ptr + step.to(gl.int64) * (2 * N) * stride_ks, stride_ks, 2 * N, D, True)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
    return k


@gluon.jit
def placed(
    q_ptr, k_ptr, y_ptr, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, H, S, T, groups
):
    """Where a program's 16 warps rows of q, its head's k and its rows of y begin; where S ends, the last rows once more."""
    M: gl.constexpr = 16 * gl.num_warps()
    head = gl.program_id(0) // groups
    first = gl.minimum(gl.program_id(0) % groups * M, S - M).to(gl.int64)
    b, h = (head // H).to(gl.int64), (head % H).to(gl.int64)
    q_ptr += b * stride_qb + h * stride_qh + first * stride_qs
    k_ptr += b * stride_kb + h * stride_kh
    y_ptr += (head.to(gl.int64) * S + first) * T
    return q_ptr, k_ptr, y_ptr


@gluon.jit
def spots(T, N: gl.constexpr):
    """[16 warps, 2 N]: where in y two neighbouring tiles go, beside their first element."""
    M: gl.constexpr = 16 * gl.num_warps()
    WIDE: gl.constexpr = wide(gl.num_warps(), 2 * N)
    row = gl.arange(0, M, gl.SliceLayout(1, WIDE)).to(gl.int64) * T
    return row[:, None] + gl.arange(0, 2 * N, gl.SliceLayout(0, WIDE))[None, :]


@gluon.jit
def once_more(
    q,
    ks,
    k_ptr,
    y_ptr,
    at,
    stride_ks,
    factor,
    steps,
    STAYS: gl.constexpr,
    D: gl.constexpr,
    N: gl.constexpr,
):
    """All of a program's rows from their own maxima, k going by twice."""
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    shift = recount(q, ks, k_ptr, stride_ks, steps, factor, STAYS, D, N)
    for step in range(steps):
        k = arrived(ks, k_ptr, stride_ks, step, STAYS, D, N)
        s = warpgroup_mma_wait(0, deps=(begin(q, k.slice(0, N), N),))
        near = scores(s, factor, shift, dtype, N)
        s = warpgroup_mma_wait(0, deps=(begin(q, k.slice(N, N), N),))
        put(y_ptr + step * (2 * N), at, near, scores(s, factor, shift, dtype, N), N)


@gluon.jit
def attention_scores_direct(
    q_ptr, k_ptr, y_ptr, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, H, S, T, groups, scale,
    D: gl.constexpr, N: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[b, h, s, :] = softmax over t of scale * q[b, h, s] . k[b, h, t], scale > 0; products and sums in float32.

    A program takes 16 warps rows of one head in two sweeps over k, 2 N of its rows at a time: sums, below the first tile's
    maximum, then scores. q stays in registers; nothing passes through shared memory but k, which stays there where STAGES hold
    all STEPS, else goes by; warps meet when it comes and nowhere else. Rows whose sums have left float32 are made once more.
    H200, 4 x 16 heads, D 64: S 512 17.3 us, 2048 212; a kernel whose loading warp streams k took 18.9 and 219.
    """
    gdc_launch_dependents()
    gdc_wait()
    M: gl.constexpr = 16 * gl.num_warps()
    SUMS: gl.constexpr = product_layout(gl.num_warps(), N)
    SIDE: gl.constexpr = gl.SliceLayout(1, SUMS)
    STAYS: gl.constexpr = STAGES == STEPS
    AHEAD: gl.constexpr = STAGES if STAYS else STAGES - 1
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    K_LAY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * N, D], dtype)
    ks = gl.allocate_shared_memory(dtype, [STAGES, 2 * N, D], K_LAY)
    qs = gl.allocate_shared_memory(dtype, [M, D], gl.NVMMASharedLayout.get_default_for([M, D], dtype))  # fmt: skip
    q_ptr, k_ptr, y_ptr = placed(
        q_ptr, k_ptr, y_ptr, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, H, S, T, groups
    )
    fetch(qs, q_ptr, stride_qs, M, D, False)
    for i in gl.static_range(AHEAD):
        fetch(ks.index(i), k_ptr + stride_ks.to(gl.int64) * (i * 2 * N), stride_ks, 2 * N, D, True)
        async_copy.commit_group()
    at = spots(T, N)
    factor = scale * LOG2E
    # of one or two the compiler would leave the loop away, and run out of registers
    laps = STEPS if STEPS > 2 else T // (2 * N)
    async_copy.wait_group(AHEAD - 1)
    q = qs.load(gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2))
    base = gl.zeros([M], gl.float32, SIDE)
    sums = by_thread(gl.zeros([M, N], gl.float32, SUMS), N)
    for step in range(laps):
        if STAYS:
            if step == 0:
                async_copy.wait_group(AHEAD // 2)
                fence_async_shared()
            if step == STAGES - AHEAD // 2:
                async_copy.wait_group(0)
                fence_async_shared()
        else:
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
        left = begin(q, ks.index(step % STAGES).slice(0, N), N)
        right = begin(q, ks.index(step % STAGES).slice(N, N), N)
        s = warpgroup_mma_wait(1, deps=(left,))
        if step == 0:
            base = based(gl.max(s, 1), factor)
        sums += by_thread(gl.exp2(s * factor - base[:, None]), N)
        s = warpgroup_mma_wait(0, deps=(right,))
        sums += by_thread(gl.exp2(s * factor - base[:, None]), N)
        if not STAYS:  # into what all warps left before this step's barrier
            ahead = step + STAGES - 1
            fetch(ks.index(ahead % STAGES), k_ptr + (ahead % STEPS).to(gl.int64) * (2 * N) * stride_ks, stride_ks, 2 * N, D, True)  # fmt: skip
            async_copy.commit_group()
    norm = gl.convert_layout(gl.sum(sums, 1), SIDE)
    shift = base + gl.log2(norm)
    for step in range(laps):
        done = step if STAYS else step + STEPS
        if not STAYS:
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
        left = begin(q, ks.index(done % STAGES).slice(0, N), N)
        right = begin(q, ks.index(done % STAGES).slice(N, N), N)
        s = warpgroup_mma_wait(1, deps=(left,))
        near = scores(s, factor, shift, dtype, N)
        s = warpgroup_mma_wait(0, deps=(right,))
        put(y_ptr + step * (2 * N), at, near, scores(s, factor, shift, dtype, N), N)
        if not STAYS:
            ahead = done + STAGES - 1
            if ahead < 2 * STEPS:
                fetch(ks.index(ahead % STAGES), k_ptr + (ahead % STEPS).to(gl.int64) * (2 * N) * stride_ks, stride_ks, 2 * N, D, True)  # fmt: skip
            async_copy.commit_group()
    if gl.min(((norm > 1e-30) & (norm < 1e38)).to(gl.int32), 0) == 0:
        once_more(q, ks, k_ptr, y_ptr, at, stride_ks, factor, laps, STAYS, D, N)


BLOCK_N = 64  # columns of a product; two of them are a step
DEPTHS = (32, 64, 128)
WARPS = (4, 8)
SHARED = 227 * 1024  # bytes that one multiprocessor's programs share
_FAR = 2**23  # offsets within a step's rows have 32 bits


def direct_refusal(
    s: int, t: int, d: int, dtype: str, align: int, strides: Sequence[int]
) -> str | None:
    """None, or why these scores cannot be made; `strides` are those of q and k over batch, head and row."""
    if dtype not in ("f16", "bf16") or align < 16 or any(n % 8 for n in strides):
        return "16-bit floats in rows at 16-byte addresses are required"
    if max(strides[2::3]) >= _FAR:
        return f"rows less than {_FAR} elements apart are required"
    if d not in DEPTHS or s < 16 * WARPS[0] or t % (2 * BLOCK_N) or not t:
        return (
            f"D in {DEPTHS}, S of {16 * WARPS[0]} and T in multiples of {2 * BLOCK_N} are required"
        )
    return None


def direct_configs(s: int, t: int, d: int) -> list[dict[str, Any]]:
    """Configurations, best guess first: warps, steps of k that shared memory holds (all of them: k stays there)."""
    steps = t // (2 * BLOCK_N)
    pairs = [(4, min(3, steps)), (8, steps), (8, min(3, steps)), (4, steps)]
    found = [{"num_warps": w, "STAGES": stages} for w, stages in dict.fromkeys(pairs)]
    return [
        c
        for c in found
        if s >= 16 * c["num_warps"]
        and _shared(c["STAGES"], d, c["num_warps"]) * (2 if d <= 64 else 1) <= SHARED
    ]


def _shared(stages: int, d: int, warps: int) -> int:
    return 2 * d * (stages * 2 * BLOCK_N + 16 * warps)


def direct_launcher(
    shape: tuple[int, int, int, int, int],
    dtype: str,
    strides_q: Sequence[int],
    strides_k: Sequence[int],
    config: Mapping[str, Any],
    device: torch.device,
) -> Callable[..., bool]:
    """A callable (q, k, y, scale) -> bool for scale > 0; shape is (B, H, S, T, D), y contiguous [B, H, S, T]; strides are
    those of batch, head and row. A neighbour's configuration gives way where it does not fit."""
    s, t, d = shape[2:]
    fitting = direct_configs(s, t, d)
    config = config if dict(config) in fitting else fitting[0]
    constexprs = {"N": BLOCK_N, "STEPS": t // (2 * BLOCK_N), "STAGES": config["STAGES"]}
    return by_rows(
        attention_scores_direct, shape, dtype, strides_q, strides_k, constexprs, config["num_warps"], device
    )  # fmt: skip


def registers(d: int) -> int:
    """Of a thread: four programs of 4 warps on a multiprocessor, or two of 8; at D 128 shared memory has room for eight warps."""
    return 224 if d > 64 else 128


def by_rows(
    kernel: Any,
    shape: tuple[int, int, int, int, int],
    dtype: str,
    strides_q: Sequence[int],
    strides_k: Sequence[int],
    constexprs: Mapping[str, Any],
    warps: int,
    device: torch.device,
) -> Callable[..., bool]:
    """A callable (q, k, y, scale) -> bool: a program for every 16 `warps` rows of a head."""
    b, h, s, t, d = shape
    groups = math.ceil(s / (16 * warps))
    names = ("stride_qb", "stride_qh", "stride_qs", "stride_kb", "stride_kh", "stride_ks")
    return launch.prepare(
        kernel,
        grid=(b * h * groups, 1, 1),
        pointers=dict.fromkeys(("q_ptr", "k_ptr", "y_ptr"), dtype),
        integers={
            **dict(zip(names, (*strides_q, *strides_k), strict=True)),
            "H": h, "S": s, "T": t, "groups": groups,
        },
        floats=("scale",),
        constexprs={"D": d, **constexprs},
        num_warps=warps,
        device=device,
        registers=registers(d),
    )  # fmt: skip
