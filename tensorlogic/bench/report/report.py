"""What a person looks at: the parts of a report, made once from result files, shown as HTML, on a terminal, or as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...measure.opportunity import time_text
from .. import compare
from ..result_file import Results, Row, load
from ..terminal.size_text import short
from ..terminal.user_error import Problem
from ..text_table import Column
from . import opportunities as report_opportunities
from . import plots as report_plots
from . import summary as report_summary
from . import tables as report_tables
from .plots import Plot
from .tables import Table

FOLD = 12  # rows of a table that are shown unfolded
LINES = "Solid: ours. Dashed: PyTorch's best. Dotted: the limit of this run."


@dataclass
class Part:
    """One section: texts, then plots and tables."""

    title: str
    texts: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Its anchor."""
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())


@dataclass
class Report:
    """Everything about one run, or about a run and the one before it."""

    results: Results
    before: Results | None
    parts: list[Part]

    @property
    def title(self) -> str:
        """The machine and the dates."""
        environment = self.results.machine["environment"]
        dates = [_date(r) for r in (self.before, self.results) if r is not None]
        return f"TensorLogic on {environment['device']}, {' and '.join(dict.fromkeys(dates))}"

    @property
    def about(self) -> str:
        """What was run, in a line."""
        run = self.results.run
        kind = "quick benchmark" if run.get("quick") else "benchmark"
        seconds = f" in {run['seconds']:.0f} s" if "seconds" in run else ""
        if "kept" in run:
            seconds = f", {run['kept']} of them kept from an interrupted run, the others{seconds}"
        return (
            f"{kind}, {len(self.results.timed)} rows{seconds}. Times are medians, intervals 95 %, ratios paired within "
            "one run; nothing was timed before it was found right."
        )

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before believing the rest."""
        runs = [r for r in (self.before, self.results) if r is not None]
        return [text.removeprefix("note: ") for r in runs for text in report_summary.caveats(r)]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Machine, versions and limits, as name and value."""
        about, environment = self.results.machine, self.results.machine["environment"]
        gpu = about.get("gpu") or {}
        found = [
            ("device", str(environment["device"])),
            ("PyTorch", str(environment["torch"])),
            ("Triton", str(environment.get("triton") or "none")),
            ("driver or instructions", str(environment.get("driver"))),
            ("TensorLogic", str(about.get("tensorlogic"))),
            ("Python, system", f"{about.get('python')}, {about.get('system')}"),
            ("processor", f"{about.get('processor')}, {about.get('usable_cores')} cores, {about.get('threads')} threads"),
            ("GPU", f"sm {gpu.get('capability')}, {gpu.get('memory_gib')} GiB, {gpu.get('multiprocessors')} multiprocessors"),
        ]  # fmt: skip
        limits = [line.partition(": ") for line in report_summary.limits(self.results)]
        return [*(found if gpu else found[:-1]), *((name, value) for name, _, value in limits)]


def _date(results: Results) -> str:
    """The day a run began."""
    return str(results.run.get("before", {}).get("time", "?"))[:10]


def make(
    results: Results, before: Results | None = None, *, mixed: bool = False, drawn: bool = True
) -> Report:
    """The report of a run; with an earlier one also what changed.

    Args:
        results: the run. before: an earlier run on the same machine (or any, if `mixed`).
        drawn: with plots, which need matplotlib.

    Raises:
        Problem: the machines differ, no row is in both runs, or matplotlib is not installed.
    """
    changed = compare.compare(before, results, mixed=mixed) if before is not None else None
    parts = [
        Part("In short", report_summary.findings(results)),
        *([_changes(changed, before, results)] if changed and before else []),
        _opportunities(results),
        Part("Every row", tables=[_rows(results)]),
        *([Part("Over size", [LINES], report_plots.over_size(results))] if drawn else []),
        _choices(results),
    ]
    return Report(results, before, [p for p in parts if p.texts or p.plots or p.tables])


