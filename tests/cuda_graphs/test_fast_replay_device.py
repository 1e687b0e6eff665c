"""The short way to a graph in C on a GPU: the driver's own launch, streams, threads, captures, random numbers, memory."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.cuda_graphs.capture import Captured
from tensorlogic.native import call_extension

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def chain(x: Tensor) -> Tensor:
    for _ in range(50):
        x = x + 1
    return x


def captured(fn: Callable[..., Any], *given: Tensor, **options: Any) -> Captured:
    made = tensorlogic.capture(fn, **options)
    for _ in range(5):
        made(*given)
    assert made.graphs == 1, made.reason
    assert type(made.way[0]) is call_extension.module().Way
    return made


def replay_of(fast: Captured) -> Any:
    return fast.replays()[0]


@torch.no_grad()
@pytest.mark.parametrize("views", [False, True])
def test_the_driver_launches_what_draws_no_numbers(
    views: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(8, 64, device="cuda")
    fast = captured(chain, x, unsafe_views=views)
    assert replay_of(fast).tape.handle
    monkeypatch.setattr(replay_of(fast).tape, "replay", None)  # PyTorch is not asked
    outs = []
    for i in range(50):
        given = x * i
        out = fast(given)
        outs.append((i, out, out.clone()))
        del given
    for i, out, then in outs:
        torch.testing.assert_close(then, x * i + 50)
        if not views:
            assert torch.equal(out, then)


@torch.no_grad()
def test_inputs_of_every_layout() -> None:
    base = torch.randn(6, 8, device="cuda")
    lazy = torch.randn(6, 8, dtype=torch.complex64, device="cuda").conj()
    for x in (base, base.t(), base[:, ::2], base[:0], base[1, 1], lazy):
        fast = captured(lambda v: (v + 1, v.sum()), x)
        for _ in range(3):
            torch.testing.assert_close(fast(x), (x + 1, x.sum()))


@torch.no_grad()
def test_random_numbers_go_on_whosever_they_are() -> None:
    x = torch.ones(256, device="cuda")
    fast = captured(lambda v: v * torch.rand_like(v), x)
    assert not replay_of(fast).tape.handle
    assert len({tuple(fast(x).tolist()) for _ in range(20)}) == 20
    own = torch.Generator("cuda").manual_seed(3)
    made = tensorlogic.capture(lambda v: v * torch.rand(256, device="cuda", generator=own))
    assert len({tuple(made(x).tolist()) for _ in range(20)}) == 20
    if made.graphs:  # PyTorch may refuse to capture another generator than its own
        assert not replay_of(made).tape.handle


@torch.no_grad()
def test_streams_wait_for_each_other() -> None:
    x = torch.randn(8, 64, device="cuda")

    def slow(v: Tensor) -> Tensor:
        y = v * 2
        torch.cuda._sleep(2_000_000)
        return y + v

    fast = captured(slow, x)
    streams = [torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs = []
    for i in range(12):
        with torch.cuda.stream(streams[i % 3]):
            given = torch.full_like(x, float(i))
            outs.append(fast(given))
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        assert torch.equal(out, torch.full_like(x, 3.0 * i))


@torch.no_grad()
def test_a_side_stream_is_used_and_its_memory_is_its_own() -> None:
    x = torch.randn(8, 64, device="cuda")
    fast, side = captured(chain, x), torch.cuda.Stream()
    with torch.cuda.stream(side):
        fast(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        y = fast(x)
        assert not side.query()
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(y, x + 50)


def test_threads_that_have_never_used_the_gpu() -> None:
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        fast = captured(chain, x)
    wrong: list[Any] = []

    def work(n: int) -> None:
        given = inputs[n]
        with torch.no_grad():
            for _ in range(200):
                if not torch.equal(fast(given), expected[n]):
                    wrong.append(n)

    inputs = [torch.full_like(x, float(n)) for n in range(4)]
    expected = [v + 50 for v in inputs]
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    first: list[Any] = []
    way: Any = fast.way[0]
    other = threading.Thread(target=lambda: first.append(torch.no_grad()(way)(x)))
    other.start()  # whose very first use of the GPU this is
    other.join()
    assert torch.equal(first[0], chain(x))


@torch.no_grad()
def test_a_graph_that_is_being_captured_takes_the_function() -> None:
    x = torch.randn(8, 64, device="cuda")
    fast = captured(chain, x, unsafe_views=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fast(x)
    x.mul_(2)
    graph.replay()
    torch.testing.assert_close(y, x + 50)
    torch.testing.assert_close(fast(x), x + 50)


@torch.no_grad()
def test_no_memory_is_lost() -> None:
    x = torch.randn(8, 64, device="cuda")
    fast = captured(lambda v: (chain(v), v * 2), x)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        fast(x)
    assert torch.cuda.memory_allocated() == before
    fast(x)
    del fast
    gc.collect()
    assert torch.cuda.memory_allocated() < before


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_may_be_current() -> None:
    x = torch.randn(8, 64, device="cuda:1")
    fast = captured(chain, x)
    for current in (0, 1):
        with torch.cuda.device(current):
            for _ in range(3):
                torch.testing.assert_close(fast(x), x + 50)


@torch.no_grad()
def test_an_optimised_model_is_led_to_its_graph_in_c() -> None:
    layers = (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU()) for _ in range(6))
    model, x = nn.Sequential(*layers).cuda().eval(), torch.randn(8, 64, device="cuda")
    fast: Any = tensorlogic.optimize(model, x)
    program = fast.__dict__.get("_program")
    program = getattr(program, "program", program)
    if program is None or program.replay is None:
        pytest.skip("nothing was captured")
    for _ in range(3):
        fast(x)
    assert type(program.way[0]) is call_extension.module().Way
    near = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)
    near(fast(x), model(x))
    before = fast(x).clone()
    fast[2][1].weight.mul_(2)
    for _ in range(3):
        near(fast(x), nn.Sequential.forward(fast, x))
    assert not torch.allclose(fast(x), before)
