"""Element-wise kernels: one flat over contiguous data, one of tiles for operands that are strided or broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.triton_runtime.device_math import (
    follow,
    gelu_erf,
    gelu_erf_grad,
    gelu_tanh,
    gelu_tanh_grad,
    relu,
    silu,
    silu_grad,
)
from tensorlogic.kernels.triton_runtime.launch import prepare
from tensorlogic.system.compile_pool import CompileFailure

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
    # dy, y -> dx; also add_relu, whose two gradients are this one
    "relu_bwd": (2, 1),
    "gelu_bwd": (2, 1),  # dy, x -> dx
    "gelu_tanh_bwd": (2, 1),
    "silu_bwd": (2, 1),
    # dy, a, b -> da, db; also affine: dy, x, scale -> dx, dscale
    "mul_bwd": (3, 2),
    "mul_relu_bwd": (3, 2),  # dy, a, b -> da, db
    "div_bwd": (3, 2),  # dy, a, b -> da, db
    # dy, x -> dx, gelu(x): what a product of gelu(x) needs in backward
    "gelu_both": (2, 2),
    "gelu_tanh_both": (2, 2),
}

#: How an operand meets the [R, C] output: whole, a [C] vector, an [R, 1] column, or a single element.
MODES = ("full", "row", "column", "one")
WIDEST = 1 << 30  # rows or columns that tiles count in 32 bits
Steps = tuple[int, int, int, int]  # strides along [outer, middle, rows, columns]


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
    """The outputs (first, second) of `OP` in float32, which are rounded to the type INTO next: 16 bits need fewer instructions.

    Of a division, too: 2 ulp of float32 over its whole range without a branch an element.
    """
    HALF: tl.constexpr = INTO.primitive_bitwidth == 16
    if OP == "add":
        y, z = a + b, a
    elif OP == "sub":
        y, z = a - b, a
    elif OP == "mul":
        y, z = a * b, a
    elif OP == "div":
        y, z = a / b if HALF else tl.div_rn(a, b), a
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
        y = a / c if HALF else tl.div_rn(a, c)
        z = -y * (b / c if HALF else tl.div_rn(b, c))
    return y, z


@triton.jit
def operand_flat(
    ptr, base, lane, C, mask, MODE: tl.constexpr, MASKED: tl.constexpr, EVICT: tl.constexpr,
    WRAP: tl.constexpr, SHORT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One operand of a flat tile in float32; a tile starts at element `base`, rows are C long, which EVEN divides.

    WRAP: a tile meets at most one end of a row, which takes a comparison an element instead of a division.
    """
    if MODE == "full":
        at = base + lane
    elif MODE == "row" or MODE == "column":
        begin = base.to(tl.int32) if SHORT else base
        col = tl.multiple_of((begin % C).to(tl.int32), EVEN) + lane
        if MODE == "row":
            at = col - tl.where(col >= C, C, 0) if WRAP else col % C
        else:
            at = begin // C + ((col >= C).to(tl.int32) if WRAP else col // C)
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
    WRAP: tl.constexpr, SHORT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of `elementwise_flat`."""
    lane = tl.arange(0, BLOCK)
    mask = lane < N - base
    a = operand_flat(a_ptr, base, lane, C, mask, A_MODE, MASKED, EVICT, WRAP, SHORT, EVEN)
    b = a
    c = a
    if INPUTS > 1:
        b = operand_flat(b_ptr, base, lane, C, mask, B_MODE, MASKED, EVICT, WRAP, SHORT, EVEN)
    if INPUTS > 2:
        c = operand_flat(c_ptr, base, lane, C, mask, C_MODE, MASKED, EVICT, WRAP, SHORT, EVEN)
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
    EVICT: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr, WRAP: tl.constexpr, SHORT: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
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
            OP, INPUTS, OUTPUTS, A_MODE, B_MODE, C_MODE, EVICT, STORE, False, BLOCK, WRAP, SHORT, EVEN,
        )  # fmt: skip
    else:
        flat_tile(
            a_ptr, b_ptr, c_ptr, y_ptr, z_ptr, N, C, base,
            OP, INPUTS, OUTPUTS, A_MODE, B_MODE, C_MODE, EVICT, STORE, True, BLOCK, WRAP, SHORT, EVEN,
        )  # fmt: skip


@triton.jit
def operand_rows(ptr, at_r, at_c, mask, rows, cols, MODE: tl.constexpr, EVICT: tl.constexpr):
    """One operand of a [BLOCK_R, BLOCK_C] tile in float32; `ptr` points to the tile's first element."""
    if MODE == "full":
        v = tl.load(ptr + (at_r[:, None] + at_c[None, :]), mask, 1.0, eviction_policy=EVICT)
    elif MODE == "row":
        v = tl.load(ptr + at_c, cols, 1.0)[None, :]
    elif MODE == "column":
        v = tl.load(ptr + at_r, rows, 1.0)[:, None]
    else:
        v = tl.load(ptr)
    return v.to(tl.float32)


