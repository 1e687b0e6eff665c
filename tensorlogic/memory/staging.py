"""Transfers of ordinary memory to and from a GPU through a bounded pool of pinned buffers, several chunks in flight."""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK = 4 << 20  # bytes of a staging buffer
LEAST = 1 << 20  # bytes below which PyTorch's own copy is as fast
MOST_THREADS = 8


@dataclass
class TransferStats:
    """What went through the staging buffers of this process."""

    transfers: int = 0
    bytes_moved: int = 0
    buffers: int = 0
    buffer_bytes: int = 0


STATS = TransferStats()


def threads() -> int:
    """How many copy at once: half the cores this process may use, at most eight."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MOST_THREADS, (usable or 2) // 2))


class _Buffer:
    """A pinned chunk, the stream that moves it, and the event after which it may be used again."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream(device)
        self.event = torch.cuda.Event()


class Stager:
    """The buffers and copy threads of one device; made at its first staged transfer, twice as many buffers as threads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        count = threads()
        self.pool = ThreadPoolExecutor(count, "tensorlogic-staging")
        self.free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        for _ in range(2 * count):
            self.free.put(_Buffer(device))
        STATS.buffers += 2 * count
        STATS.buffer_bytes += 2 * count * CHUNK

    def start(self, source: Tensor, target: Tensor, ready: torch.cuda.Event) -> list[Future[Any]]:
        """Begin to copy flat bytes between a CPU and a GPU; the GPU's side is touched after `ready`."""
        step = self.up if target.is_cuda else self.down
        spans = range(0, source.numel(), CHUNK)
        STATS.transfers += 1
        STATS.bytes_moved += source.numel()
        return [
            self.pool.submit(step, source[i : i + CHUNK], target[i : i + CHUNK], ready)
            for i in spans
        ]

    def up(self, source: Tensor, target: Tensor, ready: torch.cuda.Event) -> torch.cuda.Event:
        """One chunk to the GPU: into a buffer here, from it by the copy engine."""
        buffer = self.free.get()
        buffer.event.synchronize()  # until the chunk before has left it
        part = buffer.memory[: source.numel()]
        np.copyto(part.numpy(), source.numpy())
        with torch.cuda.stream(buffer.stream):
            buffer.stream.wait_event(ready)
            target.copy_(part, non_blocking=True)
            buffer.event.record(buffer.stream)
        done = torch.cuda.Event()
        done.record(buffer.stream)
        self.free.put(buffer)
        return done

    def down(self, source: Tensor, target: Tensor, ready: torch.cuda.Event) -> None:
        """One chunk from the GPU: into a buffer by the copy engine, out of it here."""
        buffer = self.free.get()
        buffer.event.synchronize()
        part = buffer.memory[: source.numel()]
        with torch.cuda.stream(buffer.stream):
            buffer.stream.wait_event(ready)
            part.copy_(source, non_blocking=True)
            buffer.event.record(buffer.stream)
        buffer.event.synchronize()
        np.copyto(target.numpy(), part.numpy())
        self.free.put(buffer)


_STAGERS: dict[int, Stager] = {}
_LOCK = threading.Lock()


def stager(device: torch.device) -> Stager:
    """The stager of a device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _LOCK:
        if index not in _STAGERS:
            _STAGERS[index] = Stager(torch.device("cuda", index))
        return _STAGERS[index]


class Transfer:
    """A transfer under way: `wait()` gives the tensor, and orders the current stream behind the copy where it is on a GPU."""

    def __init__(self, result: Tensor, parts: list[Future[Any]], kept: Any, final: Any) -> None:
        self._result, self._parts, self._kept, self._final = result, parts, kept, final

    def done(self) -> bool:
        """True when nothing is left to wait for on this side."""
        return all(p.done() for p in self._parts)

    def wait(self) -> Tensor:
        """The tensor, usable on the current stream (on a GPU) or at once (on a CPU)."""
        if self._parts:
            events = [part.result() for part in self._parts]
            if self._result.is_cuda or (self._kept is not None and self._kept.is_cuda):
                stream = torch.cuda.current_stream()
                for event in events:
                    if event is not None:
                        stream.wait_event(event)
            self._parts, self._kept = [], None
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
        TypeError: no tensor and nothing that offers one. RuntimeError: the device is not there.

    Example:
        >>> import numpy as np, torch, tensorlogic
        >>> tensorlogic.to(np.ones(3, dtype=np.float32), "cpu", torch.float16)
        tensor([1., 1., 1.], dtype=torch.float16)
        >>> tensorlogic.to(torch.ones(2), "cpu", asynchronous=True).wait()
        tensor([1., 1.])
    """
    source, place = as_tensor(tensor, "to: tensor"), torch.device(device)
    wanted = source.dtype if dtype is None else dtype
    handle = _staged(source, place, wanted)
    if handle is None:
        handle = Transfer(source.to(place, wanted), [], None, None)
    return handle if asynchronous else handle.wait()


def _staged(source: Tensor, place: torch.device, dtype: torch.dtype) -> Transfer | None:
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
    gpu = place if place.type == "cuda" else source.device
    with torch.cuda.device(gpu):
        ready = torch.cuda.Event()
        ready.record()
        parts = stager(gpu).start(_bytes(source), _bytes(target), ready)
    if target.dtype == dtype:
        return Transfer(target, parts, source, None)
    return Transfer(target, parts, source, lambda t: t.to(dtype))


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

    pooled = place.type == "cpu" and like.is_contiguous() and like.dtype in _POOLED
    if pooled and native.available() is None:
        made: Tensor = native.op("empty")(list(like.shape), like.dtype)
        return made
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=place)


_POOLED = (torch.float32, torch.float16, torch.bfloat16)


def _bytes(t: Tensor) -> Tensor:
    """A dense tensor's memory as flat bytes."""
    flat = torch.as_strided(t, (t.numel(),), (1,), t.storage_offset())
    return flat.view(torch.uint8)


@lru_cache
def available(kind: str = "cuda") -> bool:
    """Whether a device of this kind is there."""
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
