"""Operation by size: the speed over PyTorch's best as a grid, the same for HTML, terminal and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..cases import SQUARE
from ..result_file import Results, Row
from ..terminal.size_text import short

Interval = tuple[float, float, float]
# from which speed a win (or the inverse of a loss) takes a stronger colour
STEPS = (1.15, 1.6, 2.5)


@dataclass(frozen=True)
class Cell:
    """A ratio with its interval, above 1 better; `verdict` is "win", "even" or "loss" by the whole interval."""

    ratio: float
    low: float
    high: float
    about: str

    @property
    def verdict(self) -> str:
        """Where the interval lies."""
        return "win" if self.low > 1 else "loss" if self.high < 1 else "even"

    @property
    def strength(self) -> int:
        """1 to 4, by the size of the ratio."""
        size = max(self.ratio, 1 / max(self.ratio, 1e-9))
        return 1 + sum(size >= step for step in STEPS)

    @property
    def text(self) -> str:
        """Three characters or four."""
        r = self.ratio
        return f"{r:.0f}" if r >= 99.5 else f"{r:.1f}" if r >= 9.95 else f"{r:.2f}"


@dataclass(frozen=True)
class Grid:
    """One table of cells."""

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell | None, ...]], ...]

    def count(self, verdict: str) -> int:
        """Cells of that verdict."""
        return sum(c.verdict == verdict for _, cells in self.lines for c in cells if c is not None)


def speeds(results: Results, clock: str = "device") -> list[Grid]:
    """Grids of our speed over PyTorch's best: operations on matrices, and on vectors."""

    def cell(row: Row) -> Cell | None:
        speed = row.speed(clock=clock) if clock == "device" or row.host_us else None
        if speed is None:
            return None
        return Cell(*speed, f"{row.candidate}, {row.median_us(clock=clock):.4g} us")

    return grids([r for r in results.timed if r.category != "transfer"], cell)


def grids(rows: Iterable[Row], cell: Callable[[Row], Cell | None]) -> list[Grid]:
    """Rows as grids by the kind of their sizes."""
    kinds = {
        "by side of the matrices": [r for r in rows if r.category in SQUARE],
        "by number of elements": [r for r in rows if r.category not in (*SQUARE, "batch")],
        "by batch size": [r for r in rows if r.category == "batch"],
    }
    found = []
    for title, some in kinds.items():
        sizes = sorted({r.size for r in some})
        cells = {(f"{r.op} {r.detail}".strip(), r.dtype, r.size): cell(r) for r in some}
        names = dict.fromkeys((name, dtype) for name, dtype, _ in cells)
        lines = [
            (f"{name} {dtype}", tuple(cells.get((name, dtype, s)) for s in sizes))
            for name, dtype in names
        ]
        kept = tuple(line for line in lines if any(c is not None for c in line[1]))
        if kept:
            found.append(Grid(title, tuple(map(short, sizes)), kept))
    return found
