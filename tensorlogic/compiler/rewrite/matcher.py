"""Applies rules to a graph until none matches, and remembers which original calls each new one stands for."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from ...core.rewrite_rule import Call, Composite, Match, OneOf, Rule, Var, example
from ..trace.graph_facts import counts, writes

MISSING = object()


@dataclass
class Region:
    """A replaced part of the original graph: its calls by name, the last of them, and the op that took their place."""

    op: str
    root: str
    calls: frozenset[str]
    training: bool = True
    exact: bool = False
    node: fx.Node | None = field(default=None, repr=False)


def rewrite(
    graph: fx.Graph, rules: Sequence[Rule], banned: frozenset[str] = frozenset()
) -> list[Region]:
    """Rewrite `graph` in place; regions whose last call is in `banned` (as `op@call`) are left alone.

    Returns the regions that stand in the end, in the graph's order.
    """
    ends = [(rule, _roots(rule.pattern)) for rule in rules]
    changed = True
    while changed:
        changed = False
        for rule, targets in ends:
            for node in list(graph.nodes):
                fits = node.op == "call_function" and node.target in targets and not node._erased
                changed |= fits and _apply(graph, rule, node, banned)
    graph.lint()
    return [n.meta["region"] for n in graph.nodes if "region" in n.meta]


def again(graph: fx.Graph) -> tuple[fx.Graph, list[Region]]:
    """A copy of a graph that was rewritten, and its regions there."""
    copied = copy.deepcopy(graph)
    for node in copied.nodes:
        if "region" in node.meta:
            node.meta["region"] = replace(node.meta["region"], node=node)
    return copied, [n.meta["region"] for n in copied.nodes if "region" in n.meta]


def _roots(pattern: Call | OneOf) -> frozenset[Any]:
    """What the last call of a match may be."""
    if isinstance(pattern, Call):
        return frozenset(pattern.targets)
    return frozenset().union(*map(_roots, pattern.patterns))


def _apply(graph: fx.Graph, rule: Rule, root: fx.Node, banned: frozenset[str]) -> bool:
    name = root.meta["region"].root if "region" in root.meta else root.name
    if f"{rule.op}@{name}" in banned or example(root) is None:
        return False
    for bound, calls in _match(rule.pattern, root, {}, ()):
        found = Match(bound, root)
        if _closed(calls, root) and _still(calls, root) and rule.guard(found):
            _replace(graph, rule, found, calls, name)
            return True
    return False


def _replace(
    graph: fx.Graph, rule: Rule, found: Match, calls: tuple[fx.Node, ...], name: str
) -> None:
    root = found.root
    old = frozenset().union(
        *(n.meta["region"].calls if "region" in n.meta else {n.name} for n in calls)
    )
    before = root.prev
    with graph.inserting_before(root):
        new = rule.replace(found, emitter(graph))
    helpers = []
    while (before := before.next) is not root:
        helpers.append(before)
    made = isinstance(new, fx.Node) and new.op == "call_function" and new is not root
    if made and new.name not in old and new.meta.get("region") is None:
        exact = rule.exact and all(n.meta["region"].exact for n in calls if "region" in n.meta)
        new.meta = {**root.meta, "constant": new.meta.get("constant", False)}
        new.meta["region"] = Region(rule.op, name, old, rule.training, exact, new)
    for node in helpers:
        if "val" not in node.meta:  # what stands for the root has the root's
            node.meta["val"] = _value(node)
    root.replace_all_uses_with(new)
    for node in calls:  # root first: users go before what they use
        if not node.users and not node._erased:
            graph.erase_node(node)


def emitter(graph: fx.Graph) -> Callable[..., fx.Node]:
    """emit(function, *arguments): a new call, marked constant where its arguments are."""

    def emit(fn: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(fn, args, kwargs)
        given = node.all_input_nodes
        node.meta["constant"] = bool(given) and all(n.meta.get("constant", False) for n in given)
        return node

    return emit


def _value(node: fx.Node) -> Any:
    """What a call gives for example tensors; None where it cannot be asked without data."""
    fn: Any = getattr(node.target, "looks", node.target)
    values = fx.map_arg(node.args, lambda n: n.meta.get("val"))
    mode = next(
        (m for v in values if isinstance(v, Tensor) and (m := getattr(v, "fake_mode", None))), None
    ) or FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, torch.no_grad():
            return fn(*values, **node.kwargs)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):  # packing, say
        return None


# Matching -----------------------------------------------------------------------------------------

Bound = dict[str, Any]
Found = tuple[Bound, tuple[fx.Node, ...]]


def _match(pattern: Any, value: Any, bound: Bound, calls: tuple[fx.Node, ...]) -> Iterator[Found]:
    """Every way in which `value` matches, with what it binds and the calls it covers."""
    if isinstance(pattern, Var):
        if pattern.name not in bound:
            yield {**bound, pattern.name: value}, calls
        elif bound[pattern.name] is value:
            yield bound, calls
    elif isinstance(pattern, OneOf):
        for each in pattern.patterns:
            yield from _match(each, value, bound, calls)
    elif isinstance(pattern, Call):
        call = isinstance(value, fx.Node) and value.op == "call_function"
        if call and value.target in pattern.targets:
            yield from _match_call(pattern, value, bound, (*calls, value))
    elif isinstance(value, fx.Node):
        return
    elif isinstance(pattern, list) and isinstance(value, (list, tuple)):
        if pattern == list(value):
            yield bound, calls
    elif type(pattern) is bool or type(value) is bool or pattern is None or value is None:
        if pattern is value:
            yield bound, calls
    elif pattern == value:
        yield bound, calls


def _match_call(
    pattern: Call, node: fx.Node, bound: Bound, calls: tuple[fx.Node, ...]
) -> Iterator[Found]:
    args, defaults = arguments(node)
    wanted = [p for p in pattern.args if not (isinstance(p, Var) and p.name == "...")]
    if len(args) < len(wanted):
        return
    if len(wanted) == len(pattern.args):
        for given, default in zip(args[len(wanted) :], defaults[len(wanted) :], strict=True):
            if isinstance(given, fx.Node) or given != default:
                return
    if pattern.name:
        bound = {**bound, pattern.name: node}
    orders = [args[: len(wanted)]]
    if pattern.swap:
        orders.append([args[1], args[0], *args[2 : len(wanted)]])
    for order in orders:
        yield from _match_all(wanted, order, bound, calls)


def _match_all(
    patterns: Sequence[Any], values: Sequence[Any], bound: Bound, calls: Any
) -> Iterator[Found]:
    if not patterns:
        yield bound, calls
        return
    for more, covered in _match(patterns[0], values[0], bound, calls):
        yield from _match_all(patterns[1:], values[1:], more, covered)


def arguments(node: fx.Node) -> tuple[list[Any], list[Any]]:
    """All arguments of a call in the order of its signature, absent ones by their defaults; and those defaults."""
    names, defaults = _signature(node.target)
    given = list(node.args)
    for name, default in zip(names[len(given) :], defaults[len(given) :], strict=True):
        given.append(node.kwargs.get(name, default))
    return given, defaults


@cache
def _signature(target: Any) -> tuple[list[str], list[Any]]:
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return [a.name for a in schema.arguments], [
            a.default_value if a.has_default_value() else MISSING for a in schema.arguments
        ]
    try:
        fn = target.meaning if isinstance(target, Composite) else target
        found = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # built-in functions without a signature take what they take
        return [], []
    # ours: what only keywords give is about the call, not the operation
    if hasattr(fn, "fused"):
        found = [p for p in found if p.kind is not p.KEYWORD_ONLY]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
        return [], []
    return [p.name for p in found], [MISSING if p.default is p.empty else p.default for p in found]


def _closed(calls: tuple[fx.Node, ...], root: fx.Node) -> bool:
    """Nobody else uses an inner value, and no call writes."""
    inside = set(calls)
    return all((n is root or all(u in inside for u in n.users)) and not writes(n) for n in calls)


def _still(calls: tuple[fx.Node, ...], root: fx.Node) -> bool:
    """Nothing between the first call and the last writes: what is read at the end is what was read at the beginning."""
    inside, node = set(calls), root
    seen = 1
    while seen < len(inside):
        node = node.prev
        if node.op == "root":
            return False
        if node in inside:
            seen += 1
        elif node.op == "call_function" and writes(node) and not counts(node):
            return False
    return True
