"""Candidates that compete for a key: what is known of one, which get into the last round, which wins, and the evidence they leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.candidate import EAGER, Candidate, Config, Launcher, Probe
from ..core.key import Key
from ..core.op import OPS
from ..measure import timer
from ..plans.plan import Evidence

FINALISTS = 4
NEAR_BEST = 1.25  # of one more accurate, what a first look may overstate


@dataclass
class Contender:
    """A candidate with one of its configurations, checked and roughly timed."""

    candidate: Candidate
    config: Config
    launch: Launcher
    error: float
    rough_us: float
    then_us: float = 0.0  # with what a caller does next, where that tells

    @property
    def worth_us(self) -> float:
        """What its configurations are compared by: callers read outputs at once or long after, which then takes the same for all."""
        return self.rough_us + self.then_us


def clocks_of(entrants: Sequence[Contender]) -> set[Probe]:
    """The clocks that say when some of them are disturbed."""
    return {e.candidate.clock for e in entrants if e.candidate.clock is not None}


def nearest(rest: Sequence[Contender], key: Key) -> list[Contender]:
    """The fastest few of a first look, fastest first; where an error budget is still to choose, of every accuracy."""
    if key.precision != "adaptive":
        return [*rest[:FINALISTS]]
    known = [(e.candidate.coarse(key), e.rough_us) for e in rest]
    best = [min(us for other, us in known if other <= own) for own, _ in known]
    return [e for e, us in zip(rest, best, strict=True) if e.rough_us <= NEAR_BEST * us]


def pick(final: Sequence[Contender], times: Mapping[str, float], key: Key, kind: str) -> Contender:
    """Eager unless beaten by the tolerance; of equals that beat it ours, the last registered (the most special) first."""
    eager = next(e for e in final if e.candidate.id == EAGER)
    barred = len(final) > 1 and copying(key)
    best = min(us for id, us in times.items() if id != EAGER or not barred)
    limit = best * (1 + timer.KINSHIP[kind])
    # timed between kernels of PyTorch's; among ours, which begin while those before them end, it would take less
    elementwise = key.op in OPS and OPS[key.op].elementwise
    overlaps = key.direction == "backward" and kind == "cuda" and elementwise
    limit = limit if barred or overlaps else min(limit, times[EAGER])
    equals = [e for e in reversed(final) if e is not eager and times[e.candidate.id] <= limit]
    chosen = min(equals, key=lambda e: not e.candidate.trusted, default=eager)
    # on a GPU eager, recorded, brings PyTorch's own backward, not the fastest one: there it wins no ties
    tied = not barred and times[EAGER] <= best * (1 + timer.TOLERANCE[kind])
    recorded = key.direction == "forward" and kind == "cuda"
    return eager if tied and not (recorded or overlaps) else chosen


def copying(key: Key) -> bool:
    """Whether eager keeps copies of operands in float64, which "f32" does not where anything else serves."""
    wide = ("f64", "c128")
    return key.precision == "f32" and any(t and t.dtype not in wide for t in key.tensors)


def measured(
    e: Contender, device_us: float, host_us: float, spread: float, reason: str
) -> Evidence:
    """What was found of a candidate that was right."""
    times = round(device_us, 3), round(host_us, 3), round(spread, 4), round(e.error, 3)
    about = e.candidate.id, dict(e.config), "measured"
    return Evidence(*about, *times, reason=reason, source=e.candidate.source)


def refused(candidate: Candidate, reason: str) -> Evidence:
    """Why a candidate does not compete."""
    return Evidence(candidate.id, {}, "refused", reason=reason, source=candidate.source)
