"""What stands for the regions of one kind, and the evidence for it: times, errors, reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...measure import timer
from ..reporting.report import Row
from ..rewrite.matcher import Region

# of a way's error that the next one must have where the whole model's error grew
MILDER = 0.8


@dataclass
class Decision:
    """What stands for all regions of one kind: a way or candidate, or nothing, with the evidence."""

    way: str | None = None
    ready: tuple[str, ...] = ()  # ways that passed their check
    row: Row = field(default_factory=lambda: Row("", "", ""))
    paying: dict[str, Row] = field(default_factory=dict)  # ways that are fast enough
    plans: dict[str, str | None] = field(default_factory=dict)  # key of its op -> measured when

    def milder(self) -> bool:
        """Go over to the fastest way of those with a clearly smaller error; False where there is none."""
        limit = MILDER * (self.row.error or 0.0)
        fit = {way: r for way, r in self.paying.items() if (r.error or 0.0) <= limit}
        if not fit:
            return False
        least = min(fit, key=lambda way: slowness(fit[way]))
        found = fit[least]
        self.way, self.ready, row = least, (least,), self.row
        row.candidate, row.after_us, row.ratio = found.candidate, found.after_us, found.ratio
        row.error = found.error
        return True

    def inexact(self) -> list[str | None]:
        """This way, and those that add to the original's error no less."""
        least = max(self.row.error or 0.0, 1.1)
        return [self.way, *(w for w, r in self.paying.items() if (r.error or 0.0) >= least)]


def evidence(region: Region, way: str, shown: str, error: float, samples: timer.Samples) -> Row:
    """The times of one way beside the original calls."""
    before, after = samples.median("before"), samples.median(way)
    ratio = samples.ratio(way, "before")
    return Row(region.root, region.op, shown, 0, before, after, ratio, error)


def slowness(row: Row) -> float:
    """Of the original's time."""
    return row.ratio[0] if row.ratio is not None else float("inf")


def refused(region: Region, reason: str, error: float | None) -> Decision:
    """A region that stays as it was."""
    return Decision(None, (), Row(region.root, region.op, "", 0, error=error, refused=reason))
