"""Which program serves a traced model: the first rewriting that is right as a whole and faster than the original call."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core.tolerance import Verdict
from ..guards import tensor_tree
from ..guards.errors import MISS, Untraceable
from ..measure import timer
from ..system import compile_pool, settings
from .inductor import compile_process
from .inductor.comparison import OP as CONTEST
from .inductor.comparison import Contest, isolated, settled, stepping
from .inductor.comparison import program as compiled
from .inductor.compile_process import Unable
from .reporting.report import Report, Row
from .rewrite.matcher import Region, again, rewrite
from .rewrite.rule_set import RULES
from .rewrite.widen_pass import pays, widened
from .runtime.program import Program
from .trace.graph_facts import counts, device_of, mutates, writes
from .trace.traced_graph import Trace
from .tune import stream_parallelism as tune_stream_parallelism
from .tune.decision_store import Choice, Decision, Stored, merged
from .tune.region_graph import emit_way, full, ways_of
from .tune.region_tuner import HEATS, Judge
from .verify import equivalence
from .verify.whole_model import Original, Whole, confirmed, expected_inputs

ATTEMPTS = 8  # at a program whose error as a whole does not grow
ROUNDS = 4  # times that regions are formed again after some were undone
OURS = 0.5  # of the budget where Inductor competes for the rest
# times what the fastest way of each region takes that a program with one way for all may take
CLOSE = 1.05
# likewise where it spares two kinds of threads waiting for each other, which regions alone do not
# show
TURNS = 1.1
MUST_GAIN = 0.98  # of the original's time that the whole may take


def best(traced: Trace, original: Original) -> Program | None:
    """The program that is right and faster than the original's own call; None where none is.

    Regions, times and, where None is returned, the reason go into the original's report.
    """
    device, training, report = device_of(traced), original.training, original.report
    stored = Stored(traced, device, training, original.budget_s)
    choice = stored.whole()
    if choice is not None and choice.outcome == "compiled" and not settings.inductor():
        choice = None
    if choice is not None and choice.outcome == "original":
        choice.tell(report)
        return None
    expected = confirmed(traced, training)
    source = widened(traced) if not training and pays(traced, device) else traced
    path = compile_process.place(stored.artifact)
    if choice is not None:
        again = _loaded if choice.outcome == "compiled" else _again
        program = again(choice, source, original, expected, path)
        if program is not None:
            if not any(r.op == CONTEST for r in choice.rows):
                keep = stored.keeper(choice)
                program.contest = Contest(traced, program, original, path, keep)
            return program
    report.look()
    begin = time.perf_counter()
    budget_s = original.budget_s * (OURS if original.until else 1.0)
    judge = Judge(source, device, training, begin + budget_s / 2, begin + 2 * budget_s, stored)
    try:
        found, plan = _found(source, judge, expected, original, budget_s)
        if report.outcome == "original":
            found = None
        if found is not None:
            tune_stream_parallelism.spread(found, report)
        contest = Contest(traced, found, original, path)
        if original.until:
            rival = contest.within(original.until, expected)
            found = found if rival is None else rival
        if plan is not None and _tellable(judge, found, report):
            plans = merged(d.plans for d in plan.found.values())
            kept = Choice.of(report, found, sorted(plan.banned), plans)
            stored.keep_whole(kept)
            contest.keep = stored.keeper(kept)
        if found is not None and not original.until:
            found.contest = contest
        return found
    finally:
        stored.save()


def _again(
    choice: Choice, source: Trace, original: Original, expected: Whole, _: Path
) -> Program | None:
    """The program that an earlier process has chosen, if it is right with today's weights and inputs."""
    graph = copy.deepcopy(source.graph)
    rules = [r for r in RULES if r.training or not expected.training]
    regions = rewrite(graph, rules, frozenset(choice.banned))
    if {r.root for r in regions} != choice.ways.keys():
        return None
    found = {root: Decision(way) for root, way in choice.ways.items()}
    forced = _expand(graph, regions, found, expected.strides)
    program = Program(source, graph, forced, expected.training, original.model)
    program.ways = choice.ways
    program.function.sites.hurried |= set(choice.hurried)
    tune_stream_parallelism.again(program, choice.sections)
    return _stands(program, choice, expected, original.report)


def _loaded(
    choice: Choice, _: Trace, original: Original, expected: Whole, path: Path
) -> Program | None:
    """What Inductor has compiled for an earlier process, if it is right with today's weights and inputs."""
    try:
        function = compile_process.load(path)
    except Unable:
        return None
    program = compiled(expected.traced, function, expected.training, original.model)
    return _stands(program, choice, expected, original.report)


