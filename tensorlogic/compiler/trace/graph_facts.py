"""Facts about graphs of ATen calls: what a node writes, draws, keeps alive; which device it runs on."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...core import weight_cache
from ...core.rewrite_rule import example
from ...guards.errors import Untraceable
from ...guards.tensor_tree import storage, tensors_in
from .traced_graph import Trace


def _kernels(node: fx.Node) -> int:
    """0 for what only looks at memory in another way."""
    if node.target is operator.getitem:
        return 0
    schema = getattr(node.target, "_schema", None)
    return 0 if schema is not None and any(r.alias_info for r in schema.returns) else 1


def seeds(outs: Sequence[Tensor]) -> list[Tensor]:
    """A wave of the form of each output."""
    return [
        torch.cos(torch.arange(o.numel(), device=o.device, dtype=torch.float32))
        .reshape(o.shape)
        .to(o.dtype)
        for o in outs
    ]


def step(out: Any, training: bool, wrt: Sequence[Tensor]) -> Any:
    """Forward alone, or with the backward pass that training would add, after which weights count as changed; no `.grad`
    is touched."""
    flat = [o for o in tensors_in(out) if o.requires_grad]
    if not training or not flat or not wrt:
        return out
    seeds = [torch.ones_like(o) for o in flat]
    found = torch.autograd.grad(flat, wrt, seeds, allow_unused=True)
    weight_cache.pretend_step()
    return found


def last_uses(
    nodes: Sequence[fx.Node], outputs: Any, ends: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """call -> the values that nobody reads after it; what a call in `ends` reads counts as read by the one that it names."""
    kept: set[str] = set()
    fx.map_arg(outputs, lambda n: kept.add(n.name))
    last: dict[str, str] = {}
    order = {node.name: i for i, node in enumerate(nodes)}
    for node in nodes:
        until = (ends or {}).get(node.name, node.name)
        for used in (*node.all_input_nodes, node):
            if order[until] >= order.get(last.get(used.name, ""), -1):
                last[used.name] = until
    found: dict[str, list[str]] = {}
    for value, at in last.items():
        if value not in kept:
            found.setdefault(at, []).append(value)
    return found


def device_of(trace: Trace) -> torch.device:
    """Where the model computes."""
    given = (v for v in trace.example if isinstance(v, Tensor))
    tensors = [*(t for _, t in trace.state.values()), *given]
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


def mutates(graph: fx.Graph) -> bool:
    """True where a run changes buffers or inputs."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    trains = any(norm(n) and bool(n.args[5:6] == (True,)) for n in calls)
    return trains or any(writes(n) or getattr(n.target, "mutates", False) for n in calls)


def norm(node: fx.Node, kind: str = "_norm") -> bool:
    """Whether a call keeps running statistics, to which it writes in training without its schema saying so."""
    return kind in (name := str(node.target)) and ("batch_norm" in name or "instance_norm" in name)


def statistics(graph: fx.Graph, kind: str) -> set[str]:
    """Placeholders that norms of a kind read as running statistics."""
    norms = [n for n in graph.nodes if n.op == "call_function" and norm(n, kind)]
    return {a.name for n in norms for a in n.args[3:5] if isinstance(a, fx.Node)}


def own_outputs(graph: fx.Graph) -> None:
    """Raise where the graph has an output that no caller could be given, such as a symbolic size of another tensor."""
    for node in graph.output_node().all_input_nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Untraceable("an output is a number that depends on the shapes")


def writes(node: fx.Node) -> bool:
    """True for calls that write into an argument, and for those that hold graphs of their own, which may."""
    schema = getattr(node.target, "_schema", None)
    opaque = isinstance(node.target, torch._ops.HigherOrderOperator)
    return opaque or bool(schema is not None and schema.is_mutable)


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes into, or might."""
    if not writes(node):
        return []
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return list(node.all_input_nodes)
    targets = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    found: list[fx.Node] = []
    for each in targets:
        fx.map_arg(given.get(each.name), found.append)
    return found


def counts(node: fx.Node) -> bool:
    """A write to a number of its own, such as batch norm's count of batches, touches nothing that rules move."""
    base = example(node.args[0]) if node.args else None
    return base is not None and base.dim() == 0 and not base.is_floating_point()


def functional(graph: fx.Graph) -> None:
    """In-place calls on values that nothing else sees become out-of-place ones, which rules understand."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    sharing: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        memory = storage(node)
        if memory is not None:
            sharing.setdefault(memory, []).append(node)
    for node in list(graph.nodes):
        plain = _out_of_place(node)
        if plain is None:
            continue
        base = node.args[0]
        memory = storage(base)
        others = sharing.get(memory, []) if memory is not None else []
        at = order[node]
        earlier = [n for n in others if n is not base and order[n] < at]
        read_later = any(order[u] > at for n in earlier for u in n.users)
        if memory is None or read_later or any(n.op == "placeholder" for n in others):
            continue
        if base.op != "call_function" or example(base).shape != example(node).shape:  # type: ignore[union-attr]
            continue
        for user in list(base.users):
            if order[user] > at:
                user.replace_input_with(base, node)
        node.target = plain


def _out_of_place(node: fx.Node) -> Any:
    """aten.relu for aten.relu_; None where there is no such twin."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not writes(node):
        return None
    packet = target.overloadpacket.__name__
    if not packet.endswith("_") or packet.endswith("__") or target.namespace != "aten":
        return None
    twin = getattr(torch.ops.aten, packet[:-1], None)
    if twin is None or target._overloadname not in twin.overloads():
        return None
    base = example(node.args[0]) if node.args else None
    out = example(node)
    if base is None or out is None or base.dtype != out.dtype:
        return None
    written = [a for a in target._schema.arguments if a.alias_info and a.alias_info.is_write]
    other = example(node.args[1]) if len(node.args) > 1 else None
    wider = other is not None and torch.result_type(base, other) != base.dtype
    return None if wider or len(written) != 1 else getattr(twin, target._overloadname)


def random_call(node: fx.Node) -> bool:
    """True for calls that draw random numbers or may do something else than compute."""
    if node.op != "call_function":
        return node.op != "placeholder"
    if _drops_nothing(node):
        return False
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return True
    opaque = isinstance(node.target, torch._ops.HigherOrderOperator)
    name = str(node.target)
    return opaque or "dropout" in name or "rand" in name or "bernoulli" in name


def _drops_nothing(node: fx.Node) -> bool:
    """True for attention and recurrent layers that could drop values and do not."""
    schema = getattr(node.target, "_schema", None)
    arguments = schema.arguments if schema is not None else []
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in arguments), node.args, strict=False)) | dict(node.kwargs)
    which = next((n for n in ("dropout_p", "dropout") if n in given), None)
    return which is not None and (given[which] == 0.0 or given.get("train") is False)


def constants(graph: fx.Graph, state: set[str]) -> None:
    """Mark what depends on parameters, buffers and constants alone, and is neither random nor written to."""
    dirty = {storage(a) for n in graph.nodes if n.op == "call_function" for a in written(n)}
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["constant"] = node.name in state and storage(node) not in dirty
        elif node.op == "call_function" and not random_call(node) and not writes(node):
            pure = node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload)
            real = isinstance(node.meta.get("val"), (Tensor, tuple, list))
            fresh = storage(node) not in dirty and not norm(node)
            steady = all(n.meta.get("constant", False) for n in node.all_input_nodes)
            node.meta["constant"] = pure and real and fresh and steady
