"""Checks of arguments of any function: an error names the argument, what came, what is required."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .dtypes import NAMES


def describe(value: Any) -> str:
    """What a value is, in the words of our errors: dtype, shape and device of a tensor, else its type."""
    if isinstance(value, Tensor):
        return f"{NAMES.get(value.dtype, str(value.dtype))}{list(value.shape)} on {value.device}"
    kind = type(value).__name__
    return f"{kind} {value!r}" if isinstance(value, (int, float, str, bool)) else kind


def flag(fn: str, name: str, value: Any) -> bool:
    """True or False, and nothing that is merely true: `sum(x, 0, 1)` means something else."""
    if not isinstance(value, bool):
        raise TypeError(f"{fn}: {name} is {describe(value)}; True or False is required")
    return value


def one_of(fn: str, name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    """The value is one of the allowed words (or None)."""
    if (value is not None and not isinstance(value, str)) or value not in allowed:
        words = ", ".join(map(repr, allowed))
        shown = describe(value) if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{fn}: {name} is {shown}; it must be one of {words}")


def index(value: Any) -> int | None:
    """An int of Python's or NumPy's; None of anything else."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    return int(value) if hasattr(value, "__index__") and not isinstance(value, Tensor) else None


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that these broadcast to; raises RuntimeError where they do not.

    `torch.broadcast_shapes` imports all of sympy at its first call (0.5 to 2 s): it is asked for symbolic sizes alone, where sympy is there.
    """
    if torch.compiler.is_compiling() or not all(type(n) is int for n in itertools.chain(*shapes)):
        return tuple(torch.broadcast_shapes(*shapes))
    out = []
    for sizes in itertools.zip_longest(*map(reversed, shapes), fillvalue=1):
        wide = set(sizes) - {1}
        if len(wide) > 1:
            raise RuntimeError(f"sizes {sorted(wide)} do not broadcast")
        out.append(wide.pop() if wide else 1)
    return tuple(reversed(out))


def device(fn: str, value: Any) -> torch.device:
    """A device, or one by name or number as PyTorch takes it."""
    if isinstance(value, torch.device):
        return value
    required = "a device such as 'cpu' or 'cuda' is required"
    try:
        return torch.device(value)
    except TypeError:
        raise TypeError(f"{fn}: device is {describe(value)}; {required}") from None
    except RuntimeError as problem:
        raise ValueError(f"{fn}: device is {value!r}; {required}") from problem
