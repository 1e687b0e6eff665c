"""Softmax and its gradient over few, long rows that several programs share, in two launches; rows may begin at odd places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.row_access.contiguous import row_statistics, with_ends
from tensorlogic.kernels.row_access.split import configs_of, fits, share_of, span_of, tile_of
from tensorlogic.kernels.triton_runtime.config_check import fitting
from tensorlogic.kernels.triton_runtime.device_math import follow, powers
from tensorlogic.kernels.triton_runtime.launch import prepare


@triton.jit
def softmax_fwd_shares(
    x_ptr, part_ptr, R, C, SPAN, PARTS, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """part[r, p] = max and sum of exp(x - max) of the p-th share of row r; float32."""
    follow(PDL)
    begin, length, at, some = share_of(R, C, SPAN, WIDTH)
    ends = tl.load(x_ptr + at, mask=some, other=float("-inf")).to(tl.float32)
    peak, norm, _ = row_statistics(x_ptr + begin, length, False, LANES, WIDTH)
    peak, norm, _ = with_ends(peak, norm, 0.0, ends, some)
    to = part_ptr + (tl.program_id(0).to(tl.int64) * PARTS + tl.program_id(1)) * 2
    tl.store(to, peak)
    tl.store(to + 1, norm)


@triton.jit
def softmax_fwd_shared(
    x_ptr, part_ptr, y_ptr, R, C, SPAN, PARTS,
    LANES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = exp(x - max) / sum of the same share, from what `softmax_fwd_shares` left of the row's; x mostly comes from L2."""
    follow(PDL)
    begin, length, at, some = share_of(R, C, SPAN, WIDTH)
    p, lane = tl.arange(0, PADDED), tl.arange(0, LANES * WIDTH)
    x = tl.load(x_ptr + begin + lane, mask=lane < length, other=0.0)
    ends = tl.load(x_ptr + at, mask=some, other=0.0)
    lies = part_ptr + (tl.program_id(0).to(tl.int64) * PARTS + p) * 2
    m = tl.load(lies, mask=p < PARTS, other=float("-inf"))
    norm = tl.load(lies + 1, mask=p < PARTS, other=0.0)
    peak = tl.max(m, 0)
    scale = 1.0 / tl.sum(norm * powers(m - peak), 0)  # NaN of +inf, and of -inf alone
    y_end = powers(ends.to(tl.float32) - peak) * scale
    tl.store(y_ptr + at, y_end.to(y_ptr.dtype.element_ty), mask=some)
    for start in range(0, length, LANES * WIDTH):
        left = length - start
        after = tl.load(
            x_ptr + begin + start + LANES * WIDTH + lane,
            mask=lane < left - LANES * WIDTH,
            other=0.0,
        )
        y = powers(x.to(tl.float32) - peak) * scale
        tl.store(y_ptr + begin + start + lane, y.to(y_ptr.dtype.element_ty), mask=lane < left)
        x = after


