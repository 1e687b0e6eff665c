"""Softmax cross-entropy, forward, with a row's first tiles on their way before its target is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.cross_entropy.rows import write_loss
from tensorlogic.kernels.triton_runtime.device_math import finite_or_zero, follow
from tensorlogic.kernels.triton_runtime.exact_exp import (
    LN2,
    LOG2E,
    based,
    exponential,
    high,
    low,
    words,
)
from tensorlogic.kernels.triton_runtime.launch import prepare

IGNORED = tl.constexpr(-(2**31))  # the bits of -0.0, which no loss is


@triton.jit
def above(v, base, inside, WHOLE: tl.constexpr, kind: tl.constexpr):
    """Each lane's sum of exp(x - base) over a tile of words."""
    a = low(v, kind)
    if not WHOLE:
        a = tl.where(inside, a, float("-inf"))
    e = exponential(a, base, kind)
    if kind != tl.float32:
        b = high(v, kind)
        if not WHOLE:
            b = tl.where(inside, b, float("-inf"))
        e += exponential(b, base, kind)
    return tl.sum(e, 1)


@triton.jit
def largest(v, inside, WHOLE: tl.constexpr, kind: tl.constexpr):
    """The largest value of a tile of words."""
    a = low(v, kind)
    if kind != tl.float32:
        a = tl.maximum(a, high(v, kind))
    if not WHOLE:
        a = tl.where(inside, a, float("-inf"))
    return tl.max(tl.max(a, 1), 0)


@triton.jit
def swept(ptr, W, LANES: tl.constexpr, WORDS: tl.constexpr, kind: tl.constexpr):
    """(largest value, sum of exponentials over it) of a row of W words, in two sweeps."""
    piece = tl.arange(0, LANES)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    peak = tl.full([], float("-inf"), tl.float32)
    for start in range(0, W, LANES * WORDS):
        v = words(ptr, start, W, False, LANES, WORDS)
        peak = tl.maximum(peak, largest(v, piece < W - start, False, kind))
    base = based(finite_or_zero(peak), kind)
    norm = tl.zeros([LANES], tl.float32)
    for start in range(0, W, LANES * WORDS):
        v = words(ptr, start, W, False, LANES, WORDS)
        norm += above(v, base, piece < W - start, False, kind)
    return peak, tl.sum(norm, 0)


