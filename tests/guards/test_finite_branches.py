"""optimize where a model branches on whether its numbers are finite: one graph, and the model's own code where it would go elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler.graph_breaks import Pieces
from tensorlogic.compiler.object_models import Apart
from tensorlogic.guards.finite_branches import Foretold

from ..support.graphs import DEVICE


@pytest.fixture(autouse=True)
def unrecorded(pays: None) -> Iterator[None]:
    """Whatever is right counts as faster; nothing records gradients."""
    with torch.no_grad():
        yield


class Cache:
    """Holds what a call leaves."""

    def __init__(self) -> None:
        self.rows = torch.zeros(2, 8, device=DEVICE)


QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "not all finite": lambda x: not torch.isfinite(x).all(),
    "any infinite, any nan": lambda x: torch.isinf(x).any() or torch.isnan(x).any(),
    "joined": lambda x: x.isinf().logical_or(x.isnan()).any(),
    "of one number": lambda x: x.sum().isnan() | x.sum().isinf(),
}


class Clamping(nn.Module):
    """As encoders of half precision do: what is not finite is brought back."""

    def __init__(self, question: str = "not all finite", extra: str = "") -> None:
        super().__init__()
        self.question, self.extra = question, extra
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        for layer in (self.first, self.last):
            if self.extra == "draws":
                x = x + torch.rand_like(x)
            if self.extra == "writes":
                self.calls.add_(1)
            x = F.relu(layer(x))
            if self.extra == "other":
                if (x > 3).any():
                    x = x * 2
            elif QUESTIONS[self.question](x):
                x = torch.nan_to_num(x, 1.0).clamp(-9, 9)
        if cache is not None:
            cache.rows = cache.rows + x
        return x


def both(fast: Any, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The result, after it was compared with the model's own, and what the cache holds."""
    caches = Cache(), Cache()
    ours, theirs = fast(x, caches[0]), type(model).forward(model, x, caches[1])
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    torch.testing.assert_close(caches[0].rows, caches[1].rows, equal_nan=True)
    return ours, caches[0].rows


def given(number: float) -> Tensor:
    x = torch.randn(2, 8, device=DEVICE)
    x[0, 0] = number
    return x


@pytest.mark.parametrize("example", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("question", list(QUESTIONS))
def test_branches_on_finiteness_are_one_graph(question: str, example: float) -> None:
    model = Clamping(question).to(DEVICE).eval()
    fast = tensorlogic.optimize(model, (given(example), Cache()))
    assert isinstance(fast._program, Apart), fast.report
    for number in (example, 1.0, float("inf"), example, float("-inf"), float("nan"), 2.0):
        both(fast, model, given(number))
    served: list[bool] = []
    inner = fast._program.objects.served
    fast._program.objects.served = lambda *args: (
        served.append((out := inner(*args)) is not tensorlogic.guards.errors.MISS),
        out,
    )[1]
    for number in (example, 3.0 if example != 1.0 else float("nan")):
        both(fast, model, given(number))
    assert served == [True, False]  # the second is another branch, which the model's own code takes


def test_models_without_objects_are_one_graph_too() -> None:
    model = Clamping().to(DEVICE).eval()
    fast = tensorlogic.optimize(model, given(1.0))
    assert isinstance(fast._program, Apart), fast.report
    for number in (1.0, float("inf"), 2.0):
        x = given(number)
        torch.testing.assert_close(fast(x), Clamping.forward(model, x), equal_nan=True)


@pytest.mark.parametrize("extra", ["other", "draws", "writes"])
def test_what_could_not_be_taken_back_or_asks_something_else_is_cut(extra: str) -> None:
    model = Clamping(extra=extra).to(DEVICE).eval()
    plain = copy.deepcopy(model)
    fast = tensorlogic.optimize(model, (given(1.0), Cache()))
    assert not isinstance(fast.__dict__.get("_program"), Apart)
    assert fast is model or isinstance(fast._program, Pieces)
    for number in (1.0, float("inf"), 100.0):
        x = given(number)
        torch.manual_seed(0)
        ours = fast(x, Cache())
        torch.manual_seed(0)
        torch.testing.assert_close(ours, plain(x, Cache()), equal_nan=True)
    assert torch.equal(fast.calls, plain.calls)


def test_a_later_process_finds_the_graph_again() -> None:
    model, x = Clamping().to(DEVICE).eval(), given(1.0)
    tensorlogic.optimize(model, (x, Cache()))
    fast = tensorlogic.optimize(model, (x, Cache()))
    assert isinstance(fast._program, Apart), fast.report
    assert fast._program.program.trace.exported is None
    for number in (1.0, float("inf")):
        both(fast, model, given(number))


def test_other_questions_are_answered_by_the_tensors() -> None:
    other = torch.tensor(0.0)
    with Foretold([False]) as told:
        assert not torch.isfinite(torch.ones(2)).all()
        assert not bool(other > 1)
        assert not bool(other)
        assert bool(torch.isinf(torch.tensor([torch.inf])).any())  # beyond what is foretold
    assert told.answers == [False, True]
    assert len(told.verdict()) == 1
    assert Foretold().verdict() == []


def test_a_question_joined_with_another_is_answered_by_the_tensors() -> None:
    """A branch on sizes of numbers, too, may lead to an index that is out of range."""
    x = torch.tensor([9.0])
    with Foretold([False]) as told:
        assert bool((torch.isinf(x) | (x > 5)).any())
        assert bool(torch.isinf(x).logical_or(x > 5).any())
        assert not bool((torch.isinf(x) | torch.isnan(x)).any())
    assert told.answers == [False]
