"""Text tables: columns, cells, alignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .result_file import Row


@dataclass(frozen=True)
class Column:
    """A heading and what stands under it."""

    head: str
    cell: Callable[[Row], str]
    left: bool = False
    essential: bool = False


def plain(chosen: Sequence[Column], rows: Sequence[Row]) -> str:
    """Aligned text."""
    return aligned(
        [[c.head for c in chosen], *[[c.cell(r) for c in chosen] for r in rows]],
        [c.left for c in chosen],
    )


def aligned(cells: Sequence[Sequence[str]], left: Sequence[bool]) -> str:
    """Columns of equal width."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(left))]
    pick = [str.ljust if to_left else str.rjust for to_left in left]
    return "\n".join(
        "  ".join(
            pad(text, width) for pad, text, width in zip(pick, line, widths, strict=True)
        ).rstrip()
        for line in cells
    )
