"""Softmax of long rows and its gradient, read once: a program holds a row in shared memory and registers while the next one comes in
its place; Hopper."""

from __future__ import annotations

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tensorlogic.kernels.row_access.shared_memory import exchange, parts_held
from tensorlogic.kernels.triton_runtime.device_math import finite_or_zero
from tensorlogic.kernels.triton_runtime.exact_exp import (
    based,
    exponential,
    gradient,
    high,
    low,
    raised,
)


@gluon.jit
def softmax_held(
    x_ptr, y_ptr, R, C,
    TILES: gl.constexpr, SHARED: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr, LANES: gl.constexpr,
    WIDTH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[r, :] = exp(x - max) / sum of x [R, C], rows held and exchanged as those of `cross_entropy_held`; float32.

    Each number is read and written once. C is a multiple of WIDTH, EVEN: of a tile; only the last of TILES may be ragged. With ODD it is
    none: tiles are a row's aligned groups, of which the last two may be ragged, and its ends are held apart.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pid, programs = gl.program_id(0), gl.num_programs(0)
    kind: gl.constexpr = x_ptr.dtype.element_ty
    WORDS: gl.constexpr = WIDTH if kind == gl.float32 else WIDTH // 2
    IN: gl.constexpr = gl.BlockedLayout([1, WORDS], [32, 1], [gl.num_warps(), 1], [1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32, 1], [gl.num_warps(), 1], [1, 0])
    SIDE: gl.constexpr = gl.SliceLayout(1, IN)
    W = C // (WIDTH // WORDS)
    # 0, which the compiler does not know, as in `cross_entropy_together`
    none = R >> 31
    w_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    piece = gl.arange(0, LANES, SIDE)[:, None] * WORDS
    piece = piece + gl.arange(0, WORDS, gl.SliceLayout(0, IN))[None, :]
    place = gl.arange(0, LANES, gl.SliceLayout(1, OUT))[:, None] * WIDTH
    place = place + gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))[None, :]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    xs = gl.allocate_shared_memory(gl.int32, [SHARED, LANES, WORDS], PLAIN)
    held = ()
    for _ in gl.static_range(SHARED, TILES):
        empty = gl.zeros([LANES, WORDS], gl.int32, IN)
        held = held + (empty,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no stars)
    m = gl.full([LANES], float("-inf"), gl.float32, SIDE)
    norm = gl.zeros([LANES], gl.float32, SIDE)
    if ODD:
        ENDS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        ends = gl.full([2 * WIDTH], float("-inf"), gl.float32, ENDS)
    for row in range(pid - programs, R, programs):
        begun = row >= 0  # before, the first row comes
        after = row + programs
        peak = gl.max(m, 0)
        if ODD:
            peak = gl.maximum(peak, based(gl.max(ends, 0), kind))
        base = finite_or_zero(peak)
        part = norm * raised(m - base, kind)
        part = (part.to(gl.int32, bitcast=True) ^ none).to(gl.float32, bitcast=True)  # rounded
        total = gl.sum(part, 0)
        if ODD:
            total += gl.sum(exponential(ends, base, kind), 0)
        # NaN of inf, as inf - inf is; inf of -inf alone, whose powers are 0
        scale = 1.0 / total
        m = gl.full([LANES], float("-inf"), gl.float32, SIDE)
        norm = gl.zeros([LANES], gl.float32, SIDE)
        if ODD:
            begin, size, at_e, some = parts_held(row.to(gl.int64), R, C, WIDTH, ENDS)  # type: ignore[attr-defined]
            y = gradient(ends, base, scale, kind)
            gl.store(y_ptr + at_e, y.to(kind), mask=some & begun, cache_modifier=".cs")
            to = y_ptr + begin
            begin, length, at_e, some = parts_held(after.to(gl.int64), R, C, WIDTH, ENDS)
            ends = gl.load(x_ptr + at_e, mask=some, other=float("-inf")).to(gl.float32)
            here, W = w_ptr + begin // (WIDTH // WORDS), length // (WIDTH // WORDS)
        else:
            here = w_ptr + after.to(gl.int64) * W
            to, size = y_ptr + row.to(gl.int64) * C, C  # type: ignore[attr-defined]
        m, norm, held = exchange(
            xs, held, here, to, m, norm, base, scale, begun, begun, after < R, none, size, W, piece, place,
            TILES, SHARED, AHEAD, EVEN, ODD, LANES, WIDTH, WORDS, IN, OUT,
        )  # fmt: skip


@gluon.jit
def multiplied(y, dy, kind: gl.constexpr):
    """The products of two tiles of words, those of a lane added up; float32."""
    both = low(y, kind) * low(dy, kind)
    if kind != gl.float32:
        both += high(y, kind) * high(dy, kind)
    return gl.sum(both, 1)


@gluon.jit
def put_gradient(
    ptr, at, C, y, dy, dot, WHOLE: gl.constexpr, LANES: gl.constexpr, WIDTH: gl.constexpr, LIES: gl.constexpr
):  # fmt: skip
    """dx[at] = y (dy - dot) of two tiles of words; `at` below C where not WHOLE."""
    kind: gl.constexpr = ptr.dtype.element_ty
    d = low(y, kind) * (low(dy, kind) - dot)
    if kind != gl.float32:
        both = gl.join(d.to(kind), (high(y, kind) * (high(dy, kind) - dot)).to(kind))
        d = gl.convert_layout(both.reshape([LANES, WIDTH]), LIES)
    if WHOLE:
        gl.store(ptr + at, d, cache_modifier=".cs")
    else:
        gl.store(ptr + at, d, mask=at < C, cache_modifier=".cs")


