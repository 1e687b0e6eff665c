"""Branches on whether numbers are finite, as encoders of half precision take them: a graph takes those of the example, and says at
every call whether the model's own code would have taken the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FINITE = frozenset(("isinf", "isnan", "isfinite"))
JOINED = frozenset(("any", "all", "logical_or", "logical_and", "logical_not", "__or__", "__and__", "__invert__"))  # fmt: skip


class Foretold(TorchFunctionMode):
    """Notes what Python is told of whether numbers are finite, or tells it `answers`, whatever the tensors hold.

    Only these questions: numbers that are not finite flow through the branch not taken and harm nobody, where an index out of
    range would.
    """

    def __init__(self, answers: Sequence[bool] | None = None) -> None:
        super().__init__()
        self.told = answers
        self.answers: list[bool] = []
        self.asked: list[Tensor] = []
        # tensors that say which numbers are finite, by identity
        self._about: dict[int, Tensor] = {}

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(fn, "__name__", "")
        if name == "__bool__" and id(args[0]) in self._about:
            self.asked.append(args[0])
            known = self.told is not None and len(self.answers) < len(self.told)
            self.answers.append(self.told[len(self.answers)] if known else fn(*args))  # type: ignore[index]
            return self.answers[-1]
        out = fn(*args, **(kwargs or {}))
        tensors = [a for a in args if isinstance(a, Tensor)]
        joined = name in JOINED and bool(tensors) and all(id(a) in self._about for a in tensors)
        if (name in FINITE or joined) and isinstance(out, Tensor):
            self._about[id(out)] = out
        return out

    def verdict(self) -> list[Tensor]:
        """Whether every answer is the one that was given, as one tensor; nothing where nothing was asked."""
        pairs = zip(self.asked, self.answers, strict=True)
        held = [t.reshape(()) if a else t.reshape(()).logical_not() for t, a in pairs]
        return [torch.stack(held).all()] if held else []
