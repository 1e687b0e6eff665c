"""Element-wise kernels over contiguous data: one flat family, one for operands broadcast over rows or columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.ops.common.triton_launch import prepare
from tensorlogic.ops.common.triton_math import (
    follow,
    gelu_erf,
    gelu_erf_grad,
    gelu_tanh,
    gelu_tanh_grad,
    relu,
    silu,
    silu_grad,
)

#: op -> (number of inputs, number of outputs). Backward ops start with dy; `y` means the forward's output.
ELEMENTWISE: dict[str, tuple[int, int]] = {
    "add": (2, 1),
    "sub": (2, 1),
    "mul": (2, 1),
    "div": (2, 1),
    "relu": (1, 1),
    "gelu": (1, 1),
    "gelu_tanh": (1, 1),
    "silu": (1, 1),
    "add_relu": (2, 1),
    "mul_relu": (2, 1),
    "affine": (3, 1),  # x, scale, bias
    "neg": (1, 1),
    "relu_bwd": (2, 1),  # dy, y -> dx; also add_relu, whose two gradients are this one
    "gelu_bwd": (2, 1),  # dy, x -> dx
    "gelu_tanh_bwd": (2, 1),
    "silu_bwd": (2, 1),
    "mul_bwd": (3, 2),  # dy, a, b -> da, db; also affine: dy, x, scale -> dx, dscale
    "mul_relu_bwd": (3, 2),  # dy, a, b -> da, db
    "div_bwd": (3, 2),  # dy, a, b -> da, db
    "gelu_both": (2, 2),  # dy, x -> dx, gelu(x): what a product of gelu(x) needs in backward
    "gelu_tanh_both": (2, 2),
}

#: How an operand meets the [R, C] output: whole, a [C] vector, an [R, 1] column, or a single element.
MODES = ("full", "row", "column", "one")


@triton.jit
def reciprocal(v):
    """1 / v for v >= 1 to 3e-7, in two instructions; a full division takes eight."""
    r = tl.rsqrt(v)
    return r * r


@triton.jit
def normal_tail(x):
    """exp(-a²/2) and Φ(-a) for a = min(|x|, 16), both to 2e-6 relative.

    Φ(-a) exp(a²/2) is a polynomial in 1 / (1 + 0.3 a), fitted for relative error, so that small tails keep their
    digits. With the library's erf arithmetic, not memory, would set the time on an H200.
    """
    a = tl.minimum(tl.abs(x), 16.0, propagate_nan=tl.PropagateNan.ALL)
    t = reciprocal(1.0 + 0.3 * a)
    p = t * -0.08264507 + 0.23309904
    p = p * t - 0.037058245
    p = p * t + 0.15549983
    p = p * t + 0.11072401
    p = p * t + 0.12037966
    e = tl.exp2(a * a * -0.7213475204444817)
    return a, e, e * (p * t)


@triton.jit
def gelu_half(x, INTO: tl.constexpr):
    """x Φ(x) = x σ(g(x)) for results that are rounded to 16 bits; -g in powers of two as an odd polynomial.

    Fitted to 0.1 of float16's spacing, of the result, down to its smallest. 14 instructions an element. bfloat16 has
    smaller ones, which keep their digits by another 8 instructions.
    """
    if INTO.is_bf16():
        _, _, tail = normal_tail(x)
        return x * tl.where(x < 0, tail, 1.0 - tail)
    else:
        t = tl.minimum(x * x, 31.36, propagate_nan=tl.PropagateNan.ALL)
        p = t * -2.469553261e-9 + 2.217364756e-7
        p = p * t - 7.794377757e-6
        p = p * t + 1.207967674e-4
        p = p * t + 2.906244338e-4
        p = p * t - 0.1052567518
        p = p * t - 2.301951067
        return x * reciprocal(1.0 + tl.exp2(x * p))


@triton.jit
def gelu_half_grad(x):
    """Φ(x) + x φ(x) for results that are rounded to 16 bits."""
    a, e, tail = normal_tail(x)
    slope = tail - 0.3989422804014327 * a * e
    return tl.where(x < 0, slope, 1.0 - slope)


@triton.jit
def gelu_tanh_half(x):
    """x σ(2u), u = √(2/π) (x + 0.044715 x³), for results that are rounded to 16 bits; 2u in powers of two."""
    return x * reciprocal(1.0 + tl.exp2(x * (-2.302208198 - 0.1029432397 * x * x)))


@triton.jit
def gelu_tanh_half_grad(x):
    """d/dx x σ(2u) = σ + x σ (1 - σ) 2u' for results that are rounded to 16 bits; beyond 100 σ (1 - σ) is 0 or x is NaN."""
    s = reciprocal(1.0 + tl.exp2(x * (-2.302208198 - 0.1029432397 * x * x)))
    slope = 1.5957691216 + 0.2140644487 * tl.minimum(x * x, 1e4, propagate_nan=tl.PropagateNan.ALL)
    return s + x * s * (1.0 - s) * slope


