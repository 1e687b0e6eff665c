"""optimize: a model traced, rewritten, checked, timed and, where it pays, replaced; otherwise given back as it was."""

from __future__ import annotations

import contextlib
import copy
import io
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
from .patterns import RULES
from .regions import FAILURES, PLAIN, Decision, Judge, emit_way, full
from .report import Report, Row
from .rewrite import Region, rewrite
from .serve import MISS, Program, device_of, mutates
from .trace import Trace, Untraceable, constants, first_line, trace, writes
from .widen import pays, widened

BUDGET_S = 2.0  # seconds for measuring where the caller gives no other budget
ROUNDS = 4  # times that regions are formed again after some were undone
MUST_GAIN = 0.98  # of the original's time that the whole may take


class Optimized(nn.Module):
    """Mixed into the model's own class: forward by the program where it may serve, by the model's own code elsewhere."""

    _program: Program | None
    report: Report

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        program = self.__dict__["_program"]
        out = MISS if program is None else program(args, kwargs)
        return super().forward(*args, **kwargs) if out is MISS else out

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is copied or saved is the model; a program belongs to one process and one set of parameters."""
        plain: nn.Module = nn.Module.__new__(type(self).__mro__[2])
        plain.__dict__.update(
            {k: v for k, v in self.__dict__.items() if k not in ("_program", "report")}
        )
        return _same, (plain,)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.__reduce_ex__(4)[1][0], memo)


def _same(model: nn.Module) -> nn.Module:
    return model


def optimize(
    model: nn.Module,
    example_inputs: Any,
    *,
    training: bool = False,
    budget_s: float | None = None,
) -> nn.Module:
    """The same model, faster where that can be had: rewritten into fused calls, checked, timed and captured; never slower.

    Args:
        model: a torch.nn.Module, in the mode (train or eval) in which it will be called. It is not changed.
        example_inputs: a tuple of its positional arguments, a mapping of keyword ones, or a single tensor; of the
            shapes, dtypes and devices that matter. Other inputs are served by the model's own code.
        training: keep gradients. Without it, calls that record gradients are served by the model's own code.
        budget_s: seconds that measuring may take beside tracing (2 by default).

    Returns:
        A module of the model's own class with the same parameters, buffers and `state_dict`, and a `report` of what was
        replaced, timed, refused and why. Where nothing pays, or where the model cannot be traced, `model` itself, with
        its `report`.

    Raises:
        TypeError: model is no module. RuntimeError: training under torch.inference_mode, or during a CUDA graph capture.
        ValueError: the model itself fails on the example inputs; the cause is its own error.

    Example:
        >>> import torch, tensorlogic
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
        >>> fast = tensorlogic.optimize(model, torch.randn(4, 8))
        >>> fast.report.outcome in ("original", "rewritten", "captured")
        True
    """
    args, kwargs = _arguments(model, example_inputs, training)
    begin = time.perf_counter()
    report = Report()
    budget = BUDGET_S if budget_s is None else float(budget_s)
    try:
        served = _program(model, args, kwargs, training, budget, report)
    except Untraceable as problem:
        if problem.__cause__ is not None:  # was it tracing that failed, or the call itself?
            _must_run(model, args, kwargs)
        report.reason, served = str(problem), None
    report.seconds = time.perf_counter() - begin
    if served is None:
        model.__dict__["report"] = report
        return model
    report.bytes = served.nbytes
    fast = served.model
    fast.__dict__["_program"], fast.__dict__["report"] = served, report
    return fast


def _arguments(model: Any, given: Any, training: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize: model is {type(model).__name__}; a torch.nn.Module is required")
    if training and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "optimize: training=True under torch.inference_mode(), which records no gradients; leave that block first"
        )
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "optimize: a CUDA graph is being captured; call optimize before the capture"
        )
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(given), {}
    raise TypeError(
        f"optimize: example_inputs is {type(given).__name__}; a tuple of the model's arguments, a mapping of keyword "
        f"arguments or a tensor is required"
    )


def _must_run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise where not tracing but the call itself is what fails."""
    try:
        with torch.no_grad(), _undisturbed(), contextlib.redirect_stdout(io.StringIO()):
            copy.deepcopy(model)(*copy.deepcopy(args), **copy.deepcopy(dict(kwargs)))
    except Exception as problem:  # the model's own code may raise anything
        raise ValueError(
            f"optimize: the model fails on the example inputs ({first_line(problem)}); give inputs of the shapes, "
            f"dtypes and device that it takes"
        ) from problem


