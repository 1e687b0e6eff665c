"""The largest element of every line of an operand, by which it is scaled: one launch that reads it once, in parts of lines.

It writes what it reads in float16 meanwhile: all there is to do where no line needs a scale."""

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
RUNS = {True: 1, False: 4}  # tiles of a program along its lines
STRIDES = ("x_line", "x_along", "y_line", "y_along")
TYPES = {"f32": torch.float32, "f64": torch.float64}


@triton.jit
def line_peaks(
    x_ptr, peak_ptr, y_ptr, R, C, x_line, x_along, y_line, y_along,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, RUNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """peak[p, r] = largest |x| of RUNS tiles of line r of x [R, C]; y is x in its type."""
    follow(PDL)
    real: tl.constexpr = peak_ptr.dtype.element_ty
    across = tl.cdiv(R, BLOCK_R)
    part = tl.program_id(0) // across
    lines = tl.program_id(0) % across * BLOCK_R + tl.arange(0, BLOCK_R)
    peak = tl.zeros((BLOCK_R, BLOCK_C), real)
    for run in tl.static_range(RUNS):
        along = (part * RUNS + run) * BLOCK_C + tl.arange(0, BLOCK_C)
        at = lines.to(tl.int64)[:, None] * x_line + along.to(tl.int64)[None, :] * x_along
        inside = (lines < R)[:, None] & (along < C)[None, :]
        # x is not read again, and y is soon
        x = tl.load(x_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first").to(real)
        to = lines.to(tl.int64)[:, None] * y_line + along.to(tl.int64)[None, :] * y_along
        y = x.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + to, y, mask=inside, eviction_policy="evict_last")
        peak = tl.maximum(peak, tl.abs(x))
    at = part.to(tl.int64) * R + lines
    tl.store(peak_ptr + at, tl.max(peak, 1), mask=lines < R)


def together(strides: tuple[int, ...]) -> bool:
    """Whether neighbours along a line lie together (or nothing does)."""
    return strides[1] == 1 or strides[0] != 1


@lru_cache(maxsize=1024)
def _peaks(
    kind: str, real: str, shape: tuple[int, int], strides: tuple[int, ...], align: int, device: torch.device
) -> tuple[Start, int]:  # fmt: skip
    """(line_peaks, how many parts of a line have a peak of their own)."""
    lines, along = shape
    rows, columns = TILES[together(strides)]
    rows = rows // 2 if real == "f64" else rows  # what the registers hold
    runs = RUNS[together(strides)]
    parts = ceil(along / (runs * columns))
    start = prepare(
        line_peaks, grid=(ceil(lines / rows) * parts, 1, 1), pointers={"x_ptr": kind, "peak_ptr": real, "y_ptr": "f16"},
        integers={"R": lines, "C": along, **dict(zip(STRIDES, strides, strict=True))},
        constexprs={"BLOCK_R": rows, "BLOCK_C": columns, "RUNS": runs}, num_warps=8, device=device, align=align,
    )  # fmt: skip
    return start, parts


def peaks(x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """(largest |x| of every part of every line of x [R, C], in float32 or of float64 in that; how many parts a line has); y [R, C]
    becomes x in float16."""
    (kind,) = split_planes.names(x)
    real = "f64" if kind == "f64" else "f32"
    strides = (*x.stride(), *y.stride())
    align = split_planes.aligned(x, y)
    start, parts = _peaks(kind, real, (x.shape[0], x.shape[1]), strides, align, x.device)
    found = torch.empty(parts * x.shape[0], dtype=TYPES[real], device=x.device)
    if not start(x, found, y):
        raise RuntimeError("peaks: the kernel refused a tensor of the alignment it was built for")
    return found, parts
