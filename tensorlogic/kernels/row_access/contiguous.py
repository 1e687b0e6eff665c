"""Device functions over contiguous rows: body, ends, running maximum and sum."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_runtime.device_math import finite_or_zero, powers


@triton.jit
def online_step(m, norm, x):
    """Take x [LANES, WIDTH] into each lane's running maximum m and sum of exponentials norm [LANES]."""
    peak = tl.maximum(m, tl.max(x, 1))
    safe = finite_or_zero(peak)
    norm = norm * powers(m - safe) + tl.sum(powers(x - safe[:, None]), 1)
    return peak, norm


@triton.jit
def row_statistics(
    x_ptr, C, SUM: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, scale=1.0, off=0.0
):
    """max, sum of exp(x - max) and (with SUM) sum of x * scale - off of one row, in one read.

    WIDTH elements, one 16-byte load, stay within a thread, so a tile costs no shuffle and one extra exponential
    per WIDTH. The next tile is loaded before this one is used; the ragged tile goes first, all others are
    unmasked.
    """
    at = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    TILE: tl.constexpr = LANES * WIDTH
    whole = C // TILE * TILE
    ragged = at < C - whole
    first = tl.load(x_ptr + whole + at, mask=ragged, other=float("-inf"))
    x = tl.load(x_ptr + at, mask=(at < TILE) & (whole > 0), other=float("-inf"))
    total = tl.zeros([LANES], tl.float32)
    m = tl.full([LANES], float("-inf"), tl.float32)
    m, norm = online_step(m, tl.zeros([LANES], tl.float32), first.to(tl.float32))
    if SUM:
        total += tl.sum(tl.where(ragged, first.to(tl.float32) * scale - off, 0.0), 1)
    for start in range(TILE, whole, TILE):
        ahead = tl.load(x_ptr + start + at)
        m, norm = online_step(m, norm, x.to(tl.float32))
        if SUM:
            total += tl.sum(x.to(tl.float32) * scale - off, 1)
        x = ahead
    m, norm = online_step(m, norm, x.to(tl.float32))
    if SUM:
        total += tl.sum(tl.where(whole > 0, x.to(tl.float32) * scale - off, 0.0), 1)
    peak = tl.max(m, 0)
    return peak, tl.sum(norm * powers(m - finite_or_zero(peak)), 0), tl.sum(total, 0)


@triton.jit
def row_body(row, C, WIDTH: tl.constexpr):
    """(first, length) of the part of a row of C elements that whole aligned groups of WIDTH cover."""
    first = (WIDTH - row * C % WIDTH) % WIDTH
    return first, tl.maximum(C - first, 0).to(tl.int32) // WIDTH * WIDTH


@triton.jit
def row_ends(x_ptr, C, first, length, WIDTH: tl.constexpr):
    """The elements of a row before and behind its body, [2 * WIDTH] with -inf for none, their columns, and which there are."""
    lane = tl.arange(0, 2 * WIDTH)
    at = tl.where(lane < WIDTH, lane, first + length + lane - WIDTH)
    inside = at < tl.where(lane < WIDTH, tl.minimum(first, C), C)
    return tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32), at, inside


@triton.jit
def with_ends(peak, norm, total, ends, inside, scale=1.0, off=0.0):
    """The same statistics with a row's ends, as `row_ends` returns them, taken in."""
    higher = tl.maximum(peak, tl.max(ends, 0))
    safe = finite_or_zero(higher)
    norm = norm * powers(peak - safe) + tl.sum(powers(ends - safe), 0)
    return higher, norm, total + tl.sum(tl.where(inside, ends * scale - off, 0.0), 0)