def sharing(model: nn.Module, buffers: bool = True) -> nn.Module:
    """A copy of the module tree with the same parameters and, if asked, the same buffers."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    if buffers:
        memo |= {id(b): b for b in model.buffers()}
    made = copy.deepcopy(model, memo)
    return made


def _unfit(model: nn.Module) -> str | None:
    """Why a model is not even traced."""
    if isinstance(model, Optimized):
        return "the model is optimised already"
    if isinstance(model, (torch.jit.ScriptModule, fx.GraphModule)) and isinstance(
        model, torch.jit.ScriptModule
    ):
        return "TorchScript has an executor of its own"
    if hasattr(model, "_orig_mod"):
        return "the model is compiled by torch.compile already"
    for path, module in model.named_modules():
        hooked = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
        if path and any(hooked):
            return f"hooks on {path} would not run in a graph"
        if any(torch.nn.parameter.is_lazy(p) for p in module._parameters.values()):
            return f"{path or 'the model'} is lazy: call it once before"
    return None


def _program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    training: bool,
    budget_s: float,
    report: Report,
) -> Program | None:
    reason = _unfit(model)
    if reason:
        raise Untraceable(reason)
    try:
        clone = sharing(model)
    except Exception as problem:  # a module may hold what cannot be copied
        raise Untraceable(f"the module cannot be copied: {first_line(problem)}") from problem
    with _undisturbed(), torch.inference_mode(False), torch.set_grad_enabled(training):
        traced = trace(clone, args, kwargs)
        _as_class(clone)
        if training:
            constants(traced.graph, set())
        try:
            return _best(traced, clone, model, training, budget_s, report, (args, dict(kwargs)))
        except FAILURES as problem:  # what PyTorch raises where a graph cannot run
            raise Untraceable(f"the graph does not run: {first_line(problem)}") from problem


def _undisturbed() -> Any:
    """The default generators of the CPU and the current GPU are as before afterwards."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])


def _as_class(clone: nn.Module) -> None:
    """Give the copy a class of its own: the model's, with our forward before it."""
    cls = type(clone)
    try:
        clone.__class__ = type(
            f"Optimized{cls.__name__}", (Optimized, cls), {"__module__": cls.__module__}
        )
    except TypeError as problem:
        raise Untraceable(f"{cls.__name__} cannot be extended: {problem}") from problem
    clone.__dict__["_program"] = None


