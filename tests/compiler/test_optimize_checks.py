"""optimize: what is random is compared all the same, and callers that trace, force or misuse get PyTorch's result or a reason."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler import optimize, program_search
from tensorlogic.compiler.inductor import compile_process
from tensorlogic.compiler.runtime.program import Program, shared_outputs
from tensorlogic.compiler.trace.exporter import trace
from tensorlogic.compiler.trace.traced_graph import Trace
from tensorlogic.compiler.verify import equivalence
from tensorlogic.compiler.verify.whole_model import Whole
from tensorlogic.core.weight_cache import CACHE


class Sampling(nn.Module):
    """Draws between two products, as variational autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 32), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decode(z), torch.rand(3) + z.mean()


class Dropping(nn.Module):
    """Every call of PyTorch that drops values."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.gru = p, nn.GRU(8, 8, 2, dropout=p)
        self.lstm = nn.LSTM(8, 8, 2, dropout=p)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        drops = (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout2d)
        attention = F.scaled_dot_product_attention(x, x, x, dropout_p=self.p)
        found = [f(x, self.p, True) for f in drops] if self.p else []
        return (attention, self.gru(x[0])[0], self.lstm(x[0])[0], *found)


def traced(model: nn.Module, x: Tensor) -> Trace:
    with torch.no_grad():
        return trace(model, (x,), {})


def scaled(graph: Any, factor: float) -> Any:
    """The graph with its first output multiplied."""
    out = graph.output_node()
    first = out.all_input_nodes[0]
    with graph.inserting_before(out):
        node = graph.call_function(torch.mul, (first, factor))
        node.meta = {**first.meta}
    out.replace_input_with(first, node)
    return graph


@torch.no_grad()
@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_models_that_draw_are_compared_on_the_same_numbers(factor: float) -> None:
    made = traced(Sampling().eval(), torch.randn(8, 64))
    whole = Whole(made, False)
    program = Program(made, scaled(copy.deepcopy(made.graph), factor), {}, False, nn.Module())
    verdict = whole.judge(program)
    assert bool(verdict) == (factor == 1.0), verdict
    first, second = (program((torch.zeros(8, 64),), {})[0] for _ in range(2))
    assert not torch.equal(first, second)  # and draws its own afterwards


def test_whatever_drops_values_is_compared_without() -> None:
    made = traced(Dropping(0.4).train(), torch.randn(2, 3, 4, 8))
    calls = [n for n in made.graph.nodes if 0.4 in n.args]
    assert len(calls) == 7
    for node in calls:
        assert 0.4 not in equivalence.silent(node)
        assert len(equivalence.silent(node)) == len(node.args)
    whole = Whole(made, False)
    assert (
        whole.judge(Program(made, copy.deepcopy(made.graph), {}, False, nn.Module())).error < 1.01
    )
    wrong = Program(made, scaled(copy.deepcopy(made.graph), 1.001), {}, False, nn.Module())
    assert not whole.judge(wrong)


def test_what_drops_nothing_is_not_random() -> None:
    x = torch.randn(2, 3, 4, 8)
    assert compile_process.unfit(traced(Dropping(0.0).eval(), x)) is None
    assert compile_process.unfit(traced(Dropping(0.0).train(), x)) is None
    assert compile_process.unfit(traced(Dropping(0.4).train(), x)) is not None


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()


def test_torchscript_records_the_models_own_calls(pays: None) -> None:
    model, x = network(), torch.randn(4, 16)
    with torch.no_grad():
        fast = tensorlogic.optimize(model, x)
        recorded = torch.jit.trace(fast, (x,))
        given = torch.randn(4, 16)
        torch.testing.assert_close(recorded(given), model(given))


def test_second_derivatives_under_the_policy_that_has_them(pays: None) -> None:
    model, x = network().train(), torch.randn(4, 16, requires_grad=True)
    fast = tensorlogic.optimize(model, x.detach(), training=True)
    found = []
    with tensorlogic.policy(force="torch.eager"):
        for each in (fast, model):
            (dx,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(dx.square().sum(), x)[0])
    torch.testing.assert_close(*found)


def test_weights_without_values_are_named() -> None:
    model = network()
    model[2] = nn.Linear(32, 8, device="meta")
    assert tensorlogic.optimize(model, torch.randn(4, 16)) is model
    assert "2.weight is on the meta device" in model.report.reason


@pytest.mark.parametrize("budget", [-1, float("nan"), "soon"])
def test_budgets_that_are_none(budget: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="budget_s"):
        tensorlogic.optimize(network(), torch.randn(4, 16), budget_s=budget)


@torch.no_grad()
def test_copies_that_experiments_made_are_given_back(
    pays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = network(), torch.randn(4, 16)
    mine, found = model[0].weight, program_search.best

    def derive(tensor: Tensor, kind: str) -> None:
        CACHE.get(tensor, kind, Tensor.double, lambda t: t.nbytes)

    def experimenting(*args: Any) -> Any:
        derive(model[2].weight, "left over")
        return found(*args)

    derive(mine, "the caller's")
    monkeypatch.setattr(optimize, "best", experimenting)
    fast = tensorlogic.optimize(model, x)
    assert CACHE.holds(mine, "the caller's")
    assert not CACHE.holds(model[2].weight, "left over")
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_report_counts_copies_that_calls_keep(
    pays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = network(), torch.randn(4, 16)
    weight, call = model[0].weight, Program.__call__

    def packing(self: Program, *args: Any) -> Any:
        CACHE.settled(weight, "tiles of a test", Tensor.double, lambda t: 2 * t.nbytes)
        return call(self, *args)

    monkeypatch.setattr(Program, "__call__", packing)
    fast = tensorlogic.optimize(model, x)
    assert CACHE.holds(weight, "tiles of a test")
    assert fast.report.bytes >= 2 * weight.nbytes
    assert f"{fast.report.bytes / 2**20:.1f} MiB held besides" in str(fast.report)


@pytest.mark.parametrize("frozen", [False, True])
def test_garbage_is_searched_for_among_what_is_new(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over all that the import of a library has left takes 0.3 s; what somebody else has frozen stays so."""
    counts = []

    def failing(*_: Any) -> Any:
        counts.append(gc.get_freeze_count())
        raise ZeroDivisionError

    monkeypatch.setattr(optimize, "probe", failing)
    monkeypatch.setattr(optimize, "takes_itself", lambda *_: False)
    gc.unfreeze()
    if frozen:
        gc.freeze()
    try:
        with pytest.raises(ValueError, match="ZeroDivisionError"):
            tensorlogic.optimize(network(), torch.randn(4, 16))
        assert counts[0] > 0
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.unfreeze()