def _stands(program: Program, choice: Choice, expected: Whole, report: Report) -> Program | None:
    verdict = expected.judge(program)
    if not verdict or verdict.error > equivalence.GROWTH:
        return None
    program.capture()
    if (program.replay is not None) != choice.captured:
        return None
    choice.tell(report)
    report.error = verdict.error
    return program


def _found(
    source: Trace, judge: Judge, expected: Whole, original: Original, budget_s: float
) -> tuple[Program | None, Plan | None]:
    """Decide, check and time: the fastest program, and its plan where one was right. The report says whether it pays."""
    banned: set[str] = set()
    undone: list[Row] = []
    report = original.report
    for attempt in range(ATTEMPTS):
        plan = Plan(source, judge, banned)
        program, verdict = _right(plan.variants[0], plan, original.model, expected)
        report.rows, report.error = [*plan.rows, *undone], verdict.error
        if program is not None:
            others = [_right(v, plan, original.model, expected)[0] for v in plan.variants[1:]]
            found = [program, *(p for p in others if p is not None)]
            return _timed(found, original, budget_s), plan
        why = verdict.reason or f"error {verdict.error:.2f} times the original's"
        standing = sorted(report.regions, key=lambda r: -(r.error or 0.0))
        if not standing or attempt == ATTEMPTS - 1:
            break
        for row in standing[: max(1, len(standing) // 4)]:
            decision = next(d for d in plan.found.values() if d.row is row)
            if decision.milder():
                judge.forget(decision)
                continue
            ended = [r for r in plan.regions if plan.found[r.root].row is row]
            banned |= {f"{r.op}@{r.root}" for r in ended}
            judge.spoilt += [(r.calls, way) for r in ended for way in decision.inexact()]
            undone.append(replace(row, refused=f"the whole model's error grew: {why}"))
    report.reason, report.error = f"the rewritten model is not right: {why}", None
    return None, None


def _tellable(judge: Judge, fastest: Program | None, report: Report) -> bool:
    """Whether what was found is worth remembering: nothing was left out, nothing too noisy to tell."""
    if report.ratio is None or judge.late:
        return False
    return fastest is not None or report.ratio[0] > MUST_GAIN


def _right(
    variant: dict[str, Decision], plan: Plan, model: nn.Module, expected: Whole
) -> tuple[Program | None, Verdict]:
    """The program of one variant, if the whole model's error did not grow."""
    graph, forced = plan.graph(variant, expected.strides)
    program = Program(plan.traced, graph, forced, plan.training, model)
    program.ways = {root: d.way for root, d in variant.items()}
    with compile_pool.no_new_compiles():  # what was measured is there
        verdict = expected.judge(program)
    return (program if verdict and verdict.error <= equivalence.GROWTH else None), verdict


class Plan:
    """The regions to replace and the way for each; those that do not pay are undone until the rest does."""

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
        """The same with one way wherever it can be: ways with a memory layout of their own pay most together, and on a CPU such as run on
        threads of ours do, which wait for work while PyTorch's have it.

        Not those that would take clearly more by the times of their regions.
        """
        counts = Counter(d.way for d in self.found.values() if len(d.ready) > 1)
        mixed = [w for w, _ in counts.most_common(2) if w is not None]
        laid = {w.id for r in self.regions if r.node for w in ways_of(r.node.target) if w.layout}
        turns = _by_turns(counts)
        if len(counts) < 2 or not (turns or laid & counts.keys()):
            return []
        found = [
            {root: replace(d, way=way) if way in d.ready else d for root, d in self.found.items()}
            for way in mixed
        ]
        if turns:
            found.append({root: replace(d, way=_native(d)) for root, d in self.found.items()})
        kinds = {tuple(d.way for d in v.values()): v for v in (*reversed(found), self.found)}
        limit = (TURNS if turns else CLOSE) * _spent(self.found)
        return [v for v in kinds.values() if v is not self.found and _spent(v) <= limit]

    def graph(
        self, variant: Mapping[str, Decision], strides: Sequence[Any]
    ) -> tuple[fx.Graph, dict[str, str]]:
        """The graph with the chosen ways written out, and which candidate each op's call is to have."""
        graph, regions = again(self.rewritten)
        return graph, _expand(graph, regions, variant, strides)


def _by_turns(ways: Iterable[str | None]) -> bool:
    """Whether on a CPU some ways run on the native kernels' threads, as what an op chooses mostly does, and others on PyTorch's."""
    names = {w.partition(".")[0] for w in ways if w is not None}
    return bool(names & {"cpu", "chosen"}) and "onednn" in names


def _native(decision: Decision) -> str | None:
    """The fastest way of a region by kernels of ours, or its own where there is none."""
    paying = decision.paying
    times = {w: paying[w].after_us if w in paying else None for w in decision.ready}
    ours = {w: math.inf if us is None else us for w, us in times.items() if w.startswith("cpu.")}
    return min(ours, key=lambda way: ours[way], default=decision.way)


def _spent(variant: Mapping[str, Decision]) -> float:
    """Microseconds that the regions take by what was measured of each alone; the original's where a way did not pay."""
    rows = [d.paying.get(d.way or "") for d in variant.values()]
    plain = [d.row.before_us or 0.0 for d in variant.values()]
    return sum(
        p if r is None or r.after_us is None else r.after_us
        for r, p in zip(rows, plain, strict=True)
    )


def _rows(decisions: Iterable[Decision]) -> list[Row]:
    """One row for each kind of region, with how many there are."""
    rows = [d.row for d in decisions]
    counts = Counter(map(id, rows))
    for row in rows:
        row.count = counts[id(row)]
    return list({id(row): row for row in rows}.values())


def _expand(
    graph: fx.Graph,
    regions: Sequence[Region],
    found: Mapping[str, Decision],
    strides: Sequence[Any],
) -> dict[str, str]:
    """Write the chosen ways into the graph, whose outputs keep their `strides`; returns which candidate each op's call is to have."""
    forced, laid = {}, False
    for region in regions:
        node, way = region.node, found[region.root].way
        assert node is not None
        laid = laid or any(w.layout and w.id == way for w in ways_of(node.target))
        with graph.inserting_before(node):
            new = emit_way(graph, node.target, full(node), way)
        new.meta.update({"val": node.meta["val"], "constant": node.meta.get("constant", False)})
        new.meta["region"] = region
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        op = getattr(new.target, "fused", None)
        if way is not None and op is not None and way in op.candidates:
            forced[new.name] = way
    if laid:
        _lay(graph, strides)
    return forced


def _lay(graph: fx.Graph, strides: Sequence[Any]) -> None:
    """Hand every output out as the original does: a caller may ask for a view."""
    out = graph.output_node()
    values = tensor_tree.flat_values(out.args[0])
    for value, stride in dict(zip(values, strides, strict=True)).items():
        if isinstance(value, fx.Node) and stride is not None and value.op == "call_function":
            with graph.inserting_before(out):
                made = graph.call_function(lie, (value, stride))
            made.meta["val"] = value.meta.get("val")
            out.replace_input_with(value, made)


def lie(value: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a tensor with these strides: itself where it has them, else a copy."""
    if value.stride() == stride:
        return value
    made = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
    return made.copy_(value)


def _timed(programs: Sequence[Program], original: Original, budget_s: float) -> Program | None:
    """The fastest program, timed beside the original's own call with what guards it included; the report says whether it pays."""
    report, wrt = original.report, [t for t in programs[0].state.values() if t.requires_grad]
    with isolated(programs, original.given) as again:
        call = stepping(original, again, wrt)
        calls = {f"after {i}": call(p.serving) for i, p in enumerate(programs)}
        for program in programs:
            reason = program.capture()
            if reason is not None and program.device.type == "cuda":
                report.notes.append(f"not captured: {reason}")
        if any(p(*again()) is MISS for p in programs):
            report.reason = "the program does not fit its own example inputs"
            return None
        share, device = max(0.15, budget_s / 16), programs[0].device
        first = next(iter(calls))
        if len(calls) > 1:
            first = min(calls, key=timer.wall_samples(calls, device, share, HEATS).median)
        pair = {"before": call(original.before), first: calls[first]}
        samples = settled(pair, device, first, "before", 1.5 * share, MUST_GAIN)
    program = programs[int(first.split()[1])]
    if mutates(program.graph):
        program.capture()
    if pays_off(report, samples, first):
        report.outcome = "rewritten" if program.replay is None else "captured"
    return program


def pays_off(report: Report, samples: timer.Samples, name: str) -> bool:
    """Whether what was timed as `name` is faster than "before" by more than chance; the times go into the report."""
    report.before_us, report.after_us = samples.median("before"), samples.median(name)
    report.ratio = samples.ratio(name, "before")
    if report.ratio[0] <= MUST_GAIN and report.ratio[2] < 1:
        return True
    report.reason = "nothing pays: the original is as fast"
    return False
