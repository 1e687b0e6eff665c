"""Softmax over lines of [outer, C, inner] that lie in any strides, forward and backward: a line held in registers, or swept twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.triton_runtime.config_check import fitting
from tensorlogic.kernels.triton_runtime.device_math import follow, powers
from tensorlogic.kernels.triton_runtime.launch import prepare

from ..row_access.strided import LOWEST, NAMES, Lines, begun, from_start, placed, within


@triton.jit
def softmax_fwd_held(
    x_ptr, y_ptr, C, N, x_o, x_c, x_i, y_o, y_c, y_i,
    TILES: tl.constexpr, WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[o, :, i] = exp(x - max) / sum of BLOCK_I neighbouring lines, read once: TILES tiles of BLOCK_C elements are held; float32."""
    follow(PDL)
    outer, first, x_at = placed(N, x_c, x_i, WIDE, BLOCK_C, BLOCK_I)
    y_at = within(y_c, y_i, WIDE, BLOCK_C, BLOCK_I)
    x_ptr, y_ptr = begun(x_ptr, outer, first, x_o, x_i), begun(y_ptr, outer, first, y_o, y_i)
    c = tl.arange(0, BLOCK_C)
    live = first + tl.arange(0, BLOCK_I) < N
    most = tl.full([BLOCK_C, BLOCK_I], float("-inf"), tl.float32)
    held = ()
    for k in tl.static_range(TILES):
        mask = (k * BLOCK_C + c < C)[:, None] & live[None, :]
        x = tl.load(from_start(x_ptr, k * BLOCK_C, x_c) + x_at, mask=mask, other=float("-inf"))
        held = held + (x,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no stars)
        most = tl.maximum(most, x.to(tl.float32))
    peak = tl.max(most, 0)[None, :]
    total = tl.zeros([BLOCK_C, BLOCK_I], tl.float32)
    powered = ()
    for k in tl.static_range(TILES):
        e = powers(held[k].to(tl.float32) - peak)
        powered = powered + (e,)  # noqa: RUF005
        total += e
    scale = 1.0 / tl.sum(total, 0)[None, :]
    for k in tl.static_range(TILES):
        mask = (k * BLOCK_C + c < C)[:, None] & live[None, :]
        y = (powered[k] * scale).to(y_ptr.dtype.element_ty)
        tl.store(from_start(y_ptr, k * BLOCK_C, y_c) + y_at, y, mask=mask)


