"""What optimize did: regions, candidates, times before and after, errors, what was refused and why; as text and HTML."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...measure.opportunity import Opportunity


@dataclass
class Row:
    """Regions of one op and one size: how many, who serves them, and the evidence."""

    region: str
    op: str
    candidate: str
    count: int = 1
    before_us: float | None = None
    after_us: float | None = None
    ratio: tuple[float, float, float] | None = None  # after/before: median and 95 % interval
    error: float | None = None  # relative to the original's own error
    refused: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row's cells as text."""
        speed = ""
        if self.ratio is not None:
            speed = f"{1 / self.ratio[0]:.2f} [{1 / self.ratio[2]:.2f}, {1 / self.ratio[1]:.2f}]"
        error = "" if self.error is None else f"{self.error:.2f}"
        times = _us(self.before_us), _us(self.after_us), speed, error
        return self.region, self.op, str(self.count), self.candidate, *times, self.refused


HEADS = ("region", "op", "times", "candidate", "before us", "after us", "speed [95 %]", "error", "refused")  # fmt: skip


@dataclass
class Report:
    """The outcome of `optimize`. Times are microseconds a call, errors multiples of the original's own error."""

    # "original", or what serves the model: "rewritten", "captured", ...
    outcome: str = "original"
    reason: str = ""  # why the original came back, or what holds
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    before_us: float | None = None
    after_us: float | None = None
    ratio: tuple[float, float, float] | None = None
    error: float | None = None
    # what is held besides the model: packed weights, graphs' pool
    bytes: int = 0
    seconds: float = 0.0
    opportunities: list[Opportunity] = field(default_factory=list)  # what is left to be gained
    advice: list[str] = field(default_factory=list)  # the same in words, expected beside obtained
    watched: dict[str, Any] | None = None  # where the time of a call of the original went
    watch: Callable[[], dict[str, Any] | None] | None = field(default=None, repr=False)

    def look(self) -> None:
        """Watch one call of the original, where that is wanted and an earlier process has not done it."""
        watch, self.watch = self.watch, None
        if watch is not None:
            self.watched = watch()

    @property
    def regions(self) -> list[Row]:
        """Regions that stand."""
        return [r for r in self.rows if not r.refused]

    @property
    def refused(self) -> list[Row]:
        """Regions that were undone, each with its reason."""
        return [r for r in self.rows if r.refused]

    @property
    def summary(self) -> str:
        """One or two lines."""
        text = f"{self.outcome}: {self.reason}" if self.reason else self.outcome
        if self.before_us is not None and self.after_us is not None and self.ratio is not None:
            low, high = 1 / self.ratio[2], 1 / self.ratio[1]
            text += (
                f"\nwhole model: {self.before_us:.0f} us before, {self.after_us:.0f} us after, "
                f"{1 / self.ratio[0]:.2f}x [{low:.2f}, {high:.2f}]"
            )
        if self.error is not None:
            text += f", error {self.error:.2f} times the original's"
        return (
            text
            + f"\nready in {self.seconds:.1f} s, {self.bytes / 2**20:.1f} MiB held besides the model"
        )

    def __str__(self) -> str:
        rows = [HEADS, *(r.cells for r in self.rows)]
        shown = [i for i in range(len(HEADS)) if any(r[i] for r in rows[1:])]
        widths = [max(len(r[i]) for r in rows) for i in shown]
        lines = [
            "  ".join(r[i].ljust(w) for i, w in zip(shown, widths, strict=True)).rstrip()
            for r in rows
        ]
        return "\n".join([*(lines if self.rows else []), self.summary, *self.notes, *self.advice])

    def _repr_html_(self) -> str:
        def line(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        table = line(HEADS, "th") + "".join(line(r.cells, "td") for r in self.rows)
        said = (*self.summary.splitlines(), *self.notes, *self.advice)
        text = "<br>".join(html.escape(t) for t in said)
        return f"<table>{table}</table><p>{text}</p>"


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
