"""What goes wrong because of what a person asked for or handed over, as opposed to a fault of ours."""

from __future__ import annotations

import math


class Problem(Exception):
    """Said in one line on the terminal, exit code 2."""


def tolerated(margin: float) -> float:
    """The margin; Problem where it is no share from 0."""
    if not 0 <= margin < math.inf:
        raise Problem(f"margin is {margin}; at least 0 is required (0.05 is 5 %)")
    return margin
