"""Which program serves a traced model: the first rewriting that is right as a whole and faster than the original call."""

from __future__ import annotations

import copy
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from .. import measure
from ..numerics import Verdict
from . import check
from .code import last_uses
from .decisions import Decision
from .patterns import RULES
from .regions import HEATS, Judge, emit_way, full
from .report import Report, Row
from .rewrite import Region, again, rewrite
from .serve import Program, device_of, mutates
from .short import MISS
from .trace import Trace, Untraceable, counts, first_line, writes
from .widen import pays, widened

ATTEMPTS = 8  # at a program whose error as a whole does not grow
ROUNDS = 4  # times that regions are formed again after some were undone
MUST_GAIN = 0.98  # of the original's time that the whole may take


def best(
    traced: Trace,
    model: nn.Module,
    before: Callable[..., Any],
    training: bool,
    budget_s: float,
    report: Report,
    given: tuple[tuple[Any, ...], dict[str, Any]],
) -> Program | None:
    """The first of: rewritten, merely traced, that is right and faster than `before`, the original on `given`.

    `model` is watched by the program. Regions, times and, where None is returned, the reason go into `report`.
    """
    device = device_of(traced)
    begin = time.perf_counter()
    expected = Whole(traced, training)
    source = widened(traced) if not training and pays(traced, device) else traced
    banned: set[str] = set()
    undone: list[Row] = []
    judge = Judge(source, device, training, begin + budget_s / 2, begin + 2 * budget_s)
    for attempt in range(ATTEMPTS):
        plan = Plan(source, judge, banned)
        program, verdict = _right(plan.variants[0], plan, model, expected)
        report.rows, report.error = [*plan.rows, *undone], verdict.error
        if program is not None:
            others = [_right(v, plan, model, expected)[0] for v in plan.variants[1:]]
            found = [program, *(p for p in others if p is not None)]
            return _timed(found, before, given, training, budget_s, report)
        why = verdict.reason or f"error {verdict.error:.2f} times the original's"
        standing = sorted(
            (r for r in report.rows if not r.refused), key=lambda r: -(r.error or 0.0)
        )
        if not standing or attempt == ATTEMPTS - 1:
            break
        for row in standing[: max(1, len(standing) // 4)]:
            decision = next(d for d in plan.found.values() if d.row is row)
            if decision.milder():
                judge.forget(decision)
                continue
            banned |= {f"{r.op}@{r.root}" for r in plan.regions if plan.found[r.root].row is row}
            undone.append(replace(row, refused=f"the whole model's error grew: {why}"))
    report.reason, report.error = f"the rewritten model is not right: {why}", None
    return None


def _right(
    variant: dict[str, Decision], plan: Plan, model: nn.Module, expected: Whole
) -> tuple[Program | None, Verdict]:
    """The program of one variant, if the whole model's error did not grow."""
    graph, forced = plan.graph(variant)
    program = Program(plan.traced, graph, forced, plan.training, model)
    verdict = expected.judge(program)
    return (program if verdict and verdict.error <= check.GROWTH else None), verdict


class Plan:
    """Which regions stand and by what: undone are those that do not pay, until everything that stands does."""

    def __init__(self, traced: Trace, judge: Judge, banned: set[str]) -> None:
        self.traced, self.training, self.banned = traced, judge.training, banned
        training = judge.training
        self.rules = [r for r in RULES if r.training or not training]
        judge.writes = any(
            n.op == "call_function" and writes(n) and not counts(n) for n in traced.graph.nodes
        )
        values = expected_inputs(traced)
        refused: list[Decision] = []
        for attempt in itertools.count():
            self.rewritten, self.regions = self._rewritten()
            if attempt < ROUNDS:
                judge.decide(self.regions, values)
            known = [judge.passed.get((r.op, r.root, r.calls)) for r in self.regions]
            bad = [i for i, d in enumerate(known) if d is None or d.way is None]
            refused += [d for i in bad if (d := known[i]) is not None]
            if not bad:
                break
            more = {f"{self.regions[i].op}@{self.regions[i].root}" for i in bad}
            if more <= banned:
                raise Untraceable(f"regions come back after they were undone: {sorted(more)[0]}")
            banned |= more
        self.found = {r.root: d for r, d in zip(self.regions, known, strict=True) if d is not None}
        self.rows = [*_rows(self.found[r.root] for r in self.regions), *_rows(refused)]
        self.variants = [self.found, *self._uniform()]

    def _rewritten(self) -> tuple[fx.Graph, list[Region]]:
        graph = copy.deepcopy(self.traced.graph)
        return graph, rewrite(graph, self.rules, frozenset(self.banned))

    def _uniform(self) -> list[dict[str, Decision]]:
        """The same with one way wherever it can be: ways with a memory layout of their own pay most together."""
        counts = Counter(d.way for d in self.found.values() if len(d.ready) > 1)
        mixed = [w for w, _ in counts.most_common(2) if w is not None]
        if len(counts) < 2:
            return []
        return [
            {root: replace(d, way=way) if way in d.ready else d for root, d in self.found.items()}
            for way in mixed
        ]

    def graph(self, variant: Mapping[str, Decision]) -> tuple[fx.Graph, dict[str, str]]:
        """The graph with the chosen ways written out, and which candidate each op's call is to have."""
        graph, regions = again(self.rewritten)
        return graph, _expand(graph, regions, variant)


def _rows(decisions: Iterable[Decision]) -> list[Row]:
    """One row for each kind of region, with how many there are."""
    rows = [d.row for d in decisions]
    counts = Counter(map(id, rows))
    for row in rows:
        row.count = counts[id(row)]
    return list({id(row): row for row in rows}.values())


def _expand(
    graph: fx.Graph, regions: Sequence[Region], found: Mapping[str, Decision]
) -> dict[str, str]:
    """Write the chosen ways into the graph; returns which candidate each op's call is to have."""
    forced = {}
    for region in regions:
        node, way = region.node, found[region.root].way
        assert node is not None
        with graph.inserting_before(node):
            new = emit_way(graph, node.target, full(node), way)
        new.meta.update({"val": node.meta["val"], "constant": node.meta.get("constant", False)})
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        op = getattr(new.target, "fused", None)
        if way is not None and op is not None and way in op.candidates:
            forced[new.name] = way
    return forced


def expected_inputs(traced: Trace) -> dict[str, Any]:
    """Placeholder -> value for runs that must leave no trace: inputs, and buffers that are written to, are copies."""
    named = {n: t for n, (_, t) in traced.state.items()}
    if mutates(traced.graph):
        named = {n: t if t.requires_grad else t.detach().clone() for n, t in named.items()}
    given = {
        n: v.detach().clone() if isinstance(v, Tensor) else v
        for n, v in zip(traced.inputs, traced.example, strict=True)
    }
    return {**named, **given}


class Whole:
    """The whole model's outputs (and gradients) as the original gives them and in higher precision."""

    def __init__(self, traced: Trace, training: bool) -> None:
        self.traced, self.training = traced, training
        self.outputs = traced.graph.output_node().args[0]
        self.nodes = [n for n in traced.graph.nodes if n.op in ("call_function", "get_attr")]
        values = expected_inputs(traced)
        dtype = check.wide_dtype(list(values.values()))
        self.plain = self._run(values, None)
        wide = {n: check.widen(v, dtype) for n, v in values.items()}
        if training:
            for n, v in values.items():
                if isinstance(v, Tensor) and v.requires_grad:
                    wide[n].requires_grad_()
        self.wide = self._run(wide, dtype)

    def _run(self, values: dict[str, Any], dtype: torch.dtype | None) -> Any:
        env = dict(values)
        last = last_uses(self.nodes, self.outputs)
        with torch.set_grad_enabled(self.training):
            check.evaluate(
                self.nodes, env, self.traced.owner, dtype, None if self.training else last
            )
            outs = fx.map_arg(self.outputs, lambda n: env[n.name])
            return self._graded(outs, values)

    def _graded(self, outs: Any, values: Mapping[str, Any]) -> Any:
        wrt = [v for v in values.values() if isinstance(v, Tensor) and v.requires_grad]
        flat = [o for o in check.flat_values(outs) if isinstance(o, Tensor) and o.requires_grad]
        if not self.training or not wrt or not flat:
            return outs
        return (outs, check.gradients(flat, wrt))

    def judge(self, program: Program) -> Verdict:
        """Compare a program, run on copies of what it might change and with nothing dropped out."""
        values = expected_inputs(self.traced)
        function = program.function
        kept = [n.args for n in function.nodes]
        for node in function.nodes:
            node.args = check.silent(node)
        for name in self.traced.state:
            function.set(name, values[name])
        try:
            with torch.set_grad_enabled(self.training):
                outs = function.run(*[values[n] for n in self.traced.inputs])
                return check.compare(self._graded(outs, values), self.plain, self.wide)
        except (RuntimeError, ValueError, TypeError) as problem:
            return Verdict(f"it fails: {first_line(problem)}", float("inf"))
        finally:
            for node, args in zip(function.nodes, kept, strict=True):
                node.args = args
            function.run = function._bind
            for name, tensor in program.state.items():
                function.set(name, tensor)


def _timed(
    programs: Sequence[Program],
    before: Callable[..., Any],
    given: tuple[tuple[Any, ...], dict[str, Any]],
    training: bool,
    budget_s: float,
    report: Report,
) -> Program | None:
    """The fastest program if it beats the original's own call, with what guards it included."""
    args, kwargs = given
    live = dict(programs[0].state)
    wrt = [t for t in live.values() if t.requires_grad]
    if mutates(programs[0].graph):
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), given)
        copies = {n: t.detach().clone() for n, t in live.items() if not t.requires_grad}
        for program in programs:
            program.replace_state(copies)

    def call(model: Any) -> Callable[[], Any]:
        return lambda: check.step(model(*args, **kwargs), training, wrt)

    calls = {f"after {i}": call(p.serving) for i, p in enumerate(programs)}
    for program in programs:
        reason = program.capture()
        if reason is not None and program.device.type == "cuda":
            report.notes.append(f"not captured: {reason}")
    if any(p(args, kwargs) is MISS for p in programs):
        report.reason = "the program does not fit its own example inputs"
        return None
    share, device = max(0.15, budget_s / 16), programs[0].device
    first = next(iter(calls))
    if len(calls) > 1:
        first = min(calls, key=measure.wall_samples(calls, device, share, HEATS).median)
    pair = {"before": call(before), first: calls[first]}
    samples = measure.wall_samples(pair, device, 1.5 * share)
    program = programs[int(first.split()[1])]
    if mutates(program.graph):
        program.replace_state(live)
        program.capture()
    if not pays_off(report, samples, first):
        return None
    report.outcome = "rewritten" if program.replay is None else "captured"
    return program


def pays_off(report: Report, samples: measure.Samples, name: str) -> bool:
    """Whether what was timed as `name` is faster than "before" by more than chance; the times go into the report."""
    report.before_us, report.after_us = samples.median("before"), samples.median(name)
    report.ratio = samples.ratio(name, "before")
    if report.ratio[0] <= MUST_GAIN and report.ratio[2] < 1:
        return True
    report.reason = "nothing pays: the original is as fast"
    return False