def test_outputs_that_share_memory_are_noticed() -> None:
    """A copy of each would not do where somebody keeps both and writes to one."""

    def traced(fn: Any) -> Any:
        return torch.export.export(_Calling(fn), (torch.randn(4, 4),)).graph

    assert shared_outputs(traced(lambda x: [(y := x + 1), y[0]]))
    assert not shared_outputs(traced(lambda x: [x + 1, x + 2]))


class _Calling(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


class Known(nn.Module):
    """Keeps what it knows of its arguments by their identity."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.weakly = nn.Linear(4, 4), weakref.WeakKeyDictionary[Any, float]()

    def forward(self, x: Tensor, about: Any) -> Tensor:
        about.calls.append(len(about.calls))
        about.rows.add_(1)
        factor = self.weakly[about] if about in self.weakly else KNOWN[id(about)]
        return F.relu(self.lin(x)) * factor


KNOWN: dict[int, float] = {}


class About:
    """What a model knows something of."""

    def __init__(self) -> None:
        self.calls, self.rows = [0], torch.ones(3)


@torch.no_grad()
@pytest.mark.parametrize("weakly", [True, False])
def test_who_knows_its_arguments_by_identity_comes_back_as_it_was(weakly: bool) -> None:
    model, x, about = Known().eval(), torch.randn(2, 4), About()
    with pytest.raises(ValueError, match="fails on the example inputs"):
        tensorlogic.optimize(model, (x, about))
    if weakly:
        model.weakly[about] = 3.0
    else:
        KNOWN[id(about)] = 3.0
    fast = tensorlogic.optimize(model, (x, about))
    assert fast is model
    assert "takes its inputs, but no copies of them (KeyError" in fast.report.reason
    assert (about.calls, about.rows.tolist()) == ([0], [1.0, 1.0, 1.0])
    torch.testing.assert_close(fast(x, about), F.relu(model.lin(x)) * 3)
