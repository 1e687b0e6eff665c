"""One region's replacement cut out of the graph with its inputs, by each of its ways, to be checked and timed by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ...core.rewrite_rule import Composite, Way
from ...ops.convolution import channels_last
from ..rewrite.matcher import Region, arguments, emitter
from ..rewrite.rule_set import WAYS
from ..runtime.codegen import Function, ahead
from ..verify import equivalence

PLAIN, CHOSEN = "torch.eager", "chosen"


class Fragment:
    """The calls that replace one region, cut out with their inputs; constants computed ahead."""

    def __init__(self, region: Region, way: str | None, env: Mapping[str, Any]) -> None:
        node = region.node
        assert node is not None
        self.graph = fx.Graph()
        held: dict[str, Any] = {}

        def port(n: fx.Node) -> fx.Node:
            for known in self.graph.nodes:
                if known.name == f"port_{n.name}":
                    return known
            made = self.graph.placeholder(f"port_{n.name}")
            made.meta = {"val": n.meta.get("val"), "constant": n.meta.get("constant", False)}
            held[made.name] = value_of(n, env)
            return made

        args = full(node, port)
        out = emit_way(self.graph, node.target, args, way)
        self.graph.output(out)
        ports = [n for n in self.graph.nodes if n.op == "placeholder"]
        steady = {n.name: held[n.name] for n in ports if n.meta["constant"]}
        values, _ = ahead(self.graph, steady)
        given = [n for n in ports if not n.meta["constant"]]
        self.values = [held[n.name] for n in given]
        calls = [n for n in self.graph.nodes if n.op == "call_function" and n.name not in values]
        calls = [n for n in calls if not n.meta.get("constant", False)]
        forced = {out.name: way} if way not in (None, CHOSEN, PLAIN) else {}
        self.function = Function(
            calls, [n.name for n in given], out, {**steady, **values}, forced=forced
        )
        self.given, self.calls, self.steady, self.out = given, calls, {**steady, **values}, out

    def arrive(self, training: bool) -> None:
        """From here on it runs as it will in the model: on inputs as their producers will hand them over, perhaps recorded."""
        arriving = [_arrives(n, v) for n, v in zip(self.given, self.values, strict=True)]
        if training or any(a is not v for a, v in zip(arriving, self.values, strict=True)):
            self.values = arriving
            self.function.rebind()

    def run_checked(self) -> Any:
        """The replacement's output with nothing dropped out."""
        kept = [node.args for node in self.calls]
        for node in self.calls:
            node.args = equivalence.silent(node)
        out = self.function.run(*self.values)
        if any(node.args is not args for node, args in zip(self.calls, kept, strict=True)):
            for node, args in zip(self.calls, kept, strict=True):
                node.args = args
            self.function.rebind()  # the compiled form has the changed arguments, too
        return out


def emit_way(graph: fx.Graph, target: Any, args: tuple[Any, ...], way: str | None) -> fx.Node:
    """The calls of one way of running a step, or the call itself; `args` are all its arguments (`full`)."""
    emit = emitter(graph)
    for each in ways_of(target):
        if each.id == way:
            return each.emit(emit, args)
    schema = getattr(target, "_schema", None)
    words = [a.name for a in schema.arguments if a.kwarg_only] if schema is not None else []
    count = len(args) - len(words)
    return emit(target, *args[:count], **dict(zip(words, args[count:], strict=True)))


def ways_of(target: Any) -> tuple[Way, ...]:
    """What can run a step beside itself."""
    return target.ways if isinstance(target, Composite) else WAYS.get(target, ())


def _arrives(node: fx.Node, value: Any) -> Any:
    """An image as its producer will hand it over once that runs with adjacent channels, too."""
    adjacent = bool(node.users) and all(u.target is channels_last for u in node.users)
    return channels_last(value) if adjacent else value


def full(node: fx.Node, known: Callable[[fx.Node], Any] = lambda n: n) -> tuple[Any, ...]:
    """All arguments of a call in the order of its signature, defaults included, nodes as `known` says."""
    given = arguments(node)[0] if arguments(node)[0] else list(node.args)
    return tuple(fx.map_arg(given, known))


def value_of(n: Any, env: Mapping[str, Any]) -> Any:
    """What a node of the rewritten graph stands for, by the original's values; helpers are computed."""
    if not isinstance(n, fx.Node):
        return n
    name = n.meta["region"].root if "region" in n.meta else n.name
    if name in env:
        return env[name]
    args = fx.map_arg(tuple(n.args), lambda a: value_of(a, env))
    return n.target(*args, **dict(n.kwargs))  # type: ignore[operator]
