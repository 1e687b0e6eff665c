"""Models that torch.export cannot trace: Dynamo cuts their own code into graphs, and each is served by a program of its own."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..core.tolerance import Verdict
from ..cuda_graphs.captured_graph import FAILURES
from ..guards import tensor_tree
from ..guards.errors import MISS, Untraceable, first_line
from ..guards.global_state import plain_modes
from ..guards.model_guard import Hooks
from ..measure import timer
from ..system.thread_output import capture_output
from .dynamo_backend import rewritten
from .inductor.background_compile import Later, worthwhile
from .inductor.comparison import settled
from .program_search import MUST_GAIN, best, pays_off
from .reporting.report import Report
from .runtime.program import Program
from .trace import graph_facts
from .trace.exporter import prepare, witness
from .trace.model_copies import fresh, sharing, unwritten
from .trace.object_flattening import picking
from .trace.traced_graph import Trace, counters
from .verify import equivalence
from .verify.call_effects import outcome, random_state, widely
from .verify.gradients import opaque
from .verify.whole_model import Given, Original

# at a graph's own calls, before a program is made for it in the next: a first one is no measure
LOOKS = 2
# times the budget that graphs may take beyond it, which are merely captured then
OVER = 2
# graphs of one model; with more, the Python between them is what takes the time
LIMIT = 32


class Piece:
    """One of Dynamo's graphs, which may serve several layers of one form: for the parameters of each a program where one was
    right and faster on the inputs of the first calls, else the graph as it was."""

    def __init__(self, graph: fx.GraphModule, owner: Pieces) -> None:
        self.plain, self.owner = graph.forward, owner
        self.graph = graph
        self.traced: fx.GraphModule | None = None
        self.fixed: list[int] | None = None  # which inputs are parameters and buffers
        self.given: list[int] = []
        self.weights = self.inputs = picking(())
        # by the identities of those
        self.programs: dict[tuple[int, ...], Program | Later | None] = {}
        self.calls: dict[tuple[int, ...], int] = {}

    def __call__(self, *flat: Any) -> Any:
        """The graph's outputs."""
        if self.fixed is None:
            known = self.owner.known()
            self.fixed = [i for i, v in enumerate(flat) if id(v) in known]
            self.given = [i for i, v in enumerate(flat) if id(v) not in known]
            self.weights, self.inputs = picking(self.fixed), picking(self.given)
        ids = tuple(map(id, self.weights(flat)))
        if ids not in self.programs and self.owner.making:
            calls = self.calls[ids] = self.calls.get(ids, 0) + 1
            if calls <= LOOKS:
                return self._timed(ids, flat)
            self.programs[ids] = self._program(ids, flat)
        program = self.programs.get(ids)
        if program is not None:
            out = program(self.inputs(flat), {})
            if out is not MISS:
                return out
        return self.plain(*flat)

    def _timed(self, ids: tuple[int, ...], flat: Sequence[Any]) -> Any:
        """The graph's outputs; how long they take tells which share of the budget is theirs."""
        begin = time.perf_counter()
        out = self.plain(*flat)
        for device in {v.device for v in flat if isinstance(v, Tensor)}:
            timer.synchronize(device)
        self.owner.waiting[id(self), ids] = time.perf_counter() - begin
        return out

    def _program(self, ids: tuple[int, ...], flat: Sequence[Any]) -> Program | None:
        """What serves calls like this one from now on, if time is left and it pays."""
        owner, report = self.owner, Report()
        share = owner.share((id(self), ids))
        alike = any(p is not None for p in self.programs.values())  # what it chose is known
        if not (share or alike or owner.left > -OVER * owner.original.budget_s) or not any(
            isinstance(v, Tensor) for v in flat
        ):
            return None
        merged = list(flat)

        def before(*given: Any) -> Any:
            for i, v in zip(self.given, given, strict=True):
                merged[i] = v
            return self.plain(*merged)

        program = None
        try:
            traced = self._trace(flat)
            begin = time.perf_counter()
            given: Given = tuple(traced.example), {}
            nothing = nn.Module()  # Dynamo's own guards watch the model
            part = replace(owner.original, model=nothing, before=before, given=given)
            part.report, part.budget_s = report, share
            program = best(traced, part)
            owner.left -= time.perf_counter() - begin
        except (Untraceable, *FAILURES) as problem:
            report.reason = first_line(problem)
        owner.reports.append(report)
        return program

    def _trace(self, flat: Sequence[Any]) -> Trace:
        """The graph in ATen calls, with the parameters and buffers among its inputs as its state; traced once."""
        known, model = self.owner.known(), self.owner.model
        assert self.fixed is not None
        if self.traced is None:
            if name := opaque(self.graph):
                raise Untraceable(f"a graph with gradients of its own ({name})")
            with torch.set_grad_enabled(self.owner.original.training):
                self.traced = make_fx(
                    self.graph, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True
                )(*flat)
        graph = copy.deepcopy(self.traced.graph)
        places = [n for n in graph.nodes if n.op == "placeholder"]
        out = graph.output_node().args[0]
        if not isinstance(out, (tuple, list)):
            raise Untraceable("a graph with one bare output")
        state = {places[i].name: (known[id(flat[i])], flat[i]) for i in self.fixed}
        counted = counters(state, dict(model.named_buffers(remove_duplicate=False)))
        prepare(graph, state, counted)
        example = [flat[i] for i in self.given]
        return Trace(
            graph,
            self.traced,
            state,
            [places[i].name for i in self.given],
            pytree.tree_flatten((tuple(example), {}))[1],
            pytree.tree_flatten(tuple(out))[1],
            example,
            counted,
        )


