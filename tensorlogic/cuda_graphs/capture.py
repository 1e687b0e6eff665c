"""capture: a function as CUDA graphs, one for each kind of input, replayed without launch cost; eager where that cannot be."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core import policy as core_policy
from ..core import weight_cache
from ..core.argument_checks import describe, flag, index
from ..guards.errors import MISS
from ..guards.global_state import KEPT, Asked, keeps_parametrized, modes, plain_modes
from ..guards.model_guard import Kept, Watch, attributes, still
from ..guards.tensor_tree import leaves_of
from ..system import capture_state
from . import capture_streams
from .capture_streams import warm
from .captured_graph import FAILURES, CallTape, cause, heal
from .fast_replay import Way, short
from .host_rng import drawn_once
from .leaf_gradients import LEAVES, Leaving, saved_elsewhere
from .replay import GradientReplay, Replay, pool_of
from .static_buffers import Unseen, filled, plain, rows_of

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
# calls of one kind that run as they are before one is captured
EAGER_CALLS = 2
TOLD = (
    type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout, torch.memory_format,
    FunctionType, BuiltinFunctionType, type,
)  # fmt: skip
UNSEEN = "an input is written to by what PyTorch does not count, such as a kernel of one's own or `.data`"
FILLED = "an input that would be filled up to a bucket is written to"
# calls that run as they are after a recording that failed, and the most after calls that no graph
# may serve
PAUSE = 16


class Looked:
    """A module as it was at one moment: its tensors, and what tells whether it is still that."""

    def __init__(self, module: nn.Module | None) -> None:
        self.watch = None if module is None else Watch(module, root=True)
        self.held = [] if module is None else [*module.parameters(), *module.buffers()]
        self.kept = Kept(self.held)

    def holds(self) -> bool:
        """Whether nothing has changed but where tensors lie, which gradients they want, and their numbers."""
        return self.watch is None or (self.watch.holds() and self.kept.holds())

    def state(self) -> list[Any]:
        """Where the module's tensors lie and, where gradients are recorded, which of them want one."""
        where: list[Any] = [*map(Tensor.data_ptr, self.held)]
        return where + [t.requires_grad for t in self.held] if torch.is_grad_enabled() else where


@dataclass
class Recorded:
    """A replay, and the state in which it may serve; it is made whole before any thread finds it."""

    replay: Replay | GradientReplay
    spec: Any  # of the output
    looked: Looked
    state: Sequence[Any]  # of the module's tensors
    asked: Asked
    leaving: Leaving
    way: Way | None = None  # to the replay, for calls that look like the last one

    def lasts(self) -> bool:
        """Whether the module's tensors lie where they did, and what calls ask has the same answers."""
        return self.state == self.looked.state() and self.asked.steady()

    def unfit(self, padded: bool) -> str | None:
        """Why it may serve no call of today's, or none whose inputs were filled up to a bucket."""
        if padded and isinstance(self.replay, Replay) and self.replay.written:
            return FILLED
        return None if self.leaving.ready() else LEAVES

    def shorten(self, args: Sequence[Any]) -> Way | None:
        """The way for positional calls like this one, where there is one."""
        if self.way is None and not self.asked.looks:
            self.way = short(self.replay, args, self.spec, self._steady())
        return self.way

    def _steady(self) -> Callable[[], bool] | None:
        """What holds while the module is as it was."""
        asks, looked = self.leaving.check(self.asked.holds), self.looked
        if looked.watch is None:
            return asks
        holds, kept, state, now = looked.watch.check(), looked.kept.holds, self.state, looked.state
        same = still(looked.held, state)
        lasts = same if same is not None else lambda: kept() and now() == state
        return lambda: lasts() and holds() and (asks is None or asks())