def _best(
    traced: Trace,
    clone: nn.Module,
    model: nn.Module,
    training: bool,
    budget_s: float,
    report: Report,
    given: tuple[tuple[Any, ...], dict[str, Any]],
) -> Program | None:
    """The first of: rewritten, merely traced, that is right and faster than the original."""
    device = device_of(traced)
    deadline = time.perf_counter() + budget_s
    expected = Whole(traced, training)
    twin = sharing(model, buffers=False)
    source = widened(traced) if not training and pays(traced, device) else traced
    banned: set[str] = set()
    undone: list[Row] = []
    judge = Judge(source, device, training, deadline)
    for attempt in range(4):
        plan = Plan(source, judge, banned)
        program, verdict = _right(plan.variants[0], plan, clone, expected)
        report.rows, report.error = [*plan.rows, *undone], verdict.error
        if program is not None:
            others = [_right(v, plan, clone, expected)[0] for v in plan.variants[1:]]
            found = [program, *(p for p in others if p is not None)]
            return _timed(found, twin, given, training, budget_s, report)
        why = verdict.reason or f"error {verdict.error:.2f} times the original's"
        standing = sorted(
            (r for r in report.rows if not r.refused), key=lambda r: -(r.error or 0.0)
        )
        if not standing or attempt == 3:
            break
        for row in standing[: max(1, len(standing) // 3)]:
            banned |= {f"{r.op}@{r.root}" for r in plan.regions if plan.found[r.root].row is row}
            undone.append(replace(row, refused=f"the whole model's error grew: {why}"))
    report.reason, report.error = f"the rewritten model is not right: {why}", None
    return None


def _right(
    variant: dict[str, Decision], plan: Plan, clone: nn.Module, expected: Whole
) -> tuple[Program | None, Verdict]:
    """The program of one variant, if the whole model's error did not grow."""
    graph, forced = plan.graph(variant)
    program = Program(plan.traced, graph, forced, plan.training, clone)
    verdict = expected.judge(program)
    return (program if verdict and verdict.error <= check.GROWTH else None), verdict


class Plan:
    """Which regions stand and by what: undone are those that do not pay, until everything that stands does."""

    def __init__(self, traced: Trace, judge: Judge, banned: set[str]) -> None:
        self.traced, self.training, self.banned = traced, judge.training, banned
        training = judge.training
        self.rules = [r for r in RULES if r.training or not training]
        judge.writes = any(n.op == "call_function" and writes(n) for n in traced.graph.nodes)
        values = expected_inputs(traced)
        refused: list[Decision] = []
        for _ in range(ROUNDS):
            self.regions = self._rewritten()[1]
            self.found = judge.decide(self.regions, values)
            bad = [r for r in self.regions if self.found[r.root].way is None]
            refused += [self.found[r.root] for r in bad]
            if not bad:
                break
            banned |= {f"{r.op}@{r.root}" for r in bad}
        else:
            self.regions = self._rewritten()[1]
            self.found = {r.root: self.found.get(r.root) or Decision(PLAIN) for r in self.regions}
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
        graph, regions = self._rewritten()
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
            new = emit_way(graph, node.target, full(node, tuple(node.args)), way)
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
        seeds = [
            torch.cos(torch.arange(o.numel(), device=o.device, dtype=torch.float32))
            .reshape(o.shape)
            .to(o.dtype)
            for o in flat
        ]
        grads = torch.autograd.grad(flat, wrt, seeds, allow_unused=True)
        return (outs, [g for g in grads if g is not None])

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
    twin: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    training: bool,
    budget_s: float,
    report: Report,
) -> Program | None:
    """The fastest program if it beats the original's own call, with what guards it included."""
    args, kwargs = given
    live = dict(programs[0].state)
    if mutates(programs[0].graph):
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), given)
        copies = {n: t.detach().clone() for n, t in live.items() if not t.requires_grad}
        for program in programs:
            program.replace_state(copies)

    def call(model: Any) -> Callable[[], Any]:
        return lambda: _step(model(*args, **kwargs), training, live)

    calls = {f"after {i}": call(p.serving) for i, p in enumerate(programs)}
    for program in programs:
        reason = program.capture()
        if reason is not None and program.device.type == "cuda":
            report.notes.append(f"not captured: {reason}")
    if any(p(args, kwargs) is MISS for p in programs):
        report.reason = "the program does not fit its own example inputs"
        return None
    samples = measure.wall_samples(
        {"before": call(twin), **calls},
        programs[0].device,
        max(0.15, budget_s / 16) * (1 + len(calls)),
    )
    best = min(calls, key=samples.median)
    program = programs[int(best.split()[1])]
    if mutates(program.graph):
        program.replace_state(live)
        program.capture()
    report.before_us, report.after_us = samples.median("before"), samples.median(best)
    report.ratio = samples.ratio(best, "before")
    if report.ratio[0] > MUST_GAIN or report.ratio[2] >= 1:
        report.reason = "nothing pays: the original is as fast"
        return None
    report.outcome = "rewritten" if program.replay is None else "captured"
    return program


def _step(out: Any, training: bool, state: Mapping[str, Any]) -> Any:
    """Forward alone, or with the backward pass that training would add; no `.grad` is touched."""
    flat = [o for o in check.flat_values(_leaves(out)) if isinstance(o, Tensor) and o.requires_grad]
    if not training or not flat:
        return out
    wrt = [t for t in state.values() if t.requires_grad]
    return torch.autograd.grad(flat, wrt, [torch.ones_like(o) for o in flat], allow_unused=True)


def _leaves(out: Any) -> list[Any]:
    return pytree.tree_leaves(out)
