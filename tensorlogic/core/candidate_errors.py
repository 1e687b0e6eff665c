"""What evidence says of a candidate that raised."""

from __future__ import annotations

import torch

from ..system.compile_pool import CompileFailure

# a third party's candidate may raise anything: kept by name as its reason, never the caller's
BIND_ERRORS = (Exception,)


class Failed(Exception):
    """What failed has been put into words: `reason`."""

    def __init__(self, problem: Exception | str) -> None:
        self.reason = problem if isinstance(problem, str) else reason(problem)
        super().__init__(self.reason)


def reason(problem: Exception) -> str:
    """The reason that evidence keeps of what a candidate raised."""
    if isinstance(problem, Failed):
        return problem.reason
    text = " ".join(str(problem).split())[:300]
    if isinstance(problem, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in text:
        return f"out of memory: {text}"
    if isinstance(problem, CompileFailure):
        return f"failed to compile: {text}"
    return f"failed: {type(problem).__name__}: {text}"
