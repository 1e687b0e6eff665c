"""Tables of rows: the same cells for the terminal (rich, or plain text without it) and for Markdown."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any

from .. import machine_limits
from ..result_file import Results, Row
from ..terminal.size_text import short
from ..text_table import Column, plain

NARROW = 110  # terminals of fewer columns get the essential ones only


def columns(results: Results) -> list[Column]:
    """All columns of a run."""
    rows, host = results.timed, results.kind == "cuda"
    floors = machine_limits.Floors(results)
    kept = [
        Column("operation", lambda r: f"{r.op} {r.detail}".strip(), left=True, essential=True),
        Column("size", lambda r: short(r.size), essential=True),
        Column("dtype", lambda r: r.dtype, left=True, essential=True),
        Column("candidate", lambda r: r.candidate, left=True, essential=True),
        Column("avg ms", lambda r: _number(r.times_ms()[0]), essential=True),
        Column("min ms", lambda r: _number(r.times_ms()[1])),
        Column("max ms", lambda r: _number(r.times_ms()[2])),
        Column("GFLOPS", lambda r: _number(r.gflops) if r.flops else ""),
        Column("GB/s", lambda r: _number(r.gbs) if r.bytes else ""),
        Column("of limit", lambda r: _share(floors.share(r))),
        Column("x eager", lambda r: speed_text(r), essential=True),
    ]
    if host:
        kept += [
            Column("host us", lambda r: _number(r.median_us(clock="host")) if r.host_us else ""),
            Column("x eager, host", lambda r: speed_text(r, clock="host"), essential=True),
        ]
    if any(r.category == "fusion" for r in rows):
        kept.append(
            Column(
                "x separate",
                lambda r: speed_text(r, over="separate") if r.category == "fusion" else "",
            )
        )
    return [*kept, Column("error", lambda r: "" if r.error is None else f"{r.error:.1e}")]


def speed_text(row: Row, over: str | None = None, clock: str = "device") -> str:
    """`1.24 [1.20, 1.27]`, empty where nothing was compared."""
    if clock == "host" and not row.host_us:
        return ""
    speed = row.speed(over, clock)
    return "" if speed is None else f"{speed[0]:.2f} [{speed[1]:.2f}, {speed[2]:.2f}]"


def verdict(row: Row) -> str:
    """ "loss", "win" or "" by the interval of the speed over PyTorch's best."""
    speed = row.speed()
    return "" if speed is None else "win" if speed[1] > 1 else "loss" if speed[2] < 1 else ""


def markdown(chosen: Sequence[Column], rows: Sequence[Row]) -> str:
    """A Markdown table; losses in bold."""
    lines = [
        "| " + " | ".join(c.head for c in chosen) + " |",
        "|" + "|".join(":---" if c.left else "---:" for c in chosen) + "|",
    ]
    for row in rows:
        cells = [c.cell(row) for c in chosen]
        lost = verdict(row) == "loss"
        lines.append(
            "| "
            + " | ".join(
                f"**{t}**" if lost and c.head == "x eager" else t
                for c, t in zip(chosen, cells, strict=True)
            )
            + " |"
        )
    return "\n".join(lines)


def show(results: Results, summary: Sequence[str]) -> None:
    """Print table and summary on the terminal."""
    width = shutil.get_terminal_size((160, 40)).columns
    chosen = [c for c in columns(results) if c.essential or width >= NARROW]
    try:
        from rich.console import Console
    except ImportError:  # the extra `bench` is not installed
        sys.stdout.write(plain(chosen, results.timed) + "\n\n" + "\n".join(summary) + "\n")
        return
    console = Console(width=None if sys.stdout.isatty() else max(width, 160), highlight=False)
    console.print(
        _rich(
            chosen,
            results.timed,
            f"{results.machine['environment']['device']}, PyTorch {results.machine['environment']['torch']}",
        )
    )
    for line in summary:
        console.print(line, soft_wrap=True, markup=False)


def _rich(chosen: Sequence[Column], rows: Sequence[Row], title: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in chosen:
        table.add_column(
            column.head,
            justify="left" if column.left else "right",
            no_wrap=not column.left,
            overflow="fold",
        )
    category = ""
    for row in rows:
        if row.category != category:
            category = row.category
            table.add_row(f"[dim]{category}[/dim]")
        style = {"loss": "red", "win": "green"}.get(verdict(row), "")
        cells = [
            f"[{style}]{t}[/{style}]" if style and c.head == "x eager" else t
            for c, t in _escaped(chosen, row)
        ]
        table.add_row(*cells)
    return table


def _escaped(chosen: Sequence[Column], row: Row) -> list[tuple[Column, str]]:
    from rich.markup import escape

    return [(c, escape(c.cell(row))) for c in chosen]


def _number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.2g}" if value >= 1e-4 else f"{value:.5f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
