"""Attention scores behind a product: scale, mask and softmax in one pass over rows, in place; and the gradient of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.triton_runtime.device_math import finite_or_zero, follow, powers
from tensorlogic.kernels.triton_runtime.launch import prepare
from tensorlogic.system.compile_pool import CompileFailure

Sizes = tuple[int, int, int, int]  # B, H, S, T
LONGEST = 16384  # of a row that is held in registers
EACH = 16  # of its elements in one thread
_MASKS = ("stride_mb", "stride_mh", "stride_ms", "stride_mt")


@triton.jit
def mask_row(row, S, H, stride_mb, stride_mh, stride_ms):
    """Where in the mask a row [B * H * S] begins."""
    head = row // S
    return head // H * stride_mb + head % H * stride_mh + row % S * stride_ms


@triton.jit
def logits(x, mask_ptr, place, reads, scale, MASK: tl.constexpr):
    """scale * x + mask in float32, -inf where a score is hidden."""
    x = x.to(tl.float32) * scale
    if MASK == "float":
        x += tl.load(mask_ptr + place, mask=reads, other=0.0).to(tl.float32)
    if MASK == "bool":
        reads = reads & (tl.load(mask_ptr + place, mask=reads, other=0) != 0)
    return tl.where(reads, x, float("-inf"))


@triton.jit
def scores_rows_fwd_registers(
    y_ptr, mask_ptr, R, S, T, H, stride_mb, stride_mh, stride_ms, stride_mt, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[r, :] = softmax(scale * y[r, :] + mask) in place, rows [R, T] of B * H heads of S; a row stays in registers; float32."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_C)
    inside = (row < R)[:, None] & (col < T)[None, :]
    reads = inside
    if CAUSAL:
        reads = inside & (col[None, :] <= (row % S)[:, None])
    at = (row * T)[:, None] + col[None, :]
    place = mask_row(row, S, H, stride_mb, stride_mh, stride_ms)[:, None] + col.to(tl.int64)[None, :] * stride_mt  # fmt: skip
    x = logits(tl.load(y_ptr + at, mask=reads, other=0.0), mask_ptr, place, reads, scale, MASK)
    e = powers(x - tl.max(x, 1)[:, None])
    y = e / tl.sum(e, 1)[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scores_rows_fwd_online(
    y_ptr, mask_ptr, S, T, H, stride_mb, stride_mh, stride_ms, stride_mt, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `scores_rows_fwd_registers` for rows of any length, in two sweeps; causal rows end at their own column."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    y_ptr += row * T
    mask_ptr += mask_row(row, S, H, stride_mb, stride_mh, stride_ms)
    end = T
    if CAUSAL:
        end = tl.minimum(T, (row % S).to(tl.int32) + 1)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    norm = tl.zeros([TILE], tl.float32)
    for start in range(0, end, TILE):
        col = start + lane
        place = col.to(tl.int64) * stride_mt
        x = tl.load(y_ptr + col, mask=col < end, other=0.0)
        x = logits(x, mask_ptr, place, col < end, scale, MASK)
        higher = tl.maximum(peak, x)
        safe = finite_or_zero(higher)
        norm = norm * powers(peak - safe) + powers(x - safe)
        peak = higher
    top = tl.max(peak, 0)
    total = tl.sum(norm * powers(peak - finite_or_zero(top)), 0)
    for start in range(0, T, TILE):
        col = start + lane
        place = col.to(tl.int64) * stride_mt
        x = tl.load(y_ptr + col, mask=col < end, other=0.0)
        y = powers(logits(x, mask_ptr, place, col < end, scale, MASK) - top) / total
        tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), mask=col < T)


@triton.jit
def unhidden(ds, mask_ptr, place, reads, MASK: tl.constexpr):
    """ds where the score is seen, else 0."""
    if MASK == "bool":
        reads = reads & (tl.load(mask_ptr + place, mask=reads, other=0) != 0)
    return tl.where(reads, ds, 0.0)


@triton.jit
def scores_rows_bwd_registers(
    y_ptr, dy_ptr, mask_ptr, ds_ptr, R, S, T, H, stride_mb, stride_mh, stride_ms, stride_mt,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ds[r, :] = y * (dy - sum(dy * y)), 0 where a score is hidden; both rows stay in registers; float32."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_C)
    inside = (row < R)[:, None] & (col < T)[None, :]
    reads = inside
    if CAUSAL:
        reads = inside & (col[None, :] <= (row % S)[:, None])
    at = (row * T)[:, None] + col[None, :]
    place = mask_row(row, S, H, stride_mb, stride_mh, stride_ms)[:, None] + col.to(tl.int64)[None, :] * stride_mt  # fmt: skip
    y = tl.load(y_ptr + at, mask=reads, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=reads, other=0.0).to(tl.float32)
    ds = y * (dy - tl.sum(y * dy, 1)[:, None])
    ds = unhidden(ds, mask_ptr, place, reads, MASK)
    tl.store(ds_ptr + at, ds.to(ds_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scores_rows_bwd_looped(
    y_ptr, dy_ptr, mask_ptr, ds_ptr, S, T, H, stride_mb, stride_mh, stride_ms, stride_mt,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `scores_rows_bwd_registers` for rows of any length, in two sweeps."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    y_ptr += row * T
    dy_ptr += row * T
    ds_ptr += row * T
    mask_ptr += mask_row(row, S, H, stride_mb, stride_mh, stride_ms)
    end = T
    if CAUSAL:
        end = tl.minimum(T, (row % S).to(tl.int32) + 1)
    acc = tl.zeros([TILE], tl.float32)
    for start in range(0, end, TILE):
        col = start + lane
        y = tl.load(y_ptr + col, mask=col < end, other=0.0).to(tl.float32)
        acc += y * tl.load(dy_ptr + col, mask=col < end, other=0.0).to(tl.float32)
    dot = tl.sum(acc, 0)
    for start in range(0, T, TILE):
        col = start + lane
        place = col.to(tl.int64) * stride_mt
        y = tl.load(y_ptr + col, mask=col < end, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + col, mask=col < end, other=0.0).to(tl.float32)
        ds = unhidden(y * (dy - dot), mask_ptr, place, col < end, MASK)
        tl.store(ds_ptr + col, ds.to(ds_ptr.dtype.element_ty), mask=col < T)


def scores_rows_configs(t: int, dtype: str) -> list[dict[str, Any]]:
    """Configurations of either pass over rows of t scores, best guess first: a row in registers, or in two sweeps."""
    block_c = triton.next_power_of_2(t)
    held: list[dict[str, Any]] = []
    for elements, warps in (
        ((1024, 4), (2048, 4), (512, 1), (2048, 8)) if block_c <= LONGEST else ()
    ):
        warps = max(warps, min(32, block_c // EACH // 32))
        blocks = {"BLOCK_R": max(1, elements // block_c), "BLOCK_C": block_c}
        config = {"strategy": "registers", **blocks, "num_warps": warps}
        if config not in held:
            held.append(config)
    width = 4 if dtype == "f32" else 8
    looped = [
        {"strategy": "online", "TILE": 32 * warps * width, "num_warps": warps}
        for warps in (8, 4, 16)
    ]
    return held + looped if t <= 8192 else looped + held


def scores_rows_launcher(
    sizes: Sizes,
    dtype: str,
    mask: str,
    mask_dtype: str,
    strides_mask: Sequence[int],
    is_causal: bool,
    config: dict[str, Any],
    device: torch.device,
    align: int = 16,
) -> Callable[..., bool]:
    """A callable (y, mask, scale) -> bool: y = softmax(scale * y + mask) in place, y contiguous [B, H, S, T].

    `mask` is "none" (any tensor is passed), "bool" (True: seen) or "float" (added), `strides_mask` its four strides, 0 where it
    broadcasts. A row that sees nothing is NaN, as torch.softmax of -inf is. Raises CompileFailure for rows that do not fit.
    """
    held, integers, blocks, grid = _fitted(sizes, mask, strides_mask, config)
    return prepare(
        scores_rows_fwd_registers if held else scores_rows_fwd_online,
        grid=grid,
        pointers={"y_ptr": dtype, "mask_ptr": mask_dtype},
        integers=integers,
        floats=("scale",),
        constexprs={"MASK": mask, "CAUSAL": is_causal, **blocks},
        num_warps=config["num_warps"],
        device=device,
        align=align,
    )


def scores_rows_backward_launcher(
    sizes: Sizes,
    dtype: str,
    mask: str,
    mask_dtype: str,
    strides_mask: Sequence[int],
    is_causal: bool,
    config: dict[str, Any],
    device: torch.device,
    align: int = 16,
) -> Callable[..., bool]:
    """A callable (y, dy, mask, ds) -> bool: ds = y * (dy - sum(dy * y)), 0 where a score is hidden; all contiguous [B, H, S, T]
    but the mask, "none" or "bool" as `scores_rows_launcher` takes it (one that is added hides nothing)."""
    held, integers, blocks, grid = _fitted(sizes, mask, strides_mask, config)
    return prepare(
        scores_rows_bwd_registers if held else scores_rows_bwd_looped,
        grid=grid,
        pointers={"y_ptr": dtype, "dy_ptr": dtype, "mask_ptr": mask_dtype, "ds_ptr": dtype},
        integers=integers,
        constexprs={"MASK": mask, "CAUSAL": is_causal, **blocks},
        num_warps=config["num_warps"],
        device=device,
        align=align,
    )


def _fitted(
    sizes: Sizes, mask: str, strides_mask: Sequence[int], config: dict[str, Any]
) -> tuple[bool, dict[str, int], dict[str, int], tuple[int, int, int]]:
    """Whether rows are held, and the integers, blocks and grid that follow."""
    b, h, s, t = sizes
    rows, held = b * h * s, config["strategy"] == "registers"
    if held and config["BLOCK_C"] < t:
        raise CompileFailure(f"rows of {t} scores do not fit into {config['BLOCK_C']} columns")
    strides = strides_mask if mask != "none" else (0, 0, 0, 0)
    integers = {"S": s, "T": t, "H": h, **dict(zip(_MASKS, strides, strict=True))}
    if not held:
        return False, integers, {"TILE": config["TILE"]}, (rows, 1, 1)
    blocks = {name: config[name] for name in ("BLOCK_R", "BLOCK_C")}
    return True, {"R": rows, **integers}, blocks, (triton.cdiv(rows, blocks["BLOCK_R"]), 1, 1)
