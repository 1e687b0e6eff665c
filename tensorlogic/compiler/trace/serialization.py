"""Traced graphs as plain data and back: calls by the names of their ops, values by how they look, shared memory included."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class Unpackable(Exception):
    """What plain data cannot hold."""


KEPT = "as it is"
NAMED = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory"}


def packed(graph: fx.Graph, values: bool = True) -> list[Any]:
    """One entry a node: op, name, target, arguments, keyword arguments, example value.

    What JSON does not know, such as a function that is no operator, is in it as it is. Without `values` no example values are.

    Raises:
        Unpackable: the graph holds another one, or an example value is no plain tensor.
    """
    memory: dict[int, int] = {}
    entries: list[Any] = []
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise Unpackable(f"{node.op} {node.target}")
        target = _named(node) if node.op == "call_function" else str(node.target)
        words = {k: _told(v) for k, v in node.kwargs.items()}
        value = _look(node.meta.get("val") if values else None, memory)
        entries.append([node.op, node.name, target, _told(tuple(node.args)), words, value])
    return entries


def unpacked(entries: Sequence[Any]) -> fx.Graph:
    """The graph that was packed; example values are fake tensors. Raises what malformed data does: KeyError, TypeError ..."""
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    mode, memory = FakeTensorMode(), dict[int, Tensor]()
    for op, name, target, args, words, value in entries:
        if op == "call_function":
            target = _op(target)
        given, named = _read(args, nodes), {k: _read(v, nodes) for k, v in words.items()}
        node = nodes[name] = graph.create_node(op, target, given, named, name)  # named as a copy is
        seen = _seen(value, mode, memory)
        if seen is not None:
            node.meta["val"] = seen
    return graph


def _named(node: fx.Node) -> Any:
    target: Any = node.target
    if target is operator.getitem:
        return "getitem"
    if not isinstance(target, torch._ops.OpOverload):
        return {KEPT: target}
    return [target._schema.name, target._overloadname]


def _op(target: Any) -> Any:
    if target == "getitem":
        return operator.getitem
    if isinstance(target, dict):
        return target[KEPT]
    (space, _, word), overload = target[0].partition("::"), target[1]
    return getattr(getattr(getattr(torch.ops, space), word), overload)


def _told(value: Any) -> Any:
    """An argument of a call as plain data."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_told(v) for v in value]}
    if isinstance(value, list):
        return [_told(v) for v in value]
    if type(value) is float and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (int, float, bool, str):
        return value
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in NAMED:
        return {NAMED[type(value)]: str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": {k: _told(v) for k, v in value.items()}}
    return {KEPT: value}


def _read(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_read(v, nodes) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, told),) = value.items()
    if kind == "node":
        return nodes[told]
    if kind == "tuple":
        return tuple(_read(v, nodes) for v in told)
    if kind == "float":
        return float(told)
    if kind == "dict":
        return {k: _read(v, nodes) for k, v in told.items()}
    if kind == KEPT:
        return told
    return torch.device(told) if kind == "device" else getattr(torch, told)


def _look(value: Any, memory: dict[int, int]) -> Any:
    """An example value: of tensors the looks, and a number for the memory that they share."""
    if isinstance(value, (tuple, list)):
        kind = "list" if isinstance(value, list) else "several"
        return {kind: [_look(v, memory) for v in value]}
    if not isinstance(value, Tensor):
        return {"plain": _told(value)}
    if type(value) is not FakeTensor or value.layout != torch.strided or value.is_quantized:
        raise Unpackable(f"a {type(value).__name__}, {value.layout}")
    storage = value.untyped_storage()
    sizes = [*value.shape, *value.stride(), value.storage_offset(), storage.nbytes()]
    if not all(type(n) is int for n in sizes):
        raise Unpackable("a size that varies")
    number = memory.setdefault(storage._cdata, len(memory))
    about = list(value.shape), list(value.stride()), value.storage_offset(), storage.nbytes()
    return {"tensor": [number, *about, _told(value.dtype)["dtype"], str(value.device)]}


def _seen(value: Any, mode: FakeTensorMode, memory: dict[int, Tensor]) -> Any:
    ((kind, told),) = value.items()
    if kind == "list":
        return [_seen(v, mode, memory) for v in told]
    if kind == "several":
        return tuple(_seen(v, mode, memory) for v in told)
    if kind == "plain":
        return _read(told, {})
    number, shape, stride, offset, nbytes, dtype, device = told
    if number not in memory:
        memory[number] = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    base = torch.empty(0, dtype=getattr(torch, dtype), device="meta")
    with torch.no_grad():
        base.set_(memory[number].untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, base, torch.device(device))
