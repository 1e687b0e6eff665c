"""A compiled region as a value of a graph, and what was seen of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...guards.errors import first_line


@dataclass(frozen=True)
class Look:
    """A tensor without its contents."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @staticmethod
    def at(value: Any) -> Any:
        """Of a tensor, how it looks; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        return Look(
            tuple(value.shape),
            tuple(value.stride()),
            value.dtype,
            str(value.device),
            value.requires_grad,
        )

    def tensor(self) -> Tensor:
        """One that looks like this."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


class Compiled:
    """What Inductor has made of a graph, as one call of it."""

    __name__ = "inductor"

    def __init__(self, function: Callable[..., Any], mutates: bool) -> None:
        self.function, self.mutates = function, mutates

    def __call__(self, *given: Any) -> Any:
        """All outputs, one after the other. Raises RuntimeError where what was compiled refuses its inputs."""
        try:
            return self.function(*given)
        except AssertionError as problem:  # by which it says that a tensor lies otherwise
            raise RuntimeError(f"compiled by Inductor: {first_line(problem)}") from problem

    def __str__(self) -> str:
        return self.__name__
