"""Cross-entropy with its gradient in one pass over rows that no program's registers hold: the rest lies in shared memory; Hopper."""

from __future__ import annotations

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tensorlogic.ops.common.triton_cross_entropy_together import (
    LN2,
    ONE,
    based,
    exponential,
    gradient,
    high,
    low,
    raised,
    step,
    under,
)
from tensorlogic.ops.common.triton_rows import finite_or_zero, row_body


@gluon.jit
def parts_held(row, R, C, WIDTH: gl.constexpr, LIES: gl.constexpr):
    """`parts_of` in Gluon: where a row's groups begin and how many elements they have; where its ends lie, and which there are."""
    first, length = row_body(row, C, WIDTH)
    length = gl.where(row < R, length, 0)
    lane = gl.arange(0, 2 * WIDTH, LIES)
    at = gl.where(lane < WIDTH, lane, first + length + lane - WIDTH)
    inside = (at < gl.where(lane < WIDTH, gl.minimum(first, C), C)) & (row < R)
    return gl.multiple_of(row * C + first, WIDTH), length, row * C + at, inside


@gluon.jit
def put_tile(
    ptr, at, C, v, c, scale, live, WHOLE: gl.constexpr, LANES: gl.constexpr, WIDTH: gl.constexpr, LIES: gl.constexpr
):  # fmt: skip
    """dx[at] = scale softmax(x) of a tile of words, or 0 where the row is ignored; `at` below C where not WHOLE."""
    kind: gl.constexpr = ptr.dtype.element_ty
    d = gradient(low(v, kind), c, scale, kind)
    if kind != gl.float32:
        both = gl.join(d.to(kind), gradient(high(v, kind), c, scale, kind).to(kind))
        d = gl.convert_layout(both.reshape([LANES, WIDTH]), LIES)
    d = gl.where(live, d, 0.0)
    if WHOLE:
        gl.store(ptr + at, d, cache_modifier=".cs")
    else:
        gl.store(ptr + at, d, mask=at < C, cache_modifier=".cs")