@triton.jit
def tile_of(ptr, o, p, r, c, step_o, step_p, step_r, step_c, MODE: tl.constexpr):
    """Where the tile that begins at [o, p, r, c] begins in an operand."""
    at = o * step_o + p * step_p
    if MODE == "full" or MODE == "column":
        at += r * step_r
    if MODE == "full" or MODE == "row":
        at += c * step_c
    return ptr + at


@triton.jit
def elementwise_rows(
    a_ptr, b_ptr, c_ptr, y_ptr, z_ptr, P, R, C,
    a_o, a_p, a_r, a_c, b_o, b_p, b_r, b_c, c_o, c_p, c_r, c_c, y_o, y_p, y_r,
    OP: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    A_MODE: tl.constexpr, B_MODE: tl.constexpr, C_MODE: tl.constexpr,
    EVICT: tl.constexpr, STORE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, OUTER: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y (and z) = OP(a, b, c) over [O, P, R, C], each operand by strides of its own; float32, rounded once. WIDE: offsets within a tile
    may not fit 32 bits.

    A 2-D tile reads a vector that is repeated once and needs no division per element. An operand that lies the other way
    than y is read along its own memory: the compiler turns the tile in shared memory, in its own type.
    """
    follow(PDL)
    tiles_c = tl.cdiv(C, BLOCK_C)
    tile_r = tl.program_id(0) // tiles_c
    c = (tl.program_id(0) % tiles_c).to(tl.int64) * BLOCK_C
    o = 0
    p = 0
    if OUTER:
        tiles_r = tl.cdiv(R, BLOCK_R)
        o = (tile_r // tiles_r // P).to(tl.int64)
        p = (tile_r // tiles_r % P).to(tl.int64)
        tile_r = tile_r % tiles_r
    r = tile_r.to(tl.int64) * BLOCK_R
    row = tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_C)
    rows = row < R - r
    cols = col < C - c
    mask = rows[:, None] & cols[None, :]
    down = row
    along = col
    if WIDE:
        down = row.to(tl.int64)
        along = col.to(tl.int64)
    a_tile = tile_of(a_ptr, o, p, r, c, a_o, a_p, a_r, a_c, A_MODE)
    a = operand_rows(a_tile, down * a_r, along * a_c, mask, rows, cols, A_MODE, EVICT)
    b = a
    d = a
    if INPUTS > 1:
        b_tile = tile_of(b_ptr, o, p, r, c, b_o, b_p, b_r, b_c, B_MODE)
        b = operand_rows(b_tile, down * b_r, along * b_c, mask, rows, cols, B_MODE, EVICT)
    if INPUTS > 2:
        c_tile = tile_of(c_ptr, o, p, r, c, c_o, c_p, c_r, c_c, C_MODE)
        d = operand_rows(c_tile, down * c_r, along * c_c, mask, rows, cols, C_MODE, EVICT)
    y, z = combine(OP, y_ptr.dtype.element_ty, a, b, d)
    at = (down * y_r)[:, None] + col[None, :]
    y = tl.broadcast_to(y, [BLOCK_R, BLOCK_C]).to(y_ptr.dtype.element_ty)
    y_tile = tile_of(y_ptr, o, p, r, c, y_o, y_p, y_r, 1, "full")
    tl.store(y_tile + at, y, mask=mask, cache_modifier=STORE)
    if OUTPUTS > 1:
        z = tl.broadcast_to(z, [BLOCK_R, BLOCK_C]).to(z_ptr.dtype.element_ty)
        z_tile = tile_of(z_ptr, o, p, r, c, y_o, y_p, y_r, 1, "full")
        tl.store(z_tile + at, z, mask=mask, cache_modifier=STORE)


def elementwise_configs(
    dtypes: Sequence[str], rows: int, columns: int, modes: Sequence[str], steps: Sequence[Steps] = ()
) -> list[dict[str, Any]]:  # fmt: skip
    """Configurations, best guess first; `strategy` is "flat" or "rows", which alone takes `steps`."""
    wide = 2 if "f32" in dtypes else 1
    if any(r == 1 and c > 1 for _, _, r, c in steps) and rows > 1 and columns > 1:
        return _turned(wide, rows, columns)
    if steps:
        return _strided(wide, rows, columns)
    flat = [
        {"strategy": "flat", "BLOCK": block // wide, "stream": stream, "num_warps": warps}
        for block, warps, stream in (
            # one 16-byte access a thread; 0.997 of torch.add's speed on an H200
            (2048, 8, False),
            # as fast with two operands, 0.77 with one: blocks cannot start faster
            (1024, 4, False),
            (2048, 4, False),
            (2048, 8, True),
            (4096, 8, False),
        )
    ]
    if not {"row", "column"} & set(modes):
        return flat
    block_c = min(1024 // wide, triton.next_power_of_2(columns))
    tiled = [
        _tile(max(1, size // wide // block_c), block_c, warps)
        for size, warps in ((4096, 4), (2048, 4), (8192, 8), (1024, 4))
    ]
    if columns > WIDEST:
        return tiled
    return tiled + flat[:3] if columns % 8 == 0 else flat[:3] + tiled


def _tile(block_r: int, block_c: int, warps: int) -> dict[str, Any]:
    return {"strategy": "rows", "BLOCK_R": block_r, "BLOCK_C": block_c, "stream": False, "num_warps": warps}  # fmt: skip


def _strided(wide: int, rows: int, columns: int) -> list[dict[str, Any]]:
    """Tiles along columns, as flat's in size: as long as they go, and of the length that the last one of a row fills."""
    longest = min(1024 // wide, triton.next_power_of_2(columns))
    lengths = [n for n in (1024, 512, 256, 128) if n < longest]
    filling = min((longest, *lengths), key=lambda n: (-(-columns // n) * n > 1.1 * columns, -n))
    high = triton.next_power_of_2(rows)
    tiles = [
        _tile(min(high, max(1, size // wide // length)), length, warps)
        for length in dict.fromkeys((filling, longest))
        for size, warps in ((2048, 8), (1024, 4), (2048, 4), (4096, 8), (4096, 4))
    ]
    return [t for i, t in enumerate(tiles) if t not in tiles[:i]]


def _turned(wide: int, rows: int, columns: int) -> list[dict[str, Any]]:
    """Tiles that are read along rows and written along columns: 64 to 128 bytes each way."""
    high, long = triton.next_power_of_2(rows), triton.next_power_of_2(columns)
    sizes = ((64, 64, 8), (32, 64, 4), (64, 32, 4), (32, 32, 4), (128, 64, 16))
    tiles = []
    for r, c, warps in sizes if wide == 1 else (*sizes[2:4], *sizes[:2]):
        block_r, block_c = min(r, high), min(c, long)
        if block_c < c:
            block_r = min(high, r * c // block_c)
        elif block_r < r:
            block_c = min(long, r * c // block_r)
        tiles.append(_tile(block_r, block_c, warps))
    return [t for i, t in enumerate(tiles) if t not in tiles[:i]]


def _refused(
    rows: int, columns: int, modes: Sequence[str], config: dict[str, Any], steps: Sequence[Steps]
) -> str | None:
    """Why a configuration, as of a neighbour's plan, cannot serve these sizes."""
    if config["strategy"] == "flat":
        if steps:
            return "flat tiles take no strides"
        if {"row", "column"} & set(modes) and columns > WIDEST:
            return f"flat tiles count columns in 32 bits, {columns} are too many"
    elif any(n < 2**31 <= n + config[b] for n, b in ((rows, "BLOCK_R"), (columns, "BLOCK_C"))):
        return f"tiles of {rows} by {columns} are counted in 32 bits"
    return None


def _counted(
    rows: int, columns: int, modes: Sequence[str], block: int
) -> tuple[dict[str, int], dict[str, Any]]:
    """Sizes of `elementwise_flat` and what it knows of them: one kernel for all where nothing is repeated along rows."""
    count = rows * columns
    if not {"row", "column"} & set(modes):
        return {"N": count, "C": 1}, {"WRAP": False, "SHORT": False, "EVEN": 1}
    known = {
        "WRAP": block <= columns,
        "SHORT": count + block < 2**31,
        "EVEN": gcd(columns, block, 8),
    }
    return {"N": count, "C": columns}, known


def _stepped(
    rows: int, columns: int, modes: Sequence[str], outer: tuple[int, int], steps: Sequence[Steps]
) -> dict[str, int]:
    """Sizes and strides of `elementwise_rows`; 1, which the compiler knows, where nothing is read of them."""
    contiguous = (rows * columns * outer[1], rows * columns, columns, 1)
    found = {"P": outer[1], "R": rows, "C": columns}
    given = [*steps] or [contiguous] * (len(modes) + 1)
    for name, mode, step in zip("abcy"[: len(modes)] + "y", (*modes, "full"), given, strict=True):
        read = (outer[0] > 1, outer[1] > 1, mode in ("full", "column"), mode in ("full", "row"))
        for along, s, r in zip("oprc", step, read, strict=True):
            found[f"{name}_{along}"] = s if r and (steps or mode == "full" or s == 1) else 1
    del found["y_c"]  # which is always 1
    return found


def _far(steps: dict[str, int], config: dict[str, Any]) -> bool:
    """Whether the offset of some operand's last element in a tile may not fit 32 bits."""
    block_r, block_c = config["BLOCK_R"], config["BLOCK_C"]
    ends = (
        block_r * steps[f"{n}_r"] + block_c * steps.get(f"{n}_c", 1)
        for n in "abcy"
        if f"{n}_r" in steps
    )
    return any(end >= 2**31 for end in ends)


def _taking(start: Callable[..., bool], inputs: int, outputs: int) -> Callable[..., bool]:
    """`start` of five pointers as (*inputs, *outputs)."""
    if (inputs, outputs) == (1, 1):
        return lambda a, y: start(a, a, a, y, y)
    if (inputs, outputs) == (2, 1):
        return lambda a, b, y: start(a, b, a, y, y)
    if (inputs, outputs) == (3, 1):
        return lambda a, b, c, y: start(a, b, c, y, y)
    if (inputs, outputs) == (2, 2):
        return lambda a, b, y, z: start(a, b, a, y, z)
    return start


def elementwise_launcher(
    op: str, dtypes: Sequence[str], rows: int, columns: int, modes: Sequence[str], config: dict[str, Any], device: torch.device,
    align: int = 16, outer: tuple[int, int] = (1, 1), steps: Sequence[Steps] = (),
) -> Callable[..., bool]:  # fmt: skip
    """A callable (*inputs, *outputs) -> bool for `op` over [rows, columns], or [*outer, rows, columns] by `steps`.

    `dtypes` names the dtype of every input, then of every output; `modes` has one of MODES per input. `steps`: strides of every
    input, then those of the outputs, whose columns lie together; without them all is contiguous.
    Where nothing is broadcast along rows, any split of the element count into rows and columns is the same.
    Raises CompileFailure for a configuration that cannot serve this, whatever its own was.
    """
    inputs, outputs = ELEMENTWISE[op]
    reason = _refused(rows, columns, modes, config, steps)
    if reason is not None:
        raise CompileFailure(f"{op}: {reason}")
    flat = config["strategy"] == "flat"
    if flat:
        tiles = triton.cdiv(rows * columns, config["BLOCK"])
        integers, known = _counted(rows, columns, modes, config["BLOCK"])
    else:
        tiles = triton.cdiv(rows, config["BLOCK_R"]) * triton.cdiv(columns, config["BLOCK_C"])
        tiles *= outer[0] * outer[1]
        integers = _stepped(rows, columns, modes, outer, steps)
        known = {"OUTER": outer != (1, 1), "WIDE": _far(integers, config)}
    into, out = [*dtypes[:inputs]], [*dtypes[inputs:]]
    names = into + [into[0]] * (3 - inputs) + out + [out[0]] * (2 - outputs)
    kinds = [*modes] + ["full"] * (3 - inputs)
    blocks = {name: value for name, value in config.items() if name.startswith("BLOCK")}
    start = prepare(
        elementwise_flat if flat else elementwise_rows,
        grid=(tiles, 1, 1),
        pointers=dict(zip(("a_ptr", "b_ptr", "c_ptr", "y_ptr", "z_ptr"), names, strict=True)),
        integers=integers,
        floats=(),
        constexprs={
            "OP": op, "INPUTS": inputs, "OUTPUTS": outputs, **dict(zip(("A_MODE", "B_MODE", "C_MODE"), kinds, strict=True)),
            "EVICT": "evict_first" if config["stream"] else "", "STORE": ".cs" if config["stream"] else "", **blocks, **known,
        },
        num_warps=config["num_warps"], num_stages=1, device=device, align=align,
    )  # fmt: skip
    return _taking(start, inputs, outputs)
