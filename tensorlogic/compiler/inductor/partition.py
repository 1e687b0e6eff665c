"""What rewriting left over: runs of calls between our operations, each compiled by Inductor where that is right and faster."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ...core.rewrite_rule import example
from ...guards.errors import first_line
from ...measure import timer
from ..reporting.report import Row
from ..rewrite.precision_pass import OTHERS, PRODUCTS
from ..rewrite.rule_set import LIGHT
from ..runtime.codegen import Function
from ..runtime.program import Program
from ..trace.compiled_call import Compiled, Look
from ..trace.graph_facts import _kernels, random_call, writes
from ..tune.region_tuner import FAILURES, LEAST_GAIN, Expected, raced, stepping
from ..verify import equivalence
from . import compile_process
from .compile_process import Order, Unable

OP, NAME = "left over", "torch.inductor"
# kinds of runs that are compiled, those that take the longest first
MOST = 12
# times that a run is timed where chance could explain a gain
PATIENCE = 4
# of the time before, below which a gain is worth another look
CLEAR = 0.95
# of the whole model's time that runs of a kind must take to be worth compiling
SHARE = 0.01


@dataclass
class Run:
    """Calls of a program that lie together, and the calls of the traced graph that they stand for."""

    nodes: list[fx.Node]
    calls: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    names: dict[fx.Node, str]  # of inputs and outputs in the traced graph

    def graph(self) -> fx.Graph:
        """The traced calls alone; gives a list of the outputs."""
        graph, copies = fx.Graph(), dict[str, fx.Node]()
        for node in self.inputs:
            copies[self.names[node]] = graph.placeholder(f"given_{len(copies)}")
        for node in self.calls:
            args = fx.map_arg(node.args, lambda n: copies[n.name])
            words = fx.map_arg(node.kwargs, lambda n: copies[n.name])
            name = f"call_{len(copies)}"
            copies[node.name] = graph.create_node(node.op, node.target, args, words, name)
        graph.output([copies[self.names[n]] for n in self.outputs])
        return graph

    def function(self, owner: torch.nn.Module, forced: Mapping[str, str]) -> Function:
        """The program's own calls."""
        names = [n.name for n in self.inputs]
        return Function(self.nodes, names, list(self.outputs), {}, owner, forced)


@dataclass
class Kind:
    """Runs of the same calls on tensors that look alike; the first one's inputs stand for all."""

    runs: list[Run]
    values: list[Any]
    artifact: Path
    row: Row = field(default_factory=lambda: Row("", OP, NAME))
    made: Compiled | None = None

    @property
    def name(self) -> str:
        """By which a later process finds it."""
        return self.artifact.stem

    def order(self) -> Order:
        """What the compiling process is asked for."""
        return Order(self.runs[0].graph(), [Look.at(v) for v in self.values], self.artifact)


# Finding runs -------------------------------------------------------------------------------------


def runs(program: Program) -> list[Run]:
    """Maximal runs of what only computes and is no product; nothing between two calls of a run needs the one and feeds the other."""
    if not program.pure:
        return []
    source = {n.name: n for n in program.trace.graph.nodes}
    needed = _needed(program.graph)
    steps = dict.fromkeys(n for n in program.function.nodes if n in needed)
    stands = {_stands(n): n for n in program.graph.nodes}
    free: dict[fx.Node, list[fx.Node]] = {}  # call of the program -> calls of the traced graph
    level: dict[fx.Node, int] = {}
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    for node in steps:
        given = [i for i in node.all_input_nodes if i in steps]
        found = _free(node, source)
        if found and all(i in free or example(i) is not None for i in node.all_input_nodes):
            free[node] = found
            level[node] = max((level[i] + (i not in free) for i in given), default=0)
            parent[node] = node
            for i in given:
                if i in free and level[i] == level[node]:
                    parent[root(i)] = node
        else:
            level[node] = max((level[i] for i in given), default=0)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in free:
        groups.setdefault(root(node), []).append(node)
    made = (_run(group, free, source, stands, needed) for group in groups.values())
    return [r for r in made if r is not None]


