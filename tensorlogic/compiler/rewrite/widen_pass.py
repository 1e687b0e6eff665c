"""A half-precision graph in float32, for CPUs whose half arithmetic is slower than float32's: weights are widened once."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from ...core.rewrite_rule import example
from ...kernels.cpu import cost_model
from ..trace.graph_facts import writes
from ..trace.traced_graph import Trace

HALF = torch.float16


def pays(trace: Trace, device: torch.device) -> bool:
    """True where halves are slow and nothing in the graph is written to or handed out as it came in."""
    nodes = list(trace.graph.nodes)
    halves = any((v := example(n)) is not None and v.dtype == HALF for n in nodes)
    if device.type != "cpu" or not halves or not cost_model.half_is_slow("f16"):
        return False
    plain = all(n.op in ("placeholder", "call_function", "output") for n in nodes)
    aliases = any(n.op == "placeholder" for n in trace.graph.output_node().all_input_nodes)
    opaque = any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in nodes)
    written = any(n.op == "call_function" and writes(n) for n in nodes)
    return plain and not (aliases or opaque or written)


def widened(trace: Trace) -> Trace:
    """The trace with every float16 value in float32; inputs are widened on the way in, outputs rounded on the way out."""
    graph = copy.deepcopy(trace.graph)
    places = [n for n in graph.nodes if n.op == "placeholder"]
    for node in graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = _dtypes(node.args), _dtypes(node.kwargs)
    with graph.inserting_after(places[-1]):
        for node in places:
            if _half(node):
                users = list(node.users)
                wide = graph.call_function(Tensor.float, (node,))
                wide.meta = {**node.meta, "val": _wide(node.meta["val"])}
                for user in users:
                    user.replace_input_with(node, wide)
    output = graph.output_node()
    with graph.inserting_before(output):
        for node in list(output.all_input_nodes):
            if _half(node):
                rounded = graph.call_function(Tensor.half, (node,))
                rounded.meta = {**node.meta, "constant": False}
                output.replace_input_with(node, rounded)
    kept = set(places) | {n for n in graph.nodes if n.target is Tensor.half}
    for node in graph.nodes:
        if node not in kept and node.op == "call_function":
            node.meta["val"] = _wide(node.meta.get("val"))
    return replace(trace, graph=graph)


def _half(node: fx.Node) -> bool:
    value = example(node)
    return value is not None and value.dtype == HALF


def _dtypes(value: Any) -> Any:
    return map_aggregate(value, lambda v: torch.float32 if v is HALF else v)


def _wide(value: Any) -> Any:
    def one(tensor: Any) -> Tensor:
        if tensor.dtype != HALF:
            return cast(Tensor, tensor)
        with tensor.fake_mode:
            return tensor.new_empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32)

    return pytree.tree_map_only(Tensor, one, value)
