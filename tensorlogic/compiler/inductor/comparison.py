"""The whole model compiled by Inductor beside the program that was found; kept only where right and faster."""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...guards.errors import MISS
from ...guards.tensor_tree import storage
from ...measure import timer
from ..reporting.report import Report, Row
from ..runtime.program import Program
from ..trace import graph_facts
from ..trace.compiled_call import Compiled
from ..trace.graph_facts import mutates, written
from ..trace.traced_graph import Trace
from ..verify import equivalence
from ..verify.whole_model import Given, Original, Whole, apart
from . import compile_process
from .compile_process import Unable

OP, NAME, EVERYTHING = "inductor", "torch.inductor", "whole model"
GAIN = 0.98  # of the time of what it would replace that it may take
# of it that, where the interval says less, is worth a longer look
CLEAR = 0.95
WIDE = 0.1  # around a bound, within which more samples are taken
LEAST_S = 5.0  # below which no compilation is begun


def program(
    trace: Trace, function: Callable[..., Any], training: bool, model: nn.Module
) -> Program:
    """A program whose single call is the function that Inductor compiled."""
    call = Compiled(function, mutates(trace.graph))
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in trace.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
    outputs = list(dict.fromkeys(_leaves(trace.outputs)))
    made = graph.call_function(call, tuple(copies.values()))
    for i, node in enumerate(_leaves(trace.outputs)):
        if isinstance(node, fx.Node) and node in outputs and node not in copies:
            copies[node] = graph.call_function(operator.getitem, (made, i))
            copies[node].meta = {**node.meta, "constant": False}
    graph.output(fx.map_arg(trace.outputs, lambda n: copies[n]))
    return Program(trace, graph, {}, training, model)


def _leaves(value: Any) -> list[Any]:
    """The leaves of nested outputs, in the order in which Inductor returns them."""
    return pytree.tree_leaves(value, is_leaf=lambda v: v is None)


def written_inputs(trace: Trace) -> list[int]:
    """Positions of the inputs that a run of the graph writes to."""
    calls = [n for n in trace.graph.nodes if n.op == "call_function"]
    dirty = {storage(a) for n in calls for a in written(n)} - {None}
    places = {n.name: storage(n) for n in trace.graph.nodes if n.op == "placeholder"}
    return [i for i, name in enumerate(trace.inputs) if places[name] in dirty]


@contextlib.contextmanager
def isolated(programs: Sequence[Program], given: Given) -> Iterator[Callable[[], Given]]:
    """Let programs write to copies of buffers and inputs; they are captured inside, and again afterwards.

    Yields what gives the inputs for one call: those that calls write to hold what they held before.
    """
    trace = programs[0].trace
    if not mutates(trace.graph):
        yield lambda: given
        return
    live = dict(programs[0].state)
    for each in programs:
        each.replace_state(apart(live))
    try:
        own = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), given)
        pairs = [*zip(pytree.tree_leaves(own), pytree.tree_leaves(given), strict=True)]
        changing = [pairs[i] for i in written_inputs(trace)]

        def again() -> Given:
            with torch.no_grad():
                for mine, theirs in changing:
                    mine.copy_(theirs)
            return own

        yield again
    finally:
        for each in programs:
            each.replace_state(live)


