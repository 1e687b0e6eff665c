"""Time that only a test moves: what is measured in it takes what the test says, however busy the machine is."""

from __future__ import annotations

import time
from types import ModuleType

import pytest


class Clock:
    """Stands for the module `time` in others; `tick` seconds pass at each look, so that what waits for a time ends."""

    time_ns = staticmethod(time.time_ns)  # of the day: nothing is measured by it

    def __init__(self, now: float = 0.0, tick: float = 0.0) -> None:
        self.now, self.tick, self.slept = now, tick, 0.0

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    def stands_in(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """For the time of these modules."""
        for module in modules:
            monkeypatch.setattr(module, "time", self)


class Work(Clock):
    """Moves as this thread works, too, and not while others have the core."""

    def perf_counter(self) -> float:
        return super().perf_counter() + time.thread_time()

    monotonic = perf_counter
