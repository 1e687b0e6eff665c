"""A stand-in for CUDA's copy engines and events, which put copies off until they are waited for."""

from __future__ import annotations

import ctypes


class Engine:
    """Copy engines that put everything off until somebody asks for the second time, on CUDA's side of `staged_copy`."""

    def __init__(self, refuse: int = 0) -> None:
        self.queue: list[tuple[int, ...]] = []
        self.ended: dict[int, int] = {}  # of every event, how many of its records were reached
        self.recorded: dict[int, int] = {}
        self.moves, self.asked, self.used, self.refuse = 0, 0, 0, refuse
        whole, pointer = ctypes.c_int, ctypes.c_void_p
        self.functions = [
            ctypes.CFUNCTYPE(whole, whole)(self.use),
            ctypes.CFUNCTYPE(whole, pointer, pointer, ctypes.c_size_t, whole, pointer)(self.move),
            ctypes.CFUNCTYPE(whole, pointer, pointer)(self.record),
            ctypes.CFUNCTYPE(whole, pointer)(self.query),
        ]
        self.calls = [int(ctypes.cast(f, pointer).value or 0) for f in self.functions]

    def use(self, device: int) -> int:
        self.used = device
        return 0

    def move(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        self.queue.append((to, source, nbytes))
        self.moves += 1
        return int(self.moves == self.refuse) * 700

    def record(self, event: int, stream: int) -> int:
        self.recorded[event] = self.recorded.get(event, 0) + 1
        self.queue.append((event,))
        return 0

    def query(self, event: int) -> int:
        self.asked += 1
        if self.ended.get(event, 0) == self.recorded.get(event, 0):
            return 0
        while self.asked % 2 and self.ended.get(event, 0) < self.recorded[event]:
            self.step()
        return 600

    def step(self) -> None:
        what = self.queue.pop(0)
        if len(what) == 3:
            ctypes.memmove(*what)
        else:
            self.ended[what[0]] = self.ended.get(what[0], 0) + 1

    def finish(self) -> None:
        while self.queue:
            self.step()
