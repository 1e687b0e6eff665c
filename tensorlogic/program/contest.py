"""Inductor against what was found: the whole traced model by PyTorch's compiler, kept only where it is right and faster."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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


def compete(
    trace: Trace,
    ours: Program | None,
    before: Callable[..., Any],
    model: nn.Module,
    expected: Whole,
    until: float,
    artifact: Path,
    report: Report,
    given: Given,
) -> Program | None:
    """Inductor's program if it is ready by `until` (of `time.perf_counter`), right, and faster than `ours` or the original.

    What happened is a row of the report.
    """
    row = Row(EVERYTHING, OP, NAME)
    report.rows.append(row)
    try:
        if (reason := inductor.unfit(trace)) is not None:
            raise Unable(reason)
        left = until - time.perf_counter()
        if left < LEAST_S:
            raise Unable(f"not compiled: {max(0.0, left):.1f} s of budget_s were left")
        inductor.Compiling(trace, expected.training, artifact).wait(left)
        rival = program(trace, artifact, expected.training, model)
        verdict = expected.judge(rival)
        row.error = verdict.error if verdict else None
        if not verdict or verdict.error > check.GROWTH:
            raise Unable(verdict.reason or f"error {verdict.error:.2f} times the original's")
        won = _won(rival, ours, before, given, expected.training, row, report)
    except (Unable, OSError) as problem:
        row.refused = str(problem)
        return None
    if not won:
        row.refused = "does not pay"
        return None
    beaten = [
        r if r.refused else replace(r, refused="Inductor is faster") for r in report.rows[:-1]
    ]
    report.rows, report.error = [row, *beaten], verdict.error
    report.outcome, report.reason = "compiled", ""
    return rival


def _won(
    rival: Program,
    ours: Program | None,
    before: Callable[..., Any],
    given: Given,
    training: bool,
    row: Row,
    report: Report,
) -> bool:
    """Time it beside what it would replace and beside the original's own call."""
    programs = [rival] if ours is None else [rival, ours]
    wrt = [t for t in rival.state.values() if t.requires_grad]
    with isolated(programs, given) as (args, kwargs):
        for each in programs:
            each.capture()
        calls: Mapping[str, Callable[..., Any]] = {"before": before, "inductor": rival.serving}
        calls = calls if ours is None else {**calls, "ours": ours.serving}

        def call(model: Callable[..., Any]) -> Callable[[], Any]:
            return lambda: check.step(model(*args, **kwargs), training, wrt)

        if rival(args, kwargs) is MISS:
            raise Unable("the program does not fit its own example inputs")
        steps = {name: call(model) for name, model in calls.items()}
        other = "before" if ours is None else "ours"
        samples = settled(steps, rival.device, "inductor", other)
    if mutates(rival.trace.graph):
        for each in programs:
            each.capture()
    row.before_us, row.after_us = samples.median(other), samples.median("inductor")
    row.ratio = samples.ratio("inductor", other)
    won = row.ratio[0] <= GAIN and row.ratio[2] < 1
    if won:
        report.before_us, report.after_us = samples.median("before"), row.after_us
        report.ratio = samples.ratio("inductor", "before")
    return won


def settled(
    calls: Mapping[str, Callable[[], Any]],
    device: Any,
    name: str,
    other: str,
    share: float = 0.4,
    gain: float = GAIN,
) -> measure.Samples:
    """Samples, more of them where the machine is too busy to tell whether `name` is faster than `other`."""
    for patience in (1, 2, 4):
        samples = measure.wall_samples(calls, device, patience * share)
        ratio, low, high = samples.ratio(name, other)
        if not (low < gain < high and ratio < CLEAR):
            break
    return samples
