"""Transfers of ordinary memory to and from a GPU through a bounded pool of pinned buffers, several chunks in flight."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAST = 1 << 20  # bytes below which PyTorch's own copy is as fast
WORKERS = 8  # threads that copy, the caller among them
BUFFER, SLOTS = 2 << 20, 16  # bytes of a pinned buffer, and how many there are
CHUNKS = 16  # that a small transfer is cut into: the copy engine waits for the first, the caller for the last
SMALLEST = 1 << 18  # bytes of a chunk, below which the engine's calls take longer than its bytes
UNIT = 1 << 17  # bytes that a thread copies at a time: all of them are at one chunk
PAST_CACHES = 128 << 20  # bytes to a GPU below which threads write past the caches
CHUNK, BUFFERS = 8 << 20, 4  # without the native library: by PyTorch's threads, a piece at a time


@dataclass
class TransferStats:
    """What went through the staging buffers of this process."""

    transfers: int = 0
    bytes_moved: int = 0
    buffers: int = 0
    buffer_bytes: int = 0


STATS = TransferStats()


@lru_cache
def _runtime() -> list[int] | None:
    """Where cudaSetDevice, cudaMemcpyAsync, cudaEventRecord and cudaEventSynchronize are; None where CUDA's runtime is not."""
    version = (torch.version.cuda or "").split(".")[0]
    try:
        lib = ctypes.CDLL(f"libcudart.so.{version}")
        found = [
            ctypes.cast(getattr(lib, name), ctypes.c_void_p).value
            for name in ("cudaSetDevice", "cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize")
        ]  # fmt: skip
    except (OSError, AttributeError):
        return None
    return [address for address in found if address]


class Stager:
    """The buffers of one device and direction; made at its first staged transfer.

    Threads of the native library copy between memory and buffers while the copy engine moves the chunks before them.
    """

    def __init__(self, device: torch.device) -> None:
        from tensorlogic import native

        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.memory = torch.empty(SLOTS * BUFFER, dtype=torch.uint8, pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(SLOTS)]
        for event in self.events:
            event.record(self.stream)  # which makes them
        self.handles = [int(event.cuda_event) for event in self.events]
        self.calls = _runtime() if native.available() is None else None
        self.copy = None if self.calls is None else native.op("staged_copy")
        self.lock = threading.Lock()
        STATS.buffers += SLOTS
        STATS.buffer_bytes += self.memory.numel()

    def here(self, source: Tensor, target: Tensor, up: bool) -> None:
        """Flat bytes, in the order of the current stream; on a CPU they are there when this returns."""
        with self.lock:
            if self.copy is not None:
                host, there = (source, target) if up else (target, source)
                stream = torch._C._cuda_getCurrentRawStream(self.device.index)
                self._staged(host, there, up, stream)
            elif up:
                self._up(source, target)
            else:
                self._down(source, target)

    def aside(
        self, source: Tensor, target: Tensor, up: bool, ready: torch.cuda.Event
    ) -> torch.cuda.Event | None:
        """The same on a stream of its own behind `ready`; on a GPU they are there after the event, on a CPU at once."""
        with torch.no_grad(), torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            self.here(source, target, up)
            return self.stream.record_event() if up else None

    def _staged(self, host: Tensor, there: Tensor, up: bool, stream: int) -> None:
        """By the native library, which lets go of the interpreter meanwhile."""
        assert self.copy is not None
        n = host.numel()
        self.copy(
            host, self.memory, self.handles, self.calls, there.data_ptr(), chunk_of(n), UNIT, workers(), up,
            not up or n < PAST_CACHES, self.device.index, stream,
        )  # fmt: skip

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