class Pieces:
    """A model's forward as Dynamo's graphs and the Python between them; code that it has not seen runs as it is."""

    def __init__(self, original: Original, dynamic: bool) -> None:
        self.model = original.model
        # holds neither the caller's inputs nor the caller's model
        self.original = replace(original, before=self.model, given=((), {}))
        self.left = original.budget_s  # seconds for making programs
        self.making = True  # programs, while `pieces` calls the model
        self.waiting: dict[Any, float] = {}  # seconds of graphs for which there is none yet
        self.reports: list[Report] = []
        self.pieces: list[Piece] = []
        self.symbolic: list[fx.GraphModule] = []  # graphs whose sizes may vary
        self.graphs = 0
        self.hooks = Hooks(self.model).holds  # which Dynamo's guards leave out
        forward = _own(getattr(type(self.model).__mro__[2], "forward", None))
        method = MethodType(forward, self.model)
        self.first = torch.compile(method, backend=_weakly(self), dynamic=dynamic)
        self.later = torch._dynamo.run(method)  # with what is compiled; never compiles

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        if any(isinstance(v, torch.SymInt) for v in inputs):
            self.symbolic.append(rewritten(graph, inputs))
            return self.symbolic[-1]
        self.pieces.append(Piece(graph, self))
        known = weakref.ref(self.pieces[-1])

        def call(*flat: Any) -> Any:
            piece = known()
            assert piece is not None  # whoever runs this code holds the model, and it the pieces
            return piece(*flat)

        return call

    def known(self) -> dict[int, str]:
        """The model's parameters and buffers by identity."""
        return {
            id(t): name
            for named in (self.model.named_buffers, self.model.named_parameters)
            for name, t in named(remove_duplicate=False)
        }

    def share(self, key: Any) -> float:
        """Seconds for one graph: of what is left as much as it takes of the time of all that wait."""
        seconds = self.waiting.pop(key, 0.0)
        return max(0.0, self.left) * seconds / max(seconds + sum(self.waiting.values()), 1e-9)

    @property
    def programs(self) -> list[Program]:
        """The programs of all graphs."""
        found = [p for piece in self.pieces for p in piece.programs.values() if p is not None]
        return [p.program if isinstance(p, Later) else p for p in found]

    def compete_later(self, report: Report) -> None:
        """Inductor may compete in the background with each program; `report` is told."""
        known, reports = weakref.ref(self), self.reports

        def decided(later: Later, program: Program) -> None:
            owner = known()
            for piece in owner.pieces if owner is not None else ():
                piece.programs = {
                    i: program if p is later else p for i, p in piece.programs.items()
                }
            report.rows = [row for r in reports for row in r.rows]
            notes = (n for n in later.contest.original.report.notes if n not in report.notes)
            report.notes.extend(notes)

        for piece in self.pieces:
            for ids, program in [*piece.programs.items()]:
                if isinstance(program, Program) and worthwhile(program.contest):
                    piece.programs[ids] = Later(program, program.contest, decided)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's output, or `MISS`."""
        return self.later(*args, **kwargs) if plain_modes() and self.hooks() else MISS

    def serving(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        return self(args, kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes held besides the model."""
        return sum(p.nbytes for p in self.programs)

    @property
    def captured(self) -> bool:
        """Whether any graph is replayed as a CUDA graph."""
        return any(p.replay is not None for p in self.programs)


def _weakly(made: Pieces) -> Callable[..., Any]:
    """The backend that Dynamo keeps beside compiled code, where Python's collector cannot look: it shall keep no model alive."""
    known = weakref.ref(made)

    def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        owner = known()
        assert owner is not None
        return owner._compile(graph, inputs)

    return compiled


def _own(forward: Any) -> Any:
    """The function with a code object of its own, by which Dynamo keeps what it compiles apart."""
    if not isinstance(forward, FunctionType):
        raise Untraceable(f"forward is {type(forward).__name__}, not a Python function")
    own = FunctionType(
        forward.__code__.replace(),
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return own


def pieces(original: Original, dynamic: bool = False) -> Pieces | None:
    """The model in pieces if that is right and faster; else None, with the reason in the report.

    Raises:
        Untraceable: Dynamo does not know the model's code.
    """
    clone, model, (args, kwargs) = original.model, original.before, original.given
    training, report = original.training, original.report
    assert isinstance(model, nn.Module)
    made = Pieces(original, dynamic)
    with witness(), unwritten(clone):
        twin = sharing(model, buffers=False)
        before = random_state()
        try:
            plain = outcome(twin, twin, training, args, kwargs)
        except FAILURES as problem:  # gradients that the model's own code does not allow
            raise Untraceable(f"the model's gradients: {first_line(problem)}") from problem
        drawn = random_state() != before
        try:
            for _ in range(LOOKS + 1):
                ours = outcome(made.first, clone, training, args, kwargs)
        except Exception as problem:  # Dynamo runs the user's own code, which may raise anything
            raise Untraceable(f"Dynamo: {first_line(problem)}") from problem
        made.making = False
        wide = "" if drawn else widely(model, training, args, kwargs)
    report.rows = [row for r in made.reports for row in r.rows]
    report.notes.append(f"{made.graphs} graphs, cut by Dynamo")
    if not 0 < made.graphs <= LIMIT:
        report.reason = f"Dynamo cuts the model into {made.graphs} graphs"
        return None
    # what draws random numbers is checked graph by graph, with nothing dropped out
    if not drawn:
        if isinstance(wide, str):
            verdict = Verdict(f"no way to check it ({wide})", 0.0)
        else:
            verdict = equivalence.compare(ours, plain, wide)
        report.error = verdict.error
        if not verdict or verdict.error > equivalence.GROWTH:
            why = verdict.reason or f"error {verdict.error:.2f} times the original's"
            report.reason = f"the model in pieces is not right: {why}"
            return None
    return made if _faster(made, twin, original) else None


def _faster(made: Pieces, twin: nn.Module, original: Original) -> bool:
    """Time both on the example; where a call changes its inputs, each call has its own, on both sides."""
    (args, kwargs), report = original.given, original.report
    given = fresh(args, kwargs)
    wrt = [p for p in made.model.parameters() if p.requires_grad]

    def changes() -> bool:
        before = [(id(t), t._version) for t in tensor_tree.tensors_in(given)]
        twin(*given[0], **given[1])
        return before != [(id(t), t._version) for t in tensor_tree.tensors_in(given)]

    def call(model: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            a, k = fresh(args, kwargs) if changing else given
            return graph_facts.step(model(*a, **k), original.training, wrt)

        return run

    tensors = [*made.model.parameters(), *tensor_tree.tensors_in(given)]
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    with unwritten(made.model), capture_output("stdout"):
        changing = changes()
        given = fresh(args, kwargs) if changing else given
        pair = {"before": call(twin), "after": call(made.serving)}
        share = max(0.3, original.budget_s / 8)
        samples = settled(pair, device, "after", "before", share, MUST_GAIN)
    if not pays_off(report, samples, "after"):
        return False
    report.outcome = "captured" if made.captured else "rewritten"
    return True