@triton.jit
def softmax_bwd_shares(
    dy_ptr, y_ptr, part_ptr, R, C, SPAN, PARTS, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """part[r, p] = sum(dy y) of the p-th share of row r; float32."""
    follow(PDL)
    begin, length, at, some = share_of(R, C, SPAN, WIDTH)
    lane = tl.arange(0, LANES * WIDTH)
    y_end = tl.load(y_ptr + at, mask=some, other=0.0).to(tl.float32)
    dy_end = tl.load(dy_ptr + at, mask=some, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + begin + lane, mask=lane < length, other=0.0)
    dy = tl.load(dy_ptr + begin + lane, mask=lane < length, other=0.0)
    along = tl.zeros([LANES * WIDTH], tl.float32)
    for start in range(LANES * WIDTH, length, LANES * WIDTH):
        inside = lane < length - start
        y_after = tl.load(y_ptr + begin + start + lane, mask=inside, other=0.0)
        dy_after = tl.load(dy_ptr + begin + start + lane, mask=inside, other=0.0)
        along += y.to(tl.float32) * dy.to(tl.float32)
        y, dy = y_after, dy_after
    along += y.to(tl.float32) * dy.to(tl.float32)
    dot = tl.sum(along, 0) + tl.sum(y_end * dy_end, 0)
    tl.store(part_ptr + tl.program_id(0).to(tl.int64) * PARTS + tl.program_id(1), dot)


@triton.jit
def softmax_bwd_shared(
    dy_ptr, y_ptr, part_ptr, dx_ptr, R, C, SPAN, PARTS,
    LANES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx = y (dy - dot) of the same share, dot from what `softmax_bwd_shares` left of the row's; y and dy mostly come from L2."""
    follow(PDL)
    begin, length, at, some = share_of(R, C, SPAN, WIDTH)
    p, lane = tl.arange(0, PADDED), tl.arange(0, LANES * WIDTH)
    y_end = tl.load(y_ptr + at, mask=some, other=0.0).to(tl.float32)
    dy_end = tl.load(dy_ptr + at, mask=some, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + begin + lane, mask=lane < length, other=0.0)
    dy = tl.load(dy_ptr + begin + lane, mask=lane < length, other=0.0)
    lies = part_ptr + tl.program_id(0).to(tl.int64) * PARTS + p
    dot = tl.sum(tl.load(lies, mask=p < PARTS, other=0.0), 0)
    tl.store(dx_ptr + at, (y_end * (dy_end - dot)).to(dx_ptr.dtype.element_ty), mask=some)
    for start in range(0, length, LANES * WIDTH):
        left = length - start
        inside = lane < left - LANES * WIDTH
        y_after = tl.load(y_ptr + begin + start + LANES * WIDTH + lane, mask=inside, other=0.0)
        dy_after = tl.load(dy_ptr + begin + start + LANES * WIDTH + lane, mask=inside, other=0.0)
        dx = y.to(tl.float32) * (dy.to(tl.float32) - dot)
        tl.store(dx_ptr + begin + start + lane, dx.to(dx_ptr.dtype.element_ty), mask=lane < left)
        y, dy = y_after, dy_after


MOST_PARTS = 256  # of a row: every program reads what all of its row's left
SHAPES = ((8, 2, 2), (8, 1, 4), (4, 1, 4), (4, 2, 4), (8, 2, 4), (16, 1, 2))  # warps, groups of a thread, programs a multiprocessor  # fmt: skip


def shares_configs(rows: int, columns: int, dtype: str, cores: int = 132) -> list[dict[str, Any]]:
    """Configurations, best guess first: programs of a row, and groups that one of them reads at once."""
    return configs_of(SHAPES, MOST_PARTS, rows, columns, dtype, cores)


def shares_space(rows: int, columns: int, config: dict[str, Any], backward: bool) -> int:
    """Float32 numbers that the first launch leaves for the second."""
    return rows * int(triton.cdiv(columns, span_of(columns, config["parts"]))) * (2 - backward)


def shares_launcher(
    rows: int,
    columns: int,
    dtype: str,
    config: dict[str, Any],
    device: torch.device,
    backward: bool = False,
) -> Callable[..., bool]:
    """A callable (x, part, y) -> bool over contiguous [rows, columns] at 16-byte addresses, or (dy, y, part, dx) -> bool, its gradient; all
    of `dtype` but part, which are `shares_space` float32 numbers."""
    span, lanes, warps = span_of(columns, config["parts"]), config["LANES"], config["num_warps"]
    parts = triton.cdiv(columns, span)
    right = parts <= MOST_PARTS and fits(columns, parts, tile_of(lanes, dtype))
    fitting(right, "softmax", config, f"rows of {columns}")
    *read, written = ("dy", "y", "dx") if backward else ("x", "y")

    def launch(kernel: Any, given: list[str], **more: int) -> Callable[..., bool]:
        return prepare(
            kernel,
            grid=(rows, parts, 1),
            pointers={f"{name}_ptr": "f32" if name == "part" else dtype for name in given},
            integers={"R": rows, "C": columns, "SPAN": span, "PARTS": parts},
            constexprs={"LANES": lanes, "WIDTH": 16 // SIZES[dtype], **more},
            num_warps=warps,
            device=device,
            align=16,
        )

    kernels = (softmax_bwd_shares, softmax_bwd_shared) if backward else (softmax_fwd_shares, softmax_fwd_shared)  # fmt: skip
    leave = launch(kernels[0], [*read, "part"])
    join = launch(kernels[1], [*read, "part", written], PADDED=triton.next_power_of_2(parts))

    def start(*tensors: torch.Tensor) -> bool:
        return leave(*tensors[:-1]) and join(*tensors)

    return start
