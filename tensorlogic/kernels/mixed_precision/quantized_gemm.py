"""Products of bytes on an NVIDIA GPU: lines as int8 or float8 (e4m3) with a scale of their own, and their product scaled back.

Two launches make the bytes of an operand, whatever its layout: `triton_lines.py` reads it once, `to_bytes` again, partly from
the L2 cache. Lines lie along the inner dimension afterwards, where tensor cores want it, its end filled with zeros.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_runtime.device_math import follow
from ..triton_runtime.launch import Start, prepare
from . import line_max, split_planes
from .data_statistics import CREST

# elements that the inner dimension is filled up to, the depth of a tile
PITCH = 128
TOP = {"int8": 127.0, "fp8": 448.0}  # what the largest element of a line becomes
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
NAMES = {"int8": "i8", "fp8": "e4m3"}
# lines and elements along them of a tile, as in triton_lines.py
BYTES = {True: (16, 512), False: (64, 128)}
#: BLOCK_M, BLOCK_N, BLOCK_K, warps, stages of the product
TILES = ((128, 256, 128, 8, 4), (128, 128, 128, 4, 4), (64, 128, 128, 4, 5), (64, 64, 128, 4, 5))


@triton.jit
def to_bytes(
    x_ptr, y_ptr, scale_ptr, peak_ptr, square_ptr, flag_ptr, R, C, PARTS, DEPTH, x_line, x_along,
    TOP: tl.constexpr, CREST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[r, c] = x[r, c] / scale[r] of x [R, C], y [R, DEPTH]; scale[r] = peak of line r / TOP.

    Noted in flag: a line that is not finite, whose peak is beyond 2^-50 .. 2^50, or more than CREST times its root mean square.
    """
    follow(PDL)
    across = tl.cdiv(R, BLOCK_R)
    first = tl.program_id(0) // across
    lines = tl.program_id(0) % across * BLOCK_R + tl.arange(0, BLOCK_R)
    peak = tl.zeros((BLOCK_R,), tl.float32)
    square = tl.zeros((BLOCK_R,), tl.float32)
    at = lines.to(tl.int64)
    for _ in range(PARTS):
        peak = tl.maximum(peak, tl.load(peak_ptr + at, mask=lines < R, other=0.0))
        square += tl.load(square_ptr + at, mask=lines < R, other=0.0)
        at += R
    empty = (peak == 0.0) & (square == 0.0)
    fits = (peak >= 8.881784197001252e-16) & (peak <= 1125899906842624.0)
    fits &= (square - square == 0.0) & (peak * peak * C <= square * (CREST * CREST))
    if first == 0:
        tl.store(scale_ptr + lines, peak / TOP, mask=lines < R)
        spoilt = tl.sum((~(fits | empty)).to(tl.int32))
        if spoilt > 0:
            tl.atomic_add(flag_ptr, 1)
    factor = tl.where(fits, TOP / tl.where(fits, peak, 1.0), 0.0)[:, None]
    along = first * BLOCK_C + tl.arange(0, BLOCK_C)
    at = lines.to(tl.int64)[:, None] * x_line + along.to(tl.int64)[None, :] * x_along
    x = tl.load(x_ptr + at, mask=(lines < R)[:, None] & (along < C)[None, :], other=0.0)
    x = tl.minimum(tl.maximum(x.to(tl.float32) * factor, -TOP), TOP)
    to = lines.to(tl.int64)[:, None] * DEPTH + along[None, :]
    inside = (lines < R)[:, None] & (along < DEPTH)[None, :]
    if y_ptr.dtype.element_ty == tl.int8:
        tl.store(y_ptr + to, tl.floor(x + 0.5).to(tl.int8), mask=inside)
    else:
        tl.store(y_ptr + to, x.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def bytes_product(
    x_ptr, w_ptr, y_ptr, x_scale_ptr, w_scale_ptr, M, N, DEPTH,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [M, N] = x [M, DEPTH] · w [N, DEPTH]ᵀ · x_scale[m] · w_scale[n]; sums of int8 are exact, those of float8 in float32."""
    follow(PDL)
    pid = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * across)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - group * GROUP_M, GROUP_M)
    inside = pid % (GROUP_M * across)
    rm = (group * GROUP_M + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = inside // height * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (rm % M).to(tl.int64)[:, None] * DEPTH + rk[None, :]
    w_at = w_ptr + (rn % N).to(tl.int64)[None, :] * DEPTH + rk[:, None]
    if x_ptr.dtype.element_ty == tl.int8:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, DEPTH, BLOCK_K):
        acc = tl.dot(tl.load(x_at), tl.load(w_at), acc, out_dtype=acc.dtype)
        x_at += BLOCK_K
        w_at += BLOCK_K
    rows = tl.load(x_scale_ptr + rm, mask=rm < M, other=0.0)
    columns = tl.load(w_scale_ptr + rn, mask=rn < N, other=0.0)
    to = y_ptr + rm.to(tl.int64)[:, None] * N + rn[None, :]
    y = acc.to(tl.float32) * rows[:, None] * columns[None, :]
    tl.store(to, y, mask=(rm < M)[:, None] & (rn < N)[None, :])


@triton.jit
def scale_sums(
    c_ptr, y_ptr, x_scale_ptr, w_scale_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [M, N] = c · x_scale[m] · w_scale[n], of whole numbers c; y may be c's memory."""
    follow(PDL)
    across = tl.cdiv(N, BLOCK_N)
    i = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (i < M)[:, None] & (j < N)[None, :]
    at = i.to(tl.int64)[:, None] * N + j[None, :]
    rows = tl.load(x_scale_ptr + i, mask=i < M, other=0.0)
    columns = tl.load(w_scale_ptr + j, mask=j < N, other=0.0)
    c = tl.load(c_ptr + at, mask=inside, other=0).to(tl.float32)
    tl.store(y_ptr + at, c * rows[:, None] * columns[None, :], mask=inside)


@lru_cache(maxsize=1024)
def _to_bytes(
    kind: str, form: str, shape: tuple[int, int], strides: tuple[int, int], parts: int, depth: int, align: int, device: torch.device,
) -> Start:  # fmt: skip
    lines, along = shape
    down, across = BYTES[line_max.together(strides)]
    return prepare(
        to_bytes, grid=(ceil(lines / down) * ceil(depth / across), 1, 1),
        pointers={
            "x_ptr": kind, "y_ptr": NAMES[form], "scale_ptr": "f32", "peak_ptr": "f32", "square_ptr": "f32", "flag_ptr": "i32",
        },
        integers={"R": lines, "C": along, "PARTS": parts, "DEPTH": depth, "x_line": strides[0], "x_along": strides[1]}, floats=(),
        constexprs={"TOP": TOP[form], "CREST": CREST[form], "BLOCK_R": down, "BLOCK_C": across},
        num_warps=8, num_stages=1, device=device, align=align,
    )  # fmt: skip


def quantise(x: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """x [R, C] as bytes [R, C rounded up to PITCH] and the scale of each line, float32 [R].

    What no scale of a line can bring into a byte is noted in `triton_split.flag`, for whoever looks at the product.
    """
    lines, along = x.shape
    depth = ceil(along / PITCH) * PITCH
    peak, square, parts = line_max.peaks(x, squares=True)
    (kind,) = split_planes.names(x)
    strides = (x.stride(0), x.stride(1))
    align = split_planes.aligned(x)
    to = _to_bytes(kind, form, (lines, along), strides, parts, depth, align, x.device)
    scale = torch.empty(lines, dtype=torch.float32, device=x.device)
    y = torch.empty(lines, depth, dtype=TYPES[form], device=x.device)
    if not to(x, y, scale, peak, square, split_planes.flag(x.device)):
        raise RuntimeError("quantise: the kernel refused tensors of the alignment it was built for")
    return y, scale


@lru_cache(maxsize=1024)
def _multiply(
    form: str, sizes: tuple[int, int, int], tile: tuple[int, ...], device: torch.device
) -> Start:
    m, n, depth = sizes
    rows, columns, deep, warps, stages = tile
    return prepare(
        bytes_product, grid=(ceil(m / rows) * ceil(n / columns), 1, 1),
        pointers={
            "x_ptr": NAMES[form], "w_ptr": NAMES[form], "y_ptr": "f32", "x_scale_ptr": "f32", "w_scale_ptr": "f32",
        },
        integers={"M": m, "N": n, "DEPTH": depth}, floats=(),
        constexprs={"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": deep, "GROUP_M": 8},
        num_warps=warps, num_stages=stages, device=device,
    )  # fmt: skip


Quantised = tuple[Tensor, Tensor]  # bytes [R, DEPTH], scales [R]


def multiply(left: Quantised, right: Quantised, form: str, rank: int = 0) -> Tensor:
    """The product [M, N] in float32 of bytes [M, DEPTH] and [N, DEPTH] with their scales; `rank` chooses the tile."""
    (x, rows), (w, columns) = left, right
    m, n = x.shape[0], w.shape[0]
    y = torch.empty(m, n, dtype=torch.float32, device=x.device)
    start = _multiply(form, (m, n, x.shape[1]), TILES[rank], x.device)
    if not start(x, w, y, rows, columns):
        raise RuntimeError("bytes_product: the kernel refused tensors that PyTorch allocated")
    return y


@lru_cache(maxsize=1024)
def _scale(m: int, n: int, device: torch.device) -> Start:
    return prepare(
        scale_sums, grid=(ceil(m / 32) * ceil(n / 256), 1, 1),
        pointers={"c_ptr": "i32", "y_ptr": "f32", "x_scale_ptr": "f32", "w_scale_ptr": "f32"},
        integers={"M": m, "N": n}, floats=(), constexprs={"BLOCK_M": 32, "BLOCK_N": 256},
        num_warps=8, num_stages=1, device=device,
    )  # fmt: skip


def scaled(c: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """c [M, N] of int32 times the scales of its rows and columns, in float32, in c's memory."""
    y = c.view(torch.float32)
    if not _scale(c.shape[0], c.shape[1], c.device)(c, y, rows, columns):
        raise RuntimeError("scale_sums: the kernel refused tensors that PyTorch allocated")
    return y
