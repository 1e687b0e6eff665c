"""Few, long rows that several programs share: each takes some of a row's aligned groups of 16 bytes, the first one the ends, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.row_access.ragged import LONGEST, parts_of

FEWEST = 8192  # elements of a row that one program would read alone
CHAIN = 4096  # tiles of a share at most: a chain of sums loses digits


@triton.jit
def share_of(R, C, SPAN, WIDTH: tl.constexpr):
    """Of this program's row: where the SPAN elements of groups that are this program's begin, and how many there are; where the
    row's ends lie, and which of them are this program's."""
    part = tl.program_id(1)
    begin, length, at, some = parts_of(tl.program_id(0).to(tl.int64), R, C, WIDTH)
    start = part * SPAN
    return begin + start, tl.maximum(tl.minimum(length - start, SPAN), 0), at, some & (part == 0)


def refusal(rows: int, columns: int, align: int, cores: int) -> str | None:
    """Why rows are left to kernels that give one to a single program, or None."""
    if align < 16:
        return "rows of tensors at 16-byte addresses are required"
    if columns > LONGEST:
        return f"rows of {columns} are longer than 32 bits count"
    if columns < FEWEST:
        return f"rows of {columns} are too short to be shared"
    return f"{rows} programs need no others" if rows >= 4 * cores else None


def span_of(columns: int, parts: int) -> int:
    """Elements of a share, in whole groups."""
    return int(triton.cdiv(triton.cdiv(columns, parts), 16)) * 16


def parts_for(rows: int, columns: int, tile: int, programs: int, most: int) -> int:
    """How many programs of `tile` elements at a time share a row, so that there are `programs` in all; 1 where sums would be less exact."""
    tiles = triton.cdiv(columns, tile)
    parts = triton.cdiv(tiles, triton.cdiv(tiles, max(2, min(programs // rows, most))))
    return int(parts) if fits(columns, int(parts), tile) else 1


def configs_of(
    shapes: Sequence[tuple[int, int, int]],
    most: int,
    rows: int,
    columns: int,
    dtype: str,
    cores: int,
) -> list[dict[str, Any]]:
    """Configurations of `shapes` (warps, groups that a thread reads at once, programs a multiprocessor), at most `most` programs a row;
    those that fill the device first."""
    found: list[dict[str, Any]] = []
    for warps, loads, programs in shapes:
        lanes = 32 * warps * loads
        parts = parts_for(rows, columns, tile_of(lanes, dtype), cores * programs, most)
        config = {"parts": parts, "LANES": lanes, "num_warps": warps}
        if parts > 1 and config not in found:
            found.append(config)
    return sorted(found, key=lambda config: -min(rows * config["parts"], cores))


def fits(columns: int, parts: int, tile: int) -> bool:
    """Whether the sums of a share are exact enough."""
    return span_of(columns, parts) <= CHAIN * tile


def tile_of(lanes: int, dtype: str) -> int:
    """Elements of `lanes` groups."""
    return lanes * 16 // SIZES[dtype]
