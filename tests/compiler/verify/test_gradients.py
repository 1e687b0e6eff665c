"""Models that make gradients of their own: straight-through estimators, reversed or clipped gradients, hooks in forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler.trace.exporter import trace
from tensorlogic.compiler.verify import gradients as verify_gradients
from tensorlogic.guards import errors

from ...support.graphs import close


class Through(torch.autograd.Function):
    """Rounds; the gradient goes through as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Tensor:
        return dy[0]


class Clipped(torch.autograd.Function):
    """Nothing, but for large gradients, which an example need not have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Tensor:
        return dy[0].clamp(-10, 10)


def reversed_by_a_hook(x: Tensor) -> Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(torch.neg)
    return y


def through(x: Tensor) -> Tensor:
    y: Tensor = Through.apply(4 * x) / 4  # type: ignore[no-untyped-call]
    return y


def clipped(x: Tensor) -> Tensor:
    y: Tensor = Clipped.apply(x)  # type: ignore[no-untyped-call]
    return y


def detached(x: Tensor) -> Tensor:
    return x + (x.sign() - x).detach()


class Net(nn.Module):
    def __init__(self, own: Callable[[Tensor], Tensor], drop: float, cut: bool) -> None:
        super().__init__()
        self.own, self.cut = own, cut
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        if self.cut and float(h.sum()) < 0:
            return h
        y: Tensor = self.down(self.own(self.drop(h)))
        return y


def gradients_of(model: nn.Module, x: Tensor, scale: float) -> list[Tensor | None]:
    model.zero_grad()
    (scale * model(x)).square().sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("own", [through, clipped, reversed_by_a_hook, detached])
@pytest.mark.parametrize("cut", [False, True])
def test_they_stay_what_they_are(pays: None, own: Callable[[Tensor], Tensor], cut: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(own, 0.0, cut).train(), torch.randn(4, 8)
    fast = tensorlogic.optimize(copy.deepcopy(model), x, training=True)
    compiled = torch.compile(
        copy.deepcopy(model), backend="tensorlogic", options={"leftovers": "eager"}
    )
    for scale in (1.0, 30.0):
        want = gradients_of(model, x, scale)
        close(gradients_of(fast, x, scale), want)
        close(gradients_of(compiled, x, scale), want)
    torch._dynamo.reset()


def test_where_values_are_dropped_they_are_seen_all_the_same(pays: None) -> None:
    """Numbers are drawn in another order there, so that only the kind of the gradients tells."""
    model, x = Net(through, 0.5, False).train(), torch.randn(4, 8)
    fast = tensorlogic.optimize(model, x, training=True)
    assert any("gradients of its own (Through)" in note for note in fast.report.notes)
    assert all(g is not None and bool(g.any()) for g in gradients_of(fast, x, 1.0)[:2])


def test_a_graph_is_compared_with_the_model() -> None:
    """Whatever it is that a graph leaves out."""
    model, x = Net(lambda v: v, 0.5, False).train(), torch.randn(4, 8, requires_grad=True)
    traced = trace(model, (x,), {})
    verify_gradients.same(traced, model, (x,), {})
    model.own = lambda v: 0.9 * v + 0.1 * v.detach()
    with pytest.raises(errors.Untraceable, match="gradients are not the model's"):
        verify_gradients.same(traced, model, (x,), {})
    model.own = lambda v: 1.1 * v
    model.drop.p = 0.0
    traced = trace(model, (x,), {})
    model.own = lambda v: v
    with pytest.raises(errors.Untraceable, match="outputs are not the model's"):
        verify_gradients.same(traced, model, (x,), {})
    assert all(p.grad is None for p in model.parameters())


def test_dropout_that_drops_all_compiles() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(1.0), nn.Linear(8, 8)).train()
    fast = torch.compile(model, backend="tensorlogic", options={"leftovers": "eager"})
    x = torch.randn(4, 8)
    close(fast(x), model(x))
    torch._dynamo.reset()
