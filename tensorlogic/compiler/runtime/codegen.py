"""A graph as one straight Python function: ops bound to their launchers, constants computed ahead, values dropped after use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from ...core import policy as core_policy
from ...core.rewrite_rule import Composite
from ...dispatch import bound_call, decision, dispatcher
from ...system import compile_pool
from ..trace.graph_facts import last_uses
from .parallel_branches import Section, Step, ordered

aten = torch.ops.aten
# kinds of calls by what wants gradients, whose ops stay bound beside the first's
OTHERS = 8
# the same calls without the boxed path of an operator overload
QUICK: dict[Any, Callable[..., Any]] = {
    aten.linear.default: torch.nn.functional.linear,
    aten.layer_norm.default: torch.layer_norm,
    aten.relu.default: torch.relu,
    aten.gelu.default: torch._C._nn.gelu,
    aten.silu.default: torch._C._nn.silu,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.view.default: Tensor.view,
    aten.reshape.default: Tensor.reshape,
    aten.permute.default: Tensor.permute,
    aten.transpose.int: Tensor.transpose,
    aten.unbind.int: torch.unbind,
    aten.flatten.using_ints: torch.flatten,
    aten.matmul.default: torch.matmul,
    aten.bmm.default: torch.bmm,
    aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.conv2d.default: torch.conv2d,
    aten.batch_norm.default: torch.batch_norm,
    aten.max_pool2d.default: torch.max_pool2d,
    aten.adaptive_avg_pool2d.default: torch._C._nn.adaptive_avg_pool2d,
    aten.mean.dim: torch.mean,
    aten.sigmoid.default: torch.sigmoid,
    aten.tanh.default: torch.tanh,
    aten.softmax.int: torch.softmax,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.squeeze.dim: torch.squeeze,
    aten.embedding.default: aten.embedding.default,
    aten.t.default: torch.t,
}


class Sites:
    """Where calls of our ops stand in a function: each is bound to a launcher when it is first met with its tensors."""

    def __init__(self, forced: Mapping[str, str] | None = None) -> None:
        self.forced = dict(forced or {})  # call -> the candidate that was found best there
        self.chosen: dict[str, str] = {}  # call -> the candidate that serves it
        self.hurried: set[str] = set()  # calls that did not wait for a compiler, and will not

    def bind(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> Callable[..., Any] | None:
        """A function of the call's own arguments that goes straight to the launcher; None where only the public call will do."""
        op = getattr(fn, "fused", None)
        if op is None or not any(isinstance(a, Tensor) for a in args):
            return None
        device = next(a.device for a in args if isinstance(a, Tensor))
        if device.type == "meta" or torch.is_autocast_enabled(device.type):
            return None
        if core_policy.current().precision is not None:  # whose choice follows the data
            return None
        ready = fn.__wrapped__(*args)  # type: ignore[attr-defined]
        if dispatcher._special(ready) is not None:
            return None
        dynamic = [a for p, a in zip(op.params, ready, strict=False) if p.is_dynamic]
        places = [_place(a, args) for a in dynamic]
        if None in places:
            return None
        recording = torch.is_grad_enabled() and any(
            isinstance(a, Tensor) and a.requires_grad for a in args
        )
        if op.gradient is not None:
            ready = (*ready, recording)
        policy = core_policy.current()
        found = op.candidates.get(self.forced.get(name, ""))
        key = op.key(ready, "forward" if recording else "inference")
        fits = found is not None and found.unfit(key) is None  # another memory layout may have come
        if fits and not policy.reproducible and policy.forced(op.name) is None:
            policy = replace(policy, tune="off", force={op.name: self.forced[name]}, entries={})
        with compile_pool.no_new_compiles(
            name in self.hurried or compile_pool.new_compiles_forbidden()
        ):
            bound = bound_call.bind(op, ready, policy, recording)
        self.chosen[name] = bound.choice.candidate.id
        if bound.choice.source == decision.NO_NEW_COMPILES:
            self.hurried.add(name)
        return _call(bound, [p for p in places if p is not None], dynamic)


def _place(value: Any, args: tuple[Any, ...]) -> int | None:
    """Where among the call's arguments an op's argument is; -1 for a value of its own that is no tensor."""
    for i, given in enumerate(args):
        if given is value and (isinstance(value, Tensor) or value is None):
            return i
    return None if isinstance(value, Tensor) else -1


def _call(bound: bound_call.Bound, places: list[int], dynamic: list[Any]) -> Callable[..., Any]:
    """run(*arguments of the public call) by way of the launcher."""
    names = [f"a{p}" if p >= 0 else f"c{i}" for i, p in enumerate(places)]
    scope: dict[str, Any] = {f"c{i}": v for i, v in enumerate(dynamic) if places[i] < 0}
    scope |= {"run": bound.run, "declined": bound.declined}
    count = max([*places, 0]) + 1
    given = ", ".join(f"a{i}" for i in range(count))
    text = (
        f"def call({given}, *_):\n    out = run({', '.join(names)})\n"
        f"    return declined(({', '.join(names)},))[0] if out is None else out\n"
    )
    exec(text, scope)
    return scope["call"]


