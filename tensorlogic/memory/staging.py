"""Transfers of ordinary memory to and from a GPU through a bounded pool of pinned buffers, several chunks in flight."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import arguments, capture_watch, stores
from . import staging_rules

PAGE = 4096
LEAST = 1 << 20  # bytes below which PyTorch's own copy is as fast
RINGS = (48 << 20, 16 << 20)  # bytes of pinned memory down and up, where a ring stays in caches
EVENTS = 32  # chunks in flight, at most
UNIT = 1 << 17  # bytes that a thread copies at a time: all of them are at one chunk
CHUNKS = (1 << 18, 4 << 20)  # bytes of the least chunk and the largest
PATIENCE = 100  # microseconds without anything to call, after which the caller copies, too
LARGE, MET = 8 << 20, 4  # bytes of transfers after so many of which their rules are timed
CHUNK, BUFFERS = 8 << 20, 4  # without the native library: by PyTorch's threads, a piece at a time


@dataclass
class TransferStats:
    """What went through the staging buffers of this process."""

    transfers: int = 0
    bytes_moved: int = 0
    buffers: int = 0
    buffer_bytes: int = 0


STATS = TransferStats()


_CALLS = ("cudaSetDevice", "cudaMemcpyAsync", "cudaEventRecord", "cudaEventQuery")


@lru_cache
def _runtime() -> list[int] | None:
    """Where CUDA's functions are that the native library calls; None where CUDA's runtime is not."""
    version = (torch.version.cuda or "").split(".")[0]
    try:
        lib = ctypes.CDLL(f"libcudart.so.{version}")
        found = [ctypes.cast(getattr(lib, name), ctypes.c_void_p).value for name in _CALLS]
    except (OSError, AttributeError):
        return None
    return [address for address in found if address]


@lru_cache
def _copy() -> Callable[..., int]:
    """The native library's `staged_copy` as a function: calling an operator with so many arguments takes 5 us longer."""
    from tensorlogic import native

    kind = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 13)  # lets go of the interpreter
    made: Callable[..., int] = kind(native.op("staged_copy_address")())
    return made


