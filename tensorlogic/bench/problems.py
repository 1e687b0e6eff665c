"""What goes wrong because of what a person asked for or handed over, as opposed to a fault of ours."""

from __future__ import annotations


class Problem(Exception):
    """Said in one line on the terminal, exit code 2."""
