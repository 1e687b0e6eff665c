"""Group norm whose groups are read by several programs each: PyTorch gives a group to one block, however long it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.triton_runtime.device_math import follow
from tensorlogic.kernels.triton_runtime.launch import prepare

# elements that a program reads at a time: 16 bytes a thread in halves
BLOCK = 1024
PROGRAMS = 512  # about four for each multiprocessor of a large GPU


@triton.jit
def places(at, HW, C, D, row, G, LAST: tl.constexpr):
    """Where elements `at` of a group's D · HW lie in memory, and of which channel they are; LAST: channels are adjacent."""
    first = (row % G) * D
    if LAST:
        image = (row // G).to(tl.int64) * HW * C
        return image + (at // D).to(tl.int64) * C + first + at % D, first + at % D
    return row.to(tl.int64) * D * HW + at, first + at // HW


@triton.jit
def group_norm_parts(
    x_ptr, part_ptr, HW, C, D, G, PARTS, SPAN, BLOCK: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """part[row, p] = mean and sum of squared deviations of the p-th SPAN elements of a group, in float32.

    Blocks are joined by Chan's formula, so a mean far from zero costs no digits.
    """
    follow(PDL)
    row, p = tl.program_id(1), tl.program_id(0)
    begin = p * SPAN
    end = tl.minimum(begin + SPAN, D * HW)
    mean, square, done = 0.0, 0.0, 0.0
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        lies, _ = places(at, HW, C, D, row, G, LAST)
        x = tl.load(x_ptr + lies, at < end, 0.0).to(tl.float32)
        count = tl.minimum(end - start, BLOCK).to(tl.float32)
        middle = tl.sum(x, 0) / count
        apart = x - middle
        delta, total = middle - mean, done + count
        spread = tl.sum(tl.where(at < end, apart * apart, 0.0), 0)  # the same in all lanes
        square += spread + delta * delta * (done * count / total)
        mean += delta * (count / total)
        done = total
    to = part_ptr + (row.to(tl.int64) * PARTS + p) * 2
    tl.store(to, mean)
    tl.store(to + 1, square)


@triton.jit
def group_norm_apply(
    x_ptr, part_ptr, gamma_ptr, beta_ptr, y_ptr, HW, C, D, G, PARTS, SPAN, eps,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) / sqrt(var + eps) · gamma + beta for the p-th SPAN elements of a group, mean and var from all parts."""
    follow(PDL)
    row, p = tl.program_id(1), tl.program_id(0)
    length = D * HW
    part = tl.arange(0, PADDED)
    known = part < PARTS
    from_ = part_ptr + (row.to(tl.int64) * PARTS + part) * 2
    middles, squares = tl.load(from_, known, 0.0), tl.load(from_ + 1, known, 0.0)
    counts = tl.where(known, tl.minimum(length - part * SPAN, SPAN), 0).to(tl.float32)
    mean = tl.sum(tl.where(known, counts * middles, 0.0), 0) / length  # the same in all lanes
    apart = middles - mean
    square = tl.sum(squares + counts * apart * apart, 0)
    scale = 1.0 / tl.sqrt(square / length + eps)
    end = tl.minimum((p + 1) * SPAN, length)
    for start in range(p * SPAN, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        live = at < end
        lies, channel = places(at, HW, C, D, row, G, LAST)
        y = (tl.load(x_ptr + lies, live, 0.0).to(tl.float32) - mean) * scale
        if gamma_ptr is not None:
            y *= tl.load(gamma_ptr + channel, live, 0.0).to(tl.float32)
        if beta_ptr is not None:
            y += tl.load(beta_ptr + channel, live, 0.0).to(tl.float32)
        tl.store(y_ptr + lies, y.to(y_ptr.dtype.element_ty), live)


def parts_of(rows: int, length: int) -> tuple[int, int]:
    """Into how many parts a group is cut, and the elements of each, whole blocks."""
    parts = max(1, min(triton.cdiv(length, BLOCK), PROGRAMS // rows))
    span = triton.cdiv(triton.cdiv(length, parts), BLOCK) * BLOCK
    return triton.cdiv(length, span), span


def group_norm_launcher(
    images: int, channels: int, pixels: int, groups: int, dtype: str, params: tuple[bool, bool],
    last: bool, device: torch.device, align: int,
) -> Callable[..., bool]:  # fmt: skip
    """A callable (x, part, [gamma,] [beta,] y, eps) -> bool; x and y [images, channels, pixels] with channels adjacent if
    `last`, part float32 [images · groups, parts, 2] by `parts_of`."""
    rows, each = images * groups, channels // groups
    parts, span = parts_of(rows, each * pixels)
    integers = {"HW": pixels, "C": channels, "D": each, "G": groups, "PARTS": parts, "SPAN": span}
    names = [n for n, given in zip(("gamma_ptr", "beta_ptr"), params, strict=True) if given]
    grid = (parts, rows, 1)
    first = prepare(
        group_norm_parts, grid=grid, pointers={"x_ptr": dtype, "part_ptr": "f32"}, integers=integers, floats=(),
        constexprs={"BLOCK": BLOCK, "LAST": last}, num_warps=4, num_stages=2, device=device, align=align,
    )  # fmt: skip
    pointers = {"x_ptr": dtype, "part_ptr": "f32", **dict.fromkeys(names, dtype), "y_ptr": dtype}
    constexprs = {"BLOCK": BLOCK, "PADDED": triton.next_power_of_2(parts), "LAST": last}
    second = prepare(
        group_norm_apply, grid=grid, pointers=pointers, integers=integers, floats=("eps",), constexprs=constexprs,
        num_warps=4, num_stages=2, device=device, align=align,
    )  # fmt: skip

    def start(x: torch.Tensor, part: torch.Tensor, *rest: object) -> bool:
        return first(x, part) and second(x, part, *rest)

    return start
