"""What a model does besides computing its outputs, seen by calling a copy of it twice; a graph would not repeat any of it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...guards.errors import Unfit
from ...guards.global_state import SEEDING, noting
from ...guards.model_state import difference, state
from ...guards.plain_values import plain, plain_object
from ...guards.python_globals import Reach
from ...guards.tensor_tree import tensors_in
from .exporter import witness
from .model_copies import fresh, sharing, unwritten
from .object_flattening import Objects, Opaque

COUNTS = (bool, int, float, str)


@dataclass
class Habits:
    """How a model behaves when it is called."""

    prints: bool = False
    sets_up: bool = False  # the first call sets something up that later ones find
    # why a graph of the arguments, as pytrees know them, would not do what the call does
    unlike: str = ""
    # around the tensors of a call, if all of them can be taken apart
    objects: Objects | None = None
    asked: frozenset[str] = frozenset()  # what its code asks PyTorch about the state around it
    outs: Sequence[Tensor] = ()  # of a first call


def probe(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Habits:
    """Call a copy of the model twice.

    Raises:
        Unfit: it changes its own attributes or globals at every call, writes to its parameters, draws numbers outside PyTorch,
            or seeds PyTorch's generator. Anything: it fails on the inputs.
    """
    twin = sharing(model, buffers=False)
    objects = _objects(args, kwargs)
    kinds = () if objects is None else objects.kinds
    with witness() as seen, unwritten(twin) as written, _uncounted(twin, kinds):
        states = [state(twin, kinds)]
        calls, asked, outs = [], set[str](), list[Tensor]()
        for _ in range(2):
            with noting() as questions:
                calls.append(_Call(twin, objects, args, kwargs))
            asked |= questions
            outs = outs or _copies(calls[0].out)
            states.append(state(twin, kinds))
    call = calls[1]
    call.compare(calls[0])
    changed = difference(states[1], states[2])
    first = difference(states[0], states[1])
    changed = changed or (first if written or (first or "").startswith("global ") else None)
    if changed:
        raise Unfit(f"the model changes {changed} when it is called")
    if seen.drew:
        raise Unfit(f"the model draws from {seen.drew}")
    names = {id(p): name for name, p in model.named_parameters()}
    if own := next((names[id(t)] for t in written if id(t) in names), None):
        raise Unfit(f"the model writes to its parameter {own} when it is called")
    if SEEDING in asked:
        raise Unfit("the model seeds PyTorch's generator when it is called")
    unlike = call.unlike(args, kwargs)
    return Habits(bool(seen.text), first is not None, unlike, call.objects, frozenset(asked), outs)


def takes_itself(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a model that fails on copies of its inputs takes the inputs themselves, as who knows them by identity does."""
    try:
        twin = sharing(model, buffers=False)
        with witness(), unwritten(twin), untouched((args, kwargs)):
            twin(*args, **kwargs)
    except Exception:  # the model's own code may raise anything
        return False
    return True


def _copies(out: Any) -> list[Tensor]:
    return [t.detach().clone() for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]


