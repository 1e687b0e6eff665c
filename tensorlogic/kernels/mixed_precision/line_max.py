"""The largest element of every line of an operand, by which it is scaled: one launch that reads it once, in parts of lines.

Where asked, it writes what it reads in a narrower type meanwhile: all there is to do where no line needs a scale."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_runtime.device_math import follow
from ..triton_runtime.launch import Start, prepare
from . import split_planes

#: Lines and elements along them of a tile, by whether neighbours along a line lie together.
TILES = {True: (8, 1024), False: (128, 64)}
RUNS = 4  # tiles that a program reads along its lines
WRITTEN = {True: 1, False: 4}  # where it writes them, too, by the same
TYPES = {"f32": torch.float32, "f64": torch.float64}


@triton.jit
def line_peaks(
    x_ptr, peak_ptr, square_ptr, y_ptr, R, C, x_line, x_along, y_line, y_along,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, RUNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """peak[p, r] = largest |x|, square[p, r], where it is given, = sum of x², of RUNS tiles of line r of x [R, C].

    y, where it is given, is x in its type.
    """
    follow(PDL)
    real: tl.constexpr = peak_ptr.dtype.element_ty
    across = tl.cdiv(R, BLOCK_R)
    part = tl.program_id(0) // across
    lines = tl.program_id(0) % across * BLOCK_R + tl.arange(0, BLOCK_R)
    peak = tl.zeros((BLOCK_R, BLOCK_C), real)
    square = tl.zeros((BLOCK_R, BLOCK_C), real)
    for run in tl.static_range(RUNS):
        along = (part * RUNS + run) * BLOCK_C + tl.arange(0, BLOCK_C)
        at = lines.to(tl.int64)[:, None] * x_line + along.to(tl.int64)[None, :] * x_along
        inside = (lines < R)[:, None] & (along < C)[None, :]
        if y_ptr is None:
            x = tl.load(x_ptr + at, mask=inside, other=0.0).to(real)
        else:  # x is not read again, and y is soon
            x = tl.load(x_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(real)
            to = lines.to(tl.int64)[:, None] * y_line + along.to(tl.int64)[None, :] * y_along
            tl.store(
                y_ptr + to, x.to(y_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_last"
            )
        peak = tl.maximum(peak, tl.abs(x))
        if square_ptr is not None:
            square += x * x
    at = part.to(tl.int64) * R + lines
    tl.store(peak_ptr + at, tl.max(peak, 1), mask=lines < R)
    if square_ptr is not None:
        tl.store(square_ptr + at, tl.sum(square, 1), mask=lines < R)


def together(strides: tuple[int, ...]) -> bool:
    """Whether neighbours along a line lie together (or nothing does)."""
    return strides[1] == 1 or strides[0] != 1


@lru_cache(maxsize=1024)
def _peaks(
    kind: str, real: str, squares: bool, shape: tuple[int, int], strides: tuple[int, ...], align: int, device: torch.device,
) -> tuple[Start, int]:  # fmt: skip
    """(line_peaks, how many parts of a line have a peak of their own); four strides where x is written in float16, too."""
    lines, along = shape
    rows, columns = TILES[together(strides)]
    rows = rows // 2 if real == "f64" else rows  # what the registers hold
    runs = WRITTEN[together(strides)] if len(strides) > 2 else RUNS
    parts = ceil(along / (runs * columns))
    found = {"peak_ptr": real, "square_ptr": real} if squares else {"peak_ptr": real}
    if len(strides) > 2:
        found["y_ptr"] = "f16"
    laid = dict(zip(("x_line", "x_along", "y_line", "y_along"), strides, strict=False))
    start = prepare(
        line_peaks, grid=(ceil(lines / rows) * parts, 1, 1), pointers={"x_ptr": kind, **found},
        integers={"R": lines, "C": along, **laid}, floats=(),
        constexprs={"BLOCK_R": rows, "BLOCK_C": columns, "RUNS": runs}, num_warps=8, num_stages=1, device=device, align=align,
    )  # fmt: skip
    return start, parts


def peaks(
    x: Tensor, real: str = "f32", squares: bool = False, rounded: Tensor | None = None
) -> tuple[Tensor, Tensor | None, int]:
    """(largest |x|, where asked for sum of x², of every part of every line of x [R, C], in `real`; how many parts a line has).

    `rounded` [R, C] becomes x in float16, where it is given.
    """
    (kind,) = split_planes.names(x)
    outs = [] if rounded is None else [rounded]
    align = split_planes.aligned(x, *outs)
    strides = (*x.stride(), *(rounded.stride() if rounded is not None else ()))
    start, parts = _peaks(kind, real, squares, (x.shape[0], x.shape[1]), strides, align, x.device)
    size = ceil(parts * x.shape[0] / 4) * 4  # each begins at a multiple of 16 bytes
    found = torch.empty((1 + squares) * size, dtype=TYPES[real], device=x.device).split(size)
    if not start(x, *found, *outs):
        raise RuntimeError("peaks: the kernel refused a tensor of the alignment it was built for")
    return found[0], found[1] if squares else None, parts
