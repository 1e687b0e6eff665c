"""What a person looks at: the parts of a report, made once from result files, shown as HTML, on a terminal, or as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...measure.opportunity import time_text
from .. import compare, machine_info
from ..result_file import Results, Row
from ..terminal.size_text import short
from . import heatmap
from . import opportunities as report_opportunities
from . import plots as report_plots
from . import summary as report_summary
from . import tables as report_tables
from .heatmap import Cell, Grid
from .svg_style import Plot

FOLD = 12  # rows of a table that are shown unfolded
RATIO = "time before over time after"
SPEED = "times as fast as PyTorch's best"


@dataclass(frozen=True)
class Table:
    """Headings and cells; a cell in a column of `marked` that begins with a sign below 1 is a loss."""

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    numbers: frozenset[str] = frozenset()
    marked: str = ""
    folded: bool = False
    cards: bool = False  # on a phone one card a line

    def lost(self, index: int, line: Sequence[str]) -> bool:
        """True for the cell of a loss."""
        text = line[index]
        if self.head[index] != self.marked or "[" not in text:
            return False
        return float(text.split(",")[-1].rstrip("] ").replace(",", "")) < 1


@dataclass
class Part:
    """One section: texts, then grids, plots and tables."""

    title: str
    texts: list[str] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    key: str = SPEED

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
        dates = [date(r) for r in (self.before, self.results) if r is not None]
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
        return [text for r in (self.before, self.results) if r is not None for text in noise(r)]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Machine, versions and limits."""
        return facts(self.results)


def date(results: Results) -> str:
    """The day a run began."""
    return str(results.run.get("before", {}).get("time", "?"))[:10]


def noise(results: Results) -> list[str]:
    """Why a run's times may not be this machine's own."""
    return [line.removeprefix("note: ") for line in report_summary.caveats(results)]


def facts(results: Results) -> list[tuple[str, str]]:
    """Machine, versions and limits, as name and value."""
    about, environment = results.machine, results.machine["environment"]
    gpu = about.get("gpu") or {}
    found = [
        ("device", str(environment["device"])),
        ("PyTorch", str(environment["torch"])),
        ("Triton", str(environment.get("triton") or "none")),
        ("driver or instructions", str(environment.get("driver"))),
        ("TensorLogic", str(about.get("tensorlogic"))),
        ("Python, system", f"{about.get('python')}, {about.get('system')}"),
        ("processor", f"{about.get('processor')}, {about.get('usable_cores')} cores, {about.get('threads')} threads"),
    ]  # fmt: skip
    if gpu:
        found.append(
            ("GPU", f"sm {gpu.get('capability')}, {gpu.get('memory_gib')} GiB, {gpu.get('multiprocessors')} multiprocessors")
        )  # fmt: skip
    return [*found, *map(_limit, report_summary.limits(results))]


def _limit(line: str) -> tuple[str, str]:
    name, _, value = line.partition(": ")
    return name, value


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
    found = compare.compare(before, results, mixed=mixed) if before is not None else None
    parts = [
        _summary(results),
        *([_changes(found, before, results, drawn)] if found and before else []),
        _opportunities(results),
        _heat(results),
        _fusion(results, drawn),
        _categories(results, drawn),
        _roofline(results, drawn),
        _errors(results, drawn),
        _choices(results),
    ]
    return Report(results, before, [p for p in parts if p.texts or p.grids or p.plots or p.tables])


def _summary(results: Results) -> Part:
    rows = results.timed
    lines = [
        *report_summary.shares(results, rows),
        *report_summary.fusion(results, rows, names=False),
    ]
    lost = [g.count("loss") for g in heatmap.speeds(results)]
    lines.append(
        f"{sum(lost)} of {sum(sum(g.count(v) for v in ('win', 'even', 'loss')) for g in heatmap.speeds(results))} "
        "rows are slower than PyTorch's best beyond doubt; they stand in red below."
    )
    lines += [f"not timed: {r.id}: {r.reason}" for r in results.rows if r.status != "ok"]
    return Part("In short", lines)


def _opportunities(results: Results) -> Part:
    every = report_opportunities.found(results)
    part = Part(
        "Opportunities",
        [
            "Where this run lies above its own floor (bytes at the bandwidth, operations at the rate that the run has reached), "
            "with the likely cause and what would help. High is a tenth of what could be saved by changing the program, or of "
            "what the operations leave; medium a fiftieth."
        ],
    )
    shown = [o for o in every if o.priority != "low"]
    rest = [o for o in every if o.priority == "low"]
    heads = report_opportunities.HEADS
    numbers = frozenset({"above the floor", "up to"})
    if shown:
        part.tables.append(Table("", heads, [o.cells for o in shown], numbers, cards=True))
    if rest:
        title = f"low priority: {len(rest)} more"
        part.tables.append(
            Table(title, heads, [o.cells for o in rest], numbers, folded=True, cards=True)
        )
    if not every:
        part.texts.append("Nothing lies far from its floor.")
    return part


def _heat(results: Results) -> Part:
    part = Part("Speed over the best of PyTorch's ways")
    for clock in machine_info.clocks(results):
        label = {"device": "device time", "host": "host time"}[clock]
        for grid in heatmap.speeds(results, clock):
            name = f"{grid.title}, {label}" if len(machine_info.clocks(results)) > 1 else grid.title
            part.grids.append(Grid(name, grid.head, grid.lines))
    part.texts = [
        "Red is slower, beyond the 95 % interval. Grey is no difference that could be shown."
    ]
    return part if part.grids else Part(part.title)