@triton.jit
def cross_entropy_ahead(
    x_ptr, t_ptr, loss_ptr, lse_ptr, R, C, IGNORE,
    SAVE: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    SKIP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """loss[r] = logsumexp(x[r]) - x[r, t], a program a row; -0.0, and only there, where the row is ignored. float32, the same bits every run.

    C is a multiple of WIDTH, EVEN: of a tile. DEPTH tiles are asked for before the target is known; SKIP: of a row
    that is ignored no more are read, for which the others wait until their target is known (512 rows: 0.8 us). All
    exponentials are taken over the largest value of the first tile, without a running maximum; a row that rises so far above it
    that their sum overflows, or whose first tile holds nothing finite, is swept again.
    """
    follow(PDL)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = WIDTH if kind == tl.float32 else WIDTH // 2
    TILE: tl.constexpr = LANES * WORDS  # in words
    W = C // (WIDTH // WORDS)
    row = tl.program_id(0).to(tl.int64)
    here = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row * W
    first = words(here, 0, W, EVEN or TILES > 1, LANES, WORDS)
    held = (first,)
    for k in tl.static_range(1, DEPTH):
        tile = words(here, k * TILE, W, EVEN or k < TILES - 1, LANES, WORDS)
        held = held + (tile,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no stars)
    t = tl.load(t_ptr + row)
    live = t != IGNORE
    known = (t >= 0) & (t < C)
    target = tl.where(known, t, 0)
    x_t = tl.load(x_ptr + row * C + target, mask=known & live, other=float("nan")).to(tl.float32)
    piece = tl.arange(0, LANES)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    norm = tl.zeros([LANES], tl.float32)
    peak = largest(first, piece < W, EVEN or TILES > 1, kind)
    base = based(finite_or_zero(peak), kind)
    go = live
    if not SKIP:
        go = tl.full([], True, tl.int1)
    if go:
        ahead = held
        for k in tl.static_range(TILES):
            if k + DEPTH < TILES:
                tile = words(
                    here, (k + DEPTH) * TILE, W, EVEN or k + DEPTH < TILES - 1, LANES, WORDS
                )
                ahead = ahead + (tile,)  # type: ignore[assignment]  # noqa: RUF005
            norm += above(ahead[k], base, piece < W - k * TILE, EVEN or k < TILES - 1, kind)
    total = tl.sum(norm, 0)
    steady = (total < float("inf")) & (peak > float("-inf"))
    if live & (steady == 0):
        peak, total = swept(here, W, LANES, WORDS, kind)
    log = tl.log(total)
    if kind == tl.float16:  # its base was rounded
        safe = finite_or_zero(peak)
        log -= tl.fma(safe, LOG2E, -based(safe, kind)) * LN2
    loss = (peak - x_t) + log  # peak + log first would round a large peak
    bits = tl.where(loss == 0.0, 0, loss.to(tl.int32, bitcast=True))
    tl.store(loss_ptr + row, tl.where(live, bits, IGNORED).to(tl.float32, bitcast=True))
    if SAVE:
        tl.store(lse_ptr + row, tl.where(live, peak + log, 0.0))


@triton.jit
def cross_entropy_total(
    loss_ptr, y_ptr, share_ptr, R, MEAN: tl.constexpr, SAVE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """y = sum or mean of loss[:R] over the rows that count, those that are not -0.0; share = the gradient's factor. One program, fixed order."""
    follow(PDL)
    lane = tl.arange(0, BLOCK)
    parts = tl.zeros([BLOCK], tl.float32)
    counted = tl.zeros([BLOCK], tl.int32)
    for start in range(0, R, BLOCK):
        inside = start + lane < R
        part = tl.load(loss_ptr + start + lane, mask=inside, other=0.0)
        counted += (inside & (part.to(tl.int32, bitcast=True) != IGNORED)).to(tl.int32)
        parts += part
    write_loss(y_ptr, share_ptr, tl.sum(parts, 0), tl.sum(counted, 0), MEAN, SAVE)


MOST_TILES = 32  # of a row: its steps are written out
LEAST_BYTES, MOST_BYTES = 8 * 1024, 16 * 1024 * MOST_TILES  # of a row


def ahead_refusal(
    columns: int, dtype: str, reduction: str, smoothing: float, align: int
) -> str | None:
    """None, or why programs that ask ahead cannot serve such a loss."""
    if reduction == "none" or smoothing:
        return "a reduced loss without smoothing is required"
    length = columns * SIZES[dtype]
    if align < 16 or length % 16 or not LEAST_BYTES <= length <= MOST_BYTES:
        return f"rows of whole groups of 16 bytes at 16-byte addresses, {LEAST_BYTES} to {MOST_BYTES} bytes, are required"
    return None


def tiles(columns: int, dtype: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """(lanes, tiles of a row): a neighbour's tiles are made larger where a row has too many of them."""
    groups, lanes = columns * SIZES[dtype] // 16, config["LANES"]
    while -(-groups // lanes) > MOST_TILES:
        lanes *= 2
    return lanes, -(-groups // lanes)


def ahead_configs(columns: int, dtype: str) -> list[dict[str, Any]]:
    """Configurations, best guess first: groups of 16 bytes in a tile, warps, tiles on their way, whether ignored rows are skipped."""
    groups = columns * SIZES[dtype] // 16
    wide = ((512, 8, 2, True), (1024, 8, 1, True), (256, 8, 4, True), (1024, 8, 1, False))
    narrow = ((256, 4, 2, True), (128, 4, 4, True), (256, 4, 2, False))
    return [
        {"LANES": lanes, "num_warps": warps, "DEPTH": depth, "SKIP": skip}
        for lanes, warps, depth, skip in (wide if groups >= 2048 else narrow)
        if groups <= lanes * MOST_TILES
    ]


def ahead_launcher(
    rows: int,
    columns: int,
    dtype: str,
    reduction: str,
    ignore_index: int,
    config: Mapping[str, Any],
    device: torch.device,
    *,
    save: bool = False,
) -> Callable[..., bool]:
    """A callable (x, t, loss, lse, y, share) -> bool, as that of `cross_entropy_launcher` for "mean" or "sum", without a counter."""
    lanes, count = tiles(columns, dtype, config)
    start = prepare(
        cross_entropy_ahead,
        grid=(rows, 1, 1),
        pointers={"x_ptr": dtype, "t_ptr": "i64", "loss_ptr": "f32", "lse_ptr": "f32"},
        integers={"R": rows, "C": columns, "IGNORE": ignore_index},
        constexprs={
            "SAVE": save, "TILES": count, "DEPTH": min(config["DEPTH"], count), "EVEN": columns * SIZES[dtype] % (16 * lanes) == 0,
            "LANES": lanes, "WIDTH": 16 // SIZES[dtype], "SKIP": config["SKIP"],
        },
        num_warps=config["num_warps"],
        device=device,
    )  # fmt: skip
    last = prepare(
        cross_entropy_total,
        grid=(1, 1, 1),
        pointers={"loss_ptr": "f32", "y_ptr": dtype, "share_ptr": "f32"},
        integers={"R": rows},
        constexprs={"MEAN": reduction == "mean", "SAVE": save, "BLOCK": 4096},
        num_warps=32,
        device=device,
    )

    def both(x: Any, t: Any, loss: Any, lse: Any, y: Any, share: Any) -> bool:
        return start(x, t, loss, lse) and last(loss, y, share)

    return both
