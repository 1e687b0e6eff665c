"""Gradients that captured functions leave in tensors: a graph writes to memory and sets no attribute, so it serves where that suffices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.cuda_graphs import capture
from tensorlogic.cuda_graphs.captured_graph import CallTape
from tensorlogic.cuda_graphs.leaf_gradients import INPUTS, LEAVES

from ..support.graphs import CUDA, DEVICE, OpTape, net


def recorded(fn: Callable[..., Any], **options: Any) -> capture.Captured:
    made = tensorlogic.capture(fn, **options)
    made.tape = CallTape if CUDA else OpTape
    return made


def batches(count: int) -> Iterator[Tensor]:
    for _ in range(count):
        yield torch.randn(3, 4, device=DEVICE)


def pair() -> tuple[nn.Module, nn.Module]:
    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())
    return model, twin


def adding(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Forward and backward, the rest is the caller's."""

    def run(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return run


def same(model: nn.Module, twin: nn.Module) -> None:
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize(
    ("calls", "every", "none", "graphs"),
    [(60, 1, True, 0), (60, 4, True, 0), (12, 4, False, 1), (12, 99, False, 1)],
)
def test_gradients_cleared_outside(calls: int, every: int, none: bool, graphs: int) -> None:
    """Where they are taken away no graph serves; where they stay and are filled with zeros, or never cleared, one does."""
    model, twin = pair()
    fast, plain = recorded(adding(model)), adding(twin)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for i, x in enumerate(batches(calls)):
        torch.testing.assert_close(fast(x), plain(x))
        same(model, twin)
        if i % every == every - 1:
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=none)
    assert fast.graphs == graphs
    assert (LEAVES in str(fast.reason)) is none


@pytest.mark.parametrize("none", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_steps_that_clear_inside(none: bool, when: str) -> None:
    """They are captured, also where somebody clears outside, too."""

    def stepper(m: nn.Module, opt: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            if when == "before":
                opt.zero_grad(set_to_none=none)
            loss = m(x).square().mean()
            loss.backward()
            opt.step()
            if when == "after":
                opt.zero_grad(set_to_none=none)
            return loss.detach()

        return step

    models = pair()
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    plain, fast = stepper(models[1], opts[1]), recorded(stepper(models[0], opts[0]))
    for i, x in enumerate(batches(10)):
        torch.testing.assert_close(fast(x), plain(x))
        same(*models)
        if i > 4 and none:
            for opt in opts:
                opt.zero_grad()
    assert (fast.graphs, fast.reason) == (1, None)


def test_gradients_that_were_added_outside_are_seen() -> None:
    """A step that clears after itself begins with none; gradients of an earlier batch are part of it once."""
    models = pair()
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]

    def stepper(m: nn.Module, opt: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def step(x: Tensor) -> None:
            m(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        return step

    plain, fast = stepper(models[1], opts[1]), recorded(stepper(models[0], opts[0]))
    for i, x in enumerate(batches(8)):
        if i == 5:
            for m in models:
                m(x + 1).square().mean().backward()
        fast(x)
        plain(x)
        same(*models)


def test_gradients_of_inputs() -> None:
    fast = recorded(lambda v: v.square().sum().backward())
    for _ in range(6):
        x = torch.randn(3, device=DEVICE, requires_grad=True)
        fast(x)
        torch.testing.assert_close(x.grad, 2 * x.detach())
    assert INPUTS in str(fast.reason)


def test_a_failed_recording_leaves_gradients_as_they_were() -> None:
    model, twin = pair()
    runs: list[int] = []

    def run(x: Tensor) -> Tensor:
        runs.append(1)
        adding(model)(x)
        if len(runs) == 3:
            raise RuntimeError("recording")
        return x.sum()

    fast, plain = recorded(run), adding(twin)
    for x in batches(3):
        model.zero_grad(set_to_none=False)
        twin.zero_grad(set_to_none=False)
        kept = [p.grad for p in model.parameters()]
        fast(x)
        plain(x)
        if len(runs) > 2:
            assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
    assert "recording" in str(fast.reason)


class Unrun(OpTape):
    """As a graph: recording computes nothing, so parameters stay as they were, and gradients that are new hold nothing yet."""

    parameters: Sequence[Tensor] = ()

    def record(self, fn: Callable[[], Any]) -> Any:
        before = [
            (p, p.grad, p.detach().clone(), None if p.grad is None else p.grad.clone())
            for p in self.parameters
        ]
        out = super().record(fn)
        self.fresh = False
        with torch.no_grad():
            for p, grad, held, added in before:
                p.copy_(held)
                if p.grad is not None and p.grad is not grad:
                    p.grad.fill_(float("nan"))
                elif grad is not None and added is not None:
                    grad.copy_(added)
        return out


@pytest.mark.parametrize(
    "kind", ["step first", "step first, cleared in place", "step last", "draws"]
)
def test_a_step_reads_the_gradients_that_its_call_would(kind: str) -> None:
    """An optimizer that steps first takes those of the call before, which a graph would have left elsewhere."""
    models = pair()
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]

    def stepping(model: nn.Module, opt: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            first = kind != "step last"
            if kind == "draws":  # by hand, of which nobody knows that it reads them
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0 if p.grad is None else 0.1 * p.grad
            elif first:
                opt.step()
            opt.zero_grad(set_to_none=kind != "step first, cleared in place")
            factor = 1 + (kind == "draws" and random.random() < 0.5)
            loss = model(x).square().mean() * factor
            loss.backward()
            if not first:
                opt.step()
            return loss.detach()

        return run

    fast = tensorlogic.capture(stepping(models[0], opts[0]))
    tape = type("Own", (Unrun,), {"parameters": [*models[0].parameters()]})
    fast.tape = CallTape if CUDA else tape
    plain = stepping(models[1], opts[1])
    for x in batches(6):
        state = random.getstate()
        found = fast(x)
        random.setstate(state)
        torch.testing.assert_close(found, plain(x))
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q)
        torch.testing.assert_close(p.grad, q.grad)
    served = kind in ("step last", "step first, cleared in place")
    assert (fast.graphs, fast.reason is None) == ((1, True) if served else (0, False))
