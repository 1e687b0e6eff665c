"""The whole model's outputs and gradients, as the original gives them and in higher precision, to judge programs by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...core.tolerance import Verdict
from ...guards import tensor_tree
from ...guards.errors import Untraceable, first_line
from ...guards.model_guard import strides_of
from ..reporting.report import Report
from ..runtime.program import Program
from ..trace import widening
from ..trace.graph_facts import last_uses, mutates, random_call
from ..trace.traced_graph import Trace
from . import equivalence

Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Original:
    """The model that a program shall replace: its own call on the example, and what the program must do."""

    model: nn.Module  # the copy that programs watch
    before: Callable[..., Any]
    given: Given  # example arguments
    training: bool
    report: Report
    budget_s: float
    # until when Inductor competes, by `time.perf_counter`; 0 where not yet
    until: float = 0.0

    def call(self) -> Any:
        """The output of the model's own code on the example."""
        return self.before(*self.given[0], **self.given[1])


def expected_inputs(traced: Trace) -> dict[str, Any]:
    """Placeholder -> value for runs that must leave no trace: inputs, and buffers that are written to, are copies."""
    named = {n: t for n, (_, t) in traced.state.items()}
    if mutates(traced.graph):
        named = apart(named)
    given = {
        n: v.detach().clone() if isinstance(v, Tensor) else v
        for n, v in zip(traced.inputs, traced.example, strict=True)
    }
    return {**named, **given}


def apart(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with copies of what needs no gradient; what is one tensor under two names stays one."""
    copies = {id(t): t if t.requires_grad else t.detach().clone() for t in named.values()}
    return {n: copies[id(t)] for n, t in named.items()}


class Whole:
    """The whole model's outputs (and gradients) as the original gives them and in higher precision."""

    def __init__(self, traced: Trace, training: bool) -> None:
        self.traced, self.training = traced, training
        self.outputs, self.nodes = traced.outputs, traced.calls
        values = expected_inputs(traced)
        dtype = widening.wide_dtype(list(values.values()))
        wants = [n for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad]
        self.wants = wants if training else []
        changing = mutates(traced.graph)
        self.changes = [n for n in values if n not in wants] if changing else []
        known = {id(v): widening.widen(v, dtype) for v in values.values()}  # tied weights stay one
        wide = {n: known[id(v)] for n, v in values.items()}  # before a run writes into the values
        for n in self.wants:
            wide[n].requires_grad_()
        self.drawn: dict[str, Tensor] = {}  # random numbers of the first run, for all others
        self.strides: list[Any] = []  # of the outputs, None of what has none
        self.plain = self._run(values, None)
        self.wide = self._run(wide, dtype)

    def gives(self, theirs: Sequence[Tensor]) -> bool:
        """Whether the graph, as it was traced, gives what the model itself has given; what draws numbers cannot be compared."""
        ours = [o for o in tensor_tree.flat_values(self.plain[0]) if isinstance(o, Tensor)]
        return any(map(random_call, self.nodes)) or equivalence.alike(ours, theirs)

    def _run(self, values: dict[str, Any], dtype: torch.dtype | None) -> Any:
        env = dict(values)
        last = last_uses(self.nodes, self.outputs)
        with torch.set_grad_enabled(self.training):
            kept = None if self.training else last
            outs = equivalence.run(self.traced, env, dtype, kept, self.drawn)
            if dtype is None:
                named = tensor_tree.flat_values(self.outputs)
                self.strides = [
                    strides_of(env[n.name] if isinstance(n, fx.Node) else n) for n in named
                ]
            return self._seen(outs, values)

    def _seen(self, outs: Any, values: Mapping[str, Any]) -> Any:
        """Everything a caller can see of a run: outputs, gradients, what buffers and inputs hold afterwards."""
        return [self._graded(outs, values), [values[n] for n in self.changes]]

    def _graded(self, outs: Any, values: Mapping[str, Any]) -> Any:
        wrt = [values[n] for n in self.wants]
        flat = [
            o for o in tensor_tree.flat_values(outs) if isinstance(o, Tensor) and o.requires_grad
        ]
        if not self.training or not wrt or not flat:
            return outs
        return (outs, equivalence.gradients(flat, wrt))

    def judge(self, program: Program) -> Verdict:
        """Compare a program, run on copies of what it might change and with nothing dropped out."""
        values = expected_inputs(self.traced)
        function = program.function
        kept = [(n.target, n.args) for n in function.nodes]
        for node in function.nodes:
            node.args = equivalence.silent(node)
            if node.name in self.drawn and equivalence.draws(node):
                node.target = _given(self.drawn[node.name])
        for name in self.traced.state:
            function.set(name, values[name])
        try:
            with torch.set_grad_enabled(self.training):
                outs = function.run(*[values[n] for n in self.traced.inputs])
                return equivalence.compare(self._seen(outs, values), self.plain, self.wide)
        except (RuntimeError, ValueError, TypeError) as problem:
            return Verdict(f"it fails: {first_line(problem)}", float("inf"))
        finally:
            for node, (target, args) in zip(function.nodes, kept, strict=True):
                node.target, node.args = target, args
            function.rebind()
            for name, tensor in program.state.items():
                function.set(name, tensor)


def confirmed(traced: Trace, training: bool) -> Whole:
    """What programs are judged by, if the graph gives what the model itself gave where nobody traced it.

    Raises:
        Untraceable: it does not, as of code that asks whether it is traced.
    """
    expected, theirs = Whole(traced, training), traced.theirs
    if theirs is not None and not expected.gives(theirs):
        raise Untraceable("the graph's outputs are not the model's")
    traced.theirs = None
    return expected


def _given(value: Tensor) -> Callable[..., Tensor]:
    """What stands for a call that draws: it gives what was drawn before."""
    return lambda *_, **__: value.clone()
