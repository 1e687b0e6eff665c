"""What is computed of weights and kept until a block ends, as autocast keeps casts: no recorded graph reads it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import tensorlogic
from tensorlogic.cuda_graphs import capture_streams, captured_graph
from tensorlogic.measure import timer
from tensorlogic.system import capture_state

from ..support.graphs import CUDA, DEVICE, captured, gradients

HALF = torch.bfloat16
GPU = torch.device("cuda", 0)


class Casts(TorchDispatchMode):
    """How often `weight` is cast."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.count = weight, 0

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        to_half = fn is torch.ops.aten._to_copy.default and args[0] is self.weight
        self.count += to_half
        return fn(*args, **(kwargs or {}))


@pytest.fixture
def layer() -> tuple[Callable[[], Tensor], Casts]:
    """A call of a product with a weight, and how often that is cast."""
    weight, x = nn.Parameter(torch.randn(6, 4)), torch.randn(3, 4)
    return lambda: F.linear(x, weight), Casts(weight)


def test_casts_are_made_anew_inside_and_afterwards(layer: Any) -> None:
    call, casts = layer
    inner = torch.autocast("cpu", HALF)  # keeps casts whatever is around it
    with torch.autocast("cpu", HALF), casts:
        call(), call()
        assert casts.count == 1
        with capture_state.uncached():
            call(), call()
            assert casts.count == 3
            with inner:
                call(), call()
            assert casts.count == 4  # of its own
        assert torch.is_autocast_cache_enabled()
        call(), call()
        assert casts.count == 5
        with pytest.raises(ValueError, match="inside"), capture_state.uncached():
            raise ValueError("inside")
        assert torch.is_autocast_cache_enabled()


class Stream:
    """In the place of one of CUDA's."""

    def wait_stream(self, other: Stream) -> None:
        """Nothing runs beside anything."""


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and graphs of a GPU that is none: recorded calls run as they are recorded."""
    if CUDA:
        pytest.skip("a machine without a GPU pretends to have one")

    class Graph:
        def replay(self) -> None:
            """What was recorded ran already."""

    cuda = torch.cuda
    for name, value in {
        "CUDAGraph": Graph,
        "graph": lambda *args, **kwargs: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": lambda device: Stream(),
        "current_stream": lambda device=None: Stream(),
        "set_stream": lambda stream: None,
        "synchronize": lambda device=None: None,
        "Event": lambda **kwargs: None,
    }.items():
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(
        capture_streams, "stream", lambda device, use=capture_streams.PROGRAMS: Stream()
    )
    monkeypatch.setattr(timer, "give_back", lambda device: None)
    monkeypatch.setattr(timer, "once", lambda step, device: 1.0)


def recorded(call: Callable[[], Tensor]) -> None:
    captured_graph.Tape(GPU, None).record(call)


def warmed(call: Callable[[], Tensor]) -> None:
    capture_streams.warm(call, GPU, 1)


@pytest.mark.parametrize("record", [recorded, warmed])
def test_recordings_cast_for_themselves(record: Any, layer: Any, pretended: None) -> None:
    call, casts = layer
    with torch.autocast("cpu", HALF), casts:
        call()
        record(call)
        assert casts.count == 2
        call()
        assert casts.count == 3


def test_timed_graphs_cast_for_themselves(layer: Any, pretended: None) -> None:
    call, casts = layer
    with torch.autocast("cpu", HALF), casts:
        call()
        timed = timer._Graph([call], GPU, 1e-9)
        inside = 1 + timed.count  # a call to warm up, and what is recorded
        assert casts.count == 1 + inside
        call()
        assert casts.count == 2 + inside


@gradients
@pytest.mark.parametrize("way", ["capture", "optimize"])
@pytest.mark.parametrize("training", [False, True])
def test_graphs_outlive_the_block_in_which_they_were_recorded(way: str, training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model = model.to(DEVICE).train(training)
    x = torch.randn(32, 64, device=DEVICE)
    with torch.set_grad_enabled(training):
        with torch.autocast(DEVICE, HALF):
            model(x)
            fast: Any = captured(model)
            if way == "optimize":
                fast = tensorlogic.optimize(model, x, training=training)
                assert fast.report.outcome == "captured"
            for _ in range(4):
                fast(x)
        for _ in range(3):
            rubbish = [torch.full((256, 64), 1e4, device=DEVICE, dtype=HALF) for _ in range(64)]
            del rubbish
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.1)
            with torch.autocast(DEVICE, HALF):
                torch.testing.assert_close(fast(x), model(x), rtol=3e-2, atol=3e-2)


def parametrized() -> nn.Module:
    torch.manual_seed(0)
    layer = parametrizations.weight_norm(nn.Linear(32, 64))
    return nn.Sequential(layer, nn.GELU(), nn.Linear(64, 32)).to(DEVICE).eval()


@torch.no_grad()
def test_weights_that_a_block_keeps_are_not_recorded() -> None:
    model, x = parametrized(), torch.randn(8, 32, device=DEVICE)
    fast = captured(model)
    with parametrize.cached():
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x))
        assert (fast.graphs, "until its block ends" in str(fast.reason)) == (0, True)
    for _ in range(40):  # looked at again in a while
        for p in model.parameters():
            p.mul_(1.01)
        torch.testing.assert_close(fast(x), model(x))
    assert (fast.graphs, fast.reason) == (1, None)


@torch.no_grad()
def test_optimize_within_a_block_that_keeps_weights(pays: None) -> None:
    """What is computed there is the model's own after it, too; others are optimised as ever."""
    model, plain = parametrized(), nn.Sequential(nn.Linear(32, 64), nn.GELU()).to(DEVICE).eval()
    x = torch.randn(8, 32, device=DEVICE)
    with parametrize.cached():
        fast = tensorlogic.optimize(model, x)
        other = tensorlogic.optimize(plain, x)
    assert "optimize it outside of that block" in fast.report.reason
    assert other is not plain
    for p in model.parameters():
        p.mul_(1.5)
    torch.testing.assert_close(fast(x), model(x))
    later = tensorlogic.optimize(model, x)
    assert later is not model
    torch.testing.assert_close(later(x), model(x))