@triton.jit
def silu_half_grad(x):
    """σ (1 + x (1 - σ)) for results that are rounded to 16 bits."""
    s = reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def silu_half(x):
    """x σ(x) for results that are rounded to 16 bits."""
    return x * reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def combine(OP: tl.constexpr, INTO: tl.constexpr, a, b, c):
    """The outputs (first, second) of `OP` in float32, which are rounded to the type INTO next: 16 bits need fewer instructions."""
    HALF: tl.constexpr = INTO.primitive_bitwidth == 16
    if OP == "add":
        y, z = a + b, a
    elif OP == "sub":
        y, z = a - b, a
    elif OP == "mul":
        y, z = a * b, a
    elif OP == "div":
        y, z = tl.div_rn(a, b), a
    elif OP == "neg":
        y, z = -a, a
    elif OP == "relu":
        y, z = relu(a), a
    elif OP == "gelu":
        y, z = gelu_half(a, INTO) if HALF else gelu_erf(a), a
    elif OP == "gelu_tanh":
        y, z = gelu_tanh_half(a) if HALF else gelu_tanh(a), a
    elif OP == "silu":
        y, z = silu_half(a) if HALF else silu(a), a
    elif OP == "add_relu":
        y, z = relu(a + b), a
    elif OP == "mul_relu":
        y, z = relu(a * b), a
    elif OP == "affine":
        y, z = a * b + c, a
    elif OP == "relu_bwd":
        y, z = tl.where(b <= 0, 0.0, a), a
    elif OP == "gelu_bwd":
        y, z = a * (gelu_half_grad(b) if HALF else gelu_erf_grad(b)), a
    elif OP == "gelu_tanh_bwd":
        y, z = a * (gelu_tanh_half_grad(b) if HALF else gelu_tanh_grad(b)), a
    elif OP == "silu_bwd":
        y, z = a * (silu_half_grad(b) if HALF else silu_grad(b)), a
    elif OP == "gelu_both":
        y, z = (
            a * (gelu_half_grad(b) if HALF else gelu_erf_grad(b)),
            gelu_half(b, INTO) if HALF else gelu_erf(b),
        )
    elif OP == "gelu_tanh_both":
        y, z = (
            a * (gelu_tanh_half_grad(b) if HALF else gelu_tanh_grad(b)),
            gelu_tanh_half(b) if HALF else gelu_tanh(b),
        )
    elif OP == "mul_bwd":
        y, z = a * c, a * b
    elif OP == "mul_relu_bwd":
        d = tl.where((b * c).to(INTO).to(tl.float32) <= 0, 0.0, a)  # as the output was rounded
        y, z = d * c, d * b
    else:
        tl.static_assert(OP == "div_bwd")
        y = tl.div_rn(a, c)
        z = -y * tl.div_rn(b, c)
    return y, z


@triton.jit
def operand_flat(
    ptr, base, lane, C, mask, MODE: tl.constexpr, MASKED: tl.constexpr, EVICT: tl.constexpr
):
    """One operand of a flat tile in float32; a tile starts at element `base`, rows are C long."""
    if MODE == "full":
        at = base + lane
    elif MODE == "row":
        at = ((base % C).to(tl.int32) + lane) % C
    elif MODE == "column":
        at = base // C + ((base % C).to(tl.int32) + lane) // C
    if MODE == "one":
        v = tl.load(ptr)
    elif MASKED:
        v = tl.load(ptr + at, mask=mask, other=1.0, eviction_policy=EVICT)
    else:
        v = tl.load(ptr + at, eviction_policy=EVICT)
    return v.to(tl.float32)


