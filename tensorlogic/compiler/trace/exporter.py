"""From a model and its example inputs to a graph of ATen calls, or the reason why there is none."""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import warnings
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..core.rewrite_rule import example
from ..cuda_graphs.host_rng import NUMPY, PYTHON, same
from ..guards.errors import Untraceable, first_line
from ..guards.model_guard import HOOKS
from ..guards.model_state import identities
from ..guards.tensor_tree import storage
from ..system.thread_output import aside

if TYPE_CHECKING:
    from ..guards.global_state import Asked
    from .objects import Objects


AUTOCAST = torch.ops.higher_order.wrap_with_autocast
GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled


@dataclass
class Trace:
    """A graph whose placeholders are parameters, buffers and constants by their names in the model, then user inputs."""

    graph: fx.Graph
    owner: nn.Module  # holds the subgraphs of higher-order calls
    state: dict[str, tuple[str, Tensor]]  # placeholder -> (name in the model or "", tensor)
    # placeholders of user inputs, in the order of the flattened arguments
    inputs: list[str]
    in_spec: Any
    out_spec: Any
    example: list[Any] = field(default_factory=list)  # flattened example arguments
    counters: Mapping[str, Tensor] = field(default_factory=dict)  # of batches, by `counters`
    exported: Any = None  # what torch.export gave
    objects: Objects | None = None  # that calls have around the inputs
    # what the model's code asks PyTorch about the state around it
    asked: Asked | None = None
    # what the model itself gave, where nothing was compared yet
    theirs: Sequence[Tensor] | None = None


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
    """Trace `model` by torch.export, without its own hooks: they run around whatever stands for its forward.

    Raises:
        Untraceable: PyTorch cannot.
    """
    with witness(), _without_hooks(model):
        try:
            program = torch.export.export(model, args, dict(kwargs))
        except Exception as problem:  # tracing runs the user's own code, which may raise anything
            raise Untraceable(f"torch.export: {first_line(problem)}") from problem
    return _read(program, model, args, kwargs)


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    held = {name: vars(model)[name] for name in HOOKS}
    try:
        vars(model).update({name: type(hooks)() for name, hooks in held.items()})
        yield
    finally:
        vars(model).update(held)


def _read(
    program: Any, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Trace:
    graph = copy.deepcopy(program.graph)
    live: dict[str, Tensor] = {}
    live.update(model.named_parameters(remove_duplicate=False))
    live.update(model.named_buffers(remove_duplicate=False))
    specs = program.graph_signature.input_specs
    places = [n for n in graph.nodes if n.op == "placeholder"]
    state: dict[str, tuple[str, Tensor]] = {}
    inputs = []
    for node, spec in zip(places, specs, strict=True):
        kind = spec.kind.name
        if kind == "USER_INPUT":
            inputs.append(node.name)
        elif kind in ("PARAMETER", "BUFFER") and spec.target in live:
            state[node.name] = (spec.target, live[spec.target])
        elif kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR") and isinstance(
            program.constants.get(spec.target), Tensor
        ):
            state[node.name] = ("", program.constants[spec.target])
        else:
            raise Untraceable(f"the graph needs {spec.target}, of kind {kind.lower()}")
    flat, in_spec = pytree.tree_flatten((args, dict(kwargs)))
    if len(flat) != len(inputs):
        raise Untraceable(f"{len(flat)} inputs were given, the graph takes {len(inputs)}")
    counted, out_spec = counters(state, live), program.call_spec.out_spec
    owner = program.graph_module
    learn = {n for n, (_, t) in state.items() if t.requires_grad or isinstance(t, nn.Parameter)}
    learn |= {n for n, v in zip(inputs, flat, strict=True) if _may_learn(v)}
    opened(graph, owner, learn)
    prepare(graph, state, counted)
    return Trace(graph, owner, state, inputs, in_spec, out_spec, flat, counted, program)