@gluon.jit
def exchange(
    xs, held, here, to, m, norm, c, scale, live, writes, more, none, C, W, piece, place,
    TILES: gl.constexpr, SHARED: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr, LANES: gl.constexpr,
    WIDTH: gl.constexpr, WORDS: gl.constexpr, IN: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Write scale exp(x - c) of the C elements that are held to `to`, and hold the W words that come from `here`, each if there are any;
    (m, norm) of these, and their tiles in registers. The last tile is ragged unless EVEN, the last two may be with ODD.

    As soon as a tile is written, the next row's comes in its place, and AHEAD tiles later it is summed.
    """
    kind: gl.constexpr = to.dtype.element_ty
    TILE: gl.constexpr = LANES * WORDS  # in words
    new = ()
    for k in gl.static_range(TILES + AHEAD):
        if k < SHARED:
            if writes:
                v = xs.index(k).load(IN)
                put_tile(to + k * (LANES * WIDTH), place, C, v, c, scale, live, True, LANES, WIDTH, OUT)  # fmt: skip
            if more:
                async_copy.async_copy_global_to_shared(
                    xs.index(k), here + (k * TILE + piece), eviction_policy="evict_first"
                )
            async_copy.commit_group()
        elif k < TILES:
            if writes:
                v = held[k - SHARED] ^ none
                left = C - k * (LANES * WIDTH)
                put_tile(to + k * (LANES * WIDTH), place, left, v, c, scale, live, EVEN or k < TILES - 1 - ODD, LANES, WIDTH, OUT)  # fmt: skip
            at = k * TILE + piece
            coming = gl.load(here + at, mask=(at < W) & more, other=0, eviction_policy="evict_first")  # fmt: skip
            new = new + (coming,)  # type: ignore[assignment]  # noqa: RUF005
        if k >= AHEAD:
            if k - AHEAD < SHARED:
                async_copy.wait_group(min(k, SHARED - 1) - (k - AHEAD))
                m, norm = step(m, norm, xs.index(k - AHEAD).load(IN), piece < W, True, kind)
            else:
                v = new[k - AHEAD - SHARED] ^ none
                m, norm = step(m, norm, v, piece < W - (k - AHEAD) * TILE, EVEN or k - AHEAD < TILES - 1 - ODD, kind)  # fmt: skip
    return m, norm, new


@gluon.jit
def cross_entropy_held(
    x_ptr, t_ptr, loss_ptr, lse_ptr, share_ptr, cell_ptr, used_ptr, dx_ptr, R, C, IGNORE,
    TILES: gl.constexpr, SHARED: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr, LANES: gl.constexpr,
    WIDTH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The losses of x [R, C], and dx as `cross_entropy_together` makes it, with its bits; float32.

    A program stays and holds a row: SHARED tiles in shared memory, the others in registers, exchanged for the next row's tile by tile,
    so that memory is read and written at the same time and rests only between the last tile's arrival and the row's sum. C is a
    multiple of WIDTH, EVEN: of a tile; only the last of TILES may be ragged. With ODD it is none: tiles are a row's aligned groups, of
    which the last two may be ragged, and its ends are held apart.
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
    guess = gl.load(cell_ptr) ^ ONE
    sure = gl.load(cell_ptr + 1) == 0
    share = gl.load(share_ptr)
    t = gl.program_id(0).to(gl.int64) * 0 + IGNORE
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
        writes = sure & begun
        first = row.to(gl.int64) * C  # type: ignore[attr-defined]
        live = t != IGNORE
        known = (t >= 0) & (t < C)
        target = gl.where(known, t, 0)
        x_t = gl.load(x_ptr + first + target, mask=known & live & begun, other=float("nan")).to(gl.float32)  # fmt: skip
        after = row + programs
        more = after < R
        t = gl.load(t_ptr + after, mask=more, other=IGNORE)
        peak = gl.max(m, 0)
        if ODD:
            peak = gl.maximum(peak, based(gl.max(ends, 0), kind))
        part = norm * raised(m - finite_or_zero(peak), kind)
        part = (part.to(gl.int32, bitcast=True) ^ none).to(gl.float32, bitcast=True)  # rounded
        total = gl.sum(part, 0)
        if ODD:
            total += gl.sum(exponential(ends, finite_or_zero(peak), kind), 0)
        log = gl.log2(total) if kind == gl.float16 else gl.log(total)
        c = peak + log
        rest = (peak - c) + log  # what rounding took from c
        loss = under(x_t, peak, kind) + log
        if kind == gl.float16:
            loss *= LN2
        gl.store(loss_ptr + row, gl.where(live, loss, 0.0), mask=begun)
        gl.store(lse_ptr + row, c, mask=begun)
        gl.store(lse_ptr + R + row, rest, mask=begun)
        own = gl.where(known, guess.to(gl.float32, bitcast=True) * share, float("nan"))
        scale = raised(-rest, kind) * own
        m = gl.full([LANES], float("-inf"), gl.float32, SIDE)
        norm = gl.zeros([LANES], gl.float32, SIDE)
        if ODD:
            begin, size, at_e, some = parts_held(row.to(gl.int64), R, C, WIDTH, ENDS)  # type: ignore[attr-defined]
            apart = gl.where(live, gradient(ends, c, scale, kind), 0.0)
            gl.store(dx_ptr + at_e, apart.to(kind), mask=some & writes, cache_modifier=".cs")
            to = dx_ptr + begin
            begin, length, at_e, some = parts_held(after.to(gl.int64), R, C, WIDTH, ENDS)
            ends = gl.load(x_ptr + at_e, mask=some, other=float("-inf")).to(gl.float32)
            here, W = w_ptr + begin // (WIDTH // WORDS), length // (WIDTH // WORDS)
        else:
            here = w_ptr + after.to(gl.int64) * W
            to, size = dx_ptr + first, C
        m, norm, held = exchange(
            xs, held, here, to, m, norm, c, scale, live, writes, more, none, size, W, piece, place,
            TILES, SHARED, AHEAD, EVEN, ODD, LANES, WIDTH, WORDS, IN, OUT,
        )  # fmt: skip
        if writes:
            tl.debug_barrier()
            d = (gradient(x_t, c, raised(-rest, kind), kind) - 1.0) * own
            gl.store(dx_ptr + first + target, d.to(dx_ptr.dtype.element_ty), mask=live)
    if pid == 0:
        gl.store(used_ptr, guess)
        gl.store(used_ptr + 1, sure.to(gl.int32))