@triton.jit
def softmax_fwd_swept(
    x_ptr, y_ptr, C, N, x_o, x_c, x_i, y_o, y_c, y_i,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `softmax_fwd_held` for lines of any length, read twice: once for maxima and sums of every lane, an exponential an element,
    once to write."""
    follow(PDL)
    outer, first, x_at = placed(N, x_c, x_i, WIDE, BLOCK_C, BLOCK_I)
    y_at = within(y_c, y_i, WIDE, BLOCK_C, BLOCK_I)
    x_ptr, y_ptr = begun(x_ptr, outer, first, x_o, x_i), begun(y_ptr, outer, first, y_o, y_i)
    c = tl.arange(0, BLOCK_C)
    live = first + tl.arange(0, BLOCK_I) < N
    m = tl.full([BLOCK_C, BLOCK_I], LOWEST, tl.float32)
    norm = tl.zeros([BLOCK_C, BLOCK_I], tl.float32)
    for start in range(0, C, BLOCK_C):
        mask = (start + c < C)[:, None] & live[None, :]
        x = tl.load(
            from_start(x_ptr, start, x_c) + x_at, mask=mask, other=float("-inf"), eviction_policy="evict_last"
        ).to(tl.float32)  # fmt: skip
        e = powers(-tl.abs(x - m))
        norm = tl.where(x > m, norm * e + 1.0, norm + e)
        m = tl.maximum(m, x)
    peak = tl.max(m, 0)[None, :]
    scale = 1.0 / tl.sum(norm * powers(m - peak), 0)[None, :]  # NaN of +inf, as inf - inf is
    for start in range(0, C, BLOCK_C):
        mask = (start + c < C)[:, None] & live[None, :]
        x = tl.load(
            from_start(x_ptr, start, x_c) + x_at, mask=mask, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)  # fmt: skip
        y = (powers(x - peak) * scale).to(y_ptr.dtype.element_ty)
        tl.store(from_start(y_ptr, start, y_c) + y_at, y, mask=mask)


@triton.jit
def softmax_bwd_held(
    dy_ptr, y_ptr, dx_ptr, C, N, dy_o, dy_c, dy_i, y_o, y_c, y_i, dx_o, dx_c, dx_i,
    TILES: tl.constexpr, WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx[o, :, i] = y (dy - sum(dy y)) of BLOCK_I neighbouring lines, held in TILES tiles of BLOCK_C elements; float32."""
    follow(PDL)
    outer, first, dy_at = placed(N, dy_c, dy_i, WIDE, BLOCK_C, BLOCK_I)
    y_at = within(y_c, y_i, WIDE, BLOCK_C, BLOCK_I)
    dx_at = within(dx_c, dx_i, WIDE, BLOCK_C, BLOCK_I)
    dy_ptr, y_ptr = begun(dy_ptr, outer, first, dy_o, dy_i), begun(y_ptr, outer, first, y_o, y_i)
    dx_ptr = begun(dx_ptr, outer, first, dx_o, dx_i)
    c = tl.arange(0, BLOCK_C)
    live = first + tl.arange(0, BLOCK_I) < N
    along = tl.zeros([BLOCK_C, BLOCK_I], tl.float32)
    held, other = (), ()
    for k in tl.static_range(TILES):
        mask = (k * BLOCK_C + c < C)[:, None] & live[None, :]
        y = tl.load(from_start(y_ptr, k * BLOCK_C, y_c) + y_at, mask=mask, other=0.0)
        dy = tl.load(from_start(dy_ptr, k * BLOCK_C, dy_c) + dy_at, mask=mask, other=0.0)
        held = held + (y,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no stars)
        other = other + (dy,)  # type: ignore[assignment]  # noqa: RUF005
        along += y.to(tl.float32) * dy.to(tl.float32)
    dot = tl.sum(along, 0)[None, :]
    for k in tl.static_range(TILES):
        mask = (k * BLOCK_C + c < C)[:, None] & live[None, :]
        dx = (held[k].to(tl.float32) * (other[k].to(tl.float32) - dot)).to(dx_ptr.dtype.element_ty)
        tl.store(from_start(dx_ptr, k * BLOCK_C, dx_c) + dx_at, dx, mask=mask)


@triton.jit
def softmax_bwd_swept(
    dy_ptr, y_ptr, dx_ptr, C, N, dy_o, dy_c, dy_i, y_o, y_c, y_i, dx_o, dx_c, dx_i,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `softmax_bwd_held` for lines of any length, read twice."""
    follow(PDL)
    outer, first, dy_at = placed(N, dy_c, dy_i, WIDE, BLOCK_C, BLOCK_I)
    y_at = within(y_c, y_i, WIDE, BLOCK_C, BLOCK_I)
    dx_at = within(dx_c, dx_i, WIDE, BLOCK_C, BLOCK_I)
    dy_ptr, y_ptr = begun(dy_ptr, outer, first, dy_o, dy_i), begun(y_ptr, outer, first, y_o, y_i)
    dx_ptr = begun(dx_ptr, outer, first, dx_o, dx_i)
    c = tl.arange(0, BLOCK_C)
    live = first + tl.arange(0, BLOCK_I) < N
    along = tl.zeros([BLOCK_C, BLOCK_I], tl.float32)
    for start in range(0, C, BLOCK_C):
        mask = (start + c < C)[:, None] & live[None, :]
        y = tl.load(from_start(y_ptr, start, y_c) + y_at, mask=mask, other=0.0)
        dy = tl.load(from_start(dy_ptr, start, dy_c) + dy_at, mask=mask, other=0.0)
        along += y.to(tl.float32) * dy.to(tl.float32)
    dot = tl.sum(along, 0)[None, :]
    for start in range(0, C, BLOCK_C):
        mask = (start + c < C)[:, None] & live[None, :]
        y = tl.load(from_start(y_ptr, start, y_c) + y_at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(from_start(dy_ptr, start, dy_c) + dy_at, mask=mask, other=0.0).to(tl.float32)
        dx = (y * (dy - dot)).to(dx_ptr.dtype.element_ty)
        tl.store(from_start(dx_ptr, start, dx_c) + dx_at, dx, mask=mask)


MOST_TILES = 16  # of a line that is held: its steps are written out
MOST_CONFIGS = 7
HELD = 64  # elements of float32 that a thread holds


def _holds(lines: Lines, config: dict[str, Any]) -> bool:
    """Whether a program's registers hold its lines; backward holds two tensors."""
    tiles = triton.cdiv(lines.length, config["BLOCK_C"])
    numbers = tiles * config["BLOCK_C"] * config["BLOCK_I"] * (len(lines.strides) - 1)
    return tiles <= MOST_TILES and numbers <= HELD * 32 * int(config["num_warps"])


def _config(strategy: str, lines: Lines, inner: int, warps: int, per: int) -> dict[str, Any]:
    """`per`: elements of a tile and thread."""
    block_i = min(inner, triton.next_power_of_2(lines.inner))
    block_c = min(32 * warps * per // block_i, triton.next_power_of_2(lines.length))
    return {"strategy": strategy, "BLOCK_C": max(1, block_c), "BLOCK_I": block_i, "num_warps": warps}  # fmt: skip


def lines_configs(lines: Lines, dtype: str, cores: int = 132) -> list[dict[str, Any]]:
    """Configurations, best guess first: "held" or "swept", how many neighbouring lines a program takes."""
    (_, stride_c, stride_i), size = lines.strides[0], SIZES[dtype]
    held: list[dict[str, Any]] = []
    if lines.inner > 1 and stride_i < stride_c:  # neighbours lie together: whole sectors of them
        widths = _widths(lines, size, cores)
        for width in widths:
            tried = (_config("held", lines, width, warps, 16) for warps in (4, 8, 16))
            held += [config for config in tried if _holds(lines, config)][:1]
        swept = [
            _config("swept", lines, width, warps, per)
            for width, warps, per in zip(widths, (8, 8, 16), (8, 8, 4), strict=True)
        ]
    else:
        block = triton.next_power_of_2(lines.length)
        for elements, least in ((2048, 4), (1024, 4), (4096, 8), (1024, 1)):
            warps = max(least, min(32, block // 1024))
            config = _config("held", lines, max(1, elements // block), warps, 16)
            held += [config] if _holds(lines, config) else []
        swept = [
            _config("swept", lines, 1, warps, per) for warps, per in ((8, 16), (16, 16), (4, 16))
        ]
    found: list[dict[str, Any]] = []
    for config in (*held, *swept):
        once = config in swept and config["BLOCK_C"] >= lines.length  # nothing to sweep: it is held
        if config not in found and not (once and held):
            found.append(config)
    return found[:MOST_CONFIGS]


def _widths(lines: Lines, size: int, cores: int) -> list[int]:
    """How many neighbouring lines a program may take, best guess first: fewer where there are too few programs."""
    widths = [max(1, bytes_ // size) for bytes_ in (32, 64, 128, 16, 8)]

    def few(width: int) -> bool:
        return lines.outer * triton.cdiv(lines.inner, width) < cores

    return sorted(widths)[:3] if few(widths[0]) else sorted(widths[:3], key=few)


def lines_launcher(
    lines: Lines, dtype: str, config: dict[str, Any], device: torch.device, align: int = 16
) -> Callable[..., bool]:
    """A callable (x, y) -> bool, softmax of every line, or of three strides (dy, y, dx) -> bool, its gradient; all of `dtype`."""
    held, backward = config["strategy"] == "held", len(lines.strides) == 3
    names, block_c, block_i = NAMES[backward], config["BLOCK_C"], config["BLOCK_I"]
    if held:
        fitting(_holds(lines, config), "softmax", config, f"lines of {lines.length}")
    pairs: Sequence[tuple[Any, Any]] = ((softmax_fwd_swept, softmax_fwd_held), (softmax_bwd_swept, softmax_bwd_held))  # fmt: skip
    return prepare(
        pairs[backward][held],
        grid=(lines.outer * triton.cdiv(lines.inner, block_i), 1, 1),
        pointers={f"{name}_ptr": dtype for name in names},
        integers={"C": lines.length, "N": lines.inner, **lines.named(names)},
        constexprs={
            **({"TILES": triton.cdiv(lines.length, block_c)} if held else {}),
            "WIDE": lines.wide(block_c, block_i),
            "BLOCK_C": block_c,
            "BLOCK_I": block_i,
        },
        num_warps=config["num_warps"],
        device=device,
        align=align,
    )
