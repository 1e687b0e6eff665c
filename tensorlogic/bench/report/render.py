"""The forms of a report: one HTML file, a terminal, Markdown."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from textwrap import fill, wrap

from ..result_file import write_text
from ..terminal.user_error import Problem
from ..text_table import aligned
from .heatmap import Cell, Grid
from .report import Part, Report, Table

CODE = re.compile(r"`([^`]+)`")
Line = str | list[tuple[str, str]]
Out = Callable[[Line, str], None]
SHORT = 30  # letters of a cell that may share its line with others


def html(report: Report) -> str:
    """The page; Problem without jinja2."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup, escape
    except ImportError as problem:
        raise Problem("reports need jinja2: `pip install 'tensorlogic-engine[bench]'`") from problem
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["code"] = lambda text: Markup(
        CODE.sub(r"<code>\1</code>", str(escape(text)))
    )
    template = files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        title=report.title,
        about=report.about,
        warnings=report.warnings,
        facts=report.facts,
        parts=report.parts,
    )


def beside(results: Sequence[Path], out: Path | None = None) -> Path:
    """Where the page of these result files goes; Problem where it would replace one of them."""
    last = results[-1]
    page = out or (last.with_suffix(".html") if last.name else last)
    if os.path.realpath(page) in map(os.path.realpath, results):
        raise Problem(
            f"the report would replace the result file {page} that it is made from: "
            + (
                "name another file by --out"
                if out
                else "give the result file a name that ends in .json"
            )
        )
    return page


def write(report: Report, path: Path) -> Path:
    """Write the page; Problem when the folder cannot be written."""
    write_text(path, html(report), "the report")
    return path


def markdown(report: Report) -> str:
    """The same without plots, for a README or an issue; losses in bold."""
    lines = [f"# {report.title}", "", report.about, ""]
    lines += [f"> {text}" for text in report.warnings]
    lines += ["", *_table(("", ""), report.facts, frozenset())]
    for part in report.parts:
        lines += ["", f"## {part.title}", "", *(f"{text}\n" for text in part.texts)]
        for grid in part.grids:
            lines += [f"### {grid.title}", "", *_grid(grid), ""]
        for table in part.tables:
            lines += [f"### {table.title}", ""] if table.title else []
            lines += [*_table(table.head, table.lines, table.numbers, table), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _table(
    head: Sequence[str],
    lines: Sequence[Sequence[str]],
    numbers: frozenset[str],
    table: Table | None = None,
) -> list[str]:
    found = ["| " + " | ".join(head) + " |"]
    found.append("|" + "|".join("---:" if h in numbers else ":---" for h in head) + "|")
    for line in lines:
        cells = [c.replace("|", "\\|") for c in line]
        if table is not None:
            cells = [f"**{c}**" if table.lost(i, line) else c for i, c in enumerate(cells)]
        found.append("| " + " | ".join(cells) + " |")
    return found


def _grid(grid: Grid) -> list[str]:
    def text(cell: Cell | None) -> str:
        if cell is None:
            return ""
        return f"**{cell.text}**" if cell.verdict == "loss" else cell.text

    lines = [(name, *map(text, cells)) for name, cells in grid.lines]
    return _table(("", *grid.head), lines, frozenset(grid.head))


def show(report: Report) -> None:
    """Print it: coloured with rich, plain without; a narrow terminal gets lists in place of wide tables."""
    width = shutil.get_terminal_size((100, 40)).columns
    out = _console(width)
    out(report.title, "bold")
    for text in [report.about, *report.warnings]:
        out(text, "red" if text in report.warnings else "")
    for name, value in report.facts:
        out(f"  {name}: {value}", "")
    for part in report.parts:
        _show(part, out, width)


def _show(part: Part, out: Out, width: int) -> None:
    tables = [t for t in part.tables if not t.folded]
    if not part.grids and not tables and (part.plots or part.tables):
        return  # only the page shows it
    out(f"\n{part.title}", "bold")
    for text in part.texts:
        out(text, "")
    for grid in part.grids:
        out(f"\n{grid.title}{' (! is slower)' if grid.count('loss') else ''}", "italic")
        for line in _coloured(grid):
            out(line, "")
    for table in tables:
        out("", "")
        for text in _plain(table, width):
            out(text, "")


def _coloured(grid: Grid) -> list[list[tuple[str, str]]]:
    """Lines of the grid, each as parts with their styles."""
    name = max(len(n) for n, _ in grid.lines)
    wide = max(6, *(len(h) + 2 for h in grid.head))
    found = [[(" " * name + "".join(h.rjust(wide - 1) + " " for h in grid.head), "dim")]]
    for label, line in grid.lines:
        parts = [(label.ljust(name), "")]
        for cell in line:
            verdict = "" if cell is None else cell.verdict
            text = "" if cell is None else cell.text
            style = {"win": "green", "loss": "bold red", "even": "dim"}.get(verdict, "")
            parts.append((text.rjust(wide - 1) + ("!" if verdict == "loss" else " "), style))
        found.append(parts)
    return found


def _plain(table: Table, width: int) -> list[str]:
    """Aligned if that fits, otherwise a line of the short cells, and the long ones beneath it."""
    left = [h not in table.numbers for h in table.head]
    text = aligned([list(table.head), *map(list, table.lines)], left).splitlines()
    if max(map(len, text)) <= width:
        return text
    found = []
    for line in table.lines:
        cells = list(zip(table.head, line, strict=True))
        short = [c if i < 2 else f"{h} {c}" for i, (h, c) in enumerate(cells) if len(c) <= SHORT]
        long = [f"{h}: {c}" for h, c in cells if len(c) > SHORT]
        for indent, given in (("", ", ".join(short)), *(("  ", each) for each in long)):
            found += wrap(given, width, initial_indent=indent, subsequent_indent=indent + "  ")
    return found


def _console(width: int) -> Out:
    """A function that prints text, wrapped, or a line in parts with their styles."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:  # the extra `bench` is not installed

        def plain(line: Line, style: str) -> None:
            text = _wrapped(line, width) if isinstance(line, str) else "".join(t for t, _ in line)
            sys.stdout.write(text.rstrip() + "\n")

        return plain
    console = Console(highlight=False)

    def coloured(line: Line, style: str) -> None:
        parts = [(_wrapped(line, width), style)] if isinstance(line, str) else line
        console.print(Text.assemble(*parts), soft_wrap=True)

    return coloured


def _wrapped(text: str, width: int) -> str:
    lines = text.split("\n")
    return "\n".join(fill(line, width) if len(line) > width else line for line in lines)
