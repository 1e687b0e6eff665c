"""Device functions that several kernels use: activations, their derivatives, dropout's mask.

They take and return float32, and treat NaN and infinity as torch does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Philox4x32 passes BigCrush from 7 rounds on (Salmon et al. 2011)
ROUNDS = tl.constexpr(7)


@triton.jit
def follow(PDL: tl.constexpr):
    """Programmatic dependent launch: let the next kernel's programs be placed once all of this one's are, and wait until
    the kernels before are done and their results visible. First in a kernel, before anything is read or written; it
    hides the start of a launch behind the end of the one before, 0.7 to 1 µs on an H200."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch(ptrs, live):
    """Bring the cache lines that `live` pointers lie in into L2, without waiting. Right at any time, also before what
    will be written there is: L2 is where all multiprocessors agree. Compiled kernels only."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [ptrs.to(tl.int64), live.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def relu(x):
    """max(x, 0) that keeps NaN, as torch.relu does."""
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def gelu_erf(x):
    """x Φ(x) = x/2 (1 + erf(x / √2)): torch's gelu with approximate="none"."""
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_erf_grad(x):
    """d/dx x Φ(x) = Φ(x) + x φ(x); exp(-x²/2) / √(2π) is φ."""
    return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + 0.3989422804014327 * x * tl.exp(
        -0.5 * x * x
    )


@triton.jit
def gelu_tanh(x):
    """x/2 (1 + tanh(u)) = x σ(2u), u = √(2/π) (x + 0.044715 x³): torch's gelu with approximate="tanh"."""
    return x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def gelu_tanh_grad(x):
    """d/dx x σ(2u) = σ + x σ (1 - σ) 2u', which keeps the digits that 1 + tanh(u) loses far below 0."""
    s = 1 / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    slope = 1.5957691216057308 * (1 + 0.134145 * x * x)
    return s + x * s * (1 - s) * slope


@triton.jit
def silu(x):
    """x σ(x), as torch computes it: x / (1 + exp(-x))."""
    return x / (1 + tl.exp(-x))


@triton.jit
def silu_grad(x):
    """d/dx x σ(x) = σ (1 + x (1 - σ))."""
    s = 1 / (1 + tl.exp(-x))
    return s * (1 + x * (1 - s))


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation named KIND: "none", "relu", "gelu" (erf), "gelu_tanh" or "silu"."""
    if KIND == "relu":
        return relu(x)
    elif KIND == "gelu":
        return gelu_erf(x)
    elif KIND == "gelu_tanh":
        return gelu_tanh(x)
    elif KIND == "silu":
        return silu(x)
    else:
        tl.static_assert(KIND == "none")
        return x


@triton.jit
def activation_grad(dy, saved, KIND: tl.constexpr):
    """dy · act'(·), where `saved` is the output for relu and the pre-activation for the others."""
    if KIND == "relu":
        return tl.where(saved <= 0, 0.0, dy)
    elif KIND == "gelu":
        return dy * gelu_erf_grad(saved)
    elif KIND == "gelu_tanh":
        return dy * gelu_tanh_grad(saved)
    elif KIND == "silu":
        return dy * silu_grad(saved)
    else:
        tl.static_assert(KIND == "none")
        return dy


@triton.jit
def dropout_keep(seed, offset, index, p):
    """True where element `index` (an integer tensor) is kept: Philox(seed, offset, index) >= p.

    The same in every kernel and direction, whatever the block shapes: backward draws it again.
    `seed` and `offset` are int64.
    """
    index = index.to(tl.uint64)
    zero = tl.zeros_like(index).to(tl.uint32)
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    first = zero + (offset & 0xFFFFFFFF).to(tl.uint32)
    second = zero + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, low, high, first, second, ROUNDS)
    return tl.uint_to_uniform_float(bits) >= p


@triton.jit
def dropout(x, seed, offset, index, p):
    """x / (1 - p) where kept, else 0."""
    return tl.where(dropout_keep(seed, offset, index, p), x / (1 - p), 0.0)


@triton.jit
def powers(v):
    """exp(v) in two instructions: tl.exp keeps subnormal results, for three instructions more each."""
    return tl.exp2(v * 1.4426950408889634)


@triton.jit
def finite_or_zero(peak):
    """A maximum that can be subtracted: -inf - -inf would be NaN where exp(-inf) = 0 is meant."""
    return tl.where(peak == float("-inf"), 0.0, peak)
