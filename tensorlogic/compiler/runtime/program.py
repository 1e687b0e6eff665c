"""A program: one graph compiled for one kind of input, with the guards under which it may serve, and its constants kept fresh."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...core import policy, weight_cache
from ...cuda_graphs.capture_streams import warm
from ...cuda_graphs.captured_graph import FAILURES, Tape, cause, heal
from ...cuda_graphs.fast_replay import Way, Words, leaves, short
from ...cuda_graphs.replay import GradientReplay, Replay
from ...guards.errors import MISS
from ...guards.global_state import autocast, plain_modes, precisions
from ...guards.model_guard import Guard, Kept, Watch, still
from ...guards.tensor_tree import storage
from ...guards.weight_fingerprint import Samples
from ...system import process
from ..trace.compiled_call import Compiled
from ..trace.graph_facts import device_of, mutates, random_call, step
from ..trace.traced_graph import Trace
from .call_signature import Form
from .codegen import Function, ahead
from .parallel_branches import Section, streams

VERSION, WANTS = attrgetter("_version"), attrgetter("requires_grad")
# calls in a row that met a changed model until looks at it grow rare
PATIENCE = 8
REST = 64  # calls between two looks, at most
_REFRESHING = threading.RLock()
process.renew_after_fork(globals(), _REFRESHING=threading.RLock)


class Program:
    """Calls of a graph for inputs like the example, `MISS` for all others; never a stale result."""

    def __init__(
        self,
        trace: Trace,
        graph: fx.Graph,
        forced: Mapping[str, str],
        training: bool,
        model: nn.Module,
    ) -> None:
        self.trace, self.graph, self.training, self.model = trace, graph, training, model
        self.device = device_of(trace)
        self.state = {name: tensor for name, (_, tensor) in trace.state.items()}
        given = {*graph.output_node().all_input_nodes}  # what a caller is given is the caller's
        places = {storage(n) for n in given} - {None}
        for node in graph.nodes:
            steady = all(n.meta.get("constant", False) for n in node.all_input_nodes)
            theirs = node in given or storage(node) in places
            if node.op == "call_function" and (theirs or not steady):
                node.meta["constant"] = False
        self.constants, sources = ahead(graph, self.state)
        names = sorted({s for read in sources.values() for s in read})
        read = [self.state[s] for s in names] + [c for s, c in trace.counters.items() if s in names]
        self.watched = list({id(t): t for t in read}.values())
        self.stamp = self._stamp()
        self.samples = Samples([*self.watched, *(t for t in self.state.values() if t.dim() > 1)])
        nodes = (n for n in graph.nodes if n.op not in ("placeholder", "output"))
        calls = [n for n in nodes if not n.meta.get("constant", False)]
        out, known = graph.output_node().args[0], {**self.state, **self.constants}
        self.function = Function(calls, trace.inputs, out, known, trace.owner, forced)
        self.made = any(isinstance(n.target, Compiled) for n in graph.nodes)  # by Inductor
        self.guard = Guard(trace.example, training)
        self.watch = Watch(model, () if trace.objects is None else trace.objects.kinds)
        self.autocast, self.force = autocast(), policy.current().force
        self.asked = trace.asked
        self.asks = None if trace.asked is None else trace.asked.holds
        self.precisions = precisions() if self.device.type == "cuda" else None
        self.form = Form(model, *pytree.tree_unflatten(trace.example, trace.in_spec))
        self.leaves = trace.in_spec == pytree.tree_flatten((tuple(trace.example), {}))[1]
        first = trace.example[0] if self.leaves and trace.example else None
        self.first = first.shape if isinstance(first, Tensor) else None
        self.single = trace.out_spec.is_leaf()
        self.ways: Mapping[str, str | None] = {}  # of its regions, each by its last call
        self.sections: list[Section] = []  # recorded on streams of their own
        self.contest: Any = None  # in which Inductor may still beat it
        self.refused = 0  # calls in a row that met a changed model
        self.resting = 0  # calls that are not to look
        # what it does not serve is served by others, so that it may rest
        self.patient = True
        self.replay: Any = None
        # to the replay, for calls that look like the last one, and to that for calls by keyword
        self.way: tuple[Way, Words | None] | None = None
        self.held = list({id(t): t for t in self.state.values()}.values())
        self.function.wanted = self.wanted = self._wanted(trace.example, True)
        fixed = self.held if self.made else self.watched  # no gradient reaches these
        self.fixed = [t for t in fixed if not t.requires_grad] if training else []
        self.kept = Kept(self.held)
        self.pointers: list[int] = []
        self.alive: list[Tensor] = []  # memory that a graph reads, even where its owner moves on
        self.pure = not mutates(graph) and not any(random_call(n) for n in calls)
        self.hands_out_state = _hands_out_state(graph)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's output, or `MISS`."""
        quick = self.way
        if quick is not None:
            way, words = quick
            if words is not None:
                out = words(args, kwargs)
            elif kwargs:
                out = MISS
            else:
                out = way(*args)
            if out is not MISS:
                return out
        if self.resting:
            self.resting -= 1
            return MISS
        if not plain_modes():  # who watches shall see no questions of ours
            return MISS
        if self.first is not None and args:  # another batch, say, is soon told
            x = args[0]
            if type(x) is Tensor and not x.is_nested and x.shape != self.first:
                return MISS
        flat: Sequence[Any] = args
        if kwargs or not self.leaves or len(args) != len(self.trace.inputs):
            flat, spec = pytree.tree_flatten((args, dict(kwargs)))
            if spec != self.trace.in_spec:
                same = self.form.of(args, kwargs)
                if same is None:
                    return MISS
                flat, spec = pytree.tree_flatten(same)
                if spec != self.trace.in_spec:
                    return MISS
        if len(flat) != len(self.trace.inputs) or self._recording():
            return MISS
        if not self.guard.holds(flat) or not self._context():
            return MISS
        if self.asked is not None and not self.asked.alike(flat):
            return MISS
        out = self._checked(flat)
        if out is MISS:
            return MISS
        if leaves((*args, *kwargs.values()), flat):
            quick = self.way
            if quick is None:
                self._shorten(args, kwargs)
            elif kwargs or quick[1] is not None:  # in another form than before
                self.way = quick[0], Words(quick[0], args, kwargs)
        return out[0] if self.single else pytree.tree_unflatten(list(out), self.trace.out_spec)

    def _shorten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Later calls like this one launch at once and look whether all is as it was while the device works."""
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        every = len(tensors) == len(self.trace.inputs)
        recording = torch.is_grad_enabled() and not self.training
        replay = self.replay
        if replay is None or recording or self.autocast is not None:
            return
        if self.asked is not None and self.asked.looks:
            return
        if self.training and not every:  # a replay with gradients takes all that is given
            return
        if not self._reaches(tensors):
            return
        steady = self._steady(replay)
        before, after = (None, steady) if self.pure else (steady, None)
        way = short(replay, tensors, self.trace.out_spec, before, after)
        if way is not None:
            self.way = way, Words(way, args, kwargs) if kwargs or not every else None

    def _steady(self, replay: Any) -> Callable[[], bool]:
        """What holds while model, parameters and constants are as they were when `replay` was recorded."""
        holds, kept, watched = self.watch.check(), self.kept.holds, self.watched
        now, where = self._where, self.pointers
        versions = [*map(VERSION, watched)]
        same = still(self.held, where, watched, versions)
        asks = self.asks
        if same is not None:
            if asks is None:
                return lambda: self.replay is replay and same() and holds()
            return lambda: self.replay is replay and same() and holds() and asks()

        def steady() -> bool:
            return (
                self.replay is replay
                and [*map(VERSION, watched)] == versions
                and now() == where
                and kept()
                and holds()
                and (asks is None or asks())
            )

        return steady

    def _checked(self, flat: Sequence[Any]) -> Any:
        """Look first, then run."""
        if not self.watch.holds() or not self.kept.holds():
            self.way = None
            self.refused += 1
            rests = self.patient and self.refused > PATIENCE
            self.resting = min(self.refused, REST) if rests else 0
            return MISS
        self.refused = 0
        capturing = _capturing(self.device)
        if capturing and self.watched:  # somebody's graph would keep what was computed of weights
            return MISS
        if self._stale():
            with _REFRESHING:  # others wait for the one that came first
                if self._stale():
                    self.refresh()
        replay = self.replay
        if replay is not None and self._where() != self.pointers:
            replay = self.replay = self.way = None  # parameters lie elsewhere now
            self.alive = []
        apart = self.pure or not _share_memory(flat)  # a graph's own copies of two would not
        if replay is not None and apart and self._reaches(flat) and not capturing:
            out = replay(flat)
            if out is not None:
                return out
        if not self.training:
            return self.function.run(*flat)
        recording = torch.is_grad_enabled()
        if recording and (any(map(WANTS, self.fixed)) or (self.made and not self._reaches(flat))):
            return MISS
        return self.function.of(self._wanted(flat, recording)).run(*flat)

    def _wanted(self, flat: Sequence[Any], recording: bool) -> Any:
        """Of which tensors gradients are recorded: ops are bound for these, and for others anew."""
        if not self.training or not recording:
            return ()
        return *map(WANTS, self.held), *(WANTS(v) for v in flat if isinstance(v, Tensor))

    def _reaches(self, flat: Sequence[Any]) -> bool:
        """Whether what was recorded or compiled for the example gives gradients of all inputs that want them now."""
        if not self.training or not torch.is_grad_enabled():
            return True
        wanted = self.wanted[len(self.held) :]
        given = (v for v in flat if isinstance(v, Tensor))
        return all(w or not v.requires_grad for w, v in zip(wanted, given, strict=True))

    def _stale(self) -> bool:
        """Whether some weight was written to since constants were computed, with a version more or without."""
        return bool(self.watched and self._stamp() != self.stamp) or bool(self.samples.unseen())

    def capture(self) -> str | None:
        """Record what was bound as a CUDA graph; the reason where that cannot be."""
        if self.device.type != "cuda":
            return "graphs are captured on CUDA devices"
        if self.hands_out_state:
            return "an output is a parameter, a buffer, an input or a view of one"
        if self.trace.objects is not None and shared_outputs(self.graph):
            return "outputs that objects keep share memory"
        flat: Sequence[Any] = self.trace.example
        if any(isinstance(v, Tensor) and v.device.type != "cuda" for v in flat):
            return "an input is not on the GPU"
        flat = self._own(flat)
        with torch.set_grad_enabled(self.training), self._unwritten():
            for last in (False, True):  # what breaks a recording may be somebody else's, and over
                try:
                    self.replay = self.recorded(flat)
                    break
                except FAILURES as problem:
                    heal(self.device)
                    self.replay = None
                    if last:
                        return cause(problem)
        self.pointers, self.way = self._where(), None
        self.alive = [t.detach() for t in self.held]
        return None

    def recorded(self, flat: Sequence[Any]) -> Replay | GradientReplay:
        """The graph, after what it does for the first time, backward included, has been done."""
        leaves = {n: t for n, t in self.state.items() if t.requires_grad}
        if not self.training:
            run = self.function.run
            warm(lambda: run(*self._own(flat)), self.device)
            if self.sections:
                forked = run = self.function.forked(self.sections, streams(self.device))
                warm(lambda: forked(*self._own(flat)), self.device)
            return Replay(run, flat, self.device)
        own = {n: t.detach().requires_grad_() for n, t in leaves.items()}
        given = [_copy(v) if isinstance(v, Tensor) else v for v in flat]
        self.replace_state(own)
        try:
            wrt = list(own.values())
            function = self.function.of(self._wanted(given, True))
            warm(lambda: step(function.run(*given), True, wrt), self.device)
            run = function.run
            return GradientReplay(
                run, given, list(leaves.values()), self.device, Tape, standins=wrt
            )
        finally:
            self.replace_state(leaves)

    def _own(self, flat: Sequence[Any]) -> Sequence[Any]:
        """Inputs for one run, copies where it may write to them."""
        if not mutates(self.graph):
            return flat
        return [_copy(v) if isinstance(v, Tensor) else v for v in flat]

    @contextlib.contextmanager
    def _unwritten(self) -> Iterator[None]:
        """What the graph reads and writes is as before afterwards."""
        named = [self.function.value(n) for n in self.state] if mutates(self.graph) else []
        kept = [(t, t.detach().clone()) for t in named if not t.requires_grad]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)

    def _where(self) -> list[int]:
        """Where parameters and buffers lie and, for training, which of them want gradients."""
        where = [*map(Tensor.data_ptr, self.held)]
        return [*where, *map(WANTS, self.held)] if self.training else where

    def serving(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for inputs that fit; with all that calls with objects around them take."""
        objects = self.trace.objects
        if objects is None:
            return self(args, kwargs)
        given = objects.taken(*objects.around(args)[:2])
        return MISS if given is None else objects.served(self, *given)

    def replace_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Read other tensors in the place of some parameters or buffers."""
        for name, tensor in tensors.items():
            self.function.set(name, tensor)

    def _recording(self) -> bool:
        """True where gradients of parameters are recorded, which the program has none of."""
        if self.training or not torch.is_grad_enabled():
            return False
        return any(map(WANTS, self.held))

    def _context(self) -> bool:
        """True where modes are as they were when the program was made."""
        if self._recording():
            return False
        if policy.current().force != self.force:  # the model's own calls obey it
            return False
        if self.precisions is not None and precisions() != self.precisions:
            return False
        return autocast() == self.autocast and (self.asks is None or self.asks())

    def _stamp(self) -> list[int]:
        return [*map(VERSION, self.watched), *map(Tensor.data_ptr, self.watched)]

    def refresh(self) -> None:
        """Compute the constants again from today's parameters and buffers; what else was derived from those that were written to
        unseen is forgotten."""
        stamp, self.way = self._stamp(), None
        for tensor in self.samples.unseen():
            weight_cache.CACHE.invalidate(tensor)
        fresh, _ = ahead(self.graph, self.state)
        theirs = {_memory(t) for t in self.state.values()} - {None}
        for name, value in fresh.items():
            old, parts = pytree.tree_leaves(self.constants[name]), pytree.tree_leaves(value)
            whose = [_memory(v) in theirs for v in parts if isinstance(v, Tensor)]
            alone = len(whose) == len(old) == len(parts) and not any(whose)
            if alone and all(map(_written, old, parts)):
                continue  # in place: captured graphs read it there
            if self.replay is not None and not all(whose):
                self.replay, self.alive = None, []  # which reads the old one
            self.constants[name] = value
            self.function.set(name, value)
        if self.device.type == "cuda":  # calls on other streams read it, too
            torch.cuda.current_stream(self.device).synchronize()
        self.samples.look()
        self.stamp = stamp

    @property
    def nbytes(self) -> int:
        """Bytes of constants held besides the model."""
        held = {id(t): t for t in self.constants.values() if isinstance(t, Tensor)}
        own = {_memory(t) for t in self.state.values()} - {None}
        total = 0
        for t in held.values():
            if _memory(t) not in own:
                total += t.numel() * t.element_size()
        return total + (self.replay.nbytes if self.replay is not None else 0)


def _memory(value: Any) -> int | None:
    """Where a tensor's memory begins; None where it has none of that kind."""
    strided = isinstance(value, Tensor) and value.layout == torch.strided
    return value.untyped_storage().data_ptr() if strided else None


