"""Softmax over the last dim, forward and backward, and the row statistics that cross-entropy shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.triton_runtime.device_math import follow
from tensorlogic.kernels.triton_runtime.launch import prepare

from ..row_access.contiguous import row_statistics
from ..triton_runtime.device_math import powers


@triton.jit
def softmax_fwd_registers(
    x_ptr, y_ptr, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):
    """y[r, :] = exp(x - max) / sum; the row stays in registers, so memory is read once; float32."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_C)
    mask = (row < R)[:, None] & (col < C)[None, :]
    at = (row * C)[:, None] + col[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=float("-inf")).to(tl.float32)
    e = powers(x - tl.max(x, 1)[:, None])
    y = e / tl.sum(e, 1)[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_fwd_online(
    x_ptr, y_ptr, C, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    """y[r, :] = exp(x - max) / sum for rows of any length: one online pass, a second that mostly hits L2."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * C
    y_ptr += row * C
    peak, norm, _ = row_statistics(x_ptr, C, False, LANES, WIDTH)
    scale = 1.0 / norm
    lane = tl.arange(0, LANES * WIDTH)
    for start in range(0, C, LANES * WIDTH):
        mask = start + lane < C
        x = tl.load(x_ptr + start + lane, mask=mask, eviction_policy="evict_first").to(tl.float32)
        y = powers(x - peak) * scale
        tl.store(y_ptr + start + lane, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_bwd_registers(
    y_ptr,
    dy_ptr,
    dx_ptr,
    R,
    C,
    scale,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """dx[r, :] = scale * y * (dy - sum(dy * y)); both rows stay in registers; float32."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_C)
    mask = (row < R)[:, None] & (col < C)[None, :]
    at = (row * C)[:, None] + col[None, :]
    y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, 1)[:, None]) * scale
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_bwd_looped(
    y_ptr, dy_ptr, dx_ptr, C, scale, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    """dx[r, :] = scale * y * (dy - sum(dy * y)) for rows of any length, in two sweeps; float32."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * C
    dy_ptr += row * C
    dx_ptr += row * C
    lane = tl.arange(0, LANES * WIDTH)
    acc = tl.zeros([LANES * WIDTH], tl.float32)
    for start in range(0, C, LANES * WIDTH):
        mask = start + lane < C
        y = tl.load(y_ptr + start + lane, mask=mask, other=0.0).to(tl.float32)
        acc += y * tl.load(dy_ptr + start + lane, mask=mask, other=0.0).to(tl.float32)
    dot = tl.sum(acc, 0)
    for start in range(0, C, LANES * WIDTH):
        mask = start + lane < C
        y = tl.load(y_ptr + start + lane, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + start + lane, mask=mask, other=0.0).to(tl.float32)
        dx = y * (dy - dot) * scale
        tl.store(dx_ptr + start + lane, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def row_configs(columns: int, dtype: str, longest: int = 32768) -> list[dict[str, Any]]:
    """Configurations for kernels over [R, columns], best guess first: "registers" or "online"."""
    width = 4 if dtype == "f32" else 8
    block_c = triton.next_power_of_2(columns)
    held: list[dict[str, Any]] = []
    if block_c <= longest:
        for elements, warps in ((2048, 4), (1024, 4), (4096, 4), (1024, 1)):
            rows = max(1, elements // block_c)
            warps = max(warps, min(32, block_c // 1024))
            config = {
                "strategy": "registers",
                "BLOCK_R": rows,
                "BLOCK_C": block_c,
                "num_warps": warps,
            }
            if config not in held:
                held.append(config)
    online = [
        {"strategy": "online", "LANES": 32 * warps * loads, "WIDTH": width, "num_warps": warps}
        for warps, loads in ((8, 2), (4, 4), (8, 4), (4, 2), (16, 2), (32, 1))
    ]
    return (held + online)[:8] if block_c <= 8192 else (online[:5] + held)[:8]


def softmax_configs(columns: int, dtype: str, backward: bool = False) -> list[dict[str, Any]]:
    """Configurations of softmax or its backward, best guess first."""
    return row_configs(columns, dtype, 16384 if backward else 32768)


def _rows_grid(rows: int, config: dict[str, Any]) -> tuple[int, int, int]:
    return (triton.cdiv(rows, config.get("BLOCK_R", 1)), 1, 1)


def _blocks(config: dict[str, Any]) -> dict[str, int]:
    return {name: config[name] for name in config if name not in ("strategy", "num_warps")}


def softmax_launcher(
    rows: int, columns: int, dtype: str, out_dtype: str, config: dict[str, Any], device: torch.device, align: int = 16
) -> Callable[..., bool]:  # fmt: skip
    """A callable (x, y) -> bool: softmax over the last dim of contiguous [rows, columns]."""
    pointers = {"x_ptr": dtype, "y_ptr": out_dtype}
    kernels = (softmax_fwd_online, softmax_fwd_registers)
    return _prepared(kernels, pointers, (), rows, columns, config, device, align)


def softmax_backward_launcher(
    rows: int, columns: int, dtypes: tuple[str, str, str], config: dict[str, Any], device: torch.device, align: int = 16
) -> Callable[..., bool]:  # fmt: skip
    """A callable (y, dy, dx, scale) -> bool: dx = scale * y * (dy - sum(dy * y)); dtypes of y, dy, dx."""
    pointers = dict(zip(("y_ptr", "dy_ptr", "dx_ptr"), dtypes, strict=True))
    kernels = (softmax_bwd_looped, softmax_bwd_registers)
    return _prepared(kernels, pointers, ("scale",), rows, columns, config, device, align)


def _prepared(
    kernels: tuple[Any, Any], pointers: dict[str, str], floats: tuple[str, ...], rows: int, columns: int,
    config: dict[str, Any], device: torch.device, align: int,
) -> Callable[..., bool]:  # fmt: skip
    """The kernel of rows in pieces, or that of whole rows."""
    held = config["strategy"] == "registers"
    return prepare(
        kernels[held],
        grid=_rows_grid(rows, config),
        pointers=pointers,
        integers={"R": rows, "C": columns} if held else {"C": columns},
        floats=floats,
        constexprs=_blocks(config),
        num_warps=config["num_warps"],
        device=device,
        align=align,
    )
