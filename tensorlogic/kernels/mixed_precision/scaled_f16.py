"""float16 operands of any range: rounded in one launch that finds the largest value of every line, scaled by powers of two in a second
one where a line's range asks for it, and the product scaled back, a launch that reads nothing of it where no line was."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_runtime.device_math import follow
from ..triton_runtime.launch import Start, prepare
from . import line_max, split_planes

# and elements along them of a tile, as in line_max.py
LINES = {True: (16, 512), False: (128, 64)}
# bytes of a line, beyond which it is read by several programs
WHOLE = 8192
LOOKING = 256  # programs that look whether lines were scaled
# elements of whole lines that a program holds at most; programs that occupy a GPU
TILE, ENOUGH = (16384, 128)
BLOCK_M, BLOCK_N = {False: 32, True: 16}, 128  # the former by whether it is in float64
# programs from which on each takes whole lines, whatever their length
STRIPS = 64
#: Then: lines of a program at least, programs wanted, elements held, warps; by whether neighbours along a line lie together
STRIP = {True: (1, 256, 8192, 8), False: (16, 128, 16384, 16)}
MOST = 64  # lines of a program


@triton.jit
def power(e, WIDE: tl.constexpr):
    """2^e in float32 (or float64, where WIDE) by its bits: exact, which no function of a GPU's library is."""
    if WIDE:
        return ((e.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fits(largest):
    """Whether float16 holds lines with these largest values as they are, or they are 0."""
    return ((largest >= 0.0009765625) & (largest <= 65504.0)) | (largest == 0.0)


@triton.jit
def exponent(largest, WIDE: tl.constexpr):
    """Of the power of two by which a line is scaled down: 0 where it fits or has no finite largest value, else that value's own."""
    if WIDE:
        e = (((largest.to(tl.int64, bitcast=True) >> 52) & 2047) - 1023).to(tl.int32)
    else:
        e = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    return tl.where(fits(largest) | (largest == float("inf")), 0, e)


@triton.jit
def halved(x, e, WIDE: tl.constexpr):
    """half(x · 2^-e), in two steps, for 2^-e alone may leave the range; what is finite stays so, and what is not."""
    half = e >> 1
    near = x * power(-half, WIDE) * power(half - e, WIDE)
    near = tl.minimum(tl.maximum(near, -65504.0), 65504.0)
    return tl.where(x - x == 0.0, near, x).to(tl.float16)


@triton.jit
def halve_lines(
    x_ptr, y_ptr, scale_ptr, peak_ptr, R, C, PARTS, x_line, x_along, y_line, y_along,
    WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = half(x · 2^-e), e of each line of x [R, C]: 0 where its largest value lies in 2^-10 .. 65504, else that value's exponent.

    In float32, or in float64 where WIDE; peak [PARTS, R] is that of parts of the lines. y is half(x) already: lines that are
    all of that range stay as they are, BLOCK_R of them together; few programs see that, and share the tiles of those that are not.
    """
    follow(PDL)
    real: tl.constexpr = tl.float64 if WIDE else tl.float32
    across = tl.cdiv(R, BLOCK_R)
    first = tl.program_id(0) // across
    lines = tl.program_id(0) % across * BLOCK_R + tl.arange(0, BLOCK_R)
    parts = tl.arange(0, 8)
    largest = tl.zeros((BLOCK_R,), real)
    for part in range(0, PARTS, 8):
        at = (part + parts).to(tl.int64)[:, None] * R + lines[None, :]
        known = (part + parts < PARTS)[:, None] & (lines < R)[None, :]
        largest = tl.maximum(largest, tl.max(tl.load(peak_ptr + at, mask=known, other=0.0), 0))
    e = exponent(largest, WIDE)
    if first == 0:
        tl.store(scale_ptr + lines, e, mask=lines < R)
    if tl.max(tl.where(fits(largest), 0, 1)) > 0:
        for tile in range(first, tl.cdiv(C, BLOCK_C), tl.num_programs(0) // across):
            along = tile * BLOCK_C + tl.arange(0, BLOCK_C)
            inside = (lines < R)[:, None] & (along < C)[None, :]
            i, k = lines.to(tl.int64)[:, None], along.to(tl.int64)[None, :]
            x = tl.load(x_ptr + i * x_line + k * x_along, mask=inside, other=0.0).to(real)
            tl.store(y_ptr + i * y_line + k * y_along, halved(x, e[:, None], WIDE), mask=inside)


@triton.jit
def halve_whole_lines(
    x_ptr, y_ptr, scale_ptr, R, C, x_line, x_along, y_line, y_along,
    WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for lines of at most BLOCK_C elements, which a program sees as a whole: one launch, and x read once.

    Where their elements do not lie together, few lines at a time are read by small pieces: 9.9 us at 1024 on an H200, 4.2 where they do.
    """
    follow(PDL)
    lines, along = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    inside = (lines < R)[:, None] & (along < C)[None, :]
    i, k = lines.to(tl.int64)[:, None], along.to(tl.int64)[None, :]
    x = tl.load(x_ptr + i * x_line + k * x_along, mask=inside, other=0.0)
    x = x.to(tl.float64 if WIDE else tl.float32)
    e = exponent(tl.max(tl.abs(x), 1), WIDE)
    tl.store(scale_ptr + lines, e, mask=lines < R)
    tl.store(y_ptr + i * y_line + k * y_along, halved(x, e[:, None], WIDE), mask=inside)


@triton.jit
def halve_strips(
    x_ptr, y_ptr, scale_ptr, R, C, x_line, x_along, y_line, y_along,
    WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for lines of any length, enough of them to occupy a GPU by whole ones: one launch, x read again only where a line needs a scale."""
    follow(PDL)
    real: tl.constexpr = tl.float64 if WIDE else tl.float32
    lines = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    i = lines.to(tl.int64)[:, None]
    peak = tl.zeros((BLOCK_R, BLOCK_C), real)
    for first in range(0, C, BLOCK_C):  # x is not read again, mostly, and y is soon
        k = (first + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
        inside = (i < R) & (k < C)
        x = tl.load(
            x_ptr + i * x_line + k * x_along, mask=inside, other=0.0, eviction_policy="evict_first"
        ).to(real)
        tl.store(
            y_ptr + i * y_line + k * y_along,
            x.to(tl.float16),
            mask=inside,
            eviction_policy="evict_last",
        )
        peak = tl.maximum(peak, tl.abs(x))
    largest = tl.max(peak, 1)
    e = exponent(largest, WIDE)
    tl.store(scale_ptr + lines, e, mask=lines < R)
    if tl.max(tl.where(fits(largest), 0, 1)) > 0:
        for first in range(0, C, BLOCK_C):
            k = (first + tl.arange(0, BLOCK_C)).to(tl.int64)[None, :]
            inside = (i < R) & (k < C)
            x = tl.load(x_ptr + i * x_line + k * x_along, mask=inside, other=0.0).to(real)
            tl.store(y_ptr + i * y_line + k * y_along, halved(x, e[:, None], WIDE), mask=inside)


@triton.jit
def moved(e_ptr, COUNT, BLOCK: tl.constexpr):
    """Above 0 where any of so many exponents is another than 0."""
    found = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, COUNT, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found |= tl.load(e_ptr + at, mask=at < COUNT, other=0)
    return tl.max(tl.where(found != 0, 1, 0))


@triton.jit
def scale_back(
    c_ptr, y_ptr, left_ptr, right_ptr, M, N,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = c · 2^(left[i] + right[j]), of either that is given; where y is c's memory, what no line moved stays untouched.

    Programs stay for several tiles: mostly there is nothing to do, which each of them sees by itself.
    """
    follow(PDL)
    any_moved = 0
    if left_ptr is not None:
        any_moved += moved(left_ptr, M, BLOCK)
    if right_ptr is not None:
        any_moved += moved(right_ptr, N, BLOCK)
    if WIDE or any_moved > 0:
        across = tl.cdiv(N, BLOCK_N)
        for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
            i = tile // across * BLOCK_M + tl.arange(0, BLOCK_M)
            j = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
            e = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
            if left_ptr is not None:
                e += tl.load(left_ptr + i, mask=i < M, other=0)[:, None]
            if right_ptr is not None:
                e += tl.load(right_ptr + j, mask=j < N, other=0)[None, :]
            if WIDE or tl.max(tl.abs(e)) > 0:
                inside = (i < M)[:, None] & (j < N)[None, :]
                at = i.to(tl.int64)[:, None] * N + j[None, :]
                half = e >> 1  # in two steps: 2^e alone may leave float32
                c = tl.load(c_ptr + at, mask=inside, other=0.0)
                if WIDE:
                    c = c.to(tl.float64)
                tl.store(y_ptr + at, c * power(half, WIDE) * power(e - half, WIDE), mask=inside)


def _start(
    kernel: Any, grid: int, kind: str, shape: tuple[int, int], strides: tuple[int, ...], block: tuple[int, int],
    align: int, device: torch.device, warps: int = 8, parts: int | None = None,
) -> Start:  # fmt: skip
    """One of the kernels that round lines; `parts` of them have a peak each where another launch has found those."""
    wide = kind == "f64"
    pointers = {"x_ptr": kind, "y_ptr": "f16", "scale_ptr": "i32"}
    integers = {"R": shape[0], "C": shape[1]}
    if parts is not None:
        pointers["peak_ptr"], integers["PARTS"] = "f64" if wide else "f32", parts
    return prepare(
        kernel, grid=(grid, 1, 1), pointers=pointers,
        integers=integers | dict(zip(line_max.STRIDES, strides, strict=True)),
        constexprs={"WIDE": wide, "BLOCK_R": block[0], "BLOCK_C": block[1]},
        num_warps=warps, device=device, align=align,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _halve(
    kind: str, shape: tuple[int, int], strides: tuple[int, ...], parts: int, align: int, device: torch.device
) -> Start:  # fmt: skip
    lines, along = shape
    block = LINES[line_max.together(strides[:2])]
    across = triton.cdiv(lines, block[0])
    shared = max(1, min(triton.cdiv(along, block[1]), LOOKING // across))
    return _start(halve_lines, across * shared, kind, shape, strides, block, align, device, parts=parts)  # fmt: skip


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, C] in float16, laid out as x lies, its rows scaled down by two to the exponents that come with it, int32 [R]."""
    rows, columns = x.shape
    turned = x.stride(0) == 1 and x.stride(1) != 1
    y = torch.empty((columns, rows) if turned else (rows, columns), dtype=torch.float16, device=x.device)  # fmt: skip
    y = y.t() if turned else y
    exponents = torch.empty(rows, dtype=torch.int32, device=x.device)
    (kind,), strides = split_planes.names(x), (*x.stride(), *y.stride())
    align = split_planes.aligned(x)
    if columns <= WHOLE // x.element_size() and line_max.together(strides[:2]):
        good = _whole(kind, (rows, columns), strides, align, x.device)(x, y, exponents)
    elif rows >= STRIPS * STRIP[line_max.together(strides[:2])][0]:
        good = _strips(kind, (rows, columns), strides, align, x.device)(x, y, exponents)
    else:
        peak, parts = line_max.peaks(x, y)
        good = _halve(kind, (rows, columns), strides, parts, align, x.device)(x, y, exponents, peak)
    if not good:
        raise RuntimeError("halves: the kernel refused tensors of the alignment it was built for")
    return y, exponents


@lru_cache(maxsize=1024)
def _whole(
    kind: str, shape: tuple[int, int], strides: tuple[int, ...], align: int, device: torch.device
) -> Start:
    lines, along = shape
    columns = max(16, triton.next_power_of_2(along))
    most = TILE // (2 if kind == "f64" else 1) // columns
    rows = max(1, min(most, triton.next_power_of_2(max(1, lines // ENOUGH))))
    grid = triton.cdiv(lines, rows)
    return _start(halve_whole_lines, grid, kind, shape, strides, (rows, columns), align, device)


@lru_cache(maxsize=1024)
def _strips(
    kind: str, shape: tuple[int, int], strides: tuple[int, ...], align: int, device: torch.device
) -> Start:
    lines, along = shape
    least, programs, held, warps = STRIP[line_max.together(strides[:2])]
    rows = min(MOST, max(least, triton.next_power_of_2(triton.cdiv(lines, programs))))
    most = held // (2 if kind == "f64" else 1) // rows
    block = (rows, min(most, max(16, triton.next_power_of_2(along))))
    return _start(halve_strips, triton.cdiv(lines, rows), kind, shape, strides, block, align, device, warps)  # fmt: skip


@lru_cache(maxsize=1024)
def _back(
    shape: tuple[int, int], given: tuple[str, ...], wide: bool, device: torch.device
) -> Start:
    rows, columns = shape
    tiles = triton.cdiv(rows, BLOCK_M[wide]) * triton.cdiv(columns, BLOCK_N)
    return prepare(
        scale_back, grid=(tiles if wide else min(tiles, LOOKING), 1, 1),
        pointers={"c_ptr": "f32", "y_ptr": "f64" if wide else "f32", **dict.fromkeys(given, "i32")}, integers={"M": rows, "N": columns},
        constexprs={"WIDE": wide, "BLOCK_M": BLOCK_M[wide], "BLOCK_N": BLOCK_N, "BLOCK": 4096}, num_warps=8, device=device, align=4,
    )  # fmt: skip


def scaled_back(c: Tensor, left: Tensor | None, right: Tensor | None, wide: bool = False) -> Tensor:
    """c [M, N] times two to the exponents of its rows and columns, where there are any: in place, or in float64 where `wide`."""
    given = {"left_ptr": left, "right_ptr": right}
    there = {name: t for name, t in given.items() if t is not None}
    if there:
        y = torch.empty_like(c, dtype=torch.float64) if wide else c
        start = _back((c.shape[0], c.shape[1]), tuple(there), wide, c.device)
        if not start(c, y, *there.values()):
            raise RuntimeError("scaled_back: the kernel refused a tensor that PyTorch allocated")
        return y
    return c
