"""Knowing when not to measure: while any thread captures a CUDA graph, or this one traces."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import function_modes, process

_LOCK = threading.Lock()
_TURN = threading.RLock()
_DEAD: list[Any] = []  # graphs to destroy when nobody records
_open: set[int] = set()
_began: dict[int, tuple[weakref.ref[Any], int]] = {}  # the same graphs, and on which stream
BEFORE: list[Callable[[], None]] = []  # called before a capture begins, while there is no other
_OWN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
# that are being taken; more than one by a thread that has it already, or where patience ended
_turns = 0
_installed = False
_HUSHED = threading.local()  # depth: how many blocks of this thread measure nothing


def install() -> None:
    """Note the begin and end of every capture made through torch.cuda.CUDAGraph; called once, on first use of a GPU."""
    global _installed
    with _LOCK:
        if _installed or not torch.cuda.is_available():
            return
        _installed = True
    graph = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _open:
            for call in BEFORE:
                call()
        _open.add(id(self))
        try:
            done = begin(self, *args, **kwargs)
        except BaseException:
            _open.discard(id(self))
            # Half known to the generator; its destructor would abort the process, so it lives for ever.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            raise
        _began[id(self)] = weakref.ref(self), torch.cuda.current_stream().cuda_stream
        _OWN[self] = {}  # one that was reset is recorded anew
        return done

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            _open.discard(id(self))
            _began.pop(id(self), None)

    graph.capture_begin, graph.capture_end = capture_begin, capture_end  # type: ignore[method-assign]


@contextmanager
def capture_lock(patience_s: float = -1.0) -> Iterator[bool]:
    """This thread's turn to record a graph: PyTorch's generators know one recording, and streams come from a pool.

    A second one that begins meanwhile leaves a graph that aborts the process when it is destroyed. Who has waited for
    `patience_s` (negative: for ever) goes on all the same. Python's collector of cycles rests meanwhile: a graph that it
    finds, whosever it is, would be destroyed by the recording thread, which breaks the recording. Gives whether it is this
    thread's turn alone.
    """
    global _turns
    mine = _TURN.acquire(timeout=patience_s)
    process.pause()
    with _LOCK:
        _turns += 1
    try:
        yield mine
    finally:
        with _LOCK:
            _turns -= 1
        process.resume()
        if mine:
            _cleared()
            _TURN.release()


@contextmanager
def uncached() -> Iterator[None]:
    """Autocast keeps none of the casts inside, nor uses those it kept: of weights, until its outermost block ends.

    A graph that read such a cast would read memory that is given to others when that block ends, and what is cast while one is
    recorded holds nothing that a call outside of the graph could read. Blocks inside that keep casts themselves find none.
    """
    kept = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)
        torch.clear_autocast_cache()


def _cleared() -> None:
    """Destroy what is buried, if nobody records."""
    if not _turns:
        _DEAD.clear()


def destroy_later(owner: Any, *names: str) -> None:
    """Take a recorded graph, and what else holds it, out of the owner's attributes; it is destroyed while nobody records."""
    _DEAD.extend(owner.__dict__.pop(name, None) for name in names)
    if _TURN.acquire(blocking=False):
        try:
            _cleared()
        finally:
            _TURN.release()


def capturing(device: torch.device) -> bool:
    """True while the current stream of this thread is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def graph_of(stream: int) -> Any:
    """The graph into which `stream` is captured: the one that began there or, as streams may join it, the only one; else None."""
    known = list(_began.values())
    for graph, began in known:
        if began == stream:
            return graph()
    return known[0][0]() if len(known) == 1 else None


def own(stream: int) -> dict[Any, Any] | None:
    """What kernels in the graph into which `stream` is captured share, kept as long as it is; None where it is not known."""
    graph = graph_of(stream)
    return None if graph is None else _OWN.setdefault(graph, {})


def any_thread() -> bool:
    """True while some thread is capturing."""
    return bool(_open)


@contextmanager
def measuring_disabled() -> Iterator[None]:
    """Nothing is measured inside."""
    _HUSHED.depth = getattr(_HUSHED, "depth", 0) + 1
    try:
        yield
    finally:
        _HUSHED.depth -= 1


def can_tune_now(device: torch.device) -> bool:
    """Whether a plan may come of calls here: measuring disturbs nobody, and PyTorch was not asked for the same bits in every run."""
    return can_measure_now(device) and not torch.are_deterministic_algorithms_enabled()


def can_measure_now(device: torch.device) -> bool:
    """True where measuring disturbs nobody: no thread captures, and this one neither traces nor transforms."""
    return not getattr(_HUSHED, "depth", 0) and can_call_now(device)


def _many_vectors() -> bool:
    """Inside `autograd.grad(..., is_grads_batched=True)`, where PyTorch refuses to draw numbers."""
    torch._C._vmapmode_increment_nesting()
    return torch._C._vmapmode_decrement_nesting() > 0


def can_call_now(device: torch.device) -> bool:
    """The same for a few small calls, which the kernel of a registered op may make under whatever modes it was called."""
    return not (
        capturing(device)
        or any_thread()
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack()
        or function_modes.intercepted()
        or torch._C._functorch.maybe_current_level() is not None
        or _many_vectors()
    )
