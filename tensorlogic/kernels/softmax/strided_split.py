"""Softmax over few, long lines of any strides, forward and backward: several programs a line, in two launches, same bits every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.row_access.strided import (
    LOWEST,
    NAMES,
    Lines,
    begun,
    from_start,
    placed,
    within,
)
from tensorlogic.kernels.triton_runtime.config_check import fitting
from tensorlogic.kernels.triton_runtime.device_math import follow, powers
from tensorlogic.kernels.triton_runtime.launch import prepare

from ..row_access.strided import inside, left_by, part_of, tile


@triton.jit
def softmax_fwd_parts(
    x_ptr, part_ptr, C, N, SPAN, PARTS, x_o, x_c, x_i,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """part[lines, p] = max and sum of exp(x - max) of the p-th SPAN elements of BLOCK_I neighbouring lines; float32. A tile is asked for
    before the one in front of it is used."""
    follow(PDL)
    outer, first, x_at = placed(N, x_c, x_i, WIDE, BLOCK_C, BLOCK_I)
    begin, length = part_of(C, SPAN)
    x_ptr = from_start(begun(x_ptr, outer, first, x_o, x_i), begin, x_c)
    i = tl.arange(0, BLOCK_I)
    live = first + i < N
    m = tl.full([BLOCK_I], LOWEST, tl.float32)
    norm = tl.zeros([BLOCK_I], tl.float32)
    x = tile(x_ptr, x_at, 0, x_c, length, live, float("-inf"), "evict_last", BLOCK_C)
    for start in range(0, length, BLOCK_C):
        after = tile(x_ptr, x_at, start + BLOCK_C, x_c, length, live, float("-inf"), "evict_last", BLOCK_C)  # fmt: skip
        values = x.to(tl.float32)
        peak = tl.maximum(m, tl.max(values, 0))
        norm = norm * powers(m - peak) + tl.sum(powers(values - peak[None, :]), 0)
        m, x = peak, after
    to = part_ptr + left_by(tl.program_id(1), PARTS, 2, BLOCK_I) + i
    tl.store(to, m)
    tl.store(to + BLOCK_I, norm)


@triton.jit
def softmax_fwd_joined(
    x_ptr, part_ptr, y_ptr, C, N, SPAN, PARTS, x_o, x_c, x_i, y_o, y_c, y_i,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = exp(x - max) / sum of the same elements, from what `softmax_fwd_parts` left of their lines' PARTS parts; x comes from L2."""
    follow(PDL)
    outer, first, x_at = placed(N, x_c, x_i, WIDE, BLOCK_C, BLOCK_I)
    y_at = within(y_c, y_i, WIDE, BLOCK_C, BLOCK_I)
    begin, length = part_of(C, SPAN)
    x_ptr = from_start(begun(x_ptr, outer, first, x_o, x_i), begin, x_c)
    y_ptr = from_start(begun(y_ptr, outer, first, y_o, y_i), begin, y_c)
    p, i = tl.arange(0, PADDED)[:, None], tl.arange(0, BLOCK_I)
    live = first + i < N
    x = tile(x_ptr, x_at, 0, x_c, length, live, 0.0, "evict_first", BLOCK_C)
    lies = part_ptr + left_by(0, PARTS, 2, BLOCK_I) + p * (2 * BLOCK_I) + i[None, :]
    m = tl.load(lies, mask=p < PARTS, other=LOWEST)
    norm = tl.load(lies + BLOCK_I, mask=p < PARTS, other=0.0)
    peak = tl.max(m, 0)[None, :]
    scale = 1.0 / tl.sum(norm * powers(m - peak), 0)[None, :]  # NaN of +inf, as inf - inf is
    for start in range(0, length, BLOCK_C):
        after = tile(x_ptr, x_at, start + BLOCK_C, x_c, length, live, 0.0, "evict_first", BLOCK_C)
        y = (powers(x.to(tl.float32) - peak) * scale).to(y_ptr.dtype.element_ty)
        tl.store(from_start(y_ptr, start, y_c) + y_at, y, mask=inside(start, length, live, BLOCK_C))
        x = after