def _fusion(results: Results, drawn: bool) -> Part:
    part = Part("Fused against separate operations")
    fused = [r for r in results.timed if r.category == "fusion"]
    if not fused:
        return part
    if drawn:
        part.plots = [
            p for c in machine_info.clocks(results) for p in report_plots.fusion(results, c)
        ]
    lines = []
    for row in fused:
        speed, separate = report_tables.speed_text(row), report_tables.speed_text(row, "separate")
        lines.append([row.op, short(row.size), row.dtype, row.candidate, speed, separate])
    head = ["operation", "size", "dtype", "candidate", "x best", "x separate"]
    numbers = frozenset({"size", "x best", "x separate"})
    part.tables.append(
        Table("all rows", head, lines, numbers, marked="x best", folded=len(lines) > FOLD)
    )
    return part


def _categories(results: Results, drawn: bool) -> Part:
    part = Part("Over size")
    if drawn:
        part.plots = [*report_plots.categories(results), *report_plots.batches(results)]
        part.texts = ["Solid: ours, shaded between the quartiles. Dashed: PyTorch's best. Dotted: the limit of this run."]  # fmt: skip
    return part if part.plots else Part(part.title)


def _roofline(results: Results, drawn: bool) -> Part:
    part = Part("Roofline")
    if drawn:
        part.plots = report_plots.roofline(results)
        part.texts = ["Every operation under the ceilings that this run has measured. Small ones cannot reach them: a launch takes longer than their work."]  # fmt: skip
    return part if part.plots else Part(part.title)


def _errors(results: Results, drawn: bool) -> Part:
    part = Part("Errors beside speeds")
    if drawn:
        part.plots = report_plots.errors(results)
    rows = [r for r in results.timed if r.error is not None and r.category != "transfer"]
    lines = [
        [r.op, short(r.size), r.dtype, time_text(r.median_us()), report_tables.speed_text(r), _number(r.error), _number(r.eager_error)]
        for r in rows
    ]  # fmt: skip
    head = ["operation", "size", "dtype", "time", "x best", "error", "PyTorch's error"]
    numbers = frozenset({"size", "time", "x best", "error", "PyTorch's error"})
    if lines:
        part.tables.append(Table("all rows", head, lines, numbers, "x best", folded=True))
    return part


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _choices(results: Results) -> Part:
    part = Part("Choices, and what the others would cost")
    rows = [r for r in results.timed if r.evidence]
    for op in dict.fromkeys(r.op for r in rows):
        lines = [line for r in rows if r.op == op for line in _alternatives(r)]
        chosen = ", ".join(dict.fromkeys(r.candidate for r in rows if r.op == op))
        head = ["size", "dtype", "candidate", "time", "of the chosen one", "why"]
        part.tables.append(
            Table(f"{op}: {chosen}", head, lines, frozenset({"size", "time", "of the chosen one"}), folded=True)
        )  # fmt: skip
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


def _changes(found: compare.Comparison, before: Results, after: Results, drawn: bool) -> Part:
    part = Part("Before and after", key=RATIO)
    counts = ", ".join(f"{n} {v}" for v in compare.ORDER if (n := found.count(v)))
    part.texts = [
        f"{date(before)} against {date(after)}: {counts} (margin {found.margin:.0%}, 95 % intervals; times count relative to PyTorch's in the same run).",
        *found.differences,
    ]
    ratios = {(c.id, c.label[3]): c for c in found.changes if c.ratio}

    def cell(row: Row) -> Cell | None:
        c = ratios.get((row.id, "device"))
        if c is None or not c.ratio or not c.low or not c.high:
            return None
        return Cell(1 / c.ratio, 1 / c.high, 1 / c.low, c.note or c.verdict)

    part.grids = heatmap.grids([r for r in after.timed if r.category != "transfer"], cell)
    if drawn:
        part.plots = report_plots.changes(found)
    changed = sorted(found.changes, key=lambda c: compare.ORDER.index(c.verdict))
    lines = [c.cells() for c in changed if c.verdict != "unchanged"]
    head = ["operation", "size", "dtype", "clock", "verdict", "after / before", "note"]
    numbers = frozenset({"size", "after / before"})
    if lines:
        part.tables.append(Table("rows that changed", head, lines, numbers, folded=len(lines) > FOLD))  # fmt: skip
    expected = report_opportunities.obtained(report_opportunities.found(before), before, after)
    if expected:
        head = ["opportunity before", "likely cause", "expected", "obtained"]
        part.tables.append(
            Table("expected and obtained", head, expected, frozenset({"expected", "obtained"}), folded=True)
        )  # fmt: skip
    return part


def read(paths: Sequence[Path], *, mixed: bool = False, drawn: bool = True) -> Report:
    """The report of one file, or of an earlier and a later one; Problem as in `results.load` and `make`."""
    from ..result_file import load
    from ..terminal.user_error import Problem

    if not 1 <= len(paths) <= 2:
        raise Problem(
            f"{len(paths)} result files were given; one, or an earlier and a later one, are required"
        )
    loaded = [load(p) for p in paths]
    if not loaded[-1].timed:
        raise Problem(f"{paths[-1]} holds no timed row; continue it with `tensorlogic bench --json {paths[-1]} --resume`")  # fmt: skip
    return make(loaded[-1], loaded[0] if len(loaded) == 2 else None, mixed=mixed, drawn=drawn)
