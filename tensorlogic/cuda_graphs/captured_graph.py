"""CapturedGraph: one recorded CUDA graph, and what must be put right when recording fails."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..guards.errors import first_line
from ..system import capture_state
from . import capture_streams

LOG = logging.getLogger("tensorlogic")


FAILURES = (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError)


# PyTorch, whose replay was read: it fills in random state, if the graph uses any, and launches
READ = ((2, 11), (2, 13))


def cause(problem: BaseException) -> str:
    """What went wrong first: ending a broken capture raises once more."""
    while problem.__context__ is not None:
        problem = problem.__context__
    return first_line(problem)


class Tape:
    """What is recorded once and replayed: a CUDA graph on one device, in a memory pool that several may share.

    `use`: on which of the device's streams it is recorded, as `lanes.stream` takes it.
    """

    use = capture_streams.PROGRAMS

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.device, self.pool, self.recorded = device, pool, False
        # of the graph as the driver launches it, where a replay does nothing else
        self.handle = 0
        capture_state.install()
        self.graph = torch.cuda.CUDAGraph()

    def record(self, fn: Callable[[], Any]) -> Any:
        """Capture `fn()`; its work happens when the tape is replayed.

        What cuBLAS works in shall be the graph's own. PyTorch keeps one such workspace a stream, and whoever records next lets
        go of it (torch.compile does), while this graph would go on writing there.
        """
        with capture_state.capture_lock(), capture_state.uncached():
            return self._record(fn)

    def _record(self, fn: Callable[[], Any]) -> Any:
        torch._C._cuda_clearCublasWorkspaces()
        side = capture_streams.stream(self.device, self.use)
        own = torch.cuda.current_stream(self.device)
        side.wait_stream(own)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a failed one leaves an empty graph
                with torch.cuda.graph(
                    self.graph, pool=self.pool, stream=side, capture_error_mode="thread_local"
                ):
                    out = fn()
        finally:
            torch.cuda.set_stream(own)  # a capture that cannot end leaves its own behind
            torch._C._cuda_clearCublasWorkspaces()
        own.wait_stream(side)
        self.recorded = True
        return out

    def replay(self) -> None:
        """Do the recorded work on the current stream; the first time shows whether PyTorch does more for it than launch."""
        if not self.recorded:
            raise RuntimeError("nothing is recorded")
        with _Noting() as noting:
            self.graph.replay()
        self.handle = 0 if noting.calls else _handle(self.graph)
        self.replay = self.graph.replay  # type: ignore[method-assign]  # without a frame of ours

    def __del__(self) -> None:
        capture_state.destroy_later(self, "replay", "graph")


class CallTape(Tape):
    """The same on the stream where `capture` warms up its callers' calls."""

    use = capture_streams.CALLS


class _Noting(TorchDispatchMode):
    """Counts calls of PyTorch: a replay makes some for each generator that the graph draws from, whosever it is."""

    calls = 0

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return fn(*args, **(kwargs or {}))


def _handle(graph: Any) -> int:
    """Where the driver knows a graph; 0 where PyTorch does not say, or may do more in a replay than was read."""
    version = tuple(int(n) for n in torch.__version__.split(".")[:2])
    tell = getattr(graph, "raw_cuda_graph_exec", None)
    return int(tell()) if tell is not None and READ[0] <= version <= READ[1] else 0


def heal(device: torch.device) -> None:
    """After a failed capture PyTorch's generator believes that one goes on; a capture that ends well tells it otherwise."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, capture_error_mode="thread_local")
        with capture_state.capture_lock(), torch.cuda.device(device), recording:
            torch.zeros(1, device=device)
    except RuntimeError as problem:  # what failed before is what the caller is told
        LOG.warning("tensorlogic: a failed capture could not be cleaned up: %s", problem)
