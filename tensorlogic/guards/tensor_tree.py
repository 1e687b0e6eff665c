"""The tensors in nested arguments and results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..core.rewrite_rule import example


def flat_values(value: Any) -> list[Any]:
    """The leaves of nested tuples and lists."""
    if isinstance(value, (tuple, list)):
        return [x for v in value for x in flat_values(v)]
    return [value]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of nested containers and of plain objects' attributes, in a fixed order, each object entered once."""
    found: list[Tensor] = []
    entered: set[int] = set()

    def walk(v: Any) -> None:
        if isinstance(v, Tensor):
            found.append(v)
        elif isinstance(v, (str, bytes, int, float, type(None), type, torch.nn.Module)):
            return
        elif id(v) not in entered:
            entered.add(id(v))
            inner = (
                v.values() if isinstance(v, Mapping) else v if isinstance(v, (tuple, list)) else ()
            )
            for each in inner or getattr(v, "__dict__", {}).values():
                walk(each)

    walk(value)
    return found


@contextlib.contextmanager
def unhooked(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Hooks of tensors, which count or log gradients of steps, hear nothing of those that are made meanwhile."""
    hooked = [(p._backward_hooks, dict(p._backward_hooks)) for p in tensors if p._backward_hooks]  # fmt: skip
    for table, _ in hooked:
        table.clear()
    try:
        yield
    finally:
        for table, held in hooked:
            table.update(held)


def storage(node: fx.Node) -> int | None:
    """The memory of a node's example tensor, by identity."""
    value = example(node)
    try:
        return None if value is None else value.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without one
        return None


def steps_of(outs: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of the autograd graph behind some outputs, each once."""
    seen: set[Any] = {None}
    waiting: list[Any] = [out.grad_fn for out in outs]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting.extend(parent for parent, _ in node.next_functions)


def leaves_of(out: Tensor) -> list[Tensor]:
    """The tensors that a backward pass from `out` would reach."""
    reached = (n.variable for n in steps_of([out]) if hasattr(n, "variable"))
    return list({id(t): t for t in reached}.values())
