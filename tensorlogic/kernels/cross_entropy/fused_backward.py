"""Softmax cross-entropy with its gradient in the same pass: made for a guessed incoming gradient, made again where that was wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.cross_entropy.rows import sum_losses, write_loss
from tensorlogic.kernels.row_access.ragged import SHORTEST, parts_of
from tensorlogic.kernels.triton_runtime.device_math import finite_or_zero, follow
from tensorlogic.kernels.triton_runtime.launch import prepare
from tensorlogic.system.compile_pool import CompileFailure

from ..triton_runtime.exact_exp import (
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
    words,
)


@triton.jit
def put(
    ptr, start, C, v, c, scale, live, WHOLE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr
):
    """dx[start : start + LANES WIDTH] = scale softmax(x) of a tile of words, or 0 where the row is ignored."""
    kind: tl.constexpr = ptr.dtype.element_ty
    d = gradient(low(v, kind), c, scale, kind)
    if kind != tl.float32:
        both = tl.join(d.to(kind), gradient(high(v, kind), c, scale, kind).to(kind))
        d = tl.reshape(both, [LANES, WIDTH])
    d = tl.where(live, d, 0.0)
    at = start + tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if WHOLE:
        tl.store(ptr + at, d, cache_modifier=".cs")
    else:
        tl.store(ptr + at, d, mask=at < C, cache_modifier=".cs")


@triton.jit
def put_ends(ptr, x, inside, c, scale, live):
    """The same of the elements at a row's ends, where they lie."""
    d = tl.where(live, gradient(x, c, scale, ptr.dtype.element_ty), 0.0)
    tl.store(ptr, d, mask=inside, cache_modifier=".cs")


@triton.jit
def count_valid(t_ptr, R, IGNORE, BLOCK: tl.constexpr):
    """How many of t[:R] are not IGNORE."""
    lane = tl.arange(0, BLOCK)
    counted = tl.zeros([BLOCK], tl.int32)
    for start in range(0, R, BLOCK):
        t = tl.load(t_ptr + start + lane, mask=start + lane < R, other=IGNORE)
        counted += (t != IGNORE).to(tl.int32)
    return tl.sum(counted, 0)


