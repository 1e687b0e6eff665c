"""Calls by keyword, or with plain values beside the tensors, on the short way to a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import copysign
from typing import Any

from torch import Tensor

from ..guards.errors import MISS
from .fast_replay import Way

PLAIN = (type(None), bool, int, float, str)


class Words:
    """Leads calls in the form of an earlier one, `args` and `kwargs`, along a way that takes the tensors alone."""

    def __init__(self, way: Way, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        values = (*args, *kwargs.values())
        self.way, self.count, self.names = way, len(args), tuple(kwargs)
        self.tensors = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
        self.rest = [(i, v, type(v)) for i, v in enumerate(values) if not isinstance(v, Tensor)]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's output, or `MISS`: other names, another order of them, or other values that are no tensors."""
        if len(args) != self.count or tuple(kwargs) != self.names:
            return MISS
        values = (*args, *kwargs.values())
        if not self.rest:
            return self.way(*values)
        for i, known, kind in self.rest:
            value = values[i]
            if value is not known and (type(value) is not kind or value != known):
                return MISS
            if kind is float and copysign(1.0, value) != copysign(1.0, known):
                return MISS  # 0.0 is no -0.0
        return self.way(*[values[i] for i in self.tensors])


def leaves(values: Sequence[Any], flat: Sequence[Any]) -> bool:
    """True where a call's arguments are what they were flattened to: tensors and plain values, nothing that holds some."""
    return len(values) == len(flat) and all(
        v is f and (isinstance(v, Tensor) or type(v) in PLAIN)
        for v, f in zip(values, flat, strict=True)
    )
