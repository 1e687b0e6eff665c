"""Attention scores on Hopper whose k stays in shared memory: the exponentials that are counted last are written as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tensorlogic.kernels.attention_scores.hopper_register_store import (
    BLOCK_N,
    LOG2E,
    SHARED,
    based,
    begin,
    by_rows,
    by_thread,
    direct_refusal,
    fetch,
    once_more,
    placed,
    product_layout,
    put,
    scores,
    spots,
    wide,
)


@gluon.jit
def clamp(x):
    """x between -127 and 127, NaN as it is: beyond, powers of two are 0 or too large for any sum that counts."""
    return tl.clamp(x, -127.0, 127.0, tl.PropagateNan.ALL)


@gluon.jit
def cubic(x):
    """2**x to 1e-4 by multiply-adds."""
    x = clamp(x)
    rounded = x + 12582912.0  # its last bits are the whole number nearest to x
    f = x - (rounded - 12582912.0)
    y = ((f * 0.05550339 + 0.24022651) * f + 0.69314718) * f + 1.0
    bits = (rounded.to(gl.int32, bitcast=True) << 23) + y.to(gl.int32, bitcast=True)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def powers(x, N: gl.constexpr, CUBIC: gl.constexpr):
    """2**x [16 warps, N], CUBIC (1 or 2) of every four by multiply-adds, for the special units are what scores wait for."""
    M: gl.constexpr = 16 * gl.num_warps()
    if CUBIC == 2:
        even, odd = gl.split(x.reshape([M, N // 2, 2]))
        y = gl.join(gl.exp2(even), cubic(odd)).reshape([M, N])
    else:
        # odd columns of every second eight; the even ones go the same way, so that all keep their
        # places
        even, odd = gl.split(x.reshape([M, N // 16, 2, 4, 2]))
        first, second = gl.split(gl.exp2(even).permute((0, 1, 3, 2)))
        even = gl.join(first, second)
        first, second = gl.split(odd.permute((0, 1, 3, 2)))
        odd = gl.join(gl.exp2(first), cubic(second))
        y = gl.join(even, odd).permute((0, 1, 3, 2, 4)).reshape([M, N])
    return gl.convert_layout(y, product_layout(gl.num_warps(), N))  # the same place, by its name


@gluon.jit
def ordered(y, dtype: gl.constexpr, N: gl.constexpr):
    """Columns of y [16 warps, N] back in their order by naming registers anew, rounded."""
    M: gl.constexpr = 16 * gl.num_warps()
    y = y.to(dtype)
    return y.reshape([M, N // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, N])


@gluon.constexpr_function
def own(warps: int, columns: int) -> gl.SharedLinearLayout:
    """[16 warps, columns] in shared memory as `wide` has it in registers: each thread's eight neighbours together, a warp's rows together."""
    offsets = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 0], [2, 0], [4, 0], [8, 0]]
    offsets += [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    offsets += [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.SharedLinearLayout(offsets)


@gluon.jit
def hold(home, e, N: gl.constexpr):
    """Exponentials [16 warps, N], rounded, into shared memory, where the same threads find them."""
    e = ordered(e, home.dtype, N)
    home.store(gl.convert_layout(e, wide(gl.num_warps(), N)))


@gluon.jit
def held(home, share, N: gl.constexpr):
    """Scores of what `hold` left."""
    NARROW: gl.constexpr = wide(gl.num_warps(), N)
    share = gl.convert_layout(share, gl.SliceLayout(1, NARROW))[:, None]
    return (home.load(NARROW).to(gl.float32) * share).to(home.dtype)


@gluon.jit
def judged(norm, HALF: gl.constexpr):
    """Of all of a program's rows: 2 where what is held is right, 1 where the sums are, 0."""
    well = gl.where((norm > 1e-30) & (norm < 1e38), gl.where(norm < HALF, 2, 1), 0)
    return gl.min(well, 0)


