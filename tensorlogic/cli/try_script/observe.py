"""What a program does: which modules it calls, and what it changes outside."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...compiler.reporting.op_profile import dtype_name
from .assist import Outermost, Run, signature

CHANGES = {  # audit events -> what a person calls them
    "socket.connect": "connects to", "socket.bind": "listens at", "subprocess.Popen": "starts", "os.system": "runs",
    "os.remove": "removes", "os.rename": "renames", "os.mkdir": "makes the folder",
    "os.rmdir": "removes the folder", "shutil.rmtree": "removes the folder",
}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
HARMLESS = ("__pycache__", "/dev/", "/proc/", ".triton", f"{tempfile.gettempdir()}/")
MOST = 20  # changes that are kept


class Outside:
    """Files that are written and sockets that are opened while active; an audit hook cannot be removed, so it sleeps."""

    def __init__(self, *ours: str) -> None:
        self.ours, self.active, self.found = (*ours, *HARMLESS), False, dict[str, None]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active or len(self.found) >= MOST:
            return
        if event == "open":
            path, _, flags = args
            if isinstance(path, (str, bytes)) and isinstance(flags, int) and flags & WRITING:
                self._note("writes", os.fsdecode(path))
        elif event in CHANGES:
            if event.startswith("socket.") and not isinstance(args[1], tuple):
                return  # within this machine
            self._note(CHANGES[event], args[1] if event.startswith("socket.") else args[0])

    def _note(self, what: str, value: object) -> None:
        text = os.fsdecode(value) if isinstance(value, bytes) else str(value)
        if not any(h in text for h in self.ours):
            self.found[f"{what} {text}"] = None


@dataclass
class Called:
    """Calls of one outermost module with one signature."""

    number: int
    name: str
    signature: str
    calls: int = 0
    seconds: float = 0.0


class Modules:
    """Counts and times outermost modules, and keeps the first outputs of each."""

    KEPT = 2  # outputs of a module
    ELEMENTS = 1 << 16  # of each

    def __init__(self) -> None:
        self.called: dict[tuple[int, str], Called] = {}
        self.outputs: dict[str, Tensor] = {}
        self.times: list[float] = []

    def serve(
        self,
        number: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Run,
    ) -> Any:
        """One call."""
        kind = signature(args, kwargs)
        begin = time.perf_counter()
        out = run(module)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        entry = self.called.setdefault((number, kind), Called(number, type(module).__name__, kind))
        entry.calls += 1
        entry.seconds += seconds
        self.times.append(seconds)
        if entry.calls <= self.KEPT:
            self.keep(f"{number} {kind} {entry.calls}", out)
        return out

    def keep(self, name: str, value: Any) -> None:
        """The beginning of every floating tensor in a value, for comparison between runs."""
        with _disable_current_modes():  # what we keep takes no time of the program's
            for i, leaf in enumerate(pytree.tree_leaves(value)):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.is_sparse:
                    flat = leaf.detach().reshape(-1)[: self.ELEMENTS]
                    kept = flat.to("cpu", torch.float64, copy=True)
                    self.outputs[f"{name} {i} {dtype_name(leaf)}"] = kept

    def watching(self) -> Outermost:
        """The patch that watches."""
        return Outermost(self.serve)