class Function:
    """Calls of a graph from `inputs` to `outputs`, compiled to Python; `scope` holds what it reads besides its inputs."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        inputs: Sequence[str],
        outputs: Any,
        values: Mapping[str, Any],
        owner: torch.nn.Module | None = None,
        forced: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes, self.inputs = list(nodes), list(inputs)
        self.outputs, self.owner = outputs, owner
        self.scope: dict[str, Any] = {}
        self.sites = Sites(forced)
        self.quick: dict[str, Callable[..., Any]] = {}
        self._values = dict(values)
        self.wanted: Any = None  # what its ops are bound for, as `of` is told
        self._others: dict[Any, Function] = {}  # bound for other things than that
        self.run: Callable[..., Any] = self._bind

    def of(self, wanted: Any) -> Function:
        """The same calls, their ops bound for gradients of what wants them now: `wanted` is equal where these are the same."""
        if wanted == self.wanted:
            return self
        found = self._others.get(wanted)
        if found is None:
            found = Function(
                self.nodes, self.inputs, self.outputs, self._values, self.owner, self.sites.forced
            )
            found.sites.hurried = self.sites.hurried
            for first in list(self._others)[: 1 if len(self._others) >= OTHERS else 0]:
                self._others.pop(first, None)
            self._others[wanted] = found
        return found

    def set(self, name: str, value: Any) -> None:
        """Another parameter, buffer or constant in the place of one that is read."""
        self._values[name] = value
        if _name(name) in self.scope:
            self.scope[_name(name)] = value
        for other in [*self._others.values()]:
            other.set(name, value)

    def value(self, name: str) -> Any:
        """The parameter, buffer or constant that is read under a name."""
        return self._values[name]

    def rebind(self) -> None:
        """Bind ops anew in the next run: its tensors have another layout, or gradients are recorded."""
        self.quick.clear()
        self._others.clear()
        self.run = self._bind

    def _bind(self, *given: Any) -> Any:
        """The first run, call by call: ops are bound to the tensors that they meet."""
        env = {**self._values, **dict(zip(self.inputs, given, strict=True))}
        last = last_uses(self.nodes, self.outputs)
        for node in self.nodes:
            if node.op == "get_attr":
                env[node.name] = operator.attrgetter(str(node.target))(self.owner)
                continue
            args = fx.map_arg(node.args, lambda n: env[n.name])
            kwargs = fx.map_arg(node.kwargs, lambda n: env[n.name])
            target = cast(Callable[..., Any], node.target)
            quick = None if kwargs else self.sites.bind(node.name, target, tuple(args))
            if quick is not None:
                self.quick[node.name] = quick
            env[node.name] = (quick or target)(*args, **kwargs)
            for done in last.get(node.name, ()):
                if done not in self._values:
                    env.pop(done, None)
        out = fx.map_arg(self.outputs, lambda n: env[n.name])
        self.run = self._compile()
        return out

    def _compile(self) -> Callable[..., Any]:
        return self._written("run", self.nodes)

    def forked(self, found: Sequence[Section], streams: Any) -> Callable[..., Any]:
        """The same calls, once bound, with those of `found` on streams of their own (`branches.Streams`).

        Within a section nothing is dropped: memory that one stream frees, another may still read.
        """
        self.scope["streams"] = streams
        return self._written("forked", list(ordered(self.nodes, found)))

    def _written(self, name: str, steps: Sequence[fx.Node | Step]) -> Callable[..., Any]:
        scope, lines = self.scope, list[str]()
        last = last_uses([s for s in steps if isinstance(s, fx.Node)], self.outputs)
        known, inside, dead = set(self.inputs), False, list[str]()
        for step in steps:
            if isinstance(step, Step):
                inside = step.what != "join"
                lines.append(f"streams.{step.what}({step.lane if step.what == 'enter' else ''})")
            else:
                known.add(step.name)
                lines += self._line(step)
                dead += [n for n in last.get(step.name, ()) if n in known]
            gone = [_name(n) for n in dead if _name(n) not in scope]
            if gone and not inside:
                lines.append(f"del {', '.join(gone)}")
            if not inside:
                dead = []
        lines.append(f"return {self._text(self.outputs)}")
        given = ", ".join(_name(n) for n in self.inputs)
        exec(f"def {name}({given}):\n    " + "\n    ".join(lines), scope)
        return scope[name]

    def _line(self, node: fx.Node) -> list[str]:
        """One call."""
        scope, name = self.scope, _name(node.name)
        if node.op == "get_attr":
            scope[name] = operator.attrgetter(str(node.target))(self.owner)
            return []
        fn = self.quick.get(node.name) or QUICK.get(node.target) or node.target
        if fn is operator.getitem:
            return [f"{name} = {self._text(node.args[0])}[{self._text(node.args[1])}]"]
        scope[f"f_{node.name}"] = fn.meaning if isinstance(fn, Composite) else fn
        words = [self._text(a) for a in node.args]
        words += [f"{k}={self._text(v)}" for k, v in node.kwargs.items()]
        return [f"{name} = f_{node.name}({', '.join(words)})"]

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            if value.name in self._values:
                self.scope[_name(value.name)] = self._values[value.name]
            return _name(value.name)
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._text(v)}, ' for v in value)})"
        if isinstance(value, slice):
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._text(v)}" for k, v in value.items()) + "}"
        if isinstance(value, (int, bool, str, type(None))):
            return repr(value)
        key = f"k{len(self.scope)}"
        self.scope[key] = value
        return key


def _name(name: str) -> str:
    return f"v_{name}"


def ahead(
    graph: fx.Graph, state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Values of all constant calls that others read, and the parameters and buffers that each depends on."""
    values: dict[str, Any] = {}
    sources: dict[str, set[str]] = {n: {n} for n in state}
    env: dict[str, Any] = dict(state)
    with torch.no_grad():
        for node in graph.nodes:
            if node.op != "call_function" or not node.meta.get("constant", False):
                continue
            args = fx.map_arg(node.args, lambda n: env[n.name])
            kwargs = fx.map_arg(node.kwargs, lambda n: env[n.name])
            env[node.name] = node.target(*args, **kwargs)
            sources[node.name] = set().union(*(sources[n.name] for n in node.all_input_nodes))
            if any(not u.meta.get("constant", False) for u in node.users):
                values[node.name] = env[node.name]
    return values, {n: sorted(sources[n]) for n in values}