@triton.jit
def softmax_bwd_parts(
    dy_ptr, y_ptr, part_ptr, C, N, SPAN, PARTS, dy_o, dy_c, dy_i, y_o, y_c, y_i,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """part[lines, p] = sum(dy y) of the p-th SPAN elements of BLOCK_I neighbouring lines; float32."""
    follow(PDL)
    outer, first, dy_at = placed(N, dy_c, dy_i, WIDE, BLOCK_C, BLOCK_I)
    y_at = within(y_c, y_i, WIDE, BLOCK_C, BLOCK_I)
    begin, length = part_of(C, SPAN)
    dy_ptr = from_start(begun(dy_ptr, outer, first, dy_o, dy_i), begin, dy_c)
    y_ptr = from_start(begun(y_ptr, outer, first, y_o, y_i), begin, y_c)
    i = tl.arange(0, BLOCK_I)
    live = first + i < N
    dot = tl.zeros([BLOCK_I], tl.float32)
    y = tile(y_ptr, y_at, 0, y_c, length, live, 0.0, "evict_last", BLOCK_C)
    dy = tile(dy_ptr, dy_at, 0, dy_c, length, live, 0.0, "evict_last", BLOCK_C)
    for start in range(0, length, BLOCK_C):
        y_after = tile(y_ptr, y_at, start + BLOCK_C, y_c, length, live, 0.0, "evict_last", BLOCK_C)
        dy_after = tile(dy_ptr, dy_at, start + BLOCK_C, dy_c, length, live, 0.0, "evict_last", BLOCK_C)  # fmt: skip
        dot += tl.sum(y.to(tl.float32) * dy.to(tl.float32), 0)
        y, dy = y_after, dy_after
    tl.store(part_ptr + left_by(tl.program_id(1), PARTS, 1, BLOCK_I) + i, dot)


@triton.jit
def softmax_bwd_joined(
    dy_ptr, y_ptr, part_ptr, dx_ptr, C, N, SPAN, PARTS, dy_o, dy_c, dy_i, y_o, y_c, y_i, dx_o, dx_c, dx_i,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx = y (dy - dot) of the same elements, dot from what `softmax_bwd_parts` left of their lines' PARTS parts; y and dy come from L2."""
    follow(PDL)
    outer, first, dy_at = placed(N, dy_c, dy_i, WIDE, BLOCK_C, BLOCK_I)
    y_at = within(y_c, y_i, WIDE, BLOCK_C, BLOCK_I)
    dx_at = within(dx_c, dx_i, WIDE, BLOCK_C, BLOCK_I)
    begin, length = part_of(C, SPAN)
    dy_ptr = from_start(begun(dy_ptr, outer, first, dy_o, dy_i), begin, dy_c)
    y_ptr = from_start(begun(y_ptr, outer, first, y_o, y_i), begin, y_c)
    dx_ptr = from_start(begun(dx_ptr, outer, first, dx_o, dx_i), begin, dx_c)
    p, i = tl.arange(0, PADDED)[:, None], tl.arange(0, BLOCK_I)
    live = first + i < N
    y = tile(y_ptr, y_at, 0, y_c, length, live, 0.0, "evict_first", BLOCK_C)
    dy = tile(dy_ptr, dy_at, 0, dy_c, length, live, 0.0, "evict_first", BLOCK_C)
    lies = part_ptr + left_by(0, PARTS, 1, BLOCK_I) + p * BLOCK_I + i[None, :]
    dot = tl.sum(tl.load(lies, mask=p < PARTS, other=0.0), 0)[None, :]
    for start in range(0, length, BLOCK_C):
        y_after = tile(y_ptr, y_at, start + BLOCK_C, y_c, length, live, 0.0, "evict_first", BLOCK_C)
        dy_after = tile(dy_ptr, dy_at, start + BLOCK_C, dy_c, length, live, 0.0, "evict_first", BLOCK_C)  # fmt: skip
        dx = (y.to(tl.float32) * (dy.to(tl.float32) - dot)).to(dx_ptr.dtype.element_ty)
        mask = inside(start, length, live, BLOCK_C)
        tl.store(from_start(dx_ptr, start, dx_c) + dx_at, dx, mask=mask)
        y, dy = y_after, dy_after


SHORTEST = 1024  # of lines that are cut
FEWEST = 8192  # elements of the lines that one program would read alone
MOST_PARTS = 256  # of a line: every program reads all of its lines' parts
COMBINED = 4096  # parts times neighbouring lines at most, by 8 warps
CHAIN = 4096  # tiles of a part at most: a chain of sums loses digits
SECTOR = 32  # bytes that memory is read by
EACH = 32  # elements that a thread has at once
TOGETHER = ((32, 64, 4, 2), (64, 64, 4, 4), (128, 128, 4, 8), (32, 64, 8, 1), (128, 32, 8, 4), (64, 64, 8, 1), (32, 32, 8, 2))  # fmt: skip
ALONE = ((1, 32, 8, 2), (1, 32, 4, 4), (1, 64, 8, 1), (1, 64, 4, 4), (1, 64, 8, 2), (1, 32, 8, 4))


def _width(lines: Lines, bytes_: int, size: int) -> int:
    """How many neighbouring lines a program takes: `bytes_` of them where they lie together."""
    together = any(abs(stride_i) < abs(stride_c) for _, stride_c, stride_i in lines.strides)
    return min(max(1, bytes_ // size), triton.next_power_of_2(lines.inner)) if together else 1


def refusal(lines: Lines, dtype: str, cores: int) -> str | None:
    """Why lines are left to kernels that give one to a single program, or None."""
    width = _width(lines, SECTOR, SIZES[dtype])
    if lines.length < SHORTEST or lines.length * width < FEWEST:
        return f"lines of {lines.length} are too short to be cut"
    programs = lines.outer * triton.cdiv(lines.inner, width)
    if programs >= 4 * cores:
        return f"{programs} programs need no parts"
    return (
        None if parts_configs(lines, dtype, cores) else "parts would be longer than sums are exact"
    )


def parts_configs(lines: Lines, dtype: str, cores: int = 132) -> list[dict[str, Any]]:
    """Configurations, best guess first: how many neighbouring lines a program takes, and in how many parts these are cut."""
    size, found = SIZES[dtype], list[dict[str, Any]]()
    together, tensors = _width(lines, SECTOR, size) > 1, len(lines.strides) - 1
    for bytes_, held, warps, programs in TOGETHER if together else ALONE:
        block_i = _width(lines, bytes_, size)
        groups = lines.outer * triton.cdiv(lines.inner, block_i)
        access = block_i if together else 16 if lines.strides[0][1] == 1 else 1
        # narrow ones take as many registers
        each = min(held // size // tensors, 4 * access, EACH // tensors)
        block_c = 32 * warps * each // block_i
        least = 128 * warps // block_i  # four elements a thread
        while block_c > least and groups * triton.cdiv(lines.length, block_c) < cores:
            block_c //= 2
        tiles = triton.cdiv(lines.length, block_c)
        combined = COMBINED * warps // 8 // block_i
        most = max(2, min(cores * programs // groups, MOST_PARTS, combined))
        parts = triton.cdiv(tiles, triton.cdiv(tiles, most))
        config = {"BLOCK_C": block_c, "BLOCK_I": block_i, "parts": parts, "num_warps": warps}
        fits = span_of(lines.length, parts) <= CHAIN * block_c
        if fits and config not in found and (not found or 2 * groups * parts >= cores):
            found.append(config)
    return found


def span_of(length: int, parts: int) -> int:
    """Elements of a part, in whole accesses."""
    return triton.cdiv(triton.cdiv(length, parts), 16) * 16


def _groups(lines: Lines, config: dict[str, Any]) -> int:
    return lines.outer * triton.cdiv(lines.inner, config["BLOCK_I"])


def parts_space(lines: Lines, config: dict[str, Any]) -> int:
    """Float32 numbers that the first launch leaves for the second."""
    parts = triton.cdiv(lines.length, span_of(lines.length, config["parts"]))
    numbers = 2 if len(lines.strides) == 2 else 1
    return _groups(lines, config) * parts * config["BLOCK_I"] * numbers


def parts_launcher(
    lines: Lines, dtype: str, config: dict[str, Any], device: torch.device, align: int = 16
) -> Callable[..., bool]:
    """A callable (x, part, y) -> bool, softmax of every line, or of three strides (dy, y, part, dx) -> bool, its gradient; all of `dtype`
    but part, which are `parts_space` float32 numbers."""
    backward, block_c, block_i = len(lines.strides) == 3, config["BLOCK_C"], config["BLOCK_I"]
    span = span_of(lines.length, config["parts"])
    parts = triton.cdiv(lines.length, span)
    fits = parts <= MOST_PARTS and parts * block_i <= COMBINED and span <= CHAIN * block_c
    fitting(fits and span + block_c < 2**31, "softmax", config, f"lines of {lines.length}")
    *read, written = NAMES[backward]
    sizes = {"C": lines.length, "N": lines.inner, "SPAN": span, "PARTS": parts, **lines.named(NAMES[backward])}  # fmt: skip

    def launch(kernel: Any, given: list[str], **more: int) -> Callable[..., bool]:
        return prepare(
            kernel,
            grid=(_groups(lines, config), parts, 1),
            pointers={f"{name}_ptr": "f32" if name == "part" else dtype for name in given},
            integers={name: n for name, n in sizes.items() if name in kernel.arg_names},
            constexprs={
                "WIDE": lines.wide(block_c, block_i),
                "BLOCK_C": block_c,
                "BLOCK_I": block_i,
                **more,
            },
            num_warps=config["num_warps"],
            device=device,
            align=align,
        )

    kernels = (softmax_bwd_parts, softmax_bwd_joined) if backward else (softmax_fwd_parts, softmax_fwd_joined)  # fmt: skip
    leave = launch(kernels[0], [*read, "part"])
    padded = triton.next_power_of_2(parts)
    join = launch(kernels[1], [*read, "part", written], PADDED=padded)

    def start(*tensors: torch.Tensor) -> bool:
        return leave(*tensors[:-1]) and join(*tensors)

    return start