@gluon.jit
def attention_scores_kept(
    q_ptr, k_ptr, y_ptr, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, H, S, T, groups, scale,
    D: gl.constexpr, N: gl.constexpr, STEPS: gl.constexpr, CUBIC: gl.constexpr, HELD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[b, h, s, :] = softmax over t of scale * q[b, h, s] . k[b, h, t], scale > 0; products and sums in float32.

    As `attention_scores_direct` where all STEPS > 2 steps of k stay in shared memory; but the exponentials of the last step wait in
    their registers for the sums and are written first, those of HELD steps before it wait in shared memory, rounded, and only the
    other steps' are made again. Of every second tile's exponentials CUBIC in four are made by multiply-adds. H200, 4 x 16 heads,
    D 64, S 512: 15.1 us, where `attention_scores_direct` takes 16.5.
    """
    gdc_launch_dependents()
    gdc_wait()
    M: gl.constexpr = 16 * gl.num_warps()
    SUMS: gl.constexpr = product_layout(gl.num_warps(), N)
    SIDE: gl.constexpr = gl.SliceLayout(1, SUMS)
    LAST: gl.constexpr = STEPS - 1
    AGAIN: gl.constexpr = LAST - HELD  # steps that are made twice
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    HALF: gl.constexpr = 6e4 if dtype == gl.float16 else 1e38  # sums up to which parts are held
    LIFT: gl.constexpr = 4.0 if HELD else 0.0  # so that later maxima may be larger, of what is held
    K_LAY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * N, D], dtype)
    ks = gl.allocate_shared_memory(dtype, [STEPS, 2 * N, D], K_LAY)
    qs = gl.allocate_shared_memory(dtype, [M, D], gl.NVMMASharedLayout.get_default_for([M, D], dtype))  # fmt: skip
    homes = ()
    for _ in gl.static_range(2 * HELD):
        home = gl.allocate_shared_memory(dtype, [M, N], own(gl.num_warps(), N))
        homes = homes + (home,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no stars)
    q_ptr, k_ptr, y_ptr = placed(
        q_ptr, k_ptr, y_ptr, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, H, S, T, groups
    )
    fetch(qs, q_ptr, stride_qs, M, D, False)
    for i in gl.static_range(STEPS):
        fetch(ks.index(i), k_ptr + stride_ks.to(gl.int64) * (i * 2 * N), stride_ks, 2 * N, D, True)
        async_copy.commit_group()
    at = spots(T, N)
    factor = scale * LOG2E
    async_copy.wait_group(STEPS - 1)
    fence_async_shared()
    q = qs.load(gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2))
    base = gl.zeros([M], gl.float32, SIDE)
    sums = by_thread(gl.zeros([M, N], gl.float32, SUMS), N)
    # what the compiler does not know to be 1 or 2 it leaves a loop, and steps stay apart, for else registers run out
    once = gl.minimum(groups, 1)
    laps = AGAIN if AGAIN > 2 else T // (2 * N) - 1 - HELD
    for step in range(laps):
        if AGAIN > 1:  # noqa: SIM102  (settled by the compiler; the inner one at run time)
            if step == 1:
                async_copy.wait_group(0)
                fence_async_shared()
        left = begin(q, ks.index(step).slice(0, N), N)
        right = begin(q, ks.index(step).slice(N, N), N)
        s = warpgroup_mma_wait(1, deps=(left,))
        if step == 0:
            base = based(gl.max(s, 1), factor) + LIFT
        sums += by_thread(gl.exp2(s * factor - base[:, None]), N)
        s = warpgroup_mma_wait(0, deps=(right,))
        sums += by_thread(powers(s * factor - base[:, None], N, CUBIC), N)
    if AGAIN == 1:
        async_copy.wait_group(0)
        fence_async_shared()
    for i in gl.static_range(HELD):
        for _ in range(once):
            left = begin(q, ks.index(AGAIN + i).slice(0, N), N)
            right = begin(q, ks.index(AGAIN + i).slice(N, N), N)
            s = warpgroup_mma_wait(1, deps=(left,))
            e = gl.exp2(s * factor - base[:, None])
            sums += by_thread(e, N)
            hold(homes[2 * i], e, N)
            s = warpgroup_mma_wait(0, deps=(right,))
            e = powers(s * factor - base[:, None], N, CUBIC)
            sums += by_thread(e, N)
            hold(homes[2 * i + 1], e, N)
    left = begin(q, ks.index(LAST).slice(0, N), N)
    right = begin(q, ks.index(LAST).slice(N, N), N)
    s = warpgroup_mma_wait(1, deps=(left,))
    near = gl.exp2(s * factor - base[:, None])
    sums += by_thread(near, N)
    s = warpgroup_mma_wait(0, deps=(right,))
    far = powers(s * factor - base[:, None], N, CUBIC)
    sums += by_thread(far, N)
    norm = gl.convert_layout(gl.sum(sums, 1), SIDE)
    share = 1.0 / norm
    near, far = near * share[:, None], far * share[:, None]
    put(y_ptr + LAST * (2 * N), at, ordered(near, dtype, N), ordered(far, dtype, N), N)
    more = 0
    if HELD:
        well = judged(norm, HALF)
        if well == 2:
            for i in gl.static_range(HELD):
                for _ in range(once):
                    y = held(homes[2 * i], share, N)
                    put(y_ptr + (AGAIN + i) * (2 * N), at, y, held(homes[2 * i + 1], share, N), N)
        else:  # what is held has left float16, so it is made again, too
            more = HELD
    shift = base + gl.log2(norm)
    for step in range(laps + more):
        left = begin(q, ks.index(step).slice(0, N), N)
        right = begin(q, ks.index(step).slice(N, N), N)
        s = warpgroup_mma_wait(1, deps=(left,))
        y = scores(s, factor, shift, dtype, N)
        s = warpgroup_mma_wait(0, deps=(right,))
        x = powers(s * factor - shift[:, None], N, CUBIC)
        put(y_ptr + step * (2 * N), at, y, ordered(x, dtype, N), N)
    # nothing hangs on it before, and the warps need not meet between the sweeps
    if not HELD:
        well = judged(norm, HALF)
    if well == 0:
        once_more(q, ks, k_ptr, y_ptr, at, stride_ks, factor, STEPS, True, D, N)


WARPS = 8
_STEP = 2 * BLOCK_N


def kept_refusal(
    s: int, t: int, d: int, dtype: str, align: int, strides: Sequence[int]
) -> str | None:
    """None, or why these scores cannot be made; `strides` are those of q and k over batch, head and row."""
    reason = direct_refusal(s, t, d, dtype, align, strides)
    if reason is None and (s < 16 * WARPS or t <= 2 * _STEP or not kept_configs(s, t, d)):
        reason = f"S from {16 * WARPS}, T above {2 * _STEP}, and k of a head in half of the shared memory are required"
    return reason


def kept_configs(s: int, t: int, d: int) -> list[dict[str, Any]]:
    """Configurations, best guess first: how many of four exponentials of every second tile are left to multiply-adds, and steps whose
    exponentials are held in shared memory."""
    rows = 16 * WARPS
    room = SHARED // (2 if d <= 64 else 1) - 2 * d * (t + rows)
    if room < 0:
        return []
    most = min(2 if d > 64 else 1, room // (2 * rows * _STEP), t // _STEP - 2)
    pairs = dict.fromkeys([(1, most), (2, most), (2, 0)])
    return [{"CUBIC": cubic, "HELD": held} for cubic, held in pairs]


def kept_launcher(
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
    fitting = kept_configs(s, t, d)
    config = config if dict(config) in fitting else fitting[0]
    constexprs = {"N": BLOCK_N, "STEPS": t // _STEP, **config}
    return by_rows(
        attention_scores_kept, shape, dtype, strides_q, strides_k, constexprs, WARPS, device
    )  # fmt: skip