def chunk_of(nbytes: int) -> int:
    """Bytes of a chunk: small ones where that is what a transfer waits for, in whole pages."""
    return min(BUFFER, max(SMALLEST, nbytes // CHUNKS >> 12 << 12))


@lru_cache
def workers() -> int:
    """Threads that copy: not all that there are, for others have work, too."""
    return max(
        1,
        min(
            WORKERS,
            (
                len(os.sched_getaffinity(0))
                if hasattr(os, "sched_getaffinity")
                else os.cpu_count() or 1
            )
            - 1,
        ),
    )


def _piece(nbytes: int) -> int:
    """Bytes of a piece without the native library: of small transfers half, so that copying and moving overlap."""
    return CHUNK if nbytes >= 8 * CHUNK else CHUNK // 2


_STAGERS: dict[tuple[int, str], Stager] = {}
_LOCK = threading.Lock()


def stager(device: torch.device, direction: str) -> Stager:
    """The stager of a device and a direction, "up" or "down"."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _LOCK:
        if (index, direction) not in _STAGERS:
            _STAGERS[index, direction] = Stager(torch.device("cuda", index))
        return _STAGERS[index, direction]


@lru_cache
def _worker() -> ThreadPoolExecutor:
    """Where asynchronous transfers run."""
    return ThreadPoolExecutor(2, "tensorlogic-staging")


class Transfer:
    """A transfer under way: `wait()` gives the tensor, and orders the current stream behind the copy where it is on a GPU."""

    def __init__(
        self, result: Tensor, part: Any = None, kept: Any = None, final: Any = None
    ) -> None:
        self._result, self._part, self._kept, self._final = result, part, kept, final

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
        if self._final is not None:
            self._result, self._final = self._final(self._result), None
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
        TypeError: no tensor and nothing that offers one, or dtype is none. ValueError: no device of that name. RuntimeError: it
            is not there.

    Example:
        >>> import numpy as np, torch, tensorlogic
        >>> tensorlogic.to(np.ones(3, dtype=np.float32), "cpu", torch.float16)
        tensor([1., 1., 1.], dtype=torch.float16)
        >>> tensorlogic.to(torch.ones(2), "cpu", asynchronous=True).wait()
        tensor([1., 1.])
    """
    source, place = as_tensor(tensor, "to: tensor"), present(device, "to")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"to: dtype is {dtype!r}; a torch.dtype such as torch.float16, or None, is required"
        )
    wanted = source.dtype if dtype is None else dtype
    handle = _staged(source, place, wanted, asynchronous)
    if handle is None:
        handle = Transfer(source.to(place, wanted))
    return handle if asynchronous else handle.wait()


def present(device: torch.device | str, fn: str) -> torch.device:
    """The device; raises ValueError where there is no such kind, RuntimeError where it is a GPU and there is none."""
    try:
        place = torch.device(device)
    except RuntimeError as problem:
        raise ValueError(
            f"{fn}: device is {device!r}; a device such as 'cpu' or 'cuda' is required"
        ) from problem
    if place.type == "cuda" and not available():
        raise RuntimeError(
            f"{fn}: device is {str(device)!r}, which is not there: PyTorch finds no CUDA device; use 'cpu'"
        )
    return place


def _staged(
    source: Tensor, place: torch.device, dtype: torch.dtype, asynchronous: bool
) -> Transfer | None:
    """The transfer through buffers; None where PyTorch's own is as good."""
    if {source.device.type, place.type} != {"cpu", "cuda"} or not torch.cuda.is_available():
        return None
    recording = source.requires_grad and torch.is_grad_enabled()
    if recording or source.layout is not torch.strided or type(source) not in _PLAIN:
        return None
    if source.numel() * source.element_size() < LEAST or (
        source.device.type == "cpu" and source.is_pinned()
    ):
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    source = source.detach().resolve_conj().resolve_neg()
    if dtype.itemsize < source.element_size():
        source = source.to(dtype)
    if not _dense(source):
        source = source.contiguous()
    target = _fresh(source, place)
    gpu, up = (place, True) if place.type == "cuda" else (source.device, False)
    mover = stager(gpu, "up" if up else "down")
    STATS.transfers += 1
    STATS.bytes_moved += source.numel() * source.element_size()
    final = None if target.dtype == dtype else lambda t: t.to(dtype)
    flat = (_bytes(source), _bytes(target))
    if not asynchronous:
        with torch.no_grad(), torch.cuda.device(gpu):
            mover.here(*flat, up)
        return Transfer(target, None, None, final)
    with torch.cuda.device(gpu):
        ready = torch.cuda.Event()
        ready.record()
    for t in (source, target):
        if t.is_cuda:  # its memory must not be given away before this stream is done with it
            t.record_stream(mover.stream)
    part = _worker().submit(mover.aside, *flat, up, ready)
    return Transfer(target, part, source, final)


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
        made: Tensor = native.op("empty")(list(like.shape), like.dtype)
        return made
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=place)


def _bytes(t: Tensor) -> Tensor:
    """A dense tensor's memory as flat bytes."""
    flat = torch.as_strided(t, (t.numel(),), (1,), t.storage_offset())
    return flat.view(torch.uint8)


@lru_cache
def available(kind: str = "cuda") -> bool:
    """Whether a device of this kind is there."""
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