@dataclass
class Entry:
    """What is known of one kind of call of a module as it was looked at."""

    looked: Looked
    calls: int = 0
    recorded: Recorded | None = None
    leaves: Sequence[Tensor] | None = None  # that gradients of the outputs reach; None: nobody's
    names: set[str] = field(default_factory=set)  # of what its code asks about the state around it
    leaving: Leaving = field(default_factory=Leaving)  # in the calls before the recording
    written: set[int] = field(default_factory=set)  # inputs without versions that a call wrote to


class Captured(Generic[P, R]):
    """A function that is replayed; `reason` says why not, where it is not."""

    def __init__(
        self,
        fn: Callable[P, R],
        max_graphs: int,
        batch: int | None,
        buckets: Sequence[int] | None,
        unsafe_views: bool,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.max_graphs, self.unsafe_views = fn, max_graphs, unsafe_views
        self.batch, self.buckets = batch, sorted(buckets) if buckets else None
        self.entries: OrderedDict[Any, Entry] = OrderedDict()
        self.finding = threading.RLock()  # held while these are looked up or cleared
        self.reason: str | None = None
        self.pause = 0  # calls until one is looked at again; 0 where none will be
        # the next pause after a call that no graph may serve; each in a row doubles it
        self.wait = 1
        self.failed = False  # once; the second time is the last
        self.module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
        if not isinstance(self.module, nn.Module):
            self.module = None
        self.looked = Looked(self.module)
        # whether a call has written to an input without PyTorch knowing
        self.unseen = False
        # to the kind that was replayed last, with the policy under which it may serve
        self.way: tuple[Way, core_policy.Policy] | None = None
        self.tape: Callable[[torch.device, Any], Any] = CallTape
        self.recording = threading.Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """fn(*args, **kwargs), replayed where a graph of such a call exists."""
        way = self.way
        if way is not None and not kwargs and core_policy.current() is way[1]:
            out = way[0](*args)
            if out is not MISS:
                return out
        if self.reason is not None and not (self.pause and self._again()):
            return self.fn(*args, **kwargs)
        self.way = None
        flat, spec = pytree.tree_flatten((args, kwargs))
        reason, device = self._suits(flat)
        if device is None:
            if reason is not None:
                self.reason, self.pause = reason, self.wait if torch.cuda.is_available() else 0
                self.wait = min(2 * self.wait, PAUSE)
            return self.fn(*args, **kwargs)
        self.wait = 1
        rows, padded = self._padded(flat)
        policy = core_policy.current()
        entry = self._entry((spec, tuple(map(_kind, padded)), modes(), policy.meaning))
        recorded = entry.recorded
        if recorded is not None and not recorded.lasts():
            recorded = entry.recorded = None  # parameters lie elsewhere now
            entry.calls, entry.leaving = 0, Leaving()
        if recorded is None:
            entry.calls += 1
            if entry.calls <= EAGER_CALLS:
                return self._eager(entry, args, kwargs, flat, device)
            recorded = self._capture(entry, padded, spec, device)
            if recorded is None:
                return self.fn(*args, **kwargs)
        unfit = recorded.unfit(rows is not None)
        if unfit is not None:
            self._stop(unfit)
            return self.fn(*args, **kwargs)
        out = recorded.replay(padded) if recorded.asked.alike(padded) else None
        if out is None:
            return self.fn(*args, **kwargs)
        if rows is None and not kwargs:
            quick = recorded.shorten(args)
            self.way = None if quick is None else (quick, policy)
        if rows is not None:
            assert self.batch is not None
            out = [rows_of(v, self.batch, *rows) for v in out]
        return pytree.tree_unflatten(list(out), recorded.spec)

    def __reduce__(self) -> Any:
        """A copy captures for itself: graphs belong to one function in one process."""
        return Captured, (self.fn, self.max_graphs, self.batch, self.buckets, self.unsafe_views)

    def _again(self) -> bool:
        """Whether the pause ends: what broke a recording may be over, and a graph may serve this call."""
        left = self.pause = max(self.pause - 1, 0)
        if not left:
            self.reason = None
        return not left

    def _suits(self, flat: Sequence[Any]) -> tuple[str | None, torch.device | None]:
        """Why no graph may serve such calls (None: not this one), and the device of those that one may."""
        tensors = [v for v in flat if isinstance(v, Tensor)]
        odd = any(map(attributes, tensors))
        for value in flat:
            if not isinstance(value, (Tensor, *TOLD)):  # objects that hold others
                kind = type(value).__name__
                owner = isinstance(value, (nn.Module, torch.optim.Optimizer, MethodType))
                instead = "capture what calls it" if owner else "pass the tensors in it"
                return f"an argument is a {kind}, whose changes nothing tells; {instead}", None
        if self.module is not None:
            tensors += itertools.islice(self.module.parameters(), 1)
        kinds = {t.device.type for t in tensors} or (
            {"cuda"} if torch.cuda.is_available() else {"cpu"}
        )
        if self.tape is CallTape and kinds != {"cuda"}:
            where = ", ".join(sorted(kinds))
            kept = (
                ". On a CPU tensorlogic's own calls keep packed weights (`nbytes`) and take outputs from their pool, and the rest "
                "runs as it is"
            )
            said = f"inputs lie on {where}; graphs are captured on CUDA devices"
            return said + (kept if kinds == {"cpu"} else ""), None
        seen = not plain_modes() or saved_elsewhere()
        if odd or seen or not all(map(plain, tensors)):
            return None, None
        if self.tape is CallTape and torch.cuda.is_current_stream_capturing():
            return None, None
        if not self.looked.holds():  # the module is another one: its graphs are stale
            with self.finding:
                self.looked = Looked(self.module)
                self.entries.clear()
        device = tensors[0].device if tensors else torch.device("cuda", torch.cuda.current_device())
        return None, device

    def _padded(self, flat: Sequence[Any]) -> tuple[tuple[int, int] | None, Sequence[Any]]:
        """(rows, rows of the bucket) and the inputs filled up to it; None where nothing is padded."""
        if self.batch is None or self.buckets is None or torch.is_grad_enabled():
            return None, flat
        sizes = {
            v.shape[self.batch] for v in flat if isinstance(v, Tensor) and v.dim() > self.batch
        }
        if len(sizes) != 1:
            return None, flat
        size = sizes.pop()
        bucket = next((b for b in self.buckets if b >= size), size)
        if bucket == size:
            return None, flat
        return (size, bucket), [
            filled(v, self.batch, bucket) if isinstance(v, Tensor) else v for v in flat
        ]

    def _entry(self, key: Any) -> Entry:
        """What is known of a kind, the latest from now on; the least recently used goes where there are too many."""
        with self.finding:
            entry = self.entries.get(key)
            if entry is None:
                entry = self.entries[key] = Entry(self.looked)
            self.entries.move_to_end(key)
            while len(self.entries) > self.max_graphs:
                self.entries.popitem(last=False)
            return entry

    def _eager(
        self,
        entry: Entry,
        args: Any,
        kwargs: Mapping[str, Any],
        flat: Sequence[Any],
        device: torch.device,
    ) -> Any:
        """A call that counts, on the stream that the capture will use; elsewhere, uncounted, while another thread records there.

        Its backward pass comes when the caller asks for it, on that stream, too, outside of any turn.
        """
        with capture_state.capture_lock(0) as free:
            if free:
                unseen = Unseen(flat if entry.calls == 1 else ())
                with entry.leaving.running(flat) as names:
                    out = warm(lambda: self.fn(*args, **kwargs), device, 1, capture_streams.CALLS)
                self.unseen = self.unseen or unseen.written()
                entry.written |= unseen.untold()
                entry.names |= names
                outs, entry.leaves = pytree.tree_leaves(out), _leaves(out, flat)
                if device.type == "cuda":
                    side = capture_streams.stream(device, capture_streams.CALLS)
                    capture_streams.shared(flat, outs, side, torch.cuda.current_stream(device))
                capture_streams.wait_for(outs, device)
                return out
        entry.calls -= 1
        return self.fn(*args, **kwargs)

    def _capture(
        self, entry: Entry, flat: Sequence[Any], spec: Any, device: torch.device
    ) -> Recorded | None:
        """Record this kind of call, unless another thread does or may yet run backward there; on failure keep the reason and
        stay eager."""
        if not self.recording.acquire(blocking=False):
            return None
        try:
            with capture_state.capture_lock():  # nobody begins a call there meanwhile
                if entry.recorded is None and not capture_streams.awaited(device):
                    entry.recorded = self._recorded(entry, flat, spec, device)
                return entry.recorded
        finally:
            self.recording.release()

    def _recorded(
        self, entry: Entry, flat: Sequence[Any], spec: Any, device: torch.device
    ) -> Recorded | None:
        given: list[Any] = []  # the structure of the output
        looked, leaving, names = entry.looked, entry.leaving, entry.names

        def run(*values: Any) -> Any:
            args, kwargs = pytree.tree_unflatten(list(values), spec)
            leaves, out = pytree.tree_flatten(self.fn(*args, **kwargs))
            given[:] = [out]
            return leaves

        try:
            if self.unseen:
                raise RuntimeError(UNSEEN)
            if keeps_parametrized():
                raise RuntimeError(f"parametrized weights are {KEPT}, and a graph would read them")
            with leaving.recording(looked.held), drawn_once(device):
                replay: Replay | GradientReplay
                if entry.leaves is not None:
                    replay = GradientReplay(run, flat, entry.leaves, device, self.tape)
                else:
                    replay = self._replay(run, flat, device)
            if isinstance(replay, Replay) and entry.written - {i for i, _ in replay.written}:
                raise RuntimeError(UNSEEN)
        except FAILURES as problem:
            heal(device)
            self._stop(cause(problem))
            return None
        asked = Asked(names, looked.held, replay.static)
        return Recorded(replay, given[0], looked, looked.state(), asked, leaving)

    def _replay(self, run: Callable[..., Any], flat: Sequence[Any], device: torch.device) -> Replay:
        """A graph of a call that hands out no gradients; it may compute some inside, as a training step does."""
        grad = torch.is_grad_enabled()

        def inside(*given: Any) -> Any:
            with torch.set_grad_enabled(grad):
                return [v.detach() if isinstance(v, Tensor) else v for v in run(*given)]

        others = [r for r in self.replays() if isinstance(r, Replay)]
        other = next((r for r in others if r.device == device), None)
        # a pool whose graphs are gone takes no other while tensors, such as gradients, lie there
        pool, line = (pool_of(device), None) if other is None else (other.pool, other.line)
        return Replay(inside, flat, device, pool, self.unsafe_views, self.tape, line)

    def replays(self) -> list[Replay | GradientReplay]:
        """Of the kinds of call that are replayed now."""
        with self.finding:
            known = [e.recorded for e in self.entries.values()]
        return [r.replay for r in known if r is not None]

    def _stop(self, reason: str) -> None:
        """Nothing is replayed from here on, the first time for a while."""
        self.reason = reason
        self.pause, self.failed = 0 if self.failed else PAUSE, True
        with self.finding:
            self.entries.clear()

    @property
    def graphs(self) -> int:
        """How many kinds of call are replayed now."""
        return len(self.replays())

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs' pool grew by, and what calls derive from a module's weights and keep."""
        derived = weight_cache.CACHE.nbytes_of(self.looked.held)
        return sum(r.nbytes for r in self.replays()) + derived


def _leaves(out: Any, given: Sequence[Any]) -> list[Tensor] | None:
    """What the gradients of a call's outputs reach besides its inputs; None where no output has any."""
    outs = [v for v in pytree.tree_leaves(out) if isinstance(v, Tensor) and v.grad_fn is not None]
    inputs = {id(v) for v in given}
    found = {id(t): t for o in outs for t in leaves_of(o) if id(t) not in inputs}
    return list(found.values()) if outs else None


def _kind(value: Any) -> Any:
    """What a graph was recorded for; 1, 1.0 and True are not the same, nor are 0.0 and -0.0."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    return type(value), value


class ModuleOf(Protocol[P, R_co]):
    """A torch.nn.Module, whose calls take and return what its forward does."""

    training: bool

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@overload
def capture(
    fn: ModuleOf[P, R],
    *,
    max_graphs: int = 8,
    batch: int | None = None,
    buckets: Sequence[int] | None = None,
    unsafe_views: bool = False,
) -> Captured[P, R]: ...
@overload
def capture(
    fn: Callable[P, R],
    *,
    max_graphs: int = 8,
    batch: int | None = None,
    buckets: Sequence[int] | None = None,
    unsafe_views: bool = False,
) -> Captured[P, R]: ...
def capture(
    fn: Callable[..., Any],
    *,
    max_graphs: int = 8,
    batch: int | None = None,
    buckets: Sequence[int] | None = None,
    unsafe_views: bool = False,
) -> Captured[Any, Any]:
    """The same function, its GPU work replayed as one CUDA graph for each kind of input, at the launch cost of one kernel.

    The first two calls of a kind (shapes, strides, dtypes, modes) run as they are; the third is captured, and later ones
    are replayed. Every call does its work exactly once, so a whole training step can be captured, too,
    that clears its gradients itself (or has them cleared by `zero_grad(set_to_none=False)`).

    Args:
        fn: a function or torch.nn.Module of tensors on one GPU, in containers that PyTorch's pytrees know, and of plain values. With gradients recorded, forward and backward of a module
            are each a graph. What a function reads besides its arguments must stay where it is in memory.
        max_graphs: kinds of input that are kept; the least recently used goes first.
        batch, buckets: the dimension of every input that is a batch of independent rows, and the sizes to which it is
            filled up with zeros (without gradients only). Without them nothing is padded.
        unsafe_views: hand out the graph's own outputs, which the next call overwrites, instead of copies.

    Returns:
        A callable. Its `reason` is None, or why calls are not replayed (no CUDA device, a value that Python needs from the
        GPU, an output that is an input, random numbers of the host): then the function itself runs. After a recording that failed there is one more,
        16 calls later; calls in a row that no graph may serve are looked at ever less often, every 16th in the end. `graphs` counts what is replayed,
        `nbytes` the memory that the graphs and packed weights hold.

    Raises:
        TypeError: fn is not callable, or an argument is of another type. ValueError: max_graphs or buckets below 1, a negative batch,
        or buckets without batch.

    Example:
        >>> import torch, tensorlogic
        >>> step = tensorlogic.capture(torch.nn.Linear(4, 4))
        >>> step(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    if not callable(fn):
        raise TypeError(f"capture: fn is {type(fn).__name__}; a function or a module is required")
    most = _number("max_graphs", max_graphs)
    if most < 1:
        raise ValueError(f"capture: max_graphs is {most}; at least 1 is required")
    dim = None if batch is None else _number("batch", batch)
    if dim is not None and dim < 0:
        raise ValueError(f"capture: batch is {dim}; a dimension from 0 is required")
    flag("capture", "unsafe_views", unsafe_views)
    sizes = None
    if buckets is not None:
        if isinstance(buckets, (str, Mapping)) or not isinstance(buckets, (Sequence, range)):
            raise TypeError(f"capture: buckets is {describe(buckets)}; a list of sizes is required")
        sizes = [_number("buckets", size) for size in buckets]
        if dim is None or not sizes or min(sizes) < 1:
            raise ValueError(
                f"capture: buckets is {sizes} and batch is {dim}; sizes of at least 1 and the batch dimension are required"
            )
    return Captured(fn, most, dim, sizes, unsafe_views)


def _number(name: str, value: Any) -> int:
    number = index(value)
    if number is None:
        raise TypeError(f"capture: {name} is {describe(value)}; a whole number is required")
    return number
