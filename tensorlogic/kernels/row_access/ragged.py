"""Rows that begin at odd places as whole aligned groups of 16 bytes, and the elements before and behind these apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.row_access.contiguous import row_body
from tensorlogic.kernels.triton_runtime.config_check import fitting
from tensorlogic.kernels.triton_runtime.launch import prepare

SHORTEST = 4  # groups of a row: of fewer the ends are most
# elements of a row, which kernels count in 32 bits, and a tile beyond
LONGEST = 2**30
MOST = {1: 8, 2: 8, 4: 8, 8: 8, 16: 7, 32: 5}  # by warps: groups of a row that a thread holds
TOGETHER = 4  # groups of several rows at most


@triton.jit
def parts_of(row, R, C, WIDTH: tl.constexpr):
    """Of one row: where its groups begin and how many elements they have; where those at its ends lie, and which there are, [2 * WIDTH]."""
    first, length = row_body(row, C, WIDTH)
    length = tl.where(row < R, length, 0)
    lane = tl.arange(0, 2 * WIDTH)
    at = tl.where(lane < WIDTH, lane, first + length + lane - WIDTH)
    inside = (at < tl.where(lane < WIDTH, tl.minimum(first, C), C)) & (row < R)
    return tl.multiple_of(row * C + first, WIDTH), length, row * C + at, inside


def refusal(columns: int, dtype: str, align: int) -> str | None:
    """Why rows are left to kernels that need not look for groups in them, or None."""
    width = 16 // SIZES[dtype]
    if align < 16:
        return "rows of tensors at 16-byte addresses are required"
    if columns % width == 0:
        return "rows begin at 16-byte addresses"
    if columns > LONGEST:
        return f"rows of {columns} are longer than 32 bits count"
    return None if columns >= SHORTEST * width else f"rows of {columns} are too short"


def tiles(columns: int, dtype: str, warps: int) -> int:
    """Tiles of a row, of a group a thread each."""
    return int(triton.cdiv(columns * SIZES[dtype], 32 * 16 * warps))


def holds(columns: int, dtype: str, rows: int, warps: int, tensors: int) -> bool:
    """Whether the registers of a program hold so many rows of so many tensors."""
    most = MOST[warps] if rows == 1 else TOGETHER
    return tiles(columns, dtype, warps) * rows * tensors <= most


def launcher(
    kernel: Any, what: str, rows: int, columns: int, dtype: str, config: dict[str, Any], device: torch.device,
    names: Sequence[str], tensors: int = 1, **known: Any,
) -> Callable[..., bool]:  # fmt: skip
    """A kernel over contiguous [rows, columns] at 16-byte addresses that holds `tensors` of its rows, or sweeps over them."""
    once, warps = config["strategy"] == "held", config["num_warps"]
    if once:
        fits = holds(columns, dtype, config["ROWS"], warps, tensors)
        fitting(fits, what, config, f"rows of {columns}")
        known |= {"ROWS": config["ROWS"], "TILES": tiles(columns, dtype, warps)}
    known |= {"LANES": 32 * warps if once else config["LANES"], "WIDTH": 16 // SIZES[dtype]}
    sizes = {"R": rows, "C": columns, "COUNT": columns}
    return prepare(
        kernel,
        grid=(triton.cdiv(rows, config.get("ROWS", 1)), 1, 1),
        pointers={f"{name}_ptr": dtype for name in names},
        integers={name: n for name, n in sizes.items() if name in kernel.arg_names},
        constexprs=known,
        num_warps=warps,
        device=device,
    )


def held(columns: int, dtype: str, tensors: int) -> list[tuple[int, int]]:
    """Rows of a program and its warps, best guess first: one row, and as few warps as hold it."""
    return [
        (rows, warps)
        for rows in (1, 2, 4)
        for warps in MOST
        if holds(columns, dtype, rows, warps, tensors)
        and not (warps > 1 and tiles(columns, dtype, warps // 2) == 1)  # half would idle
    ]
