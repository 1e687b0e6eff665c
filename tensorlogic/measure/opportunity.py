"""Opportunity: something that could be faster, by how much, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("high", "medium", "low")
HIGH, MEDIUM = 0.1, 0.02  # of all the time that the list could save


@dataclass(frozen=True)
class Opportunity:
    """One gap; times are microseconds, summed over the rows it is about."""

    what: str
    sizes: str  # where it shows, the largest gap first
    above_us: float  # what the remedy could save at most
    gain: float  # times faster those rows would be
    cause: str
    remedy: str
    # low: a flag; medium: a change of the program; high: a kernel
    effort: str
    rows: tuple[str, ...]
    priority: str = "low"

    @property
    def cells(self) -> tuple[str, ...]:
        """For a table."""
        figures = time_text(self.above_us), f"{self.gain:.2g}x"
        words = self.cause, self.remedy, self.effort
        return self.priority, self.what, self.sizes, *figures, *words


def level(share: float) -> str:
    """The priority of a share of the time."""
    return LEVELS[0 if share >= HIGH else 1 if share >= MEDIUM else 2]


def time_text(us: float) -> str:
    """Microseconds with a fitting unit."""
    if us >= 1e6:
        return f"{us / 1e6:.3g} s"
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} us"