def _objects(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Objects | None:
    try:
        return Objects(args, kwargs)
    except Opaque:
        return None


class _Call:
    """One call of a model on inputs of its own: what it gives, and what it leaves."""

    def __init__(
        self,
        model: nn.Module,
        objects: Objects | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        given: Sequence[Any] = fresh(args, kwargs)
        found = None if objects is None else objects.taken(*given)
        if objects is not None and found is not None:
            given = objects.around(found[0])
        before, spec = pytree.tree_flatten(given)
        known = [*inside(given), *model.parameters(), *model.buffers()]
        theirs = {*map(id, known)}
        self.out = model(*given[0], **given[1])
        after, now = pytree.tree_flatten(given)
        self.changes = (
            now != spec
            or repr(now) != repr(spec)  # 0 is equal to False
            or any(a is not b for a, b in zip(after, before, strict=True))
        )
        self.holders = [v for v in holders((given, self.out)) if id(v) not in theirs]
        self.hands_back = any(id(v) in theirs for v in holders(self.out))
        self.odd = odd((given, self.out), known)
        self.objects = None
        if objects is not None and found is not None:
            with contextlib.suppress(Opaque):
                left, made = objects.left(found[0], given, self.out)
                objects.told(left, [*found[0], *made])
                self.objects = objects

    def compare(self, earlier: _Call) -> None:
        """Notice objects that outlive a call: a later one would have to find them again."""
        lasting = {*map(id, earlier.holders)}
        for value in self.holders:
            if id(value) in lasting:
                self.odd = self.odd or f"a {type(value).__name__} of the model's own is handed out"

    def unlike(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Why a graph of the arguments as pytrees know them would not do what the call does."""
        if self.odd:
            self.objects = None
            return self.odd
        if kind := _opaque((args, kwargs, self.out)):
            return f"torch.export cannot take a {kind} apart"
        if self.hands_back:
            return "a call hands back a list or dict that it is given"
        return "a call changes the lists or dicts that it is given" if self.changes else ""


@contextlib.contextmanager
def _uncounted(model: nn.Module, kinds: Iterable[type]) -> Iterator[None]:
    """Numbers and texts that are global, a class's or an enclosing function's are what they were before: who counts calls has
    not called."""
    reach = Reach(model, kinds)
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
    """The kind of the first leaf of nested values that is an object, or holds tensors and is none."""
    kinds = (v for v in pytree.tree_leaves(values) if not isinstance(v, Tensor))
    return next((type(v).__name__ for v in kinds if plain_object(type(v)) or tensors_in(v)), "")


# What calls hand out and no graph would -----------------------------------------------------------


def holders(values: Any) -> list[Any]:
    """The lists, dicts and other objects in nested values that can be changed."""
    return [v for v in inside(values) if not isinstance(v, (tuple, Tensor))]


def inside(values: Any) -> list[Any]:
    """Tensors and objects, each once."""
    found: dict[int, Any] = {}
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if id(value) in found or plain(type(value)):
            continue
        found[id(value)] = value
        if isinstance(value, Tensor):
            continue
        if plain_object(type(value)):
            waiting += vars(value).values()
        else:
            waiting += _parts(value)
    return [*found.values()]


@contextlib.contextmanager
def untouched(values: Any) -> Iterator[None]:
    """Tensors, lists, dicts and attributes of objects in nested values hold afterwards what they held before."""
    found = inside(values)
    tensors = [(t, t.detach().clone()) for t in found if isinstance(t, Tensor)]
    held = [v if isinstance(v, (list, dict)) else getattr(v, "__dict__", None) for v in found]
    holding = [(v, copy.copy(v)) for v in held if isinstance(v, (list, dict))]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in tensors:
                if not torch.equal(tensor, before):
                    tensor.detach().copy_(before)
        for value, content in holding:
            if isinstance(value, list):
                value[:] = content
            else:
                value.clear()
                value.update(content)


def _parts(value: Any) -> list[Any]:
    return pytree.tree_flatten(value, is_leaf=lambda v: v is not value)[0]


def odd(values: Any, known: Iterable[Any]) -> str:
    """Why no graph would give the tensors in what a call leaves, where those of a model and its arguments are `known`."""
    found = [v for v in inside(values) if isinstance(v, Tensor) and type(v) is not nn.Parameter]
    names = {n for t in found if type(t) is Tensor for n in vars(t)}
    if not all(n.startswith("_dynamo") for n in names):  # which are advice to a compiler
        return "a tensor is given attributes"
    wanting = [t for t in known if isinstance(t, Tensor) and t.requires_grad]
    places = {*map(_memory, wanting)}  # views of these are leaves, too, where nothing is recorded
    leaf = any(t.is_leaf and t.requires_grad and _memory(t) not in places for t in found)
    if leaf and not torch.is_grad_enabled():
        return "a call makes a tensor that asks for gradients"
    return ""


def _memory(tensor: Tensor) -> int:
    """Where a tensor's memory is, itself where it has none of that kind."""
    strided = tensor.layout == torch.strided
    return tensor.untyped_storage()._cdata if strided else id(tensor)
