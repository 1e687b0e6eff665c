"""What a model does besides computing its outputs, seen by calling a copy of it twice; a graph would not repeat any of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .check import tensors_in
from .copies import fresh, sharing, unwritten
from .reach import Reach
from .trace import Unfit, plain_value, witness

COUNTS = (bool, int, float, str)


@dataclass
class Habits:
    """How a model behaves when it is called."""

    prints: bool = False
    sets_up: bool = False  # the first call sets something up that later ones find
    opaque: str = ""  # a kind of object that holds tensors and that PyTorch cannot take apart, of inputs or outputs


def probe(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Habits:
    """Call a copy of the model twice.

    Raises:
        Unfit: it changes its own attributes or globals at every call, or draws numbers outside PyTorch. Anything: it
            fails on the inputs.
    """
    twin = sharing(model, buffers=False)
    with witness() as seen, unwritten(twin) as written, _uncounted(twin):
        states = [_state(twin)]
        for _ in range(2):
            given = fresh(args, kwargs)
            outs = twin(*given[0], **given[1])
            states.append(_state(twin))
    changed = _difference(states[1], states[2])
    first = _difference(states[0], states[1])
    changed = changed or (first if written or (first or "").startswith("global ") else None)
    if changed:
        raise Unfit(f"the model changes {changed} when it is called")
    if seen.drew:
        raise Unfit(f"the model draws from {seen.drew}")
    return Habits(bool(seen.text), first is not None, _opaque((args, kwargs, outs)))


@contextlib.contextmanager
def _uncounted(model: nn.Module) -> Iterator[None]:
    """Numbers and texts that are global, a class's or an enclosing function's are what they were before: who counts calls has
    not called."""
    reach = Reach(model)
    scopes: list[tuple[Any, str, Any]] = [
        (s, n, s.get(n)) for s, names in reach.scopes for n in names
    ]
    classes = [(k, n, vars(k).get(n)) for k, names in reach.classes for n in names]
    cells = [(c, c.cell_contents) for c in reach.cells]
    try:
        yield
    finally:
        for scope, name, value in scopes:
            if type(value) in COUNTS and scope.get(name) is not value:
                scope[name] = value
        for kind, name, value in classes:
            if type(value) in COUNTS and vars(kind).get(name) is not value:
                setattr(kind, name, value)
        for cell, value in cells:
            if type(value) in COUNTS and cell.cell_contents is not value:
                cell.cell_contents = value


def _opaque(values: Any) -> str:
    """The kind of the first leaf of nested values that holds tensors, and is none."""
    leaves = (v for v in pytree.tree_leaves(values) if not isinstance(v, Tensor))
    return next((type(v).__name__ for v in leaves if tensors_in(v)), "")


def _state(model: nn.Module) -> dict[str, Any]:
    """Attributes and globals that a call might change: numbers and texts by value, others by their type and length."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _MACHINERY:
                found[f"its own attribute {path}.{name}".replace(" .", " ")] = plain_value(value)
    reach = Reach(model)
    for scope, names in reach.scopes:
        found |= {f"global {name}": plain_value(scope.get(name)) for name in names}
    for kind, names in reach.classes:
        found |= {f"global {kind.__name__}.{n}": plain_value(getattr(kind, n)) for n in names}
    return found


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    return next((name for name, value in after.items() if before.get(name) != value), None)


_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
