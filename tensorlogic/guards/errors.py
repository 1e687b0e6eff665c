"""Why a model cannot be traced or a cached call cannot serve."""

from __future__ import annotations

# what a program or a short way gives where it may not serve a call
MISS = object()


class Untraceable(Exception):
    """Why a model cannot be served by a graph."""


class Unfit(Untraceable):
    """Why no way of tracing a model is even tried."""


def first_line(problem: BaseException) -> str:
    """The kind of an error and the first line that says something."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0][:200]}" if lines else type(problem).__name__
