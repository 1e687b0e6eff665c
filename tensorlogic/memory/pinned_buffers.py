"""The pinned buffers of one device and direction, and the transfers through them."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..native import call_extension
from ..plans import open_stores
from ..system import capture_state
from . import transfer_tuning

PAGE = 4096
LEAST = 1 << 20  # bytes below which PyTorch's own copy is as fast
# bytes of pinned memory down and up, where a ring stays in caches
RINGS = (48 << 20, 16 << 20)
EVENTS = 32  # chunks in flight, at most
UNIT = 1 << 15  # bytes that a thread copies at a time
CHUNKS = (1 << 17, 4 << 20)  # bytes of the least chunk and the largest
PATIENCE = 100  # idle microseconds after which the caller copies, too
# bytes of transfers after so many of which their rules are timed
LARGE, MET = 8 << 20, 4
# without the native library: by PyTorch's threads, a piece at a time
CHUNK, BUFFERS = 8 << 20, 4


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
    from tensorlogic.native import cpu_library

    kind = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 13)  # lets go of the interpreter
    made: Callable[..., int] = kind(cpu_library.op("staged_copy_address")())
    return made


class Stager:
    """The buffers of one device and direction; made at its first staged transfer.

    Threads of the native library copy between memory and buffers while the copy engine moves the chunks before them.
    """

    def __init__(self, device: torch.device, up: bool) -> None:
        from tensorlogic.native import cpu_library

        self.device = device
        self.stream = torch.cuda.Stream(device)
        calls = _runtime() if cpu_library.available() is None else None
        ring = RINGS[up] if calls else CHUNK * BUFFERS
        self.memory = torch.empty(ring, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(EVENTS)]
        for event in self.events:
            event.record(self.stream)  # which makes them
        self.copy = None if calls is None else _copy()
        if calls is not None:
            handles = [int(event.cuda_event) for event in self.events]
            self.number = cpu_library.op("staging_open")(self.memory, handles, calls, device.index)
        found = transfer_tuning.known(device, up)
        self.up, self.rules = up, found or transfer_tuning.usual(up)
        self.left = 0 if found or self.copy is None or open_stores.distributed() else MET
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
        self._by(self.rules[transfer_tuning.size_class(n)], source, target, n)
        if (
            self.left > 0
            and n >= LARGE
            and (self.left > 1 or capture_state.can_call_now(self.device))
        ):
            self.left -= 1
            if self.left == 0:
                self._settle()

    def _by(self, rule: transfer_tuning.Rule, source: Tensor, target: Tensor, n: int) -> None:
        host, there = (source, target) if self.up else (target, source)
        self._move(rule, host.data_ptr(), there.data_ptr(), n)

    def _move(self, rule: transfer_tuning.Rule, host: int, there: int, n: int) -> None:
        assert self.copy is not None
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        # The library lets go of the interpreter meanwhile, and has callers wait for each other.
        wrong = self.copy(self.number, host, there, n, *CHUNKS, UNIT, rule.workers, PATIENCE, self.up, rule.stores, stream)  # fmt: skip
        if wrong:
            raise RuntimeError(f"to: CUDA reports error {wrong} for a transfer of {n} bytes")

    def mover(self) -> Callable[[Any], Tensor | None] | None:
        """The same in one call of C, which says None to what it leaves to others; None until the rules are known, or where it is not built."""
        from ..native import cuda_driver

        found = None if self.left > 0 or self.copy is None else cuda_driver.driver(self.device)
        if found is None:
            return None
        rules = [number for rule in self.rules for number in (rule.workers, rule.stores)]
        made: Callable[[Any], Tensor | None] = call_extension.module().Mover(
            found, (self.device.index, self.up), self.number, LEAST, (*CHUNKS, UNIT, PATIENCE), transfer_tuning.BETWEEN, rules
        )  # fmt: skip
        return made

    def _settle(self) -> None:
        """Time how transfers of this direction are best shared: once a machine, a seventh of a second."""
        most, begin = max(transfer_tuning.TIMED), time.perf_counter()
        try:
            there = torch.empty(most, dtype=torch.uint8, device=self.device)
            host = np.empty(transfer_tuning.WALKED, dtype=np.uint8)
        except (torch.OutOfMemoryError, MemoryError):
            return
        # by this thread: PyTorch's would go on spinning beside those that copy
        host[::PAGE] = 1
        at = 0

        def timer(rule: transfer_tuning.Rule, nbytes: int) -> float:
            nonlocal at
            at = at + nbytes if at + 2 * nbytes <= host.nbytes else 0
            torch.cuda.current_stream(self.device).synchronize()
            begin = time.perf_counter()
            self._move(rule, host.ctypes.data + at, there.data_ptr(), nbytes)
            torch.cuda.current_stream(self.device).synchronize()
            return time.perf_counter() - begin

        self.rules = transfer_tuning.settle(self.device, self.up, timer, begin)

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
            event.record()  # of the current stream, as the copy

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
                self.events[i % BUFFERS].record()


def _piece(nbytes: int) -> int:
    """Bytes of a piece without the native library: of small transfers half, so that copying and moving overlap."""
    return CHUNK if nbytes >= 8 * CHUNK else CHUNK // 2


def _bytes(t: Tensor) -> Tensor:
    """A dense tensor's memory as flat bytes."""
    flat = torch.as_strided(t, (t.numel(),), (1,), t.storage_offset())
    return flat.view(torch.uint8)


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
