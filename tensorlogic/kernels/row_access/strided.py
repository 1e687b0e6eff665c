"""Device functions over strided lines of [outer, C, inner], whole or in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)  # what a maximum begins at: -inf - it is no NaN


@triton.jit
def placed(N, stride_c, stride_i, WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr):
    """(outer, first of inner) of this program, and where a tile's elements lie from its first one on."""
    tiles = tl.cdiv(N, BLOCK_I)
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * BLOCK_I
    return outer, first, within(stride_c, stride_i, WIDE, BLOCK_C, BLOCK_I)


@triton.jit
def within(stride_c, stride_i, WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr):
    """Offsets of a tile [BLOCK_C, BLOCK_I], in 32 bits unless WIDE: in 64 they take twice the registers."""
    c, i = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_I)
    if WIDE:
        c, i = c.to(tl.int64), i.to(tl.int64)
    return (c * stride_c)[:, None] + (i * stride_i)[None, :]


@triton.jit
def begun(ptr, outer, first, stride_o, stride_i):
    """Where this program's lines begin."""
    return ptr + outer * stride_o + first.to(tl.int64) * stride_i


@triton.jit
def from_start(ptr, start, stride_c):
    """The same from element `start` of the lines on."""
    return ptr + (tl.full([], 0, tl.int64) + start) * stride_c


@dataclass(frozen=True)
class Lines:
    """[outer, length, inner], and for each tensor how far apart these lie in memory, in elements."""

    outer: int
    length: int
    inner: int
    strides: tuple[tuple[int, int, int], ...]

    def named(self, names: Sequence[str]) -> dict[str, int]:
        """The strides of tensors of these names, as kernels name them: x_o, x_c, x_i."""
        pairs = zip(names, self.strides, strict=True)
        return {f"{n}_{letter}": s for n, three in pairs for letter, s in zip("oci", three, strict=True)}  # fmt: skip

    def wide(self, block_c: int, block_i: int) -> bool:
        """Whether offsets within a tile may leave 32 bits."""
        return max(block_c * abs(c) + block_i * abs(i) for _, c, i in self.strides) >= 2**31


NAMES = (("x", "y"), ("dy", "y", "dx"))  # of forward's tensors and backward's


@triton.jit
def part_of(C, SPAN):
    """Where this program's part of C elements begins, and its length, which 32 bits hold."""
    begin = tl.program_id(1).to(tl.int64) * SPAN
    return begin, tl.minimum(C - begin, SPAN).to(tl.int32)


@triton.jit
def inside(start, length, live, BLOCK_C: tl.constexpr):
    """What there is of a tile from element `start` of a part on, [BLOCK_C, BLOCK_I]."""
    return (tl.arange(0, BLOCK_C) < length - start)[:, None] & live[None, :]


@triton.jit
def tile(
    ptr, at, start, stride_c, length, live, OTHER: tl.constexpr, POLICY: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A tile from element `start` of a part on, OTHER where there is nothing."""
    mask = inside(start, length, live, BLOCK_C)
    return tl.load(from_start(ptr, start, stride_c) + at, mask=mask, other=OTHER, eviction_policy=POLICY)  # fmt: skip


@triton.jit
def left_by(part, PARTS, SLOTS: tl.constexpr, BLOCK_I: tl.constexpr):
    """Where part `part` of this program's lines leaves SLOTS numbers a line, BLOCK_I of each beside one another."""
    return (tl.program_id(0).to(tl.int64) * PARTS + part) * (SLOTS * BLOCK_I)