@gluon.jit
def softmax_backward_held(
    y_ptr, dy_ptr, dx_ptr, R, C,
    TILES: gl.constexpr, SHARED: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr, LANES: gl.constexpr,
    WIDTH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """dx[r, :] = y (dy - sum(dy y)) of [R, C], rows of y and dy held, a tile of each exchanged at a time, as `exchange` does; float32."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pid, programs = gl.program_id(0), gl.num_programs(0)
    kind: gl.constexpr = y_ptr.dtype.element_ty
    WORDS: gl.constexpr = WIDTH if kind == gl.float32 else WIDTH // 2
    TILE: gl.constexpr = LANES * WORDS  # in words
    IN: gl.constexpr = gl.BlockedLayout([1, WORDS], [32, 1], [gl.num_warps(), 1], [1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32, 1], [gl.num_warps(), 1], [1, 0])
    SIDE: gl.constexpr = gl.SliceLayout(1, IN)
    W = C // (WIDTH // WORDS)
    # 0, which the compiler does not know, as in `cross_entropy_together`
    none = R >> 31
    yw_ptr = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    dw_ptr = dy_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    piece = gl.arange(0, LANES, SIDE)[:, None] * WORDS
    piece = piece + gl.arange(0, WORDS, gl.SliceLayout(0, IN))[None, :]
    place = gl.arange(0, LANES, gl.SliceLayout(1, OUT))[:, None] * WIDTH
    place = place + gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))[None, :]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ys = gl.allocate_shared_memory(gl.int32, [SHARED, LANES, WORDS], PLAIN)
    ds = gl.allocate_shared_memory(gl.int32, [SHARED, LANES, WORDS], PLAIN)
    held, other = (), ()
    for _ in gl.static_range(SHARED, TILES):
        empty = gl.zeros([LANES, WORDS], gl.int32, IN)
        held = held + (empty,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no stars)
        other = other + (empty,)  # type: ignore[assignment]  # noqa: RUF005
    along = gl.zeros([LANES], gl.float32, SIDE)
    if ODD:
        ENDS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        y_e = gl.zeros([2 * WIDTH], gl.float32, ENDS)
        d_e = gl.zeros([2 * WIDTH], gl.float32, ENDS)
    for row in range(pid - programs, R, programs):
        begun = row >= 0  # before, the first row comes
        after = row + programs
        more = after < R
        dot = gl.sum(along, 0)
        along = gl.zeros([LANES], gl.float32, SIDE)
        if ODD:
            dot += gl.sum(y_e * d_e, 0)
            begin, size, at_e, some = parts_held(row.to(gl.int64), R, C, WIDTH, ENDS)  # type: ignore[attr-defined]
            apart = (y_e * (d_e - dot)).to(kind)
            gl.store(dx_ptr + at_e, apart, mask=some & begun, cache_modifier=".cs")
            to = dx_ptr + begin
            begin, length, at_e, some = parts_held(after.to(gl.int64), R, C, WIDTH, ENDS)
            y_e = gl.load(y_ptr + at_e, mask=some, other=0.0).to(gl.float32)
            d_e = gl.load(dy_ptr + at_e, mask=some, other=0.0).to(gl.float32)
            begin, W = begin // (WIDTH // WORDS), length // (WIDTH // WORDS)
            y_here, d_here = yw_ptr + begin, dw_ptr + begin
        else:
            y_here, d_here = yw_ptr + after.to(gl.int64) * W, dw_ptr + after.to(gl.int64) * W
            to, size = dx_ptr + row.to(gl.int64) * C, C  # type: ignore[attr-defined]
        new, next_ = (), ()
        for k in gl.static_range(TILES + AHEAD):
            if k < SHARED:
                if begun:
                    y, dy = ys.index(k).load(IN), ds.index(k).load(IN)
                    put_gradient(to + k * (LANES * WIDTH), place, size, y, dy, dot, True, LANES, WIDTH, OUT)  # fmt: skip
                if more:
                    async_copy.async_copy_global_to_shared(
                        ys.index(k), y_here + (k * TILE + piece), eviction_policy="evict_first"
                    )
                    async_copy.async_copy_global_to_shared(
                        ds.index(k), d_here + (k * TILE + piece), eviction_policy="evict_first"
                    )
                async_copy.commit_group()
            elif k < TILES:
                if begun:
                    y, dy = held[k - SHARED] ^ none, other[k - SHARED] ^ none
                    left = size - k * (LANES * WIDTH)
                    put_gradient(to + k * (LANES * WIDTH), place, left, y, dy, dot, EVEN or k < TILES - 1 - ODD, LANES, WIDTH, OUT)  # fmt: skip
                at = k * TILE + piece
                y = gl.load(y_here + at, mask=(at < W) & more, other=0, eviction_policy="evict_first")  # fmt: skip
                dy = gl.load(d_here + at, mask=(at < W) & more, other=0, eviction_policy="evict_first")  # fmt: skip
                new = new + (y,)  # type: ignore[assignment]  # noqa: RUF005
                next_ = next_ + (dy,)  # type: ignore[assignment]  # noqa: RUF005
            if k >= AHEAD:
                if k - AHEAD < SHARED:
                    async_copy.wait_group(min(k, SHARED - 1) - (k - AHEAD))
                    y, dy = ys.index(k - AHEAD).load(IN), ds.index(k - AHEAD).load(IN)
                    along += multiplied(y, dy, kind)
                else:
                    y, dy = new[k - AHEAD - SHARED] ^ none, next_[k - AHEAD - SHARED] ^ none
                    along += multiplied(y, dy, kind)
        held, other = new, next_
