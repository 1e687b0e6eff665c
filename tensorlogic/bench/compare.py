"""Two result files against each other: better, worse or unchanged, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..measure.timer import interval
from .machine_info import clocks
from .result_file import Results, Row
from .terminal.size_text import short
from .terminal.user_error import Problem, tolerated
from .text_table import aligned

ORDER = ("broken", "worse", "better", "unchanged", "mended", "gone", "new")
HARDWARE = ("device", "kind", "threads")
SOFTWARE = ("torch", "triton", "driver", "libraries")


@dataclass(frozen=True)
class Change:
    """One row in both files; `ratio` is the time after over the time before, each over PyTorch's in its own run."""

    id: str
    label: tuple[str, str, str, str]  # operation, size, dtype, clock
    verdict: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    def cells(self) -> list[str]:
        """For a table."""
        change = "" if self.ratio is None else f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"
        return [*self.label, self.verdict, change, self.note]


def table(changes: Sequence[Change], now: str = "verdict", ratio: str = "after / before") -> str:
    """Changes as text, with an empty line after it; nothing where there are none."""
    head = ["operation", "size", "dtype", "time", now, ratio, ""]
    lines = [head, *(c.cells() for c in changes)]
    return aligned(lines, [True, False, True, True, True, False, True]) + "\n\n" if changes else ""


@dataclass
class Comparison:
    """All changes, and what differs between the machines' software."""

    changes: list[Change]
    margin: float
    differences: list[str] = field(default_factory=list)

    @property
    def regressions(self) -> list[Change]:
        """Rows that are slower beyond the margin, or were right and are no longer."""
        return [c for c in self.changes if c.verdict in ("worse", "broken")]

    def count(self, verdict: str) -> int:
        """Rows of that verdict."""
        return sum(c.verdict == verdict for c in self.changes)

    def __str__(self) -> str:
        ordered = sorted(self.changes, key=lambda c: ORDER.index(c.verdict))
        shown = [c for c in ordered if c.verdict != "unchanged"]
        counts = ", ".join(f"{n} {v}" for v in ORDER if (n := self.count(v)))
        notes = "".join(f"note: {d}\n" for d in self.differences)
        return (
            f"{table(shown)}{notes}{counts or 'no rows'} (margin {self.margin:.0%}; 95 % intervals)"
        )


def compare(
    before: Results,
    after: Results,
    margin: float = 0.05,
    *,
    mixed: bool = False,
    absolute: bool = False,
) -> Comparison:
    """Compare two runs.

    A row is worse when its time has grown by more than `margin` and the 95 % interval of the change lies above 1; better
    likewise. Times count relative to the fastest of PyTorch's calls measured beside them, which cancels drift of the
    machine between the runs; `absolute` compares the times themselves, as rows without a PyTorch time always are.

    Raises:
        Problem: the machines differ (unless `mixed`), the margin is negative, or no row is in both.
    """
    tolerated(margin)
    differences = machines(before, after, mixed)
    old, new = {r.id: r for r in before.rows}, {r.id: r for r in after.rows}
    if not old.keys() & new.keys():
        raise Problem(
            "the files have no row in common: they were measured with different selections"
        )
    found = [
        c
        for id in (*old, *(i for i in new if i not in old))
        for c in changes(old.get(id), new.get(id), clocks(after), margin, absolute)
    ]
    return Comparison(found, margin, differences)


def differing(before: Results, after: Results, names: Sequence[str] = HARDWARE) -> list[str]:
    """What differs between the machines of two runs, the hardware unless said."""
    a, b = before.machine["environment"], after.machine["environment"]
    return [f"{n}: {a.get(n)} before, {b.get(n)} after" for n in names if a.get(n) != b.get(n)]


def machines(before: Results, after: Results, mixed: bool) -> list[str]:
    """What differs between machines and software of two runs; Problem where that is the hardware, unless `mixed`."""
    other = differing(before, after)
    if other and not mixed:
        raise Problem(
            f"the files are of different machines ({'; '.join(other)}); pass --mixed to compare them all the same"
        )
    runs = (("before", before), ("after", after))
    partial = [f"{word} is not complete" for word, run in runs if not run.complete]
    return [*other, *differing(before, after, SOFTWARE), *partial]


def changes(
    old: Row | None, new: Row | None, known: tuple[str, ...], margin: float, absolute: bool
) -> list[Change]:
    """How one row compares, on each clock."""
    row = new or old
    assert row is not None
    name, size = f"{row.op} {row.detail}".strip(), short(row.size)
    if old is None or new is None or old.status != "ok" or new.status != "ok":
        verdict, note = _presence(old, new)
        return [Change(row.id, (name, size, row.dtype, ""), verdict, note=note)]
    found = []
    for clock in known:
        before, after = _interval(old, clock, absolute, new), _interval(new, clock, absolute, old)
        if before is None or after is None:
            continue
        ratio, low, high = after[0] / before[0], after[1] / before[2], after[2] / before[1]
        worse, better = low > 1 and ratio > 1 + margin, high < 1 and ratio < 1 / (1 + margin)
        verdict = "worse" if worse else "better" if better else "unchanged"
        note = f"{old.candidate} -> {new.candidate}" if old.candidate != new.candidate else ""
        label = (name, size, row.dtype, clock)
        found.append(Change(row.id, label, verdict, ratio, low, high, note))
    return found


def _presence(old: Row | None, new: Row | None) -> tuple[str, str]:
    if old is None:
        return "new", ""
    if new is None:
        return "gone", "not measured in the second file"
    if old.status == "ok":
        return "broken", new.reason
    return ("mended", old.reason) if new.status == "ok" else ("unchanged", new.reason)


def _interval(
    row: Row, clock: str, absolute: bool, other: Row
) -> tuple[float, float, float] | None:
    """Our time over PyTorch's with its interval, or our time alone."""
    samples = row.samples(clock)
    if row.subject not in samples.values:
        return None
    anchor = _anchor(row, other, clock)
    if absolute or anchor is None:
        return interval(sorted(samples.values[row.subject]))
    return samples.ratio(row.subject, anchor)


def _anchor(row: Row, other: Row, clock: str) -> str | None:
    """The PyTorch call that both rows have and that is fastest over both: the same for either order."""
    times = [r.samples(clock) for r in (row, other)]
    common = sorted(
        b for b in row.baselines if b != row.subject and all(b in t.values for t in times)
    )
    return min(common, key=lambda b: times[0].median(b) * times[1].median(b), default=None)
