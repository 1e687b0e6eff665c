"""Rows that begin at odd places as whole aligned groups of 16 bytes, and the elements before and behind these apart."""

from __future__ import annotations

import triton
import triton.language as tl

from tensorlogic.kernels.row_access.contiguous import row_body

SIZE = {"f16": 2, "bf16": 2, "f32": 4}
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
    width = 16 // SIZE[dtype]
    if align < 16:
        return "rows of tensors at 16-byte addresses are required"
    if columns % width == 0:
        return "rows begin at 16-byte addresses"
    if columns > LONGEST:
        return f"rows of {columns} are longer than 32 bits count"
    return None if columns >= SHORTEST * width else f"rows of {columns} are too short"


def tiles(columns: int, dtype: str, warps: int) -> int:
    """Tiles of a row, of a group a thread each."""
    return int(triton.cdiv(columns * SIZE[dtype], 32 * 16 * warps))


def holds(columns: int, dtype: str, rows: int, warps: int, tensors: int) -> bool:
    """Whether the registers of a program hold so many rows of so many tensors."""
    most = MOST[warps] if rows == 1 else TOGETHER
    return tiles(columns, dtype, warps) * rows * tensors <= most


def held(columns: int, dtype: str, tensors: int) -> list[tuple[int, int]]:
    """Rows of a program and its warps, best guess first: one row, and as few warps as hold it."""
    return [
        (rows, warps)
        for rows in (1, 2, 4)
        for warps in MOST
        if holds(columns, dtype, rows, warps, tensors)
        and not (warps > 1 and tiles(columns, dtype, warps // 2) == 1)  # half would idle
    ]
