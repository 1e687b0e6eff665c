"""Random numbers that are drawn on the host, which a recorded graph would hold as they were."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def drawn_once(device: torch.device) -> Iterator[None]:
    """Around a recording on `device`; where it fails, its numbers are drawn again, if nobody else can have drawn meanwhile.

    Raises:
        RuntimeError: numbers were drawn there, by whatever thread.
    """
    generators = [PYTHON, NUMPY, *([TORCH] if device.type != "cpu" else [])]
    before = [(name, state(), back) for name, state, back in generators]
    alone = threading.active_count() == 1
    try:
        yield
        for (name, was, _), (_, state, _) in zip(before, generators, strict=True):
            if not same(was, state()):
                raise RuntimeError(f"it draws from {name}, and a graph would repeat the numbers")
    except BaseException:
        if alone and threading.active_count() == 1:  # nothing is given out twice
            for _, was, back in before:
                back(was)
        raise


def same(state: Any, other: Any) -> bool:
    """Whether a generator stands where it stood."""
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, numpy.ndarray):
        return numpy.array_equal(state, other)
    if isinstance(state, dict) and isinstance(other, dict):
        return state.keys() == other.keys() and all(same(state[k], other[k]) for k in state)
    return bool(state == other)
