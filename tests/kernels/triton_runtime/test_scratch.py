"""Cells of captured graphs: one each, given back with the graph, lent again when nobody can still write there."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.kernels.triton_runtime import scratch
from tensorlogic.system import capture_state

CPU, GPU = torch.device("cpu"), torch.cuda.is_available()


class Graph:
    """Stands for a torch.cuda.CUDAGraph."""


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> scratch.Cells:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waited"))
    done: list[str] = []
    made = scratch.Cells(CPU)
    made.done = done  # type: ignore[attr-defined]
    return made


def test_a_graph_has_the_same_cell_until_it_is_gone(own: Any) -> None:
    graph, other = Graph(), Graph()
    first = own.lend(graph, 1)
    first[0] = 7
    assert own.lend(graph, 1).data_ptr() == first.data_ptr()
    assert len({c.data_ptr() for c in (first, own.lend(graph, 2), own.lend(other, 1))}) == 3
    left = len(own.free)
    own.collect()
    assert (len(own.free), own.done) == (left, [])  # nothing came back: nobody waits
    del graph
    gc.collect()
    assert len(own.free) == left  # what the graph was told to do may still go on
    own.collect()
    assert (len(own.free), own.done) == (left + 2, ["waited", "waited"])
    again = own.lend(other, 3)
    assert int(again.abs().sum()) == 0
    assert len(own.lent) == 2


def test_cells_do_not_run_out_by_graphs_that_come_and_go(own: Any) -> None:
    for _ in range(3 * scratch.COUNT):
        graph = Graph()
        assert own.lend(graph, 1) is not None
        del graph
        own.collect()
    held = [Graph() for _ in range(scratch.COUNT + 1)]
    found = [own.lend(g, 1) for g in held]
    assert found[-1] is None
    assert sum(c is not None for c in found) == scratch.COUNT


def test_the_graph_that_a_stream_is_captured_into(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Graph(), Graph()
    monkeypatch.setattr(capture_state, "_began", {1: (weakref.ref(one), 11)})
    assert capture_state.graph_of(11) is one
    assert capture_state.graph_of(12) is one  # a stream that joined
    capture_state._began[2] = weakref.ref(two), 22
    assert capture_state.graph_of(22) is two
    assert capture_state.graph_of(12) is None  # whose, nobody says
    assert scratch.lend(torch.device("cuda", 0), 12, 1) is None


@pytest.mark.skipif(
    not GPU or "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ,
    reason="graphs are captured on GPUs, with PyTorch's own allocator",
)
def test_captured_losses_that_come_and_go_keep_their_cells_and_memory() -> None:
    """A replay learns the incoming gradient in its cell; without one it guesses 1 for ever."""
    x = torch.randn(64, 4096, device="cuda", dtype=torch.float16, requires_grad=True)
    t = torch.arange(64, device="cuda")

    def step() -> torch.Tensor:
        with tensorlogic.policy(force="triton.together"):
            loss = tensorlogic.softmax_cross_entropy(x, t)
        return torch.autograd.grad(loss * 256, x)[0]

    want = step()
    counts = []
    for _ in range(8):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)
        own = scratch._devices[0]
        (place,) = {number for (of, _), number in own.lent.items() if of == id(graph)}
        assert own.all[place, :2].tolist() == [0x43800000 ^ 0x3F800000, 0]  # 256, and right
        counts.append(len(own.free) + len(own.back))
        del graph, got
        gc.collect()
    assert len(set(counts)) == 1
