"""Whose work runs on the stream where captures are recorded: only what is recorded, whatever backward passes other threads start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from tensorlogic.cuda_graphs import capture, capture_streams
from tensorlogic.cuda_graphs.captured_graph import Tape, heal
from tensorlogic.system import capture_state

from ..support.graphs import CUDA, DEVICE, captured, gradients

HERE = torch.device(DEVICE, 0) if CUDA else torch.device("cpu")


def loss_of(fast: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return fast(x).square().sum()


def test_nothing_is_recorded_while_another_threads_backward_pass_is_to_come() -> None:
    """It would run on the stream that is recorded, and never be computed."""
    weight = torch.randn(4, 4, device=DEVICE, requires_grad=True)
    fast, step = captured(lambda v: v @ weight), captured(lambda v: v + 1)
    x = torch.randn(3, 4, device=DEVICE)
    with torch.no_grad():
        for _ in range(capture.EAGER_CALLS):
            step(x)
    with ThreadPoolExecutor(1) as other:
        loss = other.submit(loss_of, fast, x).result()
        assert capture_streams.awaited(HERE)
        assert not other.submit(
            capture_streams.awaited, HERE
        ).result()  # which cannot do both at once
        with torch.no_grad():
            assert torch.equal(step(x), x + 1)
            assert step.graphs == 0
        loss.backward(retain_graph=True)
        assert not capture_streams.awaited(HERE)
        again = other.submit(loss_of, fast, x).result()
        assert capture_streams.awaited(HERE)
        del again  # a graph that is gone asks for nothing
    assert not capture_streams.awaited(HERE)
    with torch.no_grad():
        assert torch.equal(step(x), x + 1)
    assert step.graphs == 1
    assert weight.grad is not None


def test_a_backward_pass_that_would_be_recorded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(4, 4, device=DEVICE, requires_grad=True)
    fast, x = captured(lambda v: v @ weight), torch.randn(3, 4, device=DEVICE)
    loss = loss_of(fast, x)
    monkeypatch.setattr(capture_state, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="another thread records on the same stream; run back"):
        loss.backward(retain_graph=True)
    monkeypatch.undo()
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * x.t() @ (x @ weight.detach()))


@gradients
def test_a_backward_pass_beside_another_threads_recording() -> None:
    """The gradient of a call that warmed up is computed, not recorded into what another thread records."""
    torch.manual_seed(0)
    model, other = nn.Linear(64, 64).to(DEVICE), nn.Linear(64, 64).to(DEVICE)
    fast, x = captured(model), torch.randn(8, 64, device=DEVICE)
    recording, over = threading.Event(), threading.Event()

    def slow(v: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            recording.set()
            over.wait(20)
        out: Tensor = other(v)
        return out

    def record() -> Tensor:
        with torch.no_grad():
            other(x)  # cuBLAS cannot begin in a thread that records
            torch.cuda.current_stream().synchronize()
            lately = captured(slow) if calls else slow
            if calls:
                for _ in range(capture.EAGER_CALLS):
                    lately(x)
                return lately(x)  # type: ignore[no-any-return]
            tape = Tape(HERE, None)
            try:
                kept: Tensor = tape.record(lambda: slow(x))
            except RuntimeError:
                heal(HERE)
                raise
            tape.replay()
            return kept.clone()

    loss_of(model, x).backward()  # nor beside one
    for calls in (False, True):
        model.zero_grad()
        loss = loss_of(captured(model), x)
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(record)
            assert recording.wait(1 if calls else 20) is not calls
            try:
                loss.backward()
                torch.cuda.current_stream().synchronize()
            finally:
                over.set()
            torch.testing.assert_close(made.result(), other(x))
        grads = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
        for p, g in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad, g)
        recording.clear()
        over.clear()
    assert fast.reason is None


@gradients
def test_streams_of_others_are_not_recorded() -> None:
    """PyTorch's pool gives the same streams to everyone after 32."""
    theirs = {torch.cuda.Stream().cuda_stream for _ in range(80)}
    with ThreadPoolExecutor(1) as other:  # a thread that has never used the GPU
        made = {other.submit(capture_streams._created, 0).result(), capture_streams._created(0)}
    ours = {
        capture_streams.stream(HERE, use).cuda_stream
        for use in (capture_streams.PROGRAMS, capture_streams.CALLS)
    } | made
    assert len(ours) == 4
    assert 0 not in ours
    assert not ours & theirs


@gradients
def test_memory_of_a_warmed_call_is_not_given_away_while_it_is_read() -> None:
    """Its output lies on another stream than its reader's, which its reader does not know."""
    weight = torch.ones(1, device=DEVICE, requires_grad=True)
    fast, x = captured(lambda v: v * weight), torch.ones(1 << 20, device=DEVICE)
    for _ in range(capture.EAGER_CALLS):
        y = fast(x)
        torch.cuda._sleep(100_000_000)
        held = y.detach() * 3  # after the sleep
        del y
        with torch.cuda.stream(capture_streams.stream(HERE, capture_streams.CALLS)):
            spoiled = torch.full((1 << 20,), 7.0, device=DEVICE)
        assert bool((held == 3).all())
        assert bool((spoiled == 7).all())
