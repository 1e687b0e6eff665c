"""Rows held in shared memory while they are read twice (Hopper)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.row_access.contiguous import row_body
from tensorlogic.kernels.triton_runtime.exact_exp import gradient, high, low, step

# of a multiprocessor's 227 KiB, beside what sums pass through
SHARED_BYTES = 225 * 1024


REGISTERS = 65536  # of a multiprocessor


def tiles(columns: int, dtype: str, config: Mapping[str, Any], tensors: int = 1) -> tuple[int, int]:
    """(tiles of a row, those of them in shared memory) where a program holds a row of each of `tensors`; none there where it does not.

    Tiles in shared memory are whole: of rows that begin at odd places the last two may not be.
    """
    lanes, warps, per = config["LANES"], config["num_warps"], config["per"]
    count = -(-columns * SIZES[dtype] // (16 * lanes))
    shared = max(count - config["KEPT"], count // 2)
    words = (count - shared) * 4 * lanes // (32 * warps)
    fits = (
        2 * words * tensors <= registers(config)
        and shared * 16 * lanes * per * tensors <= SHARED_BYTES
    )
    whole = shared <= count - 1 - odd(columns, dtype)
    return count, shared if fits and whole and config["AHEAD"] <= count else 0


def odd(columns: int, dtype: str) -> bool:
    """Whether rows begin at odd places: no multiple of 16 bytes."""
    return columns * SIZES[dtype] % 16 > 0


def registers(config: Mapping[str, Any]) -> int:
    """A thread's."""
    return min(255, REGISTERS // (32 * config["num_warps"] * config["per"]) // 8 * 8)


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
