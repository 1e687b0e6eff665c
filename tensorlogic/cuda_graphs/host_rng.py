"""Random numbers that are drawn on the host, which a recorded graph would hold as they were."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

Generator = tuple[str, Callable[[], Any], Callable[[Any], Any]]  # name, its state, and back to one
PYTHON: Generator = ("Python's random", random.getstate, random.setstate)
NUMPY: Generator = (
    "numpy.random",
    lambda: numpy.random.get_state(legacy=False),
    numpy.random.set_state,
)
TORCH: Generator = ("PyTorch's generator of the CPU", torch.get_rng_state, torch.set_rng_state)

NAMED = 3  # threads at most, of those that may have drawn
SPANNING = re.MULTILINE | re.DOTALL


@contextlib.contextmanager
def drawn_once(device: torch.device) -> Iterator[None]:
    """Around a recording on `device`; where it fails, its numbers are drawn again, if nobody else can have drawn meanwhile.

    Raises:
        RuntimeError: numbers were drawn there, by whatever thread.
    """
    generators = [PYTHON, NUMPY, *([TORCH] if device.type != "cpu" else [])]
    others = Others()
    before = [state() for _, state, _ in generators]
    try:
        yield
        pairs = zip(generators, before, strict=True)
        moved = [name for (name, state, _), was in pairs if not same(was, state())]
        if moved:
            threads = " or ".join(others.awake()[:NAMED])
            whose = f", or the thread {threads} does," if threads else ","
            raise RuntimeError(
                f"it draws from {' and '.join(moved)}{whose} and a graph would repeat the numbers"
            )
    except BaseException:
        if not others.awake():  # nothing is given out twice
            for (_, _, back), was in zip(generators, before, strict=True):
                back(was)
        raise


class Others:
    """The threads beside this one: whoever was asleep all the time has drawn nothing."""

    def __init__(self) -> None:
        self.before = {thread: _sleep(thread) for thread in _others()}

    def awake(self) -> list[str]:
        """Names of those that have run since, or that may have: only Linux tells. Those that began or ended are among them."""
        now = {thread: _sleep(thread) for thread in _others()}
        return [
            repr(thread.name)
            for thread in self.before | now
            if (was := self.before.get(thread)) is None or was != now.get(thread)
        ]


def _others() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread is not threading.current_thread()]


def _sleep(thread: threading.Thread) -> tuple[Any, ...] | None:
    """Which of its sleeps a thread is in, told by how often it has left a core; None while it runs, and where nothing tells."""
    try:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    except OSError:
        return None
    told = re.search(r"^State:\s*S.*^voluntary_ctxt_switches:(.*)^nonvol\w+:(.*)", status, SPANNING)
    return told and told.groups()


def same(state: Any, other: Any) -> bool:
    """Whether a generator stands where it stood."""
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, numpy.ndarray):
        return numpy.array_equal(state, other)
    if isinstance(state, dict) and isinstance(other, dict):
        return state.keys() == other.keys() and all(same(state[k], other[k]) for k in state)
    return bool(state == other)
