"""Memory in which a captured graph's kernels leave word from one replay to the next; given back when the graph is destroyed."""

from __future__ import annotations

import ctypes
import threading
import weakref
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from ...native import call_extension
from ...system import capture_state

COUNT, WORDS = 1024, 16  # cells of a device, and 4-byte words of each
_lock = threading.Lock()
_devices: dict[int, Cells] = {}


class Cells:
    """The cells of one device, made outside of captures, because what is made inside is zeroed by every replay."""

    def __init__(self, device: torch.device) -> None:
        self.all = torch.zeros(COUNT, WORDS, dtype=torch.int32, device=device)
        self.free = list(range(COUNT))
        self.back: list[int] = []  # their graphs are gone, but perhaps not what these still do
        self.lent: dict[tuple[int, Any], int] = {}
        self.device = device

    def lend(self, graph: Any, where: Any) -> Tensor | None:
        """The cell of `graph` for `where`, until the graph is gone; None where none is left."""
        name = id(graph), where
        with _lock:
            if name not in self.lent:
                if not self.free:
                    return None
                self.lent[name] = self.free.pop()
                weakref.finalize(graph, self.back_from, name).atexit = False
            return self.all[self.lent[name]]

    def back_from(self, name: tuple[int, Any]) -> None:
        """The graph is gone."""
        # without the lock: a collection may come while it is held
        self.back.append(self.lent.pop(name))

    def collect(self) -> None:
        """What was given back may be lent again, once the device has done all it was told to."""
        with _lock:
            count = len(self.back)
            returned, self.back[:count] = self.back[:count], []
        if not returned:
            return
        torch.cuda.synchronize(self.device)
        self.all[torch.tensor(returned)] = 0
        torch.cuda.synchronize(self.device)
        with _lock:
            self.free += returned


def ready(device: torch.device) -> None:
    """Make the cells of a device; not inside a capture."""
    index = _index(device)
    with _lock:
        if index in _devices:
            return
        _devices[index] = Cells(torch.device(device.type, index))
    capture_state.BEFORE.append(_devices[index].collect)


def lend(device: torch.device, stream: int, where: Any) -> Tensor | None:
    """A cell for the graph that `stream` is captured into; None where none is left or the graph is not known."""
    graph, cells = capture_state.graph_of(stream), _devices.get(_index(device))
    return cells.lend(graph, where) if graph is not None and cells is not None else None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


_COUNTERS: dict[tuple[int, int, int, torch.dtype, str], Tensor] = {}


_CAPTURED: dict[tuple[int, int, torch.dtype, str], Tensor] = {}


# a use whose counters keep in a graph what its last replay left there
LASTING = "lasting"


def counters(
    device: torch.device, count: int, dtype: torch.dtype = torch.int32, use: str = "zero"
) -> Tensor:
    """Counters of this stream and this use, zeroed once; every launch leaves them as the next of that use may find them.

    `use` "zero": as zeros; others as their kernels say. Inside a capture they are the graph's own, zeroed by it once: its launches on one stream follow one another.
    """
    compiled = call_extension.module()
    if (
        compiled is not None
        and (slot := compiled.noted(counters, device, count, dtype, use)) is not None
    ):
        return cast(Tensor, slot)
    if device.type != "cuda":
        return torch.zeros(count, dtype=dtype, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    if torch.cuda.is_current_stream_capturing():
        return _captured(device, stream, count, dtype, use)
    where = (index, stream, 1 << max(count - 1, 0).bit_length(), dtype, use)
    found = _COUNTERS.get(where)
    if found is None:
        found = _COUNTERS[where] = torch.zeros(where[2], dtype=dtype, device=device)
        if use == LASTING:
            ready(device)
    return found


def _captured(
    device: torch.device, stream: int, count: int, dtype: torch.dtype, use: str
) -> Tensor:
    capture = _capture_id(stream)
    if capture is None:
        return torch.zeros(count, dtype=dtype, device=device)
    if use == LASTING and count <= WORDS:
        kept = lend(device, stream, (capture, stream))
        if kept is not None:
            return kept
    where = (capture, stream, dtype, use)
    found = _CAPTURED.get(where)
    if found is None or found.numel() < count:
        for other in [w for w in _CAPTURED if w[0] != capture]:
            _CAPTURED.pop(other, None)
        found = _CAPTURED[where] = torch.zeros(max(count, 256), dtype=dtype, device=device)
    return found


@lru_cache
def _capture_info() -> Any:
    """The driver's cuStreamGetCaptureInfo, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None


def _capture_id(stream: int) -> int | None:
    """The number of the capture that `stream` takes part in; None when the driver does not say."""
    info, status, number = _capture_info(), ctypes.c_int(), ctypes.c_uint64()
    if info is None or info(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    ):
        return None
    return number.value if status.value == 1 else None
