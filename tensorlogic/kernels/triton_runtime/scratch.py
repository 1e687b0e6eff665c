"""Memory in which a captured graph's kernels leave word from one replay to the next; given back when the graph is destroyed."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

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
