"""capture: a function as CUDA graphs, one for each kind of input, replayed without launch cost; eager where that cannot be."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import front
from ..tuning import leaves_of
from .graphs import FAILURES, GradientReplay, Replay, Tape, cause, heal, warm
from .serve import plain_modes
from .watch import Watch

EAGER_CALLS = 2  # calls of one kind that run as they are before one is captured


@dataclass
class Entry:
    """What is known of one kind of call."""

    calls: int = 0
    replay: Replay | GradientReplay | None = None
    spec: Any = None
    pointers: tuple[int, ...] = ()
    leaves: Sequence[Tensor] | None = (
        None  # that gradients of the outputs would reach; None where no output has a gradient
    )
    check: Callable[..., bool] | None = (
        None  # of positional tensors, where such are all that is given
    )
    count: int = 0
    grad: bool = False
    single: bool = False

    def remember(self, args: tuple[Any, ...]) -> bool:
        """True where later calls like this one can be told by a guard on their tensors alone, the short way to `key`."""
        if not args or any(type(v) is not Tensor for v in args):
            return False
        if self.check is None:
            self.check, self.count = front.guard(list(args)), len(args)
            self.grad, self.single = torch.is_grad_enabled(), self.spec.is_leaf()
        return True

    def fits(self, args: tuple[Any, ...]) -> bool:
        """True where `args` are tensors of the recorded kind, under the same modes."""
        return (
            self.check is not None
            and len(args) == self.count
            and torch.is_grad_enabled() is self.grad
            and self.check(*args)
            and not torch._C._is_any_autocast_enabled()
        )


class Captured:
    """A function that is replayed; `reason` says why not, where it is not."""

    def __init__(
        self,
        fn: Callable[..., Any],
        max_graphs: int,
        batch: int | None,
        buckets: Sequence[int] | None,
        unsafe_views: bool,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.max_graphs, self.unsafe_views = fn, max_graphs, unsafe_views
        self.batch, self.buckets = batch, sorted(buckets) if buckets else None
        self.entries: OrderedDict[Any, Entry] = OrderedDict()
        self.reason: str | None = None
        self.module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
        if not isinstance(self.module, nn.Module):
            self.module = None
        self.watch = Watch(self.module) if self.module is not None else None
        self.pool: Any = None
        self.last: Entry | None = None  # the kind that was replayed last
        self.tape: Callable[[torch.device, Any], Any] = Tape

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """fn(*args, **kwargs), replayed where a graph of such a call exists."""
        if self.reason is not None:
            return self.fn(*args, **kwargs)
        last = self.last
        if last is not None and not kwargs and last.fits(args) and self._steady(last):
            out = last.replay(args)  # type: ignore[misc]
            if out is not None:
                return out[0] if last.single else pytree.tree_unflatten(out, last.spec)
        self.last = None
        flat, spec = pytree.tree_flatten((args, kwargs))
        reason, device = self._suits(flat)
        if device is None:
            if reason is not None:
                self.reason = reason
            return self.fn(*args, **kwargs)
        rows, padded = self._padded(flat)
        key = (spec, tuple(map(_kind, padded)), _modes(device))
        entry = self.entries.get(key)
        if entry is None:
            entry = self._new(key)
        else:
            self.entries.move_to_end(key)
        if entry.replay is not None and entry.pointers != self._pointers():
            entry.replay, entry.calls = None, 0  # parameters lie elsewhere now
        if entry.replay is None:
            entry.calls += 1
            if entry.calls <= EAGER_CALLS:
                out = self._eager(args, kwargs, device)
                entry.leaves = _leaves(out, flat)
                return out
            if not self._capture(entry, padded, spec, device, rows is not None):
                return self.fn(*args, **kwargs)
        replay = entry.replay
        assert replay is not None
        out = replay(padded)
        if out is None:
            return self.fn(*args, **kwargs)
        if rows is None and not kwargs and entry.remember(args):
            self.last = entry
        if rows is not None:
            assert self.batch is not None
            out = [_rows(v, self.batch, *rows) for v in out]
        return pytree.tree_unflatten(list(out), entry.spec)

    def _steady(self, entry: Entry) -> bool:
        """True where the last kind of call may be replayed again: no mode is active, and the module is as it was."""
        if (
            entry.replay is None
            or not plain_modes()
            or (self.tape is Tape and torch._C._cuda_isCurrentStreamCapturing())
        ):
            return False
        return self.watch is None or (self.watch.holds() and entry.pointers == self._pointers())

    def _suits(self, flat: Sequence[Any]) -> tuple[str | None, torch.device | None]:
        """Why no graph may serve such calls (None: not this one), and the device of those that one may."""
        tensors = [v for v in flat if isinstance(v, Tensor)]
        if self.module is not None:
            tensors += list(self.module.parameters())[:1]
        kinds = {t.device.type for t in tensors} or (
            {"cuda"} if torch.cuda.is_available() else {"cpu"}
        )
        if self.tape is Tape and kinds != {"cuda"}:
            return (
                f"inputs lie on {', '.join(sorted(kinds))}; graphs are captured on CUDA devices",
                None,
            )
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return None, None
        if self.tape is Tape and torch.cuda.is_current_stream_capturing():
            return None, None
        if self.watch is not None and not self.watch.holds():
            self.entries.clear()  # the module is another one: its graphs are stale
            self.last = None
            assert self.module is not None
            self.watch = Watch(self.module)
        device = tensors[0].device if tensors else torch.device("cuda", torch.cuda.current_device())
        return None, device

    def _pointers(self) -> tuple[int, ...]:
        if self.module is None:
            return ()
        return tuple(t.data_ptr() for t in (*self.module.parameters(), *self.module.buffers()))

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
            _filled(v, self.batch, bucket) if isinstance(v, Tensor) else v for v in flat
        ]

    def _new(self, key: Any) -> Entry:
        entry = self.entries[key] = Entry()
        while len(self.entries) > self.max_graphs:
            self.entries.popitem(last=False)
            self.last = None
        return entry

    def _eager(self, args: Any, kwargs: Mapping[str, Any], device: torch.device) -> Any:
        """A call that counts, on the kind of stream that the capture will use."""
        return warm(lambda: self.fn(*args, **kwargs), device, times=1)

    def _capture(
        self, entry: Entry, flat: Sequence[Any], spec: Any, device: torch.device, padded: bool
    ) -> bool:
        """Record this kind of call; on failure keep the reason and stay eager."""
        if self.pool is None and self.tape is Tape:
            self.pool = torch.cuda.graph_pool_handle()

        def run(*given: Any) -> Any:
            args, kwargs = pytree.tree_unflatten(list(given), spec)
            leaves, entry.spec = pytree.tree_flatten(self.fn(*args, **kwargs))
            return leaves

        try:
            if entry.leaves is not None:
                entry.replay = GradientReplay(run, flat, entry.leaves, device, self.pool, self.tape)
            else:
                entry.replay = _recorded(run, flat, device, self)
                if padded and entry.replay.written:
                    raise RuntimeError("an input that would be filled up to a bucket is written to")
        except FAILURES as problem:
            heal(device)
            self.reason = cause(problem)
            self.entries.clear()
            self.last = None
            return False
        entry.pointers = self._pointers()
        return True

    @property
    def graphs(self) -> int:
        """How many kinds of call are replayed now."""
        return sum(e.replay is not None for e in self.entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs' pool grew by."""
        return sum(e.replay.nbytes for e in self.entries.values() if e.replay is not None)


