"""Cross-entropy with its gradient in one pass over rows that no program's registers hold: the rest lies in shared memory; Hopper."""

from __future__ import annotations

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tensorlogic.kernels.triton_runtime.device_math import finite_or_zero
from tensorlogic.kernels.triton_runtime.exact_exp import (
    LN2,
    ONE,
    based,
    exponential,
    gradient,
    raised,
    under,
)

from ..row_access.shared_memory import exchange, parts_held


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
