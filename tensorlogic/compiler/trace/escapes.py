"""What calls hand out and no graph would: objects that outlive a call, tensors with attributes, or that ask for gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...guards.plain_values import plain, plain_object


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