@triton.jit
def flat_tile(
    a_ptr, b_ptr, c_ptr, y_ptr, z_ptr, N, C, base,
    OP: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    A_MODE: tl.constexpr, B_MODE: tl.constexpr, C_MODE: tl.constexpr,
    EVICT: tl.constexpr, STORE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of `elementwise_flat`."""
    lane = tl.arange(0, BLOCK)
    mask = lane < N - base
    a = operand_flat(a_ptr, base, lane, C, mask, A_MODE, MASKED, EVICT)
    b = a
    c = a
    if INPUTS > 1:
        b = operand_flat(b_ptr, base, lane, C, mask, B_MODE, MASKED, EVICT)
    if INPUTS > 2:
        c = operand_flat(c_ptr, base, lane, C, mask, C_MODE, MASKED, EVICT)
    y, z = combine(OP, y_ptr.dtype.element_ty, a, b, c)
    if MASKED:
        tl.store(y_ptr + base + lane, y.to(y_ptr.dtype.element_ty), mask=mask, cache_modifier=STORE)
        if OUTPUTS > 1:
            tl.store(
                z_ptr + base + lane, z.to(z_ptr.dtype.element_ty), mask=mask, cache_modifier=STORE
            )
    else:
        tl.store(y_ptr + base + lane, y.to(y_ptr.dtype.element_ty), cache_modifier=STORE)
        if OUTPUTS > 1:
            tl.store(z_ptr + base + lane, z.to(z_ptr.dtype.element_ty), cache_modifier=STORE)


@triton.jit
def elementwise_flat(
    a_ptr, b_ptr, c_ptr, y_ptr, z_ptr, N, C,
    OP: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    A_MODE: tl.constexpr, B_MODE: tl.constexpr, C_MODE: tl.constexpr,
    EVICT: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y (and z) = OP(a, b, c) over N contiguous elements, computed in float32, rounded once.

    Each program owns BLOCK elements: 16-byte accesses per thread, several in flight. All tiles but the last
    are unmasked, so N that is no multiple of 8 costs nothing but in its last tile.
    """
    follow(PDL)
    base = tl.program_id(0).to(tl.int64) * BLOCK
    if base + BLOCK <= N:
        flat_tile(
            a_ptr, b_ptr, c_ptr, y_ptr, z_ptr, N, C, base,
            OP, INPUTS, OUTPUTS, A_MODE, B_MODE, C_MODE, EVICT, STORE, False, BLOCK,
        )  # fmt: skip
    else:
        flat_tile(
            a_ptr, b_ptr, c_ptr, y_ptr, z_ptr, N, C, base,
            OP, INPUTS, OUTPUTS, A_MODE, B_MODE, C_MODE, EVICT, STORE, True, BLOCK,
        )  # fmt: skip


@triton.jit
def operand_rows(
    ptr, start, row, col, C, mask, rows, cols, MODE: tl.constexpr, EVICT: tl.constexpr
):
    """One operand of a [BLOCK_R, BLOCK_C] tile in float32; `start` is the tile's first element."""
    if MODE == "full":
        at = start + (row.to(tl.int64) * C)[:, None] + col[None, :]
        v = tl.load(ptr + at, mask, 1.0, eviction_policy=EVICT)
    elif MODE == "row":
        v = tl.load(ptr + col, cols, 1.0)[None, :]
    elif MODE == "column":
        v = tl.load(ptr + start // C + row, rows, 1.0)[:, None]
    else:
        v = tl.load(ptr)
    return v.to(tl.float32)


@triton.jit
def elementwise_rows(
    a_ptr, b_ptr, c_ptr, y_ptr, z_ptr, R, C,
    OP: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    A_MODE: tl.constexpr, B_MODE: tl.constexpr, C_MODE: tl.constexpr,
    EVICT: tl.constexpr, STORE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y (and z) = OP(a, b, c) over [R, C]; operands are [R, C], [C], [R, 1] or one element; float32, rounded once.

    A 2-D tile reads a broadcast vector once per tile and needs no division per element.
    """
    follow(PDL)
    tiles_c = tl.cdiv(C, BLOCK_C)
    tile_r = tl.program_id(0) // tiles_c
    col = (tl.program_id(0) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.arange(0, BLOCK_R)
    first = tile_r.to(tl.int64) * BLOCK_R
    start = first * C
    rows = row < R - first
    cols = col < C
    mask = rows[:, None] & cols[None, :]
    a = operand_rows(a_ptr, start, row, col, C, mask, rows, cols, A_MODE, EVICT)
    b = a
    c = a
    if INPUTS > 1:
        b = operand_rows(b_ptr, start, row, col, C, mask, rows, cols, B_MODE, EVICT)
    if INPUTS > 2:
        c = operand_rows(c_ptr, start, row, col, C, mask, rows, cols, C_MODE, EVICT)
    y, z = combine(OP, y_ptr.dtype.element_ty, a, b, c)
    at = start + (row.to(tl.int64) * C)[:, None] + col[None, :]
    y = tl.broadcast_to(y, [BLOCK_R, BLOCK_C])
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask, cache_modifier=STORE)
    if OUTPUTS > 1:
        z = tl.broadcast_to(z, [BLOCK_R, BLOCK_C])
        tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), mask=mask, cache_modifier=STORE)


def elementwise_configs(
    dtypes: Sequence[str], rows: int, columns: int, modes: Sequence[str]
) -> list[dict[str, Any]]:
    """Configurations, best guess first; `strategy` is "flat" or "rows"."""
    wide = 2 if "f32" in dtypes else 1
    flat = [
        {"strategy": "flat", "BLOCK": block // wide, "stream": stream, "num_warps": warps}
        for block, warps, stream in (
            (2048, 8, False),  # one 16-byte access a thread; 0.997 of torch.add's speed on an H200
            (
                1024,
                4,
                False,
            ),  # as fast with two operands, 0.77 with one: blocks cannot start faster
            (2048, 4, False),
            (2048, 8, True),
            (4096, 8, False),
        )
    ]
    if not {"row", "column"} & set(modes):
        return flat
    block_c = min(1024 // wide, triton.next_power_of_2(columns))
    tiled = [
        {"strategy": "rows", "BLOCK_R": max(1, size // wide // block_c), "BLOCK_C": block_c,
         "stream": False, "num_warps": warps}
        for size, warps in ((4096, 4), (2048, 4), (8192, 8), (1024, 4))
    ]  # fmt: skip
    if columns > 2**30:
        return tiled
    return tiled + flat[:3] if columns % 8 == 0 else flat[:3] + tiled


def elementwise_launcher(
    op: str,
    dtypes: Sequence[str],
    rows: int,
    columns: int,
    modes: Sequence[str],
    config: dict[str, Any],
    device: torch.device,
    align: int = 16,
) -> Callable[..., bool]:
    """A callable (*inputs, *outputs) -> bool for `op` over contiguous [rows, columns].

    `dtypes` names the dtype of every input, then of every output; `modes` has one of MODES per input.
    Where nothing is broadcast along rows, any split of the element count into rows and columns is the same.
    """
    inputs, outputs = ELEMENTWISE[op]
    flat = config["strategy"] == "flat"
    count = rows * columns
    if flat:
        tiles = triton.cdiv(count, config["BLOCK"])
    else:
        tiles = triton.cdiv(rows, config["BLOCK_R"]) * triton.cdiv(columns, config["BLOCK_C"])
    into, out = [*dtypes[:inputs]], [*dtypes[inputs:]]
    names = into + [into[0]] * (3 - inputs) + out + [out[0]] * (2 - outputs)
    kinds = [*modes] + ["full"] * (3 - inputs)
    blocks = {name: value for name, value in config.items() if name.startswith("BLOCK")}
    start = prepare(
        elementwise_flat if flat else elementwise_rows,
        grid=(tiles, 1, 1),
        pointers=dict(zip(("a_ptr", "b_ptr", "c_ptr", "y_ptr", "z_ptr"), names, strict=True)),
        integers={"N": count, "C": columns} if flat else {"R": rows, "C": columns},
        floats=(),
        constexprs={
            "OP": op,
            "INPUTS": inputs,
            "OUTPUTS": outputs,
            **dict(zip(("A_MODE", "B_MODE", "C_MODE"), kinds, strict=True)),
            "EVICT": "evict_first" if config["stream"] else "",
            "STORE": ".cs" if config["stream"] else "",
            **blocks,
        },
        num_warps=config["num_warps"],
        num_stages=1,
        device=device,
        align=align,
    )
    if (inputs, outputs) == (1, 1):
        return lambda a, y: start(a, a, a, y, y)
    if (inputs, outputs) == (2, 1):
        return lambda a, b, y: start(a, b, a, y, y)
    if (inputs, outputs) == (3, 1):
        return lambda a, b, c, y: start(a, b, c, y, y)
    if (inputs, outputs) == (2, 2):
        return lambda a, b, y, z: start(a, b, a, y, z)
    return start