def _share_memory(values: Sequence[Any]) -> bool:
    """True where two tensors lie in one block of memory."""
    places = [p for p in map(_memory, values) if p]
    return len({*places}) < len(places)


def _written(old: Tensor, value: Any) -> bool:
    """Give `old` the numbers of `value`, if it can hold them as they lie."""
    if not isinstance(value, Tensor) or old.layout != torch.strided or old.is_inference():
        return False
    if old.shape != value.shape or old.stride() != value.stride():
        return False
    with torch.no_grad():
        for dim, stride in enumerate(old.stride()):
            if stride == 0 and old.shape[dim] > 1:  # expanded: the same numbers all along
                old, value = old.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        old.copy_(value)
    return True


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _capturing(device: torch.device) -> bool:
    """True while the caller records a CUDA graph, into which another cannot be launched."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _hands_out_state(graph: fx.Graph) -> bool:
    """True where an output shares memory with an input, a parameter or a buffer."""
    places = {storage(n) for n in graph.nodes if n.op == "placeholder"} - {None}
    return any(
        n.op == "placeholder" or storage(n) in places for n in graph.output_node().all_input_nodes
    )


def shared_outputs(graph: fx.Graph) -> bool:
    """True where two outputs share memory, which copies of both would not: who keeps them may write to one."""
    places = [storage(n) for n in graph.output_node().all_input_nodes]
    known = [p for p in places if p is not None]
    return len({*known}) < len(known)
