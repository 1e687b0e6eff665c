"""Softmax and its gradient over rows that begin at odd places: whole aligned groups of 16 bytes, and the ends of a row apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.row_access.contiguous import row_body, row_ends, row_statistics, with_ends
from tensorlogic.kernels.row_access.ragged import held, launcher, parts_of, tiles
from tensorlogic.kernels.triton_runtime.device_math import follow, powers


@triton.jit
def softmax_fwd_groups(
    x_ptr, y_ptr, R, C, ROWS: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """y[r, :] = exp(x - max) / sum of ROWS rows, read once: TILES tiles of each are held as they came; float32."""
    follow(PDL)
    lane = tl.arange(0, LANES * WIDTH)
    first = tl.program_id(0).to(tl.int64) * ROWS
    ends, held = (), ()
    for r in tl.static_range(ROWS):
        begin, length, at, some = parts_of(first + r, R, C, WIDTH)
        e = tl.load(x_ptr + at, mask=some, other=float("-inf"))
        ends = ends + (e,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no stars)
        for k in tl.static_range(TILES):
            inside = lane < length - k * (LANES * WIDTH)
            x = tl.load(
                x_ptr + begin + k * (LANES * WIDTH) + lane, mask=inside, other=float("-inf")
            )
            held = held + (x,)  # type: ignore[assignment]  # noqa: RUF005
    for r in tl.static_range(ROWS):
        begin, length, at, some = parts_of(first + r, R, C, WIDTH)
        end = ends[r].to(tl.float32)  # type: ignore[var-annotated]
        most = held[r * TILES].to(tl.float32)
        for k in tl.static_range(1, TILES):
            most = tl.maximum(most, held[r * TILES + k].to(tl.float32))
        peak = tl.maximum(tl.max(most, 0), tl.max(end, 0))
        total = tl.zeros([LANES * WIDTH], tl.float32)
        for k in tl.static_range(TILES):
            total += powers(held[r * TILES + k].to(tl.float32) - peak)
        e = powers(end - peak)
        scale = 1.0 / (tl.sum(total, 0) + tl.sum(e, 0))
        for k in tl.static_range(TILES):
            inside = lane < length - k * (LANES * WIDTH)
            y = powers(held[r * TILES + k].to(tl.float32) - peak) * scale
            to = y_ptr + begin + k * (LANES * WIDTH) + lane
            tl.store(to, y.to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(y_ptr + at, (e * scale).to(y_ptr.dtype.element_ty), mask=some)


@triton.jit
def softmax_fwd_groups_swept(
    x_ptr, y_ptr, C, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    """The same for rows of any length, a program each, read twice."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    first, length = row_body(row, C, WIDTH)
    ends, at, inside = row_ends(x_ptr + row * C, C, first, length, WIDTH)
    begin = tl.multiple_of(row * C + first, WIDTH)
    peak, norm, _ = row_statistics(x_ptr + begin, length, False, LANES, WIDTH)
    peak, norm, _ = with_ends(peak, norm, 0.0, ends, inside)
    scale = 1.0 / norm
    lane = tl.arange(0, LANES * WIDTH)
    for start in range(0, length, LANES * WIDTH):
        mask = start + lane < length
        x = tl.load(x_ptr + begin + start + lane, mask=mask, eviction_policy="evict_first")
        y = powers(x.to(tl.float32) - peak) * scale
        tl.store(y_ptr + begin + start + lane, y.to(y_ptr.dtype.element_ty), mask=mask)
    y = powers(ends - peak) * scale
    tl.store(y_ptr + row * C + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_bwd_groups(
    y_ptr, dy_ptr, dx_ptr, R, C,
    ROWS: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx[r, :] = y (dy - sum(dy y)) of ROWS rows, read once and held as they came; float32."""
    follow(PDL)
    lane = tl.arange(0, LANES * WIDTH)
    first = tl.program_id(0).to(tl.int64) * ROWS
    ends, held = (), ()
    for r in tl.static_range(ROWS):
        begin, length, at, some = parts_of(first + r, R, C, WIDTH)
        y = tl.load(y_ptr + at, mask=some, other=0.0)
        dy = tl.load(dy_ptr + at, mask=some, other=0.0)
        ends = ends + (y, dy)  # type: ignore[assignment]  # noqa: RUF005
        for k in tl.static_range(TILES):
            inside = lane < length - k * (LANES * WIDTH)
            y = tl.load(y_ptr + begin + k * (LANES * WIDTH) + lane, mask=inside, other=0.0)
            dy = tl.load(dy_ptr + begin + k * (LANES * WIDTH) + lane, mask=inside, other=0.0)
            held = held + (y, dy)  # type: ignore[assignment]  # noqa: RUF005
    for r in tl.static_range(ROWS):
        begin, length, at, some = parts_of(first + r, R, C, WIDTH)
        y_end = ends[2 * r].to(tl.float32)  # type: ignore[var-annotated]
        dy_end = ends[2 * r + 1].to(tl.float32)
        along = tl.zeros([LANES * WIDTH], tl.float32)
        for k in tl.static_range(r * TILES, (r + 1) * TILES):
            along += held[2 * k].to(tl.float32) * held[2 * k + 1].to(tl.float32)
        dot = tl.sum(along, 0) + tl.sum(y_end * dy_end, 0)
        for k in tl.static_range(TILES):
            y, dy = held[2 * (r * TILES + k)], held[2 * (r * TILES + k) + 1]
            dx = y.to(tl.float32) * (dy.to(tl.float32) - dot)
            inside = lane < length - k * (LANES * WIDTH)
            tl.store(dx_ptr + begin + k * (LANES * WIDTH) + lane, dx.to(dx_ptr.dtype.element_ty), mask=inside)  # fmt: skip
        tl.store(dx_ptr + at, (y_end * (dy_end - dot)).to(dx_ptr.dtype.element_ty), mask=some)


@triton.jit
def softmax_bwd_groups_swept(
    y_ptr, dy_ptr, dx_ptr, C, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    """The same for rows of any length, a program each, read twice."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    first, length = row_body(row, C, WIDTH)
    begin = tl.multiple_of(row * C + first, WIDTH)
    lane = tl.arange(0, 2 * WIDTH)
    end = row * C + tl.where(lane < WIDTH, lane, first + length + lane - WIDTH)
    some = end < row * C + tl.where(lane < WIDTH, tl.minimum(first, C), C)
    y_end = tl.load(y_ptr + end, mask=some, other=0.0).to(tl.float32)
    dy_end = tl.load(dy_ptr + end, mask=some, other=0.0).to(tl.float32)
    at = begin + tl.arange(0, LANES * WIDTH)
    along = tl.zeros([LANES * WIDTH], tl.float32)
    for start in range(0, length, LANES * WIDTH):
        mask = start + tl.arange(0, LANES * WIDTH) < length
        y = tl.load(y_ptr + at + start, mask=mask, other=0.0, eviction_policy="evict_last")
        dy = tl.load(dy_ptr + at + start, mask=mask, other=0.0, eviction_policy="evict_last")
        along += y.to(tl.float32) * dy.to(tl.float32)
    dot = tl.sum(along, 0) + tl.sum(y_end * dy_end, 0)
    for start in range(0, length, LANES * WIDTH):
        mask = start + tl.arange(0, LANES * WIDTH) < length
        y = tl.load(y_ptr + at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        dy = tl.load(dy_ptr + at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        dx = y.to(tl.float32) * (dy.to(tl.float32) - dot)
        tl.store(dx_ptr + at + start, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dx_ptr + end, (y_end * (dy_end - dot)).to(dx_ptr.dtype.element_ty), mask=some)


SWEPT = ((8, 2), (8, 1), (16, 2))  # warps, groups of a thread


def groups_configs(columns: int, dtype: str, backward: bool) -> list[dict[str, Any]]:
    """Configurations, best guess first: rows that a program holds, and "swept" ones."""
    found = [
        {"strategy": "held", "ROWS": rows, "num_warps": warps}
        for rows, warps in held(columns, dtype, 1 + backward)
    ]
    swept = [
        {"strategy": "swept", "LANES": 32 * warps * loads, "num_warps": warps}
        for warps, loads in SWEPT
    ]
    return found[:6] + (swept if tiles(columns, dtype, 16) > 1 else [])


NAMES = (("x", "y"), ("y", "dy", "dx"))  # of forward's tensors and backward's
KERNELS = {
    ("held", False): softmax_fwd_groups,
    ("swept", False): softmax_fwd_groups_swept,
    ("held", True): softmax_bwd_groups,
    ("swept", True): softmax_bwd_groups_swept,
}


def groups_launcher(
    rows: int,
    columns: int,
    dtype: str,
    config: dict[str, Any],
    device: torch.device,
    backward: bool = False,
) -> Callable[..., bool]:
    """A callable (x, y) -> bool over contiguous [rows, columns] at 16-byte addresses, or (y, dy, dx) -> bool, its gradient."""
    names, kernel = NAMES[backward], KERNELS[config["strategy"], backward]
    return launcher(kernel, "softmax", rows, columns, dtype, config, device, names, 1 + backward)
