"""The forms of a report: one HTML file, a terminal, Markdown."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from textwrap import fill

from ..result_file import write_text
from ..terminal.user_error import Problem
from .report import Report
from .tables import Table, printer

CODE = re.compile(r"`([^`]+)`")


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
    return environment.from_string(template).render(report=report)


def beside(results: Sequence[Path], out: Path | None = None) -> Path:
    """Where the page of these result files goes; Problem where it would replace one of them."""
    last = results[-1]
    page = out or (last.with_suffix(".html") if last.name else last)
    if os.path.realpath(page) in map(os.path.realpath, results):
        remedy = "name another file by --out" if out else "give the result file a name that ends in .json"  # fmt: skip
        raise Problem(f"the report would replace the result file {page} that it is made from: {remedy}")  # fmt: skip
    return page


def write(report: Report, path: Path) -> Path:
    """Write the page; Problem when the folder cannot be written."""
    write_text(path, html(report), "the report")
    return path


def markdown(report: Report) -> str:
    """The same without plots, for a README or an issue; losses in bold."""
    lines = [f"# {report.title}", "", report.about, "", *(f"> {text}" for text in report.warnings)]
    lines += ["", *Table(("", ""), report.facts).markdown()]
    for part in report.parts:
        if part.texts or part.tables:
            lines += ["", f"## {part.title}", "", *(f"{text}\n" for text in part.texts)]
        for table in part.tables:
            lines += [f"### {table.title}", ""] if table.title else []
            lines += [*table.markdown(), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def show(report: Report) -> None:
    """Print it: coloured with rich, plain without; a narrow terminal gets lists in place of wide tables."""
    width, out = shutil.get_terminal_size((100, 40)).columns, printer()

    def say(text: str, style: str = "") -> None:
        for line in text.split("\n"):
            out(fill(line, width, subsequent_indent="    "), style)

    say(report.title, "bold")
    say(report.about)
    for text in report.warnings:
        say(text, "red")
    for name, value in report.facts:
        say(f"  {name}: {value}")
    for part in report.parts:
        tables = [t for t in part.tables if not t.folded]
        if part.plots or (part.tables and not tables):
            continue  # only the page shows it
        say(f"\n{part.title}", "bold")
        for text in part.texts:
            say(text)
        for table in tables:
            for line in ("", *table.text(width)):
                out(line, "")
