"""Graph rewrites as data: a pattern over ATen calls, a guard on what it found, and what stands there instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Emit = Callable[..., Any]  # emit(function, *arguments) -> the new call's value


@dataclass(frozen=True)
class Var:
    """Anything, bound to a name; the same name twice must meet the same thing."""

    name: str


@dataclass(frozen=True)
class Call:
    """A call of one of `targets` whose leading arguments match; the others must have their defaults.

    `swap` also tries the first two arguments in the other order. `name` binds the call's own value.
    """

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    swap: bool = False
    name: str = ""


@dataclass(frozen=True)
class OneOf:
    """The first of several patterns that matches."""

    patterns: tuple[Any, ...]


class Match(Mapping[str, Any]):
    """What a pattern bound: graph nodes and constants by name, with the tensors that nodes stand for."""

    def __init__(self, bound: dict[str, Any], root: Any) -> None:
        self.bound, self.root = bound, root

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def __iter__(self) -> Any:
        return iter(self.bound)

    def __len__(self) -> int:
        return len(self.bound)

    def tensor(self, name: str) -> Tensor | None:
        """The example (shape, strides, dtype, device, no data) of a bound tensor; None where it is none."""
        return example(self.bound.get(name))

    @property
    def out(self) -> Tensor:
        """The example of the whole pattern's value."""
        found = example(self.root)
        assert found is not None
        return found


def example(value: Any) -> Tensor | None:
    """The example tensor of a graph node; None for constants and for nodes that are no tensors."""
    found = getattr(value, "meta", {}).get("val")
    return found if isinstance(found, Tensor) else None


@dataclass(frozen=True)
class Rule:
    """One rewrite: where `pattern` matches and `guard` holds, `replace(match, emit)` says what stands there instead.

    Inner calls of the pattern must have no other user. `op` is the name that reports show. `training` tells whether the
    replacement keeps gradients; `exact` that it only says the same in other words, so that nothing is gained by timing it.
    """

    op: str
    pattern: Call
    replace: Callable[[Match, Emit], Any]
    guard: Callable[[Match], bool] = lambda match: True
    training: bool = True
    exact: bool = False


@dataclass(frozen=True)
class Way:
    """One implementation of a fused step beside the plain one: where it applies and the calls that make it up.

    `layout` says that its output lies otherwise in memory than the plain one's, `training` that it keeps gradients.
    """

    id: str
    supports: Callable[[tuple[Any, ...]], str | None]  # example arguments -> None, or why not
    emit: Callable[[Emit, tuple[Any, ...]], Any]
    layout: bool = False
    training: bool = False


@dataclass(frozen=True)
class Composite:
    """A fused step of a graph that PyTorch or its libraries provide: its meaning in plain PyTorch, and ways to run it."""

    name: str
    meaning: Callable[..., Tensor]
    ways: tuple[Way, ...] = ()

    def __call__(self, *args: Any) -> Tensor:
        return self.meaning(*args)

    @property
    def __name__(self) -> str:
        return self.name


def looking(like: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Any]:
    """A function for constants, with what its result looks like: asked instead of it where no data is at hand."""

    def marked(fn: Callable[..., Tensor]) -> Any:
        fn.looks = like  # type: ignore[attr-defined]
        return fn

    return marked


def floating(*tensors: Tensor | None) -> bool:
    """True where all tensors given have one floating dtype (half, single or double) and one device."""
    present = [t for t in tensors if t is not None]
    first = present[0]
    return first.is_floating_point() and all(
        t.dtype == first.dtype and t.device == first.device for t in present
    )


def parameters_like(match: Match, *names: str) -> bool:
    """True where every named value is a parameter or buffer, or computed from such alone."""
    return all(match[n] is None or getattr(match[n], "meta", {}).get("constant") for n in names)


aten = torch.ops.aten
