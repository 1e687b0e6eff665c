"""Sizes as people write them: 1024, 1K, 128M."""

from __future__ import annotations

from .user_error import Problem

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# digits: what is longer is no size that a machine could hold
LONGEST = 12


def parse(text: str) -> int:
    """`"10K"` -> 10240; units are powers of 1024."""
    unit = UNITS.get(text[-1:].upper())
    digits = text[:-1] if unit else text
    if not (digits.isdecimal() and len(digits) <= LONGEST and int(digits) > 0):
        raise Problem(
            f"size is {text!r}; a whole number from 1, also with K, M or G (powers of 1024), is required"
        )
    return int(digits) * (unit or 1)


def shape(text: str) -> tuple[int, ...]:
    """`"16x768"` -> (16, 768)."""
    parts = text.replace(",", "x").lower().split("x")
    if not all(p.strip().isdecimal() and len(p.strip()) <= LONGEST for p in parts):
        raise Problem(f"shape is {text!r}; sizes such as 16x768 are required")
    return tuple(int(p) for p in parts)


def short(size: int) -> str:
    """`10240` -> `"10K"` where a unit divides it and it is at least ten thousand; small sizes stay as they are."""
    for unit in ("G", "M", "K"):
        if size >= 10_000 and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return str(size)