def _needed(graph: fx.Graph) -> set[fx.Node]:
    """What outputs depend on."""
    found = {graph.output_node()}
    for node in reversed(graph.nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return found


def _stands(node: fx.Node) -> str:
    """The call of the traced graph whose value a call of the program has."""
    return node.meta["region"].root if "region" in node.meta else node.name


def _free(node: fx.Node, source: Mapping[str, fx.Node]) -> list[fx.Node]:
    """The traced calls that a call stands for, if Inductor may have them; else none."""
    region, same = node.meta.get("region"), source.get(node.name)
    if region is not None:
        names: Sequence[str] = region.calls if region.op in LIGHT else ()
    else:
        names = (node.name,) if same is not None and same.target == node.target else ()
    calls = [n for n in source.values() if n.name in names]
    return calls if all(map(_plain, calls)) else []


def _plain(node: fx.Node) -> bool:
    """True for calls of PyTorch's that only compute, and no product of matrices."""
    if node.op != "call_function" or writes(node) or random_call(node):
        return False
    if node.target is operator.getitem:
        return True
    target = node.target
    name = str(target).removeprefix("aten.").partition(".")[0]
    known = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return known and target not in PRODUCTS and not name.startswith(OTHERS)


def _run(
    group: list[fx.Node],
    free: Mapping[fx.Node, list[fx.Node]],
    source: Mapping[str, fx.Node],
    stands: Mapping[str, fx.Node],
    alive: set[fx.Node],
) -> Run | None:
    """The run of these calls; None where it computes nothing, or cannot be cut out."""
    outside = alive - set(group)
    wanted = {c for n in group for c in free[n]}
    calls = [n for n in source.values() if n in wanted]
    needed = list(dict.fromkeys(i for c in calls for i in c.all_input_nodes if i not in wanted))
    outputs = [n for n in group if any(u in outside for u in n.users)]
    if not any(map(_kernels, calls)) or not outputs:
        return None
    if any(i.name not in stands for i in needed) or any(example(n) is None for n in outputs):
        return None
    inputs = [stands[i.name] for i in needed]
    if any(example(i) is None for i in inputs):
        return None
    names = {stands[i.name]: i.name for i in needed} | {n: _stands(n) for n in outputs}
    return Run(group, calls, inputs, outputs, names)


def kinds(program: Program, artifact: Path) -> list[Kind]:
    """The program's runs by kind, with what one call of it hands to the first of each."""
    found = runs(program)
    if not found:  # a call may write, too
        return []
    wanted = {i.name for r in found for i in r.inputs}
    seen: dict[str, Look | None] = {}
    kept: dict[str, Any] = {}
    first = {_text(r): r for r in reversed(found)}
    needed = {i.name for r in first.values() for i in r.inputs}

    def notice(name: str, value: Any) -> None:
        if name in wanted:
            seen[name] = Look.at(value) if value.layout == torch.strided else None
        if name in needed:
            kept[name] = value.detach().requires_grad_(wants and value.requires_grad)

    function, trace, wants = program.function, program.trace, program.training
    known = {**program.state, **program.constants}
    given = dict(zip(trace.inputs, trace.example, strict=True))
    for name, value in (*known.items(), *given.items()):
        notice(name, value)
    noticing = Function(
        function.nodes, trace.inputs, function.outputs, known, trace.owner, function.sites.forced
    )
    noticing.notice = notice
    with torch.set_grad_enabled(wants):
        noticing.run(*trace.example)
    made: dict[str, Kind] = {}
    for run in found:
        looks = [seen[i.name] for i in run.inputs]
        if None in looks:
            continue
        text = f"{_text(run)}\n{looks}"
        if text in made:
            made[text].runs.append(run)
        elif all(i.name in kept for i in run.inputs):
            name = f"{artifact.stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
            values = [kept[i.name] for i in run.inputs]
            made[text] = Kind([run], values, artifact.with_name(f"{name}.artifact"))
    return list(made.values())


def _text(run: Run) -> str:
    graph = run.graph()
    looks = [(example(i).shape, example(i).dtype) for i in run.inputs]  # type: ignore[union-attr]
    return "\n".join([*(f"{n} {n.target} {n.args} {n.kwargs}" for n in graph.nodes), str(looks)])


# Compiling and choosing ---------------------------------------------------------------------------


def worthwhile(program: Program, artifact: Path, whole_us: float) -> list[Kind]:
    """Kinds that take long enough, the longest first."""
    found = []
    for kind in kinds(program, artifact):
        call = _before(kind, program)
        call()
        us = min(timer.once(call, program.device) for _ in range(3)) * len(kind.runs)
        if us >= SHARE * whole_us:
            found.append((us, kind))
    return [kind for _, kind in sorted(found, key=lambda pair: -pair[0])[:MOST]]


def _own(kind: Kind, program: Program) -> Function:
    return kind.runs[0].function(program.trace.owner, program.function.sites.forced)


def _lies_alike(made: Sequence[Any], own: Sequence[Any]) -> bool:
    """Whether tensors have the strides of others, but for dimensions that hold one element or none."""

    def strides(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.numel():
            return None
        return [s for n, s in zip(value.shape, value.stride(), strict=True) if n > 1]

    return [*map(strides, made)] == [*map(strides, own)]


def _before(kind: Kind, program: Program) -> Callable[[], Any]:
    function = _own(kind, program)
    return _call(lambda *given: function.run(*given), kind, program.training)


def _call(run: Callable[..., Any], kind: Kind, training: bool) -> Callable[[], Any]:
    return stepping(run, kind.values) if training else lambda: run(*kind.values)


def judge(kind: Kind, program: Program, compiled: Callable[[Path], Any]) -> None:
    """Check and time what was made of a kind beside the program's own calls; its row says what came of it."""
    run, row = kind.runs[0], kind.row
    row.region, row.count = run.names[run.outputs[-1]], len(kind.runs)
    try:
        made = Compiled(compiled(kind.artifact), False)
        names = [run.names[i] for i in run.inputs]
        outputs = [run.names[o] for o in run.outputs]
        expected = Expected(run.calls, names, outputs, kind.values, program.trace.owner)
        given = list(made(*kind.values))
        verdict = equivalence.compare(given, expected.plain, expected.wide)
        row.error = verdict.error if verdict else None
        if not verdict:
            raise Unable(verdict.reason or "")
        if not _lies_alike(given, _own(kind, program).run(*kind.values)):
            raise Unable("its results lie in memory otherwise than what follows was made for")
        after = _call(made, kind, program.training)
        samples = _timed(_before(kind, program), after, program.device)
    except (Unable, *FAILURES) as problem:
        row.refused = str(problem) if isinstance(problem, Unable) else first_line(problem)
        return
    row.before_us, row.after_us = samples.median("before"), samples.median("inductor")
    row.ratio = samples.ratio("inductor", "before")
    if row.ratio[0] <= LEAST_GAIN and row.ratio[2] < 1:
        kind.made = made
    else:
        row.refused = "does not pay"


def _timed(
    before: Callable[[], Any], after: Callable[[], Any], device: torch.device
) -> timer.Samples:
    """Samples of both, more of them where the machine is too busy to tell which is faster."""
    before()
    found = timer.Samples({"before": [], "inductor": []})
    for _ in range(PATIENCE):
        more = raced({"before": [before], "inductor": [after]}, device)["inductor"]
        for name, values in found.values.items():
            values += more.values[name]
        ratio, low, high = found.ratio("inductor", "before")
        if not (low < 1 <= high and ratio < CLEAR):
            break
    return found


def woven(program: Program, chosen: Sequence[Kind]) -> Program:
    """The program with what Inductor has made in the place of its runs; everything else in its order."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inside = {n: (r, k) for k in chosen for r in k.runs for n in r.nodes}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies and node in inside:
            run, kind = inside[node]
            given = tuple(copied(i) for i in run.inputs)
            name = f"left_over_{node.name}"
            made = graph.create_node("call_function", kind.made, given, {}, name)  # type: ignore[arg-type]
            for i, out in enumerate(run.outputs):
                taken = graph.create_node(
                    "call_function", operator.getitem, (made, i), {}, out.name
                )
                taken.meta = {"val": out.meta.get("val"), "constant": False}
                copies[out] = taken
        elif node not in copies:
            for used in node.all_input_nodes:
                copied(used)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    needed = _needed(program.graph)
    for node in program.graph.nodes:
        if node.op == "placeholder" or (node in needed and node not in inside):
            copied(node)
    graph.eliminate_dead_code()  # what only prepared the calls that are gone
    forced = program.function.sites.forced
    made = Program(program.trace, graph, forced, program.training, program.model)
    made.ways, made.left_over = program.ways, [k.name for k in chosen]
    return made


def again(program: Program, names: Sequence[str], artifact: Path) -> Program:
    """The program with what an earlier process has kept. Raises Unable: that is not there any more."""
    chosen = [k for k in kinds(program, artifact) if k.name in names]
    if {k.name for k in chosen} != set(names):
        raise Unable("the runs are others by now")
    for kind in chosen:
        kind.made = Compiled(compile_process.load(kind.artifact), False)
    return woven(program, chosen)
