"""Stand-ins for the driver's functions that replay graphs: they note what is copied and launched, and do it at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

import tensorlogic
from tensorlogic.cuda_graphs.capture import Captured
from tensorlogic.native import call_extension
from tests.support.graphs import PythonTape

INT, PLACE, SIZE, WORD = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
STREAM = 0x700


class Driver:
    """Notes what it is asked for; copies and replays are done at once."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.stream, self.capturing = STREAM, 0
        self.refuse: dict[str, int] = {}  # the status of the next calls of a kind
        self.tapes: dict[int, Callable[[], None]] = {}
        kinds = (
            ctypes.CFUNCTYPE(INT)(lambda: 1),
            ctypes.CFUNCTYPE(INT, ctypes.c_int32, ctypes.POINTER(PLACE))(self._stream),
            ctypes.CFUNCTYPE(INT, PLACE, ctypes.POINTER(INT))(self._capturing),
            ctypes.CFUNCTYPE(INT, WORD, WORD, SIZE, PLACE)(self._copy),
            ctypes.CFUNCTYPE(INT, PLACE, PLACE)(self._graph),
        )
        self.kept = kinds
        launch, stream, capturing, copy, graph = (ctypes.cast(f, PLACE).value for f in kinds)
        self.driver = call_extension.module().Driver(launch, stream, capturing, 0, copy, graph)

    def _stream(self, device: int, out: Any) -> int:
        out[0] = self.stream + device
        return self.refuse.get("stream", 0)

    def _capturing(self, stream: int, out: Any) -> int:
        out[0] = self.capturing
        return self.refuse.get("capturing", 0)

    def _copy(self, to: int, start: int, size: int, stream: int) -> int:
        if not self.refuse.get("copy", 0):
            self.done.append(("copy", to, start, size, stream))
            ctypes.memmove(to, start, size)
        return self.refuse.get("copy", 0)

    def _graph(self, handle: int, stream: int) -> int:
        if not self.refuse.get("graph", 0):
            self.done.append(("graph", handle, stream))
            self.tapes[handle]()
        return self.refuse.get("graph", 0)

    def kinds(self) -> list[str]:
        """What was done since the last question."""
        found = [d[0] for d in self.done]
        self.done.clear()
        return found


def tape(driver: Driver, handle: bool = True) -> Any:
    """Tapes that the driver launches by their handles, or that it does not know."""

    class Known(PythonTape):
        def __init__(self, device: torch.device, pool: Any) -> None:
            super().__init__(device, pool)
            self.handle, self.fails, self.asked = 0, False, 0
            if handle:
                self.handle = 0x1000 + len(driver.tapes)
                driver.tapes[self.handle] = super().replay

        def replay(self) -> None:
            self.asked += 1
            if self.fails:
                raise RuntimeError("what PyTorch says")
            super().replay()

    return Known


def captured(driver: Driver, fn: Callable[..., Any], *given: Any, **options: Any) -> Captured:
    """A captured function that is replayed by the short way."""
    handle = options.pop("handle", True)
    made = tensorlogic.capture(fn, **options)
    made.tape = tape(driver, handle)
    for _ in range(5):
        made(*given)
    assert made.graphs == 1, made.reason
    assert type(made.way[0]) is call_extension.module().Way
    driver.kinds()
    return made


def replay_of(fast: Captured) -> Any:
    return fast.replays()[0]
