"""Clocks: small fixed calls whose time says whether what they run on is disturbed just now, so that nobody is judged by it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from ..core.candidate import Probe
from . import timer

DRIFT = 1.25  # of the least time: undisturbed ones lie within 6 % (AMX)
READS, FIRST_READS = 3, 9
PAUSE_S = 0.02  # between two looks at a slow clock
CLEARLY = 0.95  # of the noted time: what is less is noted
STRANGE_S = 60.0  # after it, a noted time never met is another machine's
STUDY_S = 2.0  # what one study waits and spends on looking again
POSTPONED = 16  # steps that one in the background puts off
FIRST_S, SHARE = 2.0, 0.1  # a process waits this, and of its time since


class Notes(Protocol):
    """A file of lines that outlives the process."""

    @property
    def known(self) -> Iterable[str]:
        """The lines that are known."""

    def look(self, device: torch.device) -> Path:
        """Read the file of this device's machine into `known`; returns its path."""

    def append(self, path: Path, line: str) -> None:
        """Add a line to the file."""


class InterferenceProbe:
    """A small call that takes longer while something else has the unit that a candidate runs on.

    Units that one core shares with another (tiles of AMX, say) serve neighbours, too, on machines that are rented by the core:
    then every kernel of theirs takes up to twice its time for up to seconds, and others what they always take.

    A first reading may itself be disturbed. The least time is therefore noted beside the plan store, where later processes
    find it; only the first one of all on a machine goes by its own readings alone.
    """

    def __init__(self, make: Callable[[], timer.Call | None], notes: Notes | None = None) -> None:
        self.make = make  # the call; None where no machine of this kind needs it
        self.notes = notes
        self.call: timer.Call | None = None
        self.made = False
        self.least: dict[int, float] = {}  # threads -> microseconds, noted or read
        self.own: dict[int, float] = {}  # the least that this process has read ...
        self.since: dict[int, float] = {}  # ... since when
        self.lock = threading.Lock()

    def slow(self) -> bool:
        """Whether the call takes clearly longer now than it has taken before in this process."""
        with self.lock:
            if not self.made:
                self.call, self.made = self.make(), True
            if self.call is None:
                return False
            threads = torch.get_num_threads()
            self.call()
            cpu = torch.device("cpu")
            reads = READS if threads in self.own else FIRST_READS
            now = min(timer.once(self.call, cpu) for _ in range(reads))
            return now > DRIFT * self._known(threads, now)

    def _known(self, threads: int, now: float) -> float:
        """The least time, this reading among what is known."""
        begun = self.since.setdefault(threads, time.perf_counter())
        own = self.own[threads] = min(now, self.own.get(threads, now))
        noted = self.least.get(threads) or self._noted(threads) or math.inf
        strange = own > DRIFT * noted and time.perf_counter() - begun > STRANGE_S
        least = self.least[threads] = own if strange else min(own, noted)
        if self.notes and (strange or least < CLEARLY * noted):
            path = self.notes.look(torch.device("cpu"))
            self.notes.append(path, f"{threads} {least:.3f} {time.time_ns()}")
        return least

    def _noted(self, threads: int) -> float | None:
        """What was noted last for so many threads."""
        if self.notes is None:
            return None
        self.notes.look(torch.device("cpu"))
        found = None
        for line in self.notes.known:
            match line.split():
                case [count, least, _] if count == str(threads):
                    with contextlib.suppress(ValueError):  # half a line, say
                        found = value if 0 < (value := float(least)) < math.inf else found
        return found


class WaitBudget:
    """How long one study may wait for slow clocks and look again, within what this process may."""

    # of all studies in this process; when the first of them waited
    spent_s, since = 0.0, 0.0
    lock = threading.Lock()

    def __init__(self, background: bool) -> None:
        self.background, self.left_s, self.left_steps = background, STUDY_S, POSTPONED

    def take(self, seconds: float) -> bool:
        """Take these seconds, in the background one step; False where they are not left."""
        if self.background:
            self.left_steps -= 1
            return self.left_steps >= 0
        cls, now = WaitBudget, time.perf_counter()
        with cls.lock:
            cls.since = cls.since or now
            if min(self.left_s, FIRST_S + SHARE * (now - cls.since) - cls.spent_s) < seconds:
                return False
            cls.spent_s += seconds
        self.left_s -= seconds
        return True

    def wait(self, clocks: Iterable[Probe], step_s: float) -> Iterator[float]:
        """Steps until none of these runs slow or patience ends; in the background they take no time, but come with later calls."""
        clocks = set(clocks)
        while any_slow(clocks) and self.take(PAUSE_S):
            if not self.background:
                time.sleep(PAUSE_S)
            yield step_s


def any_slow(clocks: Iterable[Probe]) -> bool:
    """Whether one of these runs slow."""
    return any(clock.slow() for clock in clocks)