class Stager:
    """The buffers of one device and direction; made at its first staged transfer.

    Threads of the native library copy between memory and buffers while the copy engine moves the chunks before them.
    """

    def __init__(self, device: torch.device, up: bool) -> None:
        from tensorlogic import native

        self.device = device
        self.stream = torch.cuda.Stream(device)
        calls = _runtime() if native.available() is None else None
        ring = RINGS[up] if calls else CHUNK * BUFFERS
        self.memory = torch.empty(ring, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(EVENTS)]
        for event in self.events:
            event.record(self.stream)  # which makes them
        self.copy = None if calls is None else _copy()
        if calls is not None:
            handles = [int(event.cuda_event) for event in self.events]
            self.number = native.op("staging_open")(self.memory, handles, calls, device.index)
        found = staging_rules.known(device, up)
        self.up, self.rules = up, found or staging_rules.usual(up)
        self.left = 0 if found or self.copy is None or stores.distributed() else MET
        self.lock = threading.Lock()
        STATS.buffers += 1
        STATS.buffer_bytes += self.memory.numel()

    def here(self, source: Tensor, target: Tensor, up: bool) -> None:
        """Dense bytes, in the order of the current stream; on a CPU they are there when this returns."""
        if self.copy is None:
            with self.lock, torch.no_grad():
                (self._up if up else self._down)(_bytes(source), _bytes(target))
            return
        n = source.numel() * source.element_size()
        self._by(self.rules[staging_rules.size_class(n)], source, target, n)
        if self.left and n >= LARGE:
            self.left -= 1
            if not self.left and capture_watch.calm(self.device):
                self._settle()

    def _by(self, rule: staging_rules.Rule, source: Tensor, target: Tensor, n: int) -> None:
        host, there = (source, target) if self.up else (target, source)
        self._move(rule, host.data_ptr(), there.data_ptr(), n)

    def _move(self, rule: staging_rules.Rule, host: int, there: int, n: int) -> None:
        assert self.copy is not None
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        with self.lock:  # the library lets go of the interpreter meanwhile
            wrong = self.copy(self.number, host, there, n, *CHUNKS, UNIT, rule.workers, PATIENCE, self.up, rule.stores, stream)  # fmt: skip
        if wrong:
            raise RuntimeError(f"to: CUDA reports error {wrong} for a transfer of {n} bytes")

    def _settle(self) -> None:
        """Time how transfers of this direction are best shared: once a machine, a seventh of a second."""
        most, begin = max(staging_rules.TIMED), time.perf_counter()
        try:
            there = torch.empty(most, dtype=torch.uint8, device=self.device)
            host = np.empty(staging_rules.WALKED, dtype=np.uint8)
        except (torch.OutOfMemoryError, MemoryError):
            return
        host[::PAGE] = 1  # by this thread: PyTorch's would go on spinning beside those that copy
        at = 0

        def timer(rule: staging_rules.Rule, nbytes: int) -> float:
            nonlocal at
            at = at + nbytes if at + 2 * nbytes <= host.nbytes else 0
            torch.cuda.current_stream(self.device).synchronize()
            begin = time.perf_counter()
            self._move(rule, host.ctypes.data + at, there.data_ptr(), nbytes)
            torch.cuda.current_stream(self.device).synchronize()
            return time.perf_counter() - begin

        self.rules = staging_rules.settle(self.device, self.up, timer, begin)

    def aside(
        self, source: Tensor, target: Tensor, up: bool, ready: torch.cuda.Event
    ) -> torch.cuda.Event | None:
        """The same on a stream of its own behind `ready`; on a GPU they are there after the event, on a CPU at once."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            self.here(source, target, up)
            return self.stream.record_event() if up else None

    def _up(self, source: Tensor, target: Tensor) -> None:
        size, buffers = _piece(source.numel()), self.memory.split(CHUNK)
        pieces = zip(source.split(size), target.split(size), strict=True)
        for i, (piece, to) in enumerate(pieces):
            event = self.events[i % BUFFERS]
            event.synchronize()  # until the chunk before has left it
            part = buffers[i % BUFFERS][: piece.numel()]
            part.copy_(piece)
            to.copy_(part, non_blocking=True)
            event.record(self.stream)

    def _down(self, source: Tensor, target: Tensor) -> None:
        size, buffers = _piece(source.numel()), self.memory.split(CHUNK)
        pieces, targets = source.split(size), target.split(size)
        for i in range(len(pieces) + BUFFERS - 1):
            out = i - BUFFERS + 1
            if 0 <= out < len(targets):
                self.events[out % BUFFERS].synchronize()
                targets[out].copy_(buffers[out % BUFFERS][: targets[out].numel()])
            if i < len(pieces):
                part = buffers[i % BUFFERS][: pieces[i].numel()]
                part.copy_(pieces[i], non_blocking=True)
                self.events[i % BUFFERS].record(self.stream)


def _piece(nbytes: int) -> int:
    """Bytes of a piece without the native library: of small transfers half, so that copying and moving overlap."""
    return CHUNK if nbytes >= 8 * CHUNK else CHUNK // 2


_STAGERS: dict[tuple[int, bool], Stager] = {}
_LOCK = threading.Lock()


def stager(index: int, up: bool) -> Stager:
    """The stager of a device and a direction."""
    found = _STAGERS.get((index, up))
    if found is None:
        with _LOCK:
            found = _STAGERS.get((index, up)) or Stager(torch.device("cuda", index), up)
            _STAGERS[index, up] = found
    return found


@lru_cache
def _worker() -> ThreadPoolExecutor:
    """Where asynchronous transfers run."""
    return ThreadPoolExecutor(2, "tensorlogic-staging")


class Transfer:
    """A transfer under way: `wait()` gives the tensor, and orders the current stream behind the copy where it is on a GPU."""

    def __init__(self, result: Tensor, part: Any = None, kept: Any = None) -> None:
        self._result, self._part, self._kept = result, part, kept
        self._dtype = result.dtype

    def then(self, dtype: torch.dtype) -> None:
        """Have the tensor converted when it is there."""
        self._dtype = dtype

    def done(self) -> bool:
        """True when nothing is left to wait for on this side."""
        return not isinstance(self._part, Future) or self._part.done()

    def wait(self) -> Tensor:
        """The tensor, usable on the current stream (on a GPU) or at once (on a CPU)."""
        event = self._part.result() if isinstance(self._part, Future) else self._part
        if event is not None:
            stream = torch.cuda.current_stream(self._result.device)
            stream.wait_event(event)
            self._result.record_stream(stream)
        self._part = self._kept = None
        self._result = self._result.to(self._dtype)
        return self._result


def as_tensor(value: Any, name: str = "tensor") -> Tensor:
    """A tensor of what offers DLPack, NumPy's interface or `__array__`, sharing memory where it allows."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    if hasattr(value, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(value)
    if hasattr(value, "__array__"):
        return as_tensor(np.asarray(value))
    raise TypeError(
        f"{name} is {type(value).__name__}; a torch.Tensor, a NumPy array, or an object with __dlpack__ or __array__ "
        f"is required: wrap data with torch.as_tensor"
    )


def shared(t: Tensor) -> bool:
    """Whether a NumPy array may write to this memory unseen: PyTorch lets storages that it shares with one grow no more."""
    return t.device.type == "cpu" and not t.untyped_storage().resizable()


