"""Who records a CUDA graph and when graphs are destroyed: one thread at a time, nothing collected meanwhile; what is the graph's own."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tensorlogic.cuda_graphs import capture, capture_streams, captured_graph
from tensorlogic.cuda_graphs.captured_graph import Tape
from tensorlogic.system import capture_state, process

from ..support.graphs import DEVICE, captured


def test_turns_to_record_are_exclusive() -> None:
    def late() -> bool:
        with capture_state.capture_lock(0.05):  # gives up and goes on
            return capture_state._TURN.acquire(blocking=False)

    with capture_state.capture_lock(), ThreadPoolExecutor(1) as pool, capture_state.capture_lock():
        assert not pool.submit(late).result()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(late).result()
        pool.submit(capture_state._TURN.release).result()


def test_nothing_is_collected_while_a_graph_is_recorded() -> None:
    """A graph in a cycle, whosever it is, would be destroyed by the recording thread and break its recording."""
    assert gc.isenabled()
    with capture_state.capture_lock():
        assert not gc.isenabled()
        with capture_state.capture_lock():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no graph"), capture_state.capture_lock():
        raise ValueError("no graph")
    assert gc.isenabled()
    gc.disable()
    try:
        with capture_state.capture_lock():
            pass
        assert not gc.isenabled()  # as its owner wants it
    finally:
        gc.enable()


def test_nothing_is_collected_while_a_graph_is_recorded_beside_a_thread_that_imports() -> None:
    """Whoever ends first leaves the collector off for the other."""
    with process.paused():
        with capture_state.capture_lock():
            pass
        assert not gc.isenabled()
    process.pause()
    with capture_state.capture_lock():
        process.resume()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_graph_is_destroyed_while_nobody_records() -> None:
    class Owner:
        def __init__(self) -> None:
            self.graph = nn.Identity()

    def drop() -> weakref.ref[nn.Module]:
        owner = Owner()
        known = weakref.ref(owner.graph)
        capture_state.destroy_later(owner, "graph", "replay")
        return known

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(drop).result()() is None
        with capture_state.capture_lock():
            known, own = pool.submit(drop).result(), drop()
            with capture_state.capture_lock():
                pass
            assert known() is not None
            assert own() is not None  # not even by who records
        assert known() is None
        assert own() is None


def test_a_graph_that_could_not_begin_is_never_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's destructor throws where the generator does not know the graph."""

    class Graph:
        def capture_begin(self) -> None:
            raise RuntimeError("Cannot register the state during capturing stage.")

        def capture_end(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(capture_state, "_installed", False)
    capture_state.install()
    graph = Graph()
    known = weakref.ref(graph)
    with pytest.raises(RuntimeError, match="capturing stage"):
        graph.capture_begin()
    del graph
    gc.collect()
    assert known() is not None
    assert not capture_state.any_thread()


def test_what_cublas_works_in_belongs_to_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    class Graph:
        def replay(self) -> None:
            done.append("replayed")

    @contextlib.contextmanager
    def recording(*_: Any, **__: Any) -> Iterator[None]:
        done.append("recording")
        yield
        done.append("recorded")

    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("let go"), raising=False
    )
    monkeypatch.setattr(capture_state, "_installed", True)  # nobody watches this one
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(capture_streams, "stream", lambda device, use: Stream())
    tape = Tape(torch.device("cuda", 0), None)
    assert tape.record(lambda: done.append("work") or 3) == 3  # type: ignore[func-returns-value]
    tape.replay()
    assert done == ["let go", "recording", "work", "recorded", "let go", "replayed"]


@torch.no_grad()
def test_calls_are_not_warmed_up_where_another_thread_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would be recorded into its graph, on the stream that all recordings of a device share."""
    warmed: list[int] = []

    def noted(fn: Any, device: torch.device, times: int, use: str) -> Any:
        warmed.append(times)
        return fn()

    monkeypatch.setattr(capture, "warm", noted)
    fast, x = captured(lambda v: v + 1), torch.randn(3, device=DEVICE)
    recording, over = threading.Event(), threading.Event()

    def record() -> None:
        with capture_state.capture_lock():
            recording.set()
            assert over.wait(30)

    other = threading.Thread(target=record)
    other.start()
    assert recording.wait(30)
    for _ in range(4):
        assert torch.equal(fast(x), x + 1)
    assert (warmed, [e.calls for e in fast.entries.values()]) == ([], [0])
    over.set()
    other.join()
    for _ in range(capture.EAGER_CALLS):
        assert torch.equal(fast(x), x + 1)
    assert warmed == [1] * capture.EAGER_CALLS
    assert torch.equal(fast(x), x + 1)
    assert fast.graphs == 1


def test_the_first_replay_tells_what_pytorch_does_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        draws = False

        def replay(self) -> None:
            if self.draws:
                torch.zeros(1).fill_(3)

        def raw_cuda_graph_exec(self) -> int:
            return 77

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(capture_state, "install", lambda: None)
    for draws, version, told in (
        (False, "2.11.0", 77), (False, "2.13.1+cu130", 77), (True, "2.13.0", 0), (False, "2.14.0a0", 0), (False, "2.10.0", 0),
    ):  # fmt: skip
        monkeypatch.setattr(torch, "__version__", version)
        made: Any = Tape(torch.device("cpu"), None)
        with pytest.raises(RuntimeError, match="nothing is recorded"):
            made.replay()
        made.recorded, made.graph.draws = True, draws
        assert made.handle == 0
        for _ in range(2):
            made.replay()
            assert made.handle == told
    assert captured_graph._handle(SimpleNamespace()) == 0
