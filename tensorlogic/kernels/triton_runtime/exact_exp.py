"""Exponentials and products of softmax's gradient by exact arithmetic on 16-bit words."""

from __future__ import annotations

import triton
import triton.language as tl

from tensorlogic.kernels.triton_runtime.device_math import finite_or_zero

LOG2E = tl.constexpr(1.4426950408889634)


LN2 = tl.constexpr(0.6931471805599453)


ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the first guess: a cell begins as zeros


@triton.jit
def words(ptr, start, W, WHOLE: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr):
    """x[start : start + LANES WORDS] as words of 4 bytes, two halves each, so that registers hold no more than memory does; all
    in words. What lies behind the row's end is 0."""
    at = start + tl.arange(0, LANES)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    if WHOLE:
        return tl.load(ptr + at, eviction_policy="evict_first")
    else:
        return tl.load(ptr + at, mask=at < W, other=0, eviction_policy="evict_first")


@triton.jit
def low(v, kind: tl.constexpr):
    """The first value of each word, in float32."""
    if kind == tl.float16:
        return (v & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif kind == tl.bfloat16:
        return (v << 16).to(tl.float32, bitcast=True)
    else:
        return v.to(tl.float32, bitcast=True)


@triton.jit
def high(v, kind: tl.constexpr):
    """The second one."""
    if kind == tl.float16:
        return (v >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (v & -65536).to(tl.float32, bitcast=True)


@triton.jit
def exponential(x, base, kind: tl.constexpr):
    """exp(x - base), `base` as `based` returns it: one instruction less for float16, whose base is in units of log 2 and whose
    product a fused multiply-add leaves exact; values as large as the others' are subtracted first.

    The multiply-add is asked for: of a value chosen beside a constant, as at a row's ragged end, the compiler multiplies both first.
    """
    if kind != tl.float16:
        return tl.exp2((x - base) * LOG2E)
    else:
        return tl.exp2(tl.fma(x, LOG2E, -base))


@triton.jit
def based(x, kind: tl.constexpr):
    """x as a base of `exponential`."""
    if kind != tl.float16:
        return x
    else:
        return x * LOG2E


@triton.jit
def under(x, base, kind: tl.constexpr):
    """How far x lies under a base, in its units; exact for float16, as in `exponential`."""
    if kind != tl.float16:
        return base - x
    else:
        return tl.fma(-x, LOG2E, base)


@triton.jit
def raised(base, kind: tl.constexpr):
    """exp of a difference of bases."""
    if kind != tl.float16:
        return tl.exp2(base * LOG2E)
    else:
        return tl.exp2(base)


@triton.jit
def step(m, norm, v, inside, WHOLE: tl.constexpr, kind: tl.constexpr):
    """Take a tile of words into each lane's largest base m and sum norm of exp(x - m)."""
    a = low(v, kind)
    if not WHOLE:
        a = tl.where(inside, a, float("-inf"))
    if kind == tl.float32:
        most = tl.maximum(m, tl.max(a, 1))
        safe = finite_or_zero(most)
        e = exponential(a, safe[:, None], kind)
    else:
        b = high(v, kind)
        if not WHOLE:
            b = tl.where(inside, b, float("-inf"))
        most = tl.maximum(m, based(tl.max(tl.maximum(a, b), 1), kind))
        safe = finite_or_zero(most)
        e = exponential(a, safe[:, None], kind) + exponential(b, safe[:, None], kind)
    return most, norm * raised(m - safe, kind) + tl.sum(e, 1)


@triton.jit
def gradient(x, c, scale, kind: tl.constexpr):
    """scale softmax(x): the same instructions wherever it is made, so that it has the same bits."""
    return exponential(x, c, kind) * scale