def _opportunities(results: Results) -> Part:
    every = report_opportunities.found(results)
    part = Part(
        "Opportunities",
        [
            "Where this run lies above its own floor (bytes at the bandwidth, operations at the rate that the run has reached), "
            "with the likely cause and what would help. High is a tenth of what could be saved by changing the program, or of "
            "what the operations leave; medium a fiftieth."
            if every
            else "Nothing lies far from its floor."
        ],
    )
    rest = [o.cells for o in every if o.priority == "low"]
    shown = [o.cells for o in every if o.priority != "low"]
    for title, cells in (("", shown), (f"low priority: {len(rest)} more", rest)):
        if cells:
            part.tables.append(
                Table(report_opportunities.HEADS, cells, frozenset({"above the floor", "up to"}), title, folded=bool(title), cards=True)
            )  # fmt: skip
    return part


def _rows(results: Results) -> Table:
    error = Column("PyTorch's error", lambda r: report_tables.error_text(r.eager_error))
    chosen, rows = [*report_tables.columns(results), error], results.timed
    title = f"{len(rows)} rows, losses marked; errors are relative to float64"
    return report_tables.of_rows(chosen, rows, title, folded=len(rows) > FOLD)


def _choices(results: Results) -> Part:
    part = Part("Choices, and what the others would cost")
    rows = [r for r in results.timed if r.evidence]
    head = ["size", "dtype", "candidate", "time", "of the chosen one", "why"]
    numbers = frozenset({"size", "time", "of the chosen one"})
    for op in dict.fromkeys(r.op for r in rows):
        lines = [line for r in rows if r.op == op for line in _alternatives(r)]
        chosen = ", ".join(dict.fromkeys(r.candidate for r in rows if r.op == op))
        part.tables.append(Table(head, lines, numbers, f"{op}: {chosen}", folded=True))
    if rows:
        part.texts.append(
            "Candidates as they were measured on their own before the choice; `tensorlogic.policy(force=...)` would run them."
        )
    return part


def _alternatives(row: Row) -> Iterator[list[str]]:
    """A line for each candidate that could run."""
    times = {
        e["candidate"]: max(e["device_us"], e["host_us"])
        for e in row.evidence
        if e["status"] == "measured"
    }
    base = times.get(row.candidate)
    for e in row.evidence:
        id = e["candidate"]
        if e["status"] != "measured":
            if e["reason"].startswith(("wrong", "failed")):
                yield [short(row.size), row.dtype, id, "", "", f"refused: {e['reason']}"]
            continue
        ratio = f"{times[id] / base:.2f}" if base else ""
        why = "chosen" if id == row.candidate else e["reason"]
        yield [short(row.size), row.dtype, id, time_text(times[id]), ratio, why]


def _changes(found: compare.Comparison, before: Results, after: Results) -> Part:
    counts = ", ".join(f"{n} {v}" for v in compare.ORDER if (n := found.count(v)))
    text = f"{_date(before)} against {_date(after)}: {counts} (margin {found.margin:.0%}, 95 % intervals; times count relative to PyTorch's in the same run)."
    part = Part("Before and after", [text, *found.differences])
    changed = sorted(found.changes, key=lambda c: compare.ORDER.index(c.verdict))
    lines = [c.cells() for c in changed if c.verdict != "unchanged"]
    if lines:
        head = ["operation", "size", "dtype", "clock", "verdict", "after / before", "note"]
        part.tables.append(
            Table(head, lines, frozenset({"size", "after / before"}), "rows that changed", folded=len(lines) > FOLD)
        )  # fmt: skip
    expected = report_opportunities.obtained(report_opportunities.found(before), before, after)
    if expected:
        head = ["opportunity before", "likely cause", "expected", "obtained"]
        part.tables.append(
            Table(head, expected, frozenset({"expected", "obtained"}), "expected and obtained", folded=True)
        )  # fmt: skip
    return part


def read(paths: Sequence[Path], *, mixed: bool = False, drawn: bool = True) -> Report:
    """The report of one file, or of an earlier and a later one; Problem as in `results.load` and `make`."""
    if not 1 <= len(paths) <= 2:
        raise Problem(
            f"{len(paths)} result files were given; one, or an earlier and a later one, are required"
        )
    loaded = [load(p) for p in paths]
    if not loaded[-1].timed:
        raise Problem(f"{paths[-1]} holds no timed row; continue it with `tensorlogic bench --json {paths[-1]} --resume`")  # fmt: skip
    return make(loaded[-1], loaded[0] if len(loaded) == 2 else None, mixed=mixed, drawn=drawn)
