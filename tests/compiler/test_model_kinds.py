"""Models of every kind, optimised: nested outputs, writing, tied, not to be traced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic

from ..support.graphs import close, served


class Outputs(nn.Module):
    """Nested outputs: the input itself, a view of it, a parameter, a number, tensors used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(8.0))

    def forward(
        self, x: Tensor, *, factor: float = 1.0, others: dict[str, Tensor] | None = None
    ) -> Any:
        y = F.relu(self.lin(x)) * factor
        rest = {k: v + 1 for k, v in (others or {}).items()}
        return {
            "y": y,
            "pair": (y, x),
            "view": x[0],
            "weight": self.lin.weight,
            "n": 3,
            **rest,
            "table": self.table * 2,
        }


@torch.no_grad()
def test_nested_outputs_and_keywords(pays: None) -> None:
    model, x = Outputs().eval(), torch.randn(4, 8)
    given = {"x": x, "factor": 2.0, "others": {"a": torch.ones(2)}}
    fast = tensorlogic.optimize(model, given)
    assert fast.report.outcome == "rewritten", fast.report.reason
    assert served(fast, **given)
    out, plain = fast(**given), model(**given)
    assert list(out) == list(plain)
    assert out["pair"][1] is x
    assert out["pair"][0] is out["y"]
    assert out["weight"] is model.lin.weight
    assert out["n"] == 3
    assert out["view"].data_ptr() == x.data_ptr()
    close(out["y"], plain["y"])
    close(out["a"], plain["a"])
    first = out["table"]
    first.zero_()  # what the caller is given is the caller's
    close(fast(**given)["table"], plain["table"])
    assert not served(fast, x, factor=3.0, others={"a": torch.ones(2)})
    close(fast(x, factor=3.0, others={"a": torch.ones(2)})["y"], model(x, factor=3.0)["y"])


class InPlace(nn.Module):
    """Writes into values, views, its input and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.lin(x)
        y.view(-1)[:8] = 1
        z = self.lin(y).relu_()
        z += y
        x.mul_(2)
        return z + x + self.calls


@torch.no_grad()
def test_writing_models_write_once_a_call(pays: None) -> None:
    model = InPlace().eval()
    x = torch.randn(4, 8)
    kept = x.clone()
    fast = tensorlogic.optimize(model, (x,))
    assert torch.equal(x, kept)
    assert model.calls == 0
    a, b = x.clone(), x.clone()
    out = fast(a)
    assert fast.calls == 1
    twin = InPlace().eval()
    twin.load_state_dict(model.state_dict())
    twin.calls.zero_()
    close(out, twin(b))
    close(a, b)


@torch.no_grad()
def test_tied_weights_and_shared_modules(pays: None) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight
            self.mid = nn.Linear(8, 8)

        def forward(self, i: Tensor) -> Tensor:
            return self.head(self.mid(F.relu(self.mid(self.embed(i)))))

    model, i = Tied().eval(), torch.arange(6).view(2, 3)
    fast = tensorlogic.optimize(model, (i,))
    assert served(fast, i)
    close(fast(i), model(i))
    fast.embed.weight.mul_(2)
    close(fast(i), model(i))
    assert fast.head.weight is fast.embed.weight


class Reasons:
    """Models that cannot be served by a graph."""

    class Printing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            print("here")
            return super().forward(x)

    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    class Counting(nn.Linear):
        n = 0

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            return super().forward(x) * self.n


@pytest.mark.parametrize("kind", [Reasons.Printing, Reasons.Branching, Reasons.Counting])
def test_untraceable_models_come_back_with_the_reason(kind: type[nn.Module]) -> None:
    model = kind(4, 4)
    x = torch.ones(2, 4)
    with torch.no_grad():
        fast = tensorlogic.optimize(model, (x,))
        assert fast is model
        assert fast.report.outcome == "original"
        assert fast.report.reason
        assert getattr(model, "n", 0) == 0
        expected = copy.deepcopy(model)(x)
        close(fast(x), expected)


def test_a_forward_of_the_object_itself_is_left_as_it_is(pays: None) -> None:
    """It hid the program: the report told of a gain, and every call ran the model's own code."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    usual = type(model).forward
    model.forward = lambda x: usual(model, x) + 1  # type: ignore[method-assign]
    x = torch.randn(4, 8)
    with torch.no_grad():
        fast = tensorlogic.optimize(model, x)
        close(fast(x), usual(model, x) + 1)
    assert fast is model
    assert "forward was replaced" in str(fast.report.reason)
