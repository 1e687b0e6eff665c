"""Tables: the columns of a run's rows, and a table's forms for Markdown and for a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from .. import machine_limits
from ..result_file import Results, Row
from ..terminal.size_text import short
from ..text_table import Column, aligned, plain

NARROW = 110  # terminals of fewer columns get the essential ones only
SHORT = 30  # letters of a cell that may share its line with others
LOSSES = {"x eager": "device", "x eager, host": "host"}  # columns that show them, by the clock
Out = Callable[[str, str], object]  # prints a line in a style


@dataclass(frozen=True)
class Table:
    """Headings and cells; `losses` are numbers of lines with the heading of the column."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    numbers: frozenset[str] = frozenset()
    title: str = ""
    losses: frozenset[tuple[int, str]] = frozenset()
    folded: bool = False
    cards: bool = False  # on a phone one card a line

    def markdown(self) -> list[str]:
        """Lines of Markdown; losses in bold."""
        found = ["| " + " | ".join(self.head) + " |"]
        found.append("|" + "|".join("---:" if h in self.numbers else ":---" for h in self.head) + "|")  # fmt: skip
        for number, line in enumerate(self.lines):
            cells = [f"**{c}**" if (number, h) in self.losses else c for h, c in zip(self.head, line, strict=True)]  # fmt: skip
            found.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
        return found

    def text(self, width: int) -> list[str]:
        """Aligned if that fits, otherwise a line of the short cells, and the long ones beneath it."""
        left = [h not in self.numbers for h in self.head]
        text = aligned([list(self.head), *map(list, self.lines)], left).splitlines()
        if max(map(len, text)) <= width:
            return text
        found = []
        for line in self.lines:
            cells = list(zip(self.head, line, strict=True))
            few = [c if i < 2 else f"{h} {c}" for i, (h, c) in enumerate(cells) if len(c) <= SHORT]
            long = [f"{h}: {c}" for h, c in cells if len(c) > SHORT]
            for indent, given in (("", ", ".join(few)), *(("  ", each) for each in long)):
                found += wrap(given, width, initial_indent=indent, subsequent_indent=indent + "  ")
        return found


def columns(results: Results) -> list[Column]:
    """All columns of a run."""
    floors = machine_limits.Floors(results)
    found = [
        Column("operation", lambda r: f"{r.op} {r.detail}".strip(), left=True, essential=True),
        Column("size", lambda r: short(r.size), essential=True),
        Column("dtype", lambda r: r.dtype, left=True, essential=True),
        Column("candidate", lambda r: r.candidate, left=True, essential=True),
        Column("avg ms", lambda r: _number(r.times_ms()[0]), essential=True),
        Column("min ms", lambda r: _number(r.times_ms()[1])),
        Column("max ms", lambda r: _number(r.times_ms()[2])),
        Column("GFLOPS", lambda r: _number(r.gflops) if r.flops else ""),
        Column("GB/s", lambda r: _number(r.gbs) if r.bytes else ""),
        Column("of limit", lambda r: "" if (s := floors.share(r)) is None else f"{s:.0%}"),
        Column("x eager", speed_text, essential=True),
    ]
    if results.kind == "cuda":
        found += [
            Column("host us", lambda r: _number(r.median_us(clock="host")) if r.host_us else ""),
            Column("x eager, host", lambda r: speed_text(r, clock="host"), essential=True),
        ]
    if any(r.category == "fusion" for r in results.timed):
        fused = lambda r: speed_text(r, "separate") if r.category == "fusion" else ""  # noqa: E731
        found.append(Column("x separate", fused))
    return [*found, Column("error", lambda r: error_text(r.error))]


def speed_text(row: Row, over: str | None = None, clock: str = "device") -> str:
    """`1.24 [1.20, 1.27]`, empty where nothing was compared."""
    speed = row.speed(over, clock) if clock == "device" or row.host_us else None
    return "" if speed is None else f"{speed[0]:.2f} [{speed[1]:.2f}, {speed[2]:.2f}]"


def error_text(value: float | None) -> str:
    """A relative error, empty where none was measured."""
    return "" if value is None else f"{value:.1e}"


def of_rows(chosen: Sequence[Column], rows: Sequence[Row], title: str = "", folded: bool = False) -> Table:  # fmt: skip
    """Rows as a table."""
    numbers = frozenset(c.head for c in chosen if not c.left)
    lines = [[c.cell(r) for c in chosen] for r in rows]
    losses = {
        (number, head)
        for number, r in enumerate(rows)
        for head, clock in LOSSES.items()
        if (clock == "device" or r.host_us) and (r.speed(clock=clock) or (1.0, 1.0, 1.0))[2] < 1
    }
    return Table([c.head for c in chosen], lines, numbers, title, frozenset(losses), folded)


def markdown(chosen: Sequence[Column], rows: Sequence[Row]) -> str:
    """Rows as a Markdown table; losses in bold."""
    return "\n".join(of_rows(chosen, rows).markdown())


def show(results: Results, summary: Sequence[str]) -> None:
    """Print rows and summary on the terminal."""
    width, out = shutil.get_terminal_size((160, 40)).columns, printer()
    chosen = [c for c in columns(results) if c.essential or width >= NARROW]
    environment = results.machine["environment"]
    out(f"{environment['device']}, PyTorch {environment['torch']}", "bold")
    head, *lines = plain(chosen, results.timed).splitlines()
    out(head, "bold")
    for row, line in zip(results.timed, lines, strict=True):
        speed = row.speed() or (1.0, 1.0, 1.0)
        out(line, "green" if speed[1] > 1 else "red" if speed[2] < 1 else "")
    for line in ("", *summary):
        out(line, "")


def printer() -> Out:
    """A function that prints a line: with rich in a style, plain without."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:  # the extra `bench` is not installed
        return lambda line, style: sys.stdout.write(line.rstrip() + "\n")
    console = Console(highlight=False)
    return lambda line, style: console.print(Text(line, style), soft_wrap=True)


def _number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.2g}" if value >= 1e-4 else f"{value:.5f}"