@dataclass
class Contest:
    """One traced model, what serves it now (`ours`, or None for its own code), and the original's call to compare with."""

    trace: Trace
    ours: Program | None
    original: Original
    artifact: Path
    keep: Callable[[Report, Program | None], None] | None = None  # for later processes
    share_s: float = 0.4  # for timing

    def begin(self, niceness: int = 0) -> compile_process.Compiling:
        """Start compiling. Raises Unable or OSError where that cannot be."""
        if (reason := compile_process.unfit(self.trace)) is not None:
            raise Unable(reason)
        training = self.original.training
        return compile_process.Compiling(self.trace, self.artifact, training, niceness)

    def within(self, until: float, expected: Whole) -> Program | None:
        """Inductor's program if it is ready by `until` (of `time.perf_counter`), right and faster; a row of the report
        says what happened."""
        try:
            left = until - time.perf_counter()
            if left < LEAST_S and compile_process.unfit(self.trace) is None:
                raise Unable(f"not compiled: {max(0.0, left):.1f} s of budget_s were left")
            job = self.begin()
            try:
                job.wait(until - time.perf_counter())
            finally:
                job.stop()
        except (Unable, OSError) as problem:
            report = self.original.report
            report.rows = [*report.rows, Row(EVERYTHING, OP, NAME, refused=str(problem))]
            return None
        return self.compared(job, expected)

    def compared(self, job: compile_process.Compiling, expected: Whole) -> Program | None:
        """The program that a job has made, if it is right and faster than what there is; a row says what happened."""
        row, original = Row(EVERYTHING, OP, NAME), self.original
        report = original.report
        try:
            rival = program(self.trace, job.made(), original.training, original.model)
            verdict = expected.judge(rival)
            row.error = verdict.error if verdict else None
            if not verdict or verdict.error > equivalence.GROWTH:
                raise Unable(verdict.reason or f"error {verdict.error:.2f} times the original's")
            if self._faster(rival, row, verdict.error):
                rows = (
                    r if r.refused else replace(r, refused="Inductor is faster")
                    for r in report.rows
                )
                report.rows = [row, *rows]
                return rival
        except (Unable, OSError) as problem:
            row.refused = str(problem)
        report.rows = [*report.rows, row]
        return None

    def _faster(self, rival: Program, row: Row, error: float) -> bool:
        """Whether a program beats what there is; if so it takes that place, and the report tells its times."""
        report = self.original.report
        samples, other = self._timed(rival)
        row.before_us, row.after_us = samples.median(other), samples.median("inductor")
        row.ratio = samples.ratio("inductor", other)
        if row.ratio[0] > GAIN or row.ratio[2] >= 1:
            row.refused = "does not pay"
            return False
        self.ours, report.error = rival, error
        report.before_us, report.after_us = samples.median("before"), row.after_us
        report.ratio = samples.ratio("inductor", "before")
        report.outcome, report.reason = "compiled", ""
        return True

    def _timed(self, rival: Program) -> tuple[timer.Samples, str]:
        """Times beside the original's own call and beside what it would replace, and which of them that is."""
        original = self.original
        programs = [rival] if self.ours is None else [rival, self.ours]
        wrt = [t for t in rival.state.values() if t.requires_grad]
        with isolated(programs, original.given) as again:
            for each in programs:
                if each.replay is None or mutates(each.graph):
                    each.capture()
            call = stepping(original, again, wrt)
            if rival(*again()) is MISS:
                raise Unable("the program does not fit its own example inputs")
            steps = {"before": call(original.before), "inductor": call(rival.serving)}
            other = "before"
            if self.ours is not None:
                steps[other := "ours"] = call(self.ours.serving)
            samples = settled(steps, rival.device, "inductor", other, self.share_s)
        if mutates(rival.trace.graph):
            for each in programs:
                each.capture()
        return samples, other


def stepping(
    original: Original, again: Callable[[], Given], wrt: Sequence[Tensor]
) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """Makes a timed call of a model: on the inputs that `again` gives, with its backward pass in training."""

    def call(model: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            args, kwargs = again()
            return graph_facts.step(model(*args, **kwargs), original.training, wrt)

        return run

    return call


def settled(
    calls: Mapping[str, Callable[[], Any]],
    device: Any,
    name: str,
    other: str,
    share: float,
    gain: float = GAIN,
) -> timer.Samples:
    """Time calls until it is clear whether `name` is faster than `other`: few samples where that is plain, more on a busy machine."""
    for patience in (1, 2, 4):
        told = functools.partial(clearly, name=name, other=other, gain=gain)
        samples = timer.wall_samples(calls, device, patience * share, told=told)
        ratio, low, high = samples.ratio(name, other)
        if not (low < gain < high and ratio < CLEAR):
            break
    return samples


def clearly(samples: timer.Samples, name: str, other: str, gain: float) -> bool:
    """Whether the interval of the ratio lies so far from `gain`, on either side, that more samples would decide nothing."""
    _, low, high = samples.ratio(name, other)
    return high < (1 - WIDE) * gain or low > (1 + WIDE) * gain