def _leaves(out: Any, given: Sequence[Any]) -> list[Tensor] | None:
    """What the gradients of a call's outputs reach besides its inputs; None where no output has any."""
    outs = [v for v in pytree.tree_leaves(out) if isinstance(v, Tensor) and v.grad_fn is not None]
    inputs = {id(v) for v in given}
    found = {id(t): t for o in outs for t in leaves_of(o) if id(t) not in inputs}
    return list(found.values()) if outs else None


def _recorded(
    run: Callable[..., Any], flat: Sequence[Any], device: torch.device, owner: Captured
) -> Replay:
    """A graph of a call that hands out no gradients; it may compute some inside, as a training step does."""
    grad = torch.is_grad_enabled()

    def inside(*given: Any) -> Any:
        with torch.set_grad_enabled(grad):
            return [v.detach() if isinstance(v, Tensor) else v for v in run(*given)]

    return Replay(inside, flat, device, owner.pool, owner.unsafe_views, owner.tape)


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return value if _hashable(value) else id(value)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _modes(device: torch.device) -> Any:
    on = torch.is_autocast_enabled(device.type)
    return torch.is_grad_enabled(), torch.get_autocast_dtype(device.type) if on else None


def _filled(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros appended along `dim`."""
    if x.dim() <= dim:
        return x
    shape = list(x.shape)
    shape[dim] = size
    made = x.new_zeros(shape)
    made.narrow(dim, 0, x.shape[dim]).copy_(x)
    return made


def _rows(value: Any, dim: int, rows: int, bucket: int) -> Any:
    """The rows that the caller gave."""
    if isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == bucket:
        return value.narrow(dim, 0, rows)
    return value


def capture(
    fn: Callable[..., Any],
    *,
    max_graphs: int = 8,
    batch: int | None = None,
    buckets: Sequence[int] | None = None,
    unsafe_views: bool = False,
) -> Captured:
    """The same function, its GPU work replayed as one CUDA graph for each kind of input, at the launch cost of one kernel.

    The first two calls of a kind (shapes, strides, dtypes, modes) run as they are; the third is captured, and later ones
    are replayed. Every call does its work exactly once, so a whole training step can be captured, too.

    Args:
        fn: a function or torch.nn.Module of tensors on one GPU. With gradients recorded, forward and backward of a module
            are each a graph. What a function reads besides its arguments must stay where it is in memory.
        max_graphs: kinds of input that are kept; the least recently used goes first.
        batch, buckets: the dimension of every input that is a batch of independent rows, and the sizes to which it is
            filled up with zeros (without gradients only). Without them nothing is padded.
        unsafe_views: hand out the graph's own outputs, which the next call overwrites, instead of copies.

    Returns:
        A callable. Its `reason` is None, or why calls are not replayed (no CUDA device, a value that Python needs from the
        GPU, an output that is an input): then the function itself runs. `graphs` counts what is replayed, `nbytes` the
        memory the graphs hold.

    Raises:
        TypeError: fn is not callable. ValueError: max_graphs or buckets below 1, or buckets without batch.

    Example:
        >>> import torch, tensorlogic
        >>> step = tensorlogic.capture(torch.nn.Linear(4, 4))
        >>> step(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    if not callable(fn):
        raise TypeError(f"capture: fn is {type(fn).__name__}; a function or a module is required")
    if max_graphs < 1:
        raise ValueError(f"capture: max_graphs is {max_graphs}; at least 1 is required")
    if buckets is not None and (batch is None or not buckets or min(buckets) < 1):
        raise ValueError(
            f"capture: buckets is {list(buckets)} and batch is {batch}; sizes of at least 1 and the batch dimension are required"
        )
    return Captured(fn, max_graphs, batch, buckets, unsafe_views)
