"""What either side has taken for calls of one kind, how often it is timed, and for how long that settles where they run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import link_speed

AGAIN = 3  # runs of either side that are timed, at least
# at most, while they get faster or take far longer than expected
MORE = 12
MOMENT_S = 0.05  # a side that has taken so long is not timed more often
NEW = 0.9  # of the least time: a run below may precede a faster one
STRANGE = 3.0  # times what is expected: others had the cores
CALL_S = 50e-6  # what calling takes at most
# slow runs on a GPU in a row, after which both are timed again
LATE = 8
SHARE = 0.05  # of a key's time that timing the slower side again may take
CPU = torch.device("cpu")


@dataclass
class Trial:
    """What either side has taken for one key, and what that has settled for so many calls."""

    place: torch.device | None = None  # of the faster side; None while both are being timed
    left: float = 0.0  # calls that go there before both are timed again
    rest: float = 0.0  # how many those were at first
    taken: dict[str, list[float]] = field(default_factory=dict)  # seconds, by side
    work: float = 0.0  # operations of such a call
    here: float = math.inf  # seconds that the CPU is expected to take
    likely: float = math.inf  # the same, where a product's speed tells much of it
    both: bool = False  # whether each side is timed, whatever is expected of it
    late: int = 0  # runs in a row on the GPU that took longer than the CPU did

    def enough(self, side: str) -> bool:
        """Whether this side's runs tell what a call takes: not while they get faster, nor at first while all took strangely long."""
        taken = self.taken.get(side, [])
        strange = self._strange(side)
        if strange and self.rest:
            return True
        if len(taken) < AGAIN:
            return False
        if len(taken) >= MORE or sum(taken) >= MOMENT_S:
            return True
        return not strange and taken[-1] >= NEW * min(taken[:-1])

    def settle(self, place: torch.device, lasting: bool) -> None:
        """Go there: for good if `lasting` or without a GPU, else longer every time; a strangely slow CPU gets a chance soon."""
        other = "cuda" if place.type == "cpu" else "cpu"
        best, runs = min(self.taken.get(place.type, ()), default=0.0), self.taken.get(other, [])
        slower = min(runs, default=self.here if other == "cpu" else math.inf)
        if lasting or not best:
            earned = math.inf
        elif self._strange(other):
            earned = AGAIN
        else:
            earned = (len(runs) or AGAIN) * slower / best / SHARE
        self.place, self.late = place, 0
        self.rest = max(2 * self.rest, earned)
        self.left = self.rest - 1  # this call is the first

    def due(self) -> bool:
        """Count a call that goes where it was settled; after the last of them both sides that have a chance are timed anew."""
        self.left -= 1
        if self.left >= 0:
            return False
        self.place, self.taken, self.both = None, {}, len(self.taken) > 1
        if not self.both:
            link_speed.time_again(CPU)
        return True

    def timed(self, side: str, run: Callable[[], Any]) -> Any:
        """Run, and note how long it took while nothing is settled; later on, whether a GPU does what was seen of it."""
        if self.place is not None and (side == "cpu" or self.left == math.inf):
            return run()
        begin = time.perf_counter()
        out = run()
        if side == "cuda" and self.place is None:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        if self.place is None:
            self.note(side, seconds)
        else:
            self._compare(seconds)
        return out

    def note(self, side: str, seconds: float) -> None:
        """Keep how long a call has taken there; infinitely long where it failed. It also tells how fast a CPU is at least."""
        if self.place is not None:
            return
        self.taken.setdefault(side, []).append(seconds)
        if side == "cpu" and self.work:
            link_speed.shown(CPU, self.work / max(seconds, 1e-9))

    def _compare(self, seconds: float) -> None:
        """Let both be timed again where the GPU takes longer than the CPU did: what a transfer takes depends on what else runs."""
        cpu = min(self.taken.get("cpu", ()), default=math.inf)
        self.late = self.late + 1 if seconds > cpu else 0
        if self.late >= LATE:
            self.left = 0.0

    def _strange(self, side: str) -> bool:
        """Whether a CPU took far longer than a product of that size should: others had its cores, for a moment or for long."""
        if side != "cpu":
            return False
        return min(self.taken.get(side, ()), default=0.0) >= STRANGE * self.likely + CALL_S