def to(
    tensor: Any,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    *,
    asynchronous: bool = False,
) -> Any:
    """Move a tensor to a device, ordinary memory to and from a GPU through pinned buffers with several chunks in flight.

    A conversion happens before the transfer where it makes fewer bytes, else after it. Pinned or small memory, other
    devices and tensors that record gradients take PyTorch's own `Tensor.to`.

    Args:
        tensor: any shape, dtype and device; NumPy arrays and objects with `__dlpack__` or `__array__` are taken without a copy.
        device: where to. dtype: of the result; the tensor's own if None.
        asynchronous: return a `Transfer` at once; its `wait()` gives the tensor. Until then leave the source alone.

    Returns:
        The tensor itself where nothing is to be done, else a new one with the same shape and strides (contiguous where
        the source's elements do not lie together).

    Raises:
        TypeError: no tensor and nothing that offers one, or device or dtype is none. ValueError: no device of that name.
            RuntimeError: it is not there.

    Example:
        >>> import numpy as np, torch, tensorlogic
        >>> tensorlogic.to(np.ones(3, dtype=np.float32), "cpu", torch.float16)
        tensor([1., 1., 1.], dtype=torch.float16)
        >>> tensorlogic.to(torch.ones(2), "cpu", asynchronous=True).wait()
        tensor([1., 1.])
    """
    source, place = as_tensor(tensor, "to: tensor"), present(device, "to")
    arguments.flag("to", "asynchronous", asynchronous)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"to: dtype is {dtype!r}; a torch.dtype such as torch.float16, or None, is required"
        )
    wanted = source.dtype if dtype is None else dtype
    found = _staged(source, place, wanted, asynchronous)
    if found is None:
        found = source.to(place, wanted)
    if not asynchronous:
        return found
    return found if isinstance(found, Transfer) else Transfer(found)


def present(device: torch.device | str, fn: str) -> torch.device:
    """The device; raises ValueError where there is no such kind, RuntimeError where it is a GPU and there is none."""
    place = arguments.device(fn, device)
    if place.type == "cuda" and not available():
        raise RuntimeError(
            f"{fn}: device is {str(device)!r}, which is not there: PyTorch finds no CUDA device; use 'cpu'"
        )
    return place


def _staged(
    source: Tensor, place: torch.device, dtype: torch.dtype, asynchronous: bool
) -> Tensor | Transfer | None:
    """What was moved through buffers, or is being moved; None where PyTorch's own transfer is as good."""
    up, kind = source.is_cpu, place.type
    if kind != ("cuda" if up else "cpu") or not (up or source.is_cuda):
        return None
    if (source.requires_grad and torch.is_grad_enabled()) or type(source) not in _PLAIN:
        return None
    nbytes = source.numel() * source.element_size()
    if nbytes < LEAST or source.layout is not torch.strided or (up and source.is_pinned()):
        return None
    if not torch.cuda.is_initialized():
        torch.cuda.init()
    if torch.cuda.is_current_stream_capturing():
        return None
    if source.requires_grad:
        source = source.detach()
    if source.is_conj() or source.is_neg():
        source = source.resolve_conj().resolve_neg()
    if dtype is not source.dtype and dtype.itemsize < source.element_size():
        source = source.to(dtype)
        nbytes = source.numel() * source.element_size()
    if not (source.is_contiguous() or _dense(source)):
        source = source.contiguous()
    index = place.index if up else source.device.index
    here = torch._C._cuda_getDevice()
    index = here if index is None else index
    STATS.transfers += 1
    STATS.bytes_moved += nbytes
    if index == here and not asynchronous:
        moved = _moved(source, place, index, up)
    else:
        with torch.cuda.device(index):
            moved = _moved(source, place, index, up, asynchronous)
    if isinstance(moved, Transfer):
        moved.then(dtype)
        return moved
    return moved if moved.dtype == dtype else moved.to(dtype)


def _moved(
    source: Tensor, place: torch.device, index: int, up: bool, asynchronous: bool = False
) -> Any:
    """On the device of that index, which is the current one."""
    mover, target = stager(index, up), _fresh(source, place)
    if not asynchronous:
        mover.here(source, target, up)
        return target
    ready = torch.cuda.Event()
    ready.record()
    for t in (source, target):
        if t.is_cuda:  # its memory must not be given away before this stream is done with it
            t.record_stream(mover.stream)
    return Transfer(target, _worker().submit(mover.aside, source, target, up, ready), source)


_PLAIN = (Tensor, torch.nn.Parameter)


def _dense(t: Tensor) -> bool:
    """Whether the elements lie together in some order of the dimensions."""
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True


def _fresh(like: Tensor, place: torch.device) -> Tensor:
    """Memory of the same layout there; on a CPU from the pool, whose pages are there already."""
    from tensorlogic import native

    if place.type == "cpu" and like.is_contiguous() and native.available() is None:
        made: Tensor = native.op("empty")(like.shape, like.dtype)
        return made
    return torch.empty_like(like, device=place)  # dense, as it lies


def _bytes(t: Tensor) -> Tensor:
    """A dense tensor's memory as flat bytes."""
    flat = torch.as_strided(t, (t.numel(),), (1,), t.storage_offset())
    return flat.view(torch.uint8)


@lru_cache
def available(kind: str = "cuda") -> bool:
    """Whether a device of this kind is there."""
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
