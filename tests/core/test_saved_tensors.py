"""What forward keeps for backward: no more than PyTorch does, and what is written to in between is noticed as there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.ops.linear import LINEAR

from ..support.helpers import TABLE

# These make again in backward what PyTorch keeps (normalised rows, probabilities, a product), from operands that
# they keep instead: a write to one of those raises, where PyTorch has no more use of it.
FROM_OPERANDS = ("mul_relu", "gelu_linear", "layer_norm_linear", "softmax_cross_entropy")
ROADS: dict[str, Callable[[], Any]] = {
    "recorded": nullcontext,
    "registered": lambda: FlopCounterMode(display=False),  # a mode of PyTorch's sees the call
}
Inputs = tuple[list[Tensor], list[Tensor]]


@pytest.fixture(autouse=True)
def _ours_recorded() -> Iterator[None]:
    """Even torch.eager's calls are recorded by us, as any other candidate's are."""
    watching = replace(policy.current(), tune="off", observer=lambda *_, **__: None, entries={})
    with policy.use(watching):
        yield


def _patterns(count: int) -> list[tuple[bool, ...]]:
    """Gradients wanted of all operands, of each alone, of all but each."""
    ones = [tuple(i == j for j in range(count)) for i in range(count)]
    found = [(True,) * count, *ones, *(tuple(not n for n in one) for one in ones)]
    return [p for p in dict.fromkeys(found) if any(p)]


def _inputs(shapes: Sequence[tuple[int, ...]], needs: Sequence[bool]) -> Inputs:
    """Leaves, and operands that may be written to."""
    torch.manual_seed(0)
    leaves = [torch.rand(s).add_(0.5).requires_grad_(n) for s, n in zip(shapes, needs, strict=True)]
    return leaves, [leaf * 1 if leaf.requires_grad else leaf for leaf in leaves]


def _bytes(fn: Callable[..., Tensor], args: list[Tensor]) -> int:
    """Bytes kept for backward besides operands, which their owners hold, each storage once."""
    held: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fn(*args)
    return sum(held.values())


def _gradients(
    fn: Callable[..., Tensor],
    shapes: Sequence[tuple[int, ...]],
    needs: Sequence[bool],
    written: int,
) -> list[Tensor | None] | str:
    """Gradients of the leaves, the operand at `written` multiplied in place behind the call (-1: the output); "raises"."""
    leaves, args = _inputs(shapes, needs)
    y = fn(*args)
    with torch.no_grad():
        [*args, y][written].mul_(3)
    try:
        y.backward(torch.linspace(0.1, 1.1, y.numel()).reshape(y.shape))
    except RuntimeError as problem:
        if "modified by an inplace operation" not in str(problem):
            raise
        return "raises"
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", TABLE)
def test_a_write_between_forward_and_backward_does_what_it_does_in_pytorch(
    name: str, road: str
) -> None:
    ours, theirs, shapes = TABLE[name]
    for needs in _patterns(len(shapes)):
        for written in range(-1, len(shapes)):
            expected = _gradients(theirs, shapes, needs, written)
            with ROADS[road]():
                got = _gradients(ours, shapes, needs, written)
            if got == "raises":
                assert expected == "raises" or name in FROM_OPERANDS, (needs, written)
            elif expected != "raises":
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            else:  # PyTorch kept what ours has no use of: right all the same
                untouched = _gradients(theirs, shapes, needs, len(shapes))
                torch.testing.assert_close(got, untouched, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", [n for n in TABLE if n not in FROM_OPERANDS])
def test_no_more_is_kept_than_by_pytorch(name: str, road: str) -> None:
    ours, theirs, shapes = TABLE[name]
    for needs in _patterns(len(shapes)):
        most = _bytes(theirs, _inputs(shapes, needs)[1])
        with ROADS[road]():
            assert _bytes(ours, _inputs(shapes, needs)[1]) <= most, needs


@pytest.mark.parametrize("fn", [tensorlogic.sum, tensorlogic.mean])
def test_a_reduction_keeps_nothing_of_its_operand(fn: Callable[..., Tensor]) -> None:
    x = torch.randn(8, 16, requires_grad=True)
    for _ in range(3):  # in Python first, then in C where that is built
        h = x * 1
        assert _bytes(lambda h: fn(h, 1), [h]) == 0
        y = fn(h, 1)
        with torch.no_grad():
            h.zero_()
        y.sum().backward()
    share = 1.0 if fn is tensorlogic.sum else 1 / 16
    torch.testing.assert_close(x.grad, torch.full((8, 16), 3 * share))


def test_a_frozen_weight_lets_go_of_the_operand() -> None:
    """As when only adapters beside a layer are trained: the layer's input would be half of a model's activations."""
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16)
    for _ in range(3):
        h = x * 1
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: weight):
            y = tensorlogic.linear(h, weight)
        assert [t.data_ptr() for t in kept] == [weight.data_ptr()]
        (dx,) = torch.autograd.grad(y, h, torch.ones_like(y))
        torch.testing.assert_close(dx, torch.ones(8, 4) @ weight)


def test_a_compiled_backward_is_right_where_only_looks_were_kept() -> None:
    """Sizes are symbols there, and looks hold them."""

    def step(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return tensorlogic.sum(tensorlogic.add(tensorlogic.linear(x, w), b), 1)

    compiled = torch.compile(step, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 9):
        x, w = torch.randn(rows, 6, requires_grad=True), torch.randn(4, 6)
        b = torch.randn(4, requires_grad=True)
        got = torch.autograd.grad(compiled(x, w, b).sum(), (x, b))
        expected = torch.autograd.grad(((x @ w.T + b).sum(1)).sum(), (x, b))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("candidate", LINEAR.candidates)
def test_what_is_written_to_the_output_is_recorded(candidate: str) -> None:
    """Whatever view of its own memory a candidate returns: `y += residual` is what a call of PyTorch's allows."""
    x = torch.randn(2, 64, 32, requires_grad=True)
    weight, residual = torch.randn(48, 32), torch.randn(2, 64, 48, requires_grad=True)
    if LINEAR.candidates[candidate].unfit(
        LINEAR.key((x, weight, None, None, "none", True), "forward")
    ):
        pytest.skip("not for these operands, or not on this machine")
    with tensorlogic.policy(force=candidate):
        for _ in range(3):  # in Python first, then in C where that is built
            y = tensorlogic.linear(x, weight)
            y += residual
            y.mul_(2)
            dx, dr = torch.autograd.grad(y.sum(), (x, residual))
            torch.testing.assert_close(dr, torch.full_like(dr, 2))
            torch.testing.assert_close(dx, torch.full_like(y, 2) @ weight)


@pytest.mark.parametrize("ours", [tensorlogic.max, tensorlogic.min])
def test_the_gradient_of_an_extreme_is_pytorchs_where_it_is_not_finite(
    ours: Callable[..., Tensor],
) -> None:
    theirs = torch.amax if ours is tensorlogic.max else torch.amin
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan, 1.0, 2.0], [3.0, 3.0, 3.0], [inf, -inf, 0.0], [1.0, 2.0, 1.0]])
    for dy in (torch.ones(4), torch.tensor([0.0, inf, nan, 2.0])):
        found = []
        for fn in (ours, theirs):
            leaf = x.clone().requires_grad_()
            found += torch.autograd.grad(fn(leaf, 1), leaf, dy)
        torch.testing.assert_close(*found, equal_nan=True)
