"""torch.compile(..., backend="tensorlogic"): same results and gradients, our ops inside, dynamic batches without recompiling."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensorlogic.compiler import dynamo_backend as compiler_dynamo_backend
from tensorlogic.compiler.dynamo_backend import backend
from tensorlogic.compiler.rewrite import matcher


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.mid = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.relu(self.mid(x)) + self.mid(x)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The ops of every graph that was compiled."""
    torch._dynamo.reset()
    graphs: list[list[str]] = []
    plain = matcher.rewrite

    def watched(*args: Any) -> Any:
        found = plain(*args)
        graphs.append([r.op for r in found])
        return found

    monkeypatch.setattr(compiler_dynamo_backend, "rewrite", watched)
    yield graphs
    torch._dynamo.reset()


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=backend, options={"leftovers": "eager"}, **options)


def test_registered_by_name() -> None:
    names = [
        e.value for e in entry_points(group="torch_dynamo_backends") if e.name == "tensorlogic"
    ]
    if not names:
        pytest.skip("the installed package is older than its entry point")
    assert "tensorlogic" in torch._dynamo.list_backends()


def test_inference_and_gradients(seen: list[list[str]]) -> None:
    model = Model()
    twin = copy.deepcopy(model)
    fast = compiled(model)
    x = torch.randn(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), twin(x), rtol=1e-4, atol=1e-5)
    assert seen == [["linear", "linear", "linear", "linear"]]
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    fast(a).square().sum().backward()
    twin(b).square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_dynamic_batches_compile_once(seen: list[list[str]]) -> None:
    model = Model()
    fast = compiled(model, dynamic=True)
    for rows in (3, 4, 7, 11):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(seen) == 1


@torch.no_grad()
def test_batches_that_vary_become_dynamic_by_themselves(seen: list[list[str]]) -> None:
    model = Model()
    fast = compiled(model)
    for rows in (3, 4, 7, 11, 16):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(seen) == 2  # of the first size, and of any


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
@torch.no_grad()
def test_what_is_left_goes_to_inductor_for_any_batch(seen: list[list[str]]) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.gelu(lin(x)) * torch.sigmoid(x) + x

    lin = nn.Linear(8, 8)
    fast = torch.compile(fn, backend=backend, dynamic=True)
    for rows in (3, 4, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x), fn(x), rtol=1e-4, atol=1e-5)
    assert seen == [["linear"]]


class Sized(nn.Module):
    """Sizes that PyTorch's own Python takes from its inputs, and ones that the model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.lin = nn.EmbeddingBag(50, 8, mode="sum"), nn.Linear(8, 8)

    def forward(self, i: Tensor) -> Tensor:
        y = F.relu(self.lin(self.bag(i))).view(2 * i.shape[0], -1)
        return y + torch.arange(2 * i.shape[0])[:, None]


@torch.no_grad()
def test_no_size_of_the_first_inputs_stays_in_a_dynamic_graph(seen: list[list[str]]) -> None:
    model = Sized()
    fast = compiled(model, dynamic=True)
    for rows in (5, 4, 7):
        given = torch.randint(50, (rows, 11))
        torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-5)
    assert seen == [["linear"]]


def test_gradient_checkpointing(seen: list[list[str]]) -> None:
    inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def step(x: Tensor) -> Any:
        return checkpoint(inner, x, use_reentrant=False)

    x, fast = torch.randn(5, 8, requires_grad=True), compiled(step)
    got, want = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (fast, step))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_weights_may_change(seen: list[list[str]]) -> None:
    model, x = Model(), torch.randn(5, 8)
    fast = compiled(model)
    fast(x)
    model.up.weight.mul_(3)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_graph_breaks_and_in_place_calls(seen: list[list[str]]) -> None:
    lin = nn.Linear(8, 8)

    def fn(x: Tensor) -> Tensor:
        y = lin(x).relu_()
        if y.sum() > 1e9:
            return y
        y += x
        return lin(y)

    fast = compiled(fn)
    x = torch.randn(5, 8)
    torch.testing.assert_close(fast(x), fn(x), rtol=1e-4, atol=1e-5)
    assert not seen  # what writes in place is compiled as it is


def test_unknown_options() -> None:
    torch._dynamo.reset()
    fast = torch.compile(nn.Linear(2, 2), backend=backend, options={"leftovers": "nobody"})
    with pytest.raises(Exception, match="leftovers"):
        fast(torch.ones(1, 2))
