"""Inductor against what was found: the whole traced model by PyTorch's compiler, kept only where it is right and faster."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from .. import measure
from . import check, inductor
from .inductor import Unable
from .report import Report, Row
from .serve import Program, mutates
from .short import MISS
from .trace import Trace
from .whole import Whole, apart

OP, NAME, EVERYTHING = "inductor", "torch.inductor", "whole model"
GAIN = 0.98  # of the time of what it would replace that it may take
CLEAR = 0.95  # of it that, where the interval says less, is worth a longer look
LEAST_S = 5.0  # below which no compilation is begun
Given = tuple[tuple[Any, ...], dict[str, Any]]


class Compiled:
    """What Inductor has made of a graph, as one call of it."""

    __name__ = OP

    def __init__(self, function: Callable[..., Any], mutates: bool) -> None:
        self.function, self.mutates = function, mutates

    def __call__(self, *given: Any) -> Any:
        """All outputs, one after the other."""
        return self.function(*given)

    def __str__(self) -> str:
        return OP


def program(trace: Trace, artifact: Path, training: bool, model: nn.Module) -> Program:
    """The program whose one call is what Inductor has made. Raises Unable: it cannot be loaded."""
    call = Compiled(inductor.load(artifact), mutates(trace.graph))
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in trace.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
    outputs = list(dict.fromkeys(_leaves(trace.graph.output_node().args[0])))
    made = graph.call_function(call, tuple(copies.values()))
    for i, node in enumerate(_leaves(trace.graph.output_node().args[0])):
        if isinstance(node, fx.Node) and node in outputs and node not in copies:
            copies[node] = graph.call_function(operator.getitem, (made, i))
            copies[node].meta = {**node.meta, "constant": False}
    graph.output(fx.map_arg(trace.graph.output_node().args[0], lambda n: copies[n]))
    return Program(trace, graph, {}, training, model)


def _leaves(value: Any) -> list[Any]:
    """Inductor gives the outputs in this order."""
    return pytree.tree_leaves(value, is_leaf=lambda v: v is None)


@contextlib.contextmanager
def isolated(programs: Sequence[Program], given: Given) -> Iterator[Given]:
    """Inside, what the programs write are copies of buffers and inputs; they are captured inside, and again afterwards."""
    if not mutates(programs[0].trace.graph):
        yield given
        return
    live = dict(programs[0].state)
    for each in programs:
        each.replace_state(apart(live))
    try:
        yield pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), given)
    finally:
        for each in programs:
            each.replace_state(live)


@dataclass
class Contest:
    """One traced model, what serves it now (`ours`, or None for its own code), and the original's call to compare with."""

    trace: Trace
    ours: Program | None
    before: Callable[..., Any]
    model: nn.Module
    training: bool
    artifact: Path
    report: Report
    given: Given
    keep: Callable[[Report, Program | None], None] | None = None  # for later processes
    share_s: float = 0.4  # for timing

    def begin(self, niceness: int = 0) -> inductor.Compiling:
        """Start compiling. Raises Unable or OSError where that cannot be."""
        if (reason := inductor.unfit(self.trace)) is not None:
            raise Unable(reason)
        return inductor.Compiling(self.trace, self.training, self.artifact, niceness)

    def within(self, until: float, expected: Whole) -> Program | None:
        """Inductor's program if it is ready by `until` (of `time.perf_counter`), right and faster; a row of the report
        says what happened."""

        def compiled() -> None:
            left = until - time.perf_counter()
            if left < LEAST_S and inductor.unfit(self.trace) is None:
                raise Unable(f"not compiled: {max(0.0, left):.1f} s of budget_s were left")
            self.begin().wait(left)

        return self.decided(compiled, expected)

    def decided(self, compiled: Callable[[], None], expected: Whole) -> Program | None:
        """Inductor's program if it is right and faster, once `compiled` has returned; a row says what happened."""
        row, report = Row(EVERYTHING, OP, NAME), self.report
        try:
            compiled()
            rival = program(self.trace, self.artifact, self.training, self.model)
            verdict = expected.judge(rival)
            row.error = verdict.error if verdict else None
            if not verdict or verdict.error > check.GROWTH:
                raise Unable(verdict.reason or f"error {verdict.error:.2f} times the original's")
            samples, other = self._timed(rival)
        except (Unable, OSError) as problem:
            row.refused = str(problem)
            report.rows = [*report.rows, row]
            return None
        row.before_us, row.after_us = samples.median(other), samples.median("inductor")
        row.ratio = samples.ratio("inductor", other)
        if row.ratio[0] > GAIN or row.ratio[2] >= 1:
            row.refused = "does not pay"
            report.rows = [*report.rows, row]
            return None
        beaten = [r if r.refused else replace(r, refused="Inductor is faster") for r in report.rows]
        report.rows, report.error = [row, *beaten], verdict.error
        report.before_us, report.after_us = samples.median("before"), row.after_us
        report.ratio = samples.ratio("inductor", "before")
        report.outcome, report.reason = "compiled", ""
        return rival

    def _timed(self, rival: Program) -> tuple[measure.Samples, str]:
        """Times beside the original's own call and beside what it would replace, and which of them that is."""
        programs = [rival] if self.ours is None else [rival, self.ours]
        wrt = [t for t in rival.state.values() if t.requires_grad]
        with isolated(programs, self.given) as (args, kwargs):
            for each in programs:
                each.capture()

            def call(model: Callable[..., Any]) -> Callable[[], Any]:
                return lambda: check.step(model(*args, **kwargs), self.training, wrt)

            if rival(args, kwargs) is MISS:
                raise Unable("the program does not fit its own example inputs")
            steps = {"before": call(self.before), "inductor": call(rival.serving)}
            other = "before"
            if self.ours is not None:
                steps[other := "ours"] = call(self.ours.serving)
            samples = settled(steps, rival.device, "inductor", other, self.share_s)
        if mutates(rival.trace.graph):
            for each in programs:
                each.capture()
        return samples, other


def settled(
    calls: Mapping[str, Callable[[], Any]],
    device: Any,
    name: str,
    other: str,
    share: float,
    gain: float = GAIN,
) -> measure.Samples:
    """Samples, more of them where the machine is too busy to tell whether `name` is faster than `other`."""
    for patience in (1, 2, 4):
        samples = measure.wall_samples(calls, device, patience * share)
        ratio, low, high = samples.ratio(name, other)
        if not (low < gain < high and ratio < CLEAR):
            break
    return samples