@triton.jit
def cross_entropy_together(
    x_ptr, t_ptr, loss_ptr, lse_ptr, y_ptr, share_ptr, counter_ptr, cell_ptr, used_ptr, dx_ptr, R, C, IGNORE,
    MEAN: tl.constexpr, HELD: tl.constexpr, EVEN: tl.constexpr, ODD: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum or mean of the losses of x [R, C], and dx = g share (softmax(x) - one-hot) for the g guessed in cell; float32.

    A program holds HELD tiles, a row, in registers, so that x is read once: 4 bytes an element in float16 where forward and backward
    move 6. C is a multiple of WIDTH, EVEN: of a tile; with ODD it is none: tiles are a row's aligned groups, its ends are held apart. The
    loop is left after a row where there is a program for each; without it the compiler asks for half of the row only when it has used
    the other half. An H200, 4096 x 32000 in float16: 142 us, 0.85 of the reachable bandwidth, two kernels 202; what reads again from
    L2 what it did not hold: 173 to 297."""
    follow(PDL)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = WIDTH if kind == tl.float32 else WIDTH // 2
    TILE: tl.constexpr = LANES * WORDS  # in words
    W = C // (WIDTH // WORDS)
    zero = tl.full([], 0, tl.int64)  # the interpreter's rows are Python's integers
    # 0, which the compiler does not know: what was unpacked before is unpacked again
    none = R >> 31
    w_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    t = tl.load(t_ptr + pid)
    if ODD:
        begin, length, at_e, some = parts_of(pid + zero, R, C, WIDTH)
        ends = tl.load(x_ptr + at_e, mask=some, other=float("-inf")).to(tl.float32)
        at_w, W = begin // (WIDTH // WORDS), length // (WIDTH // WORDS)
    held = ()
    for k in tl.static_range(HELD):
        if not ODD:
            at_w = (pid + zero) * W
        held = held + (  # type: ignore[assignment]  # noqa: RUF005  (Triton has no stars)
            words(w_ptr + at_w, k * TILE, W, EVEN or k < HELD - 1 - ODD, LANES, WORDS),
        )
    guess = tl.load(cell_ptr) ^ ONE
    sure = tl.load(cell_ptr + 1) == 0
    share = tl.load(share_ptr)
    valid = tl.full([], 0, tl.int32)
    piece = tl.arange(0, LANES)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    for row in range(pid, R, programs):
        first = (row + zero) * C
        live = t != IGNORE
        known = (t >= 0) & (t < C)
        target = tl.where(known, t, 0)
        x_t = tl.load(x_ptr + first + target, mask=known & live, other=float("nan")).to(tl.float32)
        after = row + programs
        more = after < R
        t = tl.load(t_ptr + after, mask=more, other=IGNORE)
        m = tl.full([LANES], float("-inf"), tl.float32)
        norm = tl.zeros([LANES], tl.float32)
        for k in tl.static_range(HELD):
            m, norm = step(m, norm, held[k], piece < W - k * TILE, EVEN or k < HELD - 1 - ODD, kind)
        peak = tl.max(m, 0)
        if ODD:
            peak = tl.maximum(peak, based(tl.max(ends, 0), kind))
        part = norm * raised(m - finite_or_zero(peak), kind)
        part = (part.to(tl.int32, bitcast=True) ^ none).to(tl.float32, bitcast=True)  # rounded: an
        # exchange fused with the product adds what one thread has not rounded, and threads then differ in their sums' last bit
        total = tl.sum(part, 0)
        if ODD:
            total += tl.sum(exponential(ends, finite_or_zero(peak), kind), 0)
        log = tl.log2(total) if kind == tl.float16 else tl.log(total)
        c = peak + log
        rest = (peak - c) + log  # what rounding took from c
        loss = under(x_t, peak, kind) + log
        if kind == tl.float16:
            loss *= LN2
        tl.store(loss_ptr + row, tl.where(live, loss, 0.0))
        tl.store(lse_ptr + row, c)
        tl.store(lse_ptr + R + row, rest)
        valid += live.to(tl.int32)
        own = tl.where(known, (guess.to(tl.float32, bitcast=True) * share), float("nan"))
        scale = raised(-rest, kind) * own
        new = ()
        here, size, next_w = first, C, W
        if ODD:
            here, size = begin, length
            if sure:
                put_ends(dx_ptr + at_e, ends, some, c, scale, live)
            begin, length, at_e, some = parts_of(after + zero, R, C, WIDTH)
            ends = tl.load(x_ptr + at_e, mask=some, other=float("-inf")).to(tl.float32)
            at_w, next_w = begin // (WIDTH // WORDS), length // (WIDTH // WORDS)
        for k in tl.static_range(HELD):
            start = k * LANES * WIDTH
            if sure:
                v = held[k] ^ none
                whole: tl.constexpr = EVEN or k < HELD - 1 - ODD
                put(dx_ptr + here, start, size, v, c, scale, live, whole, LANES, WIDTH)
            at = k * TILE + piece
            if not ODD:
                at_w = (after + zero) * W
            there = w_ptr + at_w + at
            following = tl.load(
                there, mask=(at < next_w) & more, other=0, eviction_policy="evict_first"
            )
            new = new + (following,)  # type: ignore[assignment]  # noqa: RUF005
        held = new
        if ODD:
            W = next_w
        if sure:
            tl.debug_barrier()
            d = (gradient(x_t, c, raised(-rest, kind), kind) - 1.0) * own
            tl.store(dx_ptr + first + target, d.to(dx_ptr.dtype.element_ty), mask=live)
    if pid == 0:
        tl.store(used_ptr, guess)
        tl.store(used_ptr + 1, sure.to(tl.int32))
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, (valid.to(tl.int64) << 32) + 1, sem="acq_rel")
    if (before & 0xFFFFFFFF) == programs - 1:
        everything = sum_losses(loss_ptr, R, BLOCK)
        write_loss(y_ptr, share_ptr, everything, (before >> 32) + valid, MEAN, False)
        tl.store(counter_ptr, tl.full([], 0, tl.int64))


@triton.jit
def cross_entropy_share(
    t_ptr, share_ptr, R, IGNORE, MEAN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """share = one over the rows that count, for a mean, else 1; one program."""
    follow(PDL)
    share = tl.full([], 1.0, tl.float32)
    if MEAN:
        share /= count_valid(t_ptr, R, IGNORE, BLOCK).to(tl.float32)
    tl.store(share_ptr, share)


@triton.jit
def cross_entropy_settle(
    x_ptr, t_ptr, lse_ptr, dy_ptr, share_ptr, used_ptr, cell_ptr, dx_ptr, R, C, IGNORE,
    ODD: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx as `cross_entropy_together` would have made it had it known dy: nothing to do where it guessed right.

    The cell learns dy: its first word is what to guess next, the second says whether guesses are wrong at present.
    """
    follow(PDL)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    dy = tl.load(dy_ptr).to(tl.float32)
    bits = dy.to(tl.int32, bitcast=True)
    if pid == 0:
        missed = (tl.load(cell_ptr) ^ ONE) != bits
        tl.store(cell_ptr, bits ^ ONE)
        tl.store(cell_ptr + 1, missed.to(tl.int32))
    zero = tl.full([], 0, tl.int64)  # the interpreter's rows are Python's integers
    todo = tl.cdiv(C, LANES * WIDTH) * (R + zero)
    if (tl.load(used_ptr) == bits) & (tl.load(used_ptr + 1) == 1):
        todo = zero
    TILE: tl.constexpr = LANES * WIDTH
    kind: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = WIDTH if kind == tl.float32 else WIDTH // 2
    W = C // (WIDTH // WORDS)
    tiles = tl.cdiv(C, TILE)
    factor = dy * tl.load(share_ptr)
    w_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    for unit in range(pid + zero, todo, programs):
        row = (unit + zero) // tiles
        tile = (unit + zero) % tiles
        at_w = row * W
        if ODD:
            here, length, at_e, some = parts_of(row, R, C, WIDTH)
            at_w, W = here // (WIDTH // WORDS), length // (WIDTH // WORDS)
        v = words(w_ptr + at_w, tile * LANES * WORDS, W, False, LANES, WORDS)
        t = tl.load(t_ptr + row)
        c = tl.load(lse_ptr + row)
        rest = tl.load(lse_ptr + R + row)
        live = t != IGNORE
        known = (t >= 0) & (t < C)
        own = tl.where(known, factor, float("nan"))
        scale = raised(-rest, kind) * own
        if not ODD:
            here, length = row * C, C
        put(dx_ptr + here, tile * TILE, length, v, c, scale, live, False, LANES, WIDTH)
        target = tl.where(known, t, 0)
        owner = target // TILE
        if ODD:
            if tile == 0:  # this tile's program has the ends, too
                ends = tl.load(x_ptr + at_e, mask=some, other=0.0).to(tl.float32)
                put_ends(dx_ptr + at_e, ends, some, c, scale, live)
            spot = target - (here - row * C)
            owner = tl.where((spot >= 0) & (spot < length), spot // TILE, 0)
        if owner == tile:
            x_t = tl.load(x_ptr + row * C + target, mask=known & live, other=float("nan")).to(
                tl.float32
            )
            tl.debug_barrier()
            d = (gradient(x_t, c, raised(-rest, kind), kind) - 1.0) * own
            tl.store(dx_ptr + row * C + target, d.to(dx_ptr.dtype.element_ty), mask=live)


# of a row that a thread holds: with more, two programs of 8 warps do not fit a multiprocessor
MOST_WORDS = 64


def together_refusal(
    columns: int, dtype: str, reduction: str, smoothing: float, align: int
) -> str | None:
    """None, or why loss and gradient cannot be made in one pass."""
    width = 16 // SIZES[dtype]
    if reduction == "none" or smoothing:
        return "a reduced loss without smoothing is required"
    if align < 16:
        return "tensors at 16-byte addresses are required"
    if columns % width and columns < SHORTEST * width:
        return f"rows of {columns} are too short to be cut into groups of {width}"
    return None


def together_configs(columns: int, dtype: str) -> list[dict[str, Any]]:
    """Configurations, best guess first: lanes and warps; none where a row is too long or shorter than half a tile."""
    width = 16 // SIZES[dtype]
    return [
        {"LANES": lanes, "num_warps": lanes // 32}
        for lanes in (256, 512, 128, 32)
        if lanes * width <= 2 * columns and 4 * triton.cdiv(columns, lanes * width) <= MOST_WORDS
    ]


def share_launcher(
    rows: int, reduction: str, ignore_index: int, device: torch.device
) -> Callable[..., bool]:
    """A callable (t, share) -> bool that writes what every row's gradient is multiplied by."""
    return prepare(
        cross_entropy_share,
        grid=(1, 1, 1),
        pointers={"t_ptr": "i64", "share_ptr": "f32"},
        integers={"R": rows, "IGNORE": ignore_index},
        constexprs={"MEAN": reduction == "mean", "BLOCK": 8192},
        num_warps=16,
        device=device,
    )


def together_launcher(
    rows: int,
    columns: int,
    dtype: str,
    reduction: str,
    ignore_index: int,
    config: dict[str, Any],
    device: torch.device,
) -> Callable[..., bool]:
    """A callable (x, t, part, lse, y, share, counter, cell, used, dx) -> bool for "mean" or "sum".

    x, dx [rows, columns] contiguous, t int64 [rows]; part: float32 workspace [rows]; lse: float32 [2 rows]; y: the loss, share:
    float32 [1]; counter: int64 [1], zero before and after; cell and used: int32 [2], for `settle_launcher`.
    """
    lanes, width = config["LANES"], 16 // SIZES[dtype]
    held = triton.cdiv(columns, lanes * width)
    if 4 * held > MOST_WORDS:
        raise CompileFailure(f"a program of {lanes} lanes does not hold a row of {columns} {dtype}")
    first = share_launcher(rows, reduction, ignore_index, device)
    start = prepare(
        cross_entropy_together,
        grid=(rows, 1, 1),
        pointers={
            "x_ptr": dtype, "t_ptr": "i64", "loss_ptr": "f32", "lse_ptr": "f32", "y_ptr": dtype, "share_ptr": "f32", "counter_ptr": "i64",
            "cell_ptr": "i32", "used_ptr": "i32", "dx_ptr": dtype,
        },
        integers={"R": rows, "C": columns, "IGNORE": ignore_index},
        constexprs={
            "MEAN": reduction == "mean", "HELD": held, "EVEN": columns % (lanes * width) == 0, "ODD": columns % width > 0,
            "BLOCK": 128 * config["num_warps"], "LANES": lanes, "WIDTH": width,
        },
        num_warps=config["num_warps"],
        device=device,
        registers=128 if 4 * held > MOST_WORDS // 2 else 64,
    )  # fmt: skip

    def both(x: Any, t: Any, part: Any, lse: Any, y: Any, share: Any, *rest: Any) -> bool:
        return first(t, share) and start(x, t, part, lse, y, share, *rest)

    return both


def settle_launcher(
    rows: int,
    columns: int,
    dtype: str,
    dy_dtype: str,
    ignore_index: int,
    device: torch.device,
    cores: int,
) -> Callable[..., bool]:
    """A callable (x, t, lse, dy, share, used, cell, dx) -> bool; dy: one element. With `used` zero, dx is made whatever it holds."""
    return prepare(
        cross_entropy_settle,
        grid=(cores * 8, 1, 1),
        pointers={
            "x_ptr": dtype, "t_ptr": "i64", "lse_ptr": "f32", "dy_ptr": dy_dtype, "share_ptr": "f32", "used_ptr": "i32", "cell_ptr": "i32",
            "dx_ptr": dtype,
        },
        integers={"R": rows, "C": columns, "IGNORE": ignore_index},
        constexprs={"ODD": columns * SIZES[dtype] % 16 > 0, "LANES": 256, "WIDTH": 16 // SIZES[dtype]},
        num_warps=8,
        device=device,
    )  # fmt: skip