def _may_learn(value: Any) -> bool:
    """Whether a later call's input may record gradients, as a parameter that is frozen now may."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def counters(
    state: Mapping[str, tuple[str, Tensor]], live: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """placeholder -> the count of batches of the module that it belongs to, among the model's buffers `live`.

    Batch norm in training writes to its statistics without counting a version of them, but it counts its batches.
    """
    found = {n: f"{name.rpartition('.')[0]}.num_batches_tracked" for n, (name, _) in state.items()}
    return {n: live[name.lstrip(".")] for n, name in found.items() if name.lstrip(".") in live}


def norm(node: fx.Node, kind: str = "_norm") -> bool:
    """Whether a call keeps running statistics, to which it writes in training without its schema saying so."""
    return kind in (name := str(node.target)) and ("batch_norm" in name or "instance_norm" in name)


def statistics(graph: fx.Graph, kind: str) -> set[str]:
    """Placeholders that norms of a kind read as running statistics."""
    norms = [n for n in graph.nodes if n.op == "call_function" and norm(n, kind)]
    return {a.name for n in norms for a in n.args[3:5] if isinstance(a, fx.Node)}


def prepare(
    graph: fx.Graph, state: Mapping[str, tuple[str, Tensor]], counted: Mapping[str, Tensor]
) -> None:
    """Make a traced graph fit for rewriting: in-place calls that nobody sees become plain ones, constants are marked.

    Statistics whose module does not count its batches (`counted`; instance norms never do) are none: nobody would notice that
    they changed.
    """
    own_outputs(graph)
    identities(graph)
    functional(graph)
    if not any(n.op == "call_function" and writes(n) and not counts(n) for n in graph.nodes):
        for node in graph.nodes:  # tracing may have left out a copy that real strides need
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
    known = {n for n, (_, t) in state.items() if not t.is_inference()}
    noticed = statistics(graph, "batch_norm") & counted.keys()
    unnoticed = statistics(graph, "_norm") - (noticed - statistics(graph, "instance_norm"))
    constants(graph, known - unnoticed)


def opened(graph: fx.Graph, owner: nn.Module, learn: Collection[str]) -> None:
    """Blocks that set a mode which changes nothing become what stands in them; in others, too, `identities` go.

    Such are those without autocast where there is none, and those without gradients on what no gradient reaches: `learn` are the
    placeholders which one does.
    """
    live = {n for n in graph.nodes if n.name in learn}
    _reach(graph.nodes, live)
    waiting = list(graph.nodes)
    while waiting:
        node = waiting.pop()
        block, given = _block_of(node, live)
        if block is None or any(user.target is not operator.getitem for user in node.users):
            continue
        inner = cast("fx.GraphModule", owner.get_submodule(str(block.target))).graph
        if not all(
            isinstance(out, fx.Node) for out in cast("tuple[Any, ...]", inner.output_node().args[0])
        ):
            continue
        known = dict(zip(inner.find_nodes(op="placeholder"), given, strict=True))
        with graph.inserting_before(node):
            outs = cast("tuple[Any, ...]", graph.graph_copy(inner, known))
        for held in inner.find_nodes(op="get_attr"):
            known[held].target = f"{block.target}.{held.target}"
        copied = [known[each] for each in inner.nodes if each.op == "call_function"]
        _reach(copied, live)
        waiting += copied
        for user in list(node.users):
            user.replace_all_uses_with(outs[cast(int, user.args[1])])
            graph.erase_node(user)
        graph.erase_node(node)
        if not block.users:
            graph.erase_node(block)
    for each in owner.modules():
        if isinstance(each, fx.GraphModule) and each is not owner:
            identities(each.graph)
            each.recompile()


def _block_of(node: fx.Node, live: Container[fx.Node]) -> tuple[fx.Node | None, Sequence[Any]]:
    """The block that a node calls in a mode that changes nothing, and its arguments; none for other nodes."""
    values = cast("tuple[Any, ...]", node.args)
    if node.target is AUTOCAST:
        device, _, on, _, block, *given = values
        idle = not on and not torch.is_autocast_enabled(device)
    elif node.target is GRADIENTS:
        on, block, *given = values
        idle = on == torch.is_grad_enabled() or not (on or any(v in live for v in given))
    else:
        return None, ()
    return block if idle else None, given


def _reach(nodes: Iterable[fx.Node], live: set[fx.Node]) -> None:
    """Add to `live` what gradients reach, but for blocks without."""
    for node in nodes:
        off = node.target is GRADIENTS and not node.args[0]
        if not off and any(a in live for a in node.all_input_nodes):
            live.add(node)


def own_outputs(graph: fx.Graph) -> None:
    """Raise where the graph has an output that no caller could be given, such as a symbolic size of another tensor."""
    for node in graph.output_node().all_input_nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Untraceable("an output is a number that depends on the shapes")


@dataclass
class Seen:
    text: str = ""
    drew: str = ""


@contextlib.contextmanager
def witness() -> Iterator[Seen]:
    """Notice what a graph would not repeat: printing, and numbers drawn outside PyTorch; the state of both is restored.

    Nothing is printed by this thread, or logged by any, meanwhile: PyTorch shows whole graphs where tracing fails.
    """
    with aside("stdout", "stderr") as out:
        seen, quiet = Seen(), logging.root.manager.disable
        generators = [(*generator, generator[1]()) for generator in (PYTHON, NUMPY)]
        modes = torch.is_grad_enabled()
        try:
            logging.disable(logging.CRITICAL)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield seen
        finally:
            logging.disable(quiet)
            torch.set_grad_enabled(modes)
            seen.text = out.getvalue()
            for name, state, back, was in generators:
                if not seen.drew and not same(was, state()):
                    seen.drew = name
                back(was)


# Views and in-place calls -------------------------------------------------------------------------


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
        if memory is None or any(
            n.op == "placeholder"
            or (
                n is not base
                and order[n] < order[node]
                and any(order[u] > order[node] for u in n.users)
            )
            for n in others
        ):
            continue
        if base.op != "call_function" or example(base).shape != example(node).shape:  # type: ignore[union-attr]
            continue
        for user in list(base.users):
            if order[user] > order[node]:
                user.replace_input_with(base, node)
        node.target = plain


def _out_of_place(node: fx.Node) -> Any:
    """aten.relu for aten.relu_; None where there is no such twin."""
    if (
        node.op != "call_function"
        or not writes(node)
        or not isinstance(node.target, torch._ops.OpOverload)
    ):
        return None
    packet = node.target.overloadpacket.__name__
    if not packet.endswith("_") or packet.endswith("__") or node.target.namespace != "aten":
        return None
    twin = getattr(torch.ops.aten, packet[:-1], None)
    if twin is None or node.target._overloadname not in twin.overloads():
        return None
    base = example(node.args[0]) if node.args else None
    out = example(node)
    if base is None or out is None or base.dtype != out.dtype:
        return None
    written = [a for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write]
    other = example(node.args[1]) if len(node.args) > 1 else None
    wider = other is not None and torch.result_type(base, other) != base.dtype
    return None if wider or len(written) != 1 else getattr(twin, node.target._overloadname)


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
            fresh = storage(node) not in dirty
            batch = norm(node)
            node.meta["constant"] = (
                pure
                and real
                and fresh
                and not batch
                and all(n.meta.get("constant", False) for n in node.all_input_nodes)
            )
