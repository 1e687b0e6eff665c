"""From a model and its example inputs to a graph of ATen calls, or the reason why there is none."""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import warnings
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...cuda_graphs.host_rng import NUMPY, PYTHON, same
from ...guards.errors import Untraceable, first_line
from ...guards.model_guard import HOOKS
from ...guards.model_state import identities
from ...system.thread_output import capture_output
from .graph_facts import constants, counts, functional, own_outputs, statistics, writes
from .model_copies import live_tensors
from .traced_graph import Trace, counters

AUTOCAST = torch.ops.higher_order.wrap_with_autocast
GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled


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
    live = live_tensors(model)
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


@dataclass
class Seen:
    text: str = ""
    drew: str = ""


@contextlib.contextmanager
def witness() -> Iterator[Seen]:
    """Notice what a graph would not repeat: printing, and numbers drawn outside PyTorch; the state of both is restored.

    Nothing is printed by this thread, or logged by any, meanwhile: PyTorch shows whole graphs where tracing fails.
    """
    with capture_output("stdout", "stderr") as out:
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
