"""optimize where torch.export fails: graphs as Dynamo cuts them, the Python between them as it is, nothing done twice."""

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
from tensorlogic.compiler import graph_breaks, program_search
from tensorlogic.compiler.graph_breaks import Pieces
from tensorlogic.compiler.trace import widening
from tensorlogic.compiler.verify.call_effects import widely

from ..support.clockwork import Clock
from ..support.graphs import Layers


class Cache:
    """What a decoder keeps between its steps, as an object of the user's own, which copies itself."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def __deepcopy__(self, memo: Any) -> Cache:
        copied = Cache()
        copied.rows = copy.deepcopy(self.rows, memo)
        return copied

    def update(self, x: Tensor) -> Tensor:
        self.rows = [torch.cat([*self.rows, x], 1)]
        return self.rows[0]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache | None = None) -> dict[str, Any]:
        cache = cache or Cache()
        seen = cache.update(F.gelu(self.lin(x)))
        return {"y": F.relu(self.out(seen.mean(1))), "cache": cache}


def filled(steps: int = 3) -> Cache:
    cache = Cache()
    cache.update(torch.randn(2, steps, 8))
    return cache


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-5)


@torch.no_grad()
def test_objects_that_calls_change(pays: None) -> None:
    model, x, cache = Decoder().eval(), torch.randn(2, 1, 8), filled()
    fast = tensorlogic.optimize(model, {"x": x, "cache": cache})
    assert isinstance(fast._program, Pieces), fast.report.reason
    assert "linear" in [r.op for r in fast.report.regions]
    assert cache.rows[0].shape == (2, 3, 8)
    mine, theirs = copy.deepcopy(cache), copy.deepcopy(cache)
    for _ in range(4):  # the first step has the example's sizes, the others run as they are
        x = torch.randn(2, 1, 8)
        out, plain = fast(x, cache=mine), model(x, cache=theirs)
        assert out["cache"] is mine
        close(out["y"], plain["y"])
        close(mine.rows[0], theirs.rows[0])


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.sign = nn.Linear(4, 4), nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        print("called")
        if y.sum() > 1:
            return self.b(y) * self.sign
        return self.b(y) - 1


@torch.no_grad()
def test_branches_prints_and_changes_are_followed(
    pays: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = Branching().eval(), torch.full((2, 4), 3.0)
    nn.init.ones_(model.a.weight)
    fast = tensorlogic.optimize(model, x)
    assert isinstance(fast._program, Pieces), fast.report.reason
    assert "called" not in capsys.readouterr().out

    def follows() -> None:
        for given in (x, -x, torch.ones(3, 4)):
            out = fast(given)
            assert capsys.readouterr().out == "called\n"
            close(out, Branching.forward(fast, given))
            capsys.readouterr()

    follows()
    fast.sign = -2.0
    follows()
    fast.b.weight.mul_(2)
    follows()
    fast.b.weight = nn.Parameter(torch.randn(4, 4))
    follows()
    fast.load_state_dict({k: v + 1 for k, v in fast.state_dict().items()})
    follows()
    fast.b = nn.Linear(4, 4, bias=False)
    follows()


def test_gradients(pays: None) -> None:
    model, x = Branching().train(), torch.full((2, 4), 3.0)
    twin = copy.deepcopy(model)
    fast = tensorlogic.optimize(model, x, training=True)
    assert isinstance(fast._program, Pieces), fast.report.reason
    fast(x).square().sum().backward()
    twin(x).square().sum().backward()
    for p, q in zip(fast.parameters(), twin.parameters(), strict=True):
        close(p.grad, q.grad)


class FirstCall(nn.Linear):
    """Sets its weight from the first batch that it sees."""

    ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.weight.data.copy_(x[:4] / x.std().item())
            self.ready = True
        return super().forward(x)


@torch.no_grad()
def test_a_first_call_that_sets_weights_is_left_to_the_caller(pays: None) -> None:
    model = FirstCall(4, 4).eval()
    before = model.weight.clone()
    fast = tensorlogic.optimize(model, torch.randn(4, 4))
    assert fast is model
    assert "ready" in fast.report.reason
    assert torch.equal(model.weight, before)
    assert not model.ready


class Lazy(nn.Linear):
    """Sets something up at the first call, which every later one finds."""

    table = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = [1.0, 2.0]
        return F.relu(super().forward(x)) * self.table[1]


@torch.no_grad()
def test_what_a_first_call_sets_up_is_set_up(pays: None) -> None:
    model, x = Lazy(4, 4).eval(), torch.randn(2, 4)
    fast = tensorlogic.optimize(model, x)
    assert fast.report.outcome == "rewritten", fast.report.reason
    assert model.table is None
    close(fast(x), model(x))


@torch.no_grad()
def test_sizes_that_vary_are_served_by_one_graph(pays: None) -> None:
    model = Decoder().eval()
    given = {"x": torch.randn(2, 3, 8), "cache": filled(5)}
    fast = tensorlogic.optimize(model, given, dynamic=True)
    program = fast._program
    assert isinstance(program, Pieces), fast.report.reason
    assert program.graphs == 1
    calls: list[tuple[Any, ...]] = []
    (graph,) = program.symbolic
    graph.register_forward_pre_hook(lambda _, args: calls.append(args))
    mine, theirs = filled(4), Cache()
    theirs.rows = [mine.rows[0].clone()]
    for n, rows in enumerate((2, 3, 4, 7)):
        x = torch.randn(2, rows, 8)
        out, plain = fast(x, cache=mine), model(x, cache=theirs)
        close(out["y"], plain["y"])
        close(mine.rows[0], theirs.rows[0])
        assert len(calls) == n + 1
    assert program.graphs == 1


class Keeping:
    """Models that keep tensors from call to call, in the ways that there are."""

    class Attribute(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.kept = torch.zeros(4)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.kept + 1
            return F.relu(super().forward(x)) + self.kept

    class InPlace(Attribute):
        def forward(self, x: Tensor) -> Tensor:
            self.kept.add_(1)
            return F.relu(nn.Linear.forward(self, x)) + self.kept

    class Late(Attribute):
        def __init__(self) -> None:
            super().__init__()
            self.kept: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = torch.zeros(4) if self.kept is None else self.kept + 1
            return F.relu(nn.Linear.forward(self, x)) + self.kept

    class Buffer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("kept", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.kept + 1
            return F.relu(super().forward(x)) + self.kept


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", [Keeping.Attribute, Keeping.InPlace, Keeping.Late, Keeping.Buffer])
def test_what_a_model_keeps_is_as_it_was(kind: Any, dynamic: bool, pays: None) -> None:
    model, x = kind(), torch.randn(2, 4)
    twin = copy.deepcopy(model)
    fast = tensorlogic.optimize(model, x, budget_s=0.1, dynamic=dynamic)
    assert model.kept is None or torch.equal(model.kept, torch.zeros(4))
    for _ in range(3):
        torch.testing.assert_close(fast(x), twin(x))


def test_a_model_without_a_gradient_comes_back() -> None:
    class Spoiling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if x.sum() > 1e9:
                return y * 2
            x.mul_(2)  # what the weight's gradient needs
            return y

    model = Spoiling(4, 4)
    fast = tensorlogic.optimize(model, torch.randn(2, 4), training=True, budget_s=0.1)
    assert fast is model
    assert "gradient" in fast.report.reason


@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_what_dynamo_keeps_holds_no_model(dynamic: bool, pays: None) -> None:
    """Its caches lie on code objects, where Python's collector does not look: what they hold would stay for ever."""
    model, x = Branching().eval(), torch.randn(3, 4)
    fast = tensorlogic.optimize(model, x, dynamic=dynamic)
    assert isinstance(fast._program, Pieces), fast.report.reason
    close(fast(x), model(x))
    known = [weakref.ref(model.a.weight), weakref.ref(fast._program)]
    del model, fast
    gc.collect()
    assert [k() for k in known] == [None, None]


class Grouped(Branching):
    """Calls that know no float64, as grouped products of experts do not."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("expected float32 or halves")
        return super().forward(x)


@torch.no_grad()
def test_halves_are_checked_in_float32_where_float64_is_unknown(
    pays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widening, "wide_dtype", lambda tensors: torch.float64)  # as on a GPU
    model, x = Grouped().eval().bfloat16(), torch.randn(3, 4).bfloat16()
    fast = tensorlogic.optimize(model, x)
    assert isinstance(fast._program, Pieces), fast.report.reason
    assert fast.report.error is not None
    fast = tensorlogic.optimize(model.float(), x.float())  # nothing wider is known
    assert "no way to check it (in torch.float64: " in fast.report.reason


class Insisting(nn.Module):
    """Asks for float32, which everything is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.a(x), -1, dtype=torch.float32)
        if shares.max() > 2.0:
            shares = shares * 2
        scale = torch.ones(8, dtype=torch.float32) * 2
        return self.b(torch.cat((shares.float(), x.to(torch.float32) * scale), -1).to(dtype=torch.float32))  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
def test_code_that_asks_for_float32_is_checked_in_float64(training: bool, pays: None) -> None:
    model, x = Insisting().train(training), torch.randn(3, 8)
    with torch.set_grad_enabled(training):
        fast = tensorlogic.optimize(model, x, training=training)
        assert isinstance(fast._program, Pieces), fast.report.reason
        assert fast.report.error is not None
        torch.testing.assert_close(fast(x), model(x))
    wide = widely(model, training, (x,), {})
    assert not isinstance(wide, str)
    assert [t.dtype for t in wide[0]] == [torch.float64]
    exact = copy.deepcopy(model).double()
    shares = torch.softmax(exact.a(x.double()), -1)
    torch.testing.assert_close(wide[0][0], exact.b(torch.cat((shares, x.double() * 2), -1)))


@torch.no_grad()
def test_layers_of_one_form_have_a_program_each(pays: None) -> None:
    model, x = Layers().eval(), torch.randn(4, 8)
    fast = tensorlogic.optimize(model, x)
    assert isinstance(fast._program, Pieces), fast.report.reason
    assert [len(p.programs) for p in fast._program.pieces] == [3]
    assert len(fast._program.programs) == 3
    served = []
    for program in fast._program.programs:
        run = program.function.run
        program.function.run = lambda *a, run=run: (served.append(1), run(*a))[1]
    close(fast(x), model(x))
    assert len(served) == 3
    model.layers[1].a.weight.mul_(2.0)
    model.layers[2].b.bias.data = torch.randn(8)
    close(fast(x), model(x))
    fast.layers[0].a = copy.deepcopy(model.layers[1].a)  # another parameter: the graph as it was
    twin = copy.deepcopy(model)
    twin.layers[0].a = fast.layers[0].a
    close(fast(x), twin(x))
    x[0, 0] = 1e6  # the other side of the branch
    close(fast(x), twin(x))


def test_a_graph_is_given_its_share_of_the_budget() -> None:
    made = Pieces.__new__(Pieces)
    made.left, made.waiting = 2.0, {"long": 3.0, "short": 1.0}
    assert made.share("long") == 1.5
    made.left -= 1.5
    assert made.share("short") == 0.5
    assert made.share("never timed") == 0.0


@torch.no_grad()
def test_graphs_behind_a_slow_one_are_served_too(
    pays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a slow or busy machine takes for the first graph leaves later ones without a choice, not without a program."""

    class Step(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x).relu()
            if x.max() > 1e4:
                x = x * 2
            return x

    clock, shares, plain = Clock(), list[float](), program_search.best

    def slow(*args: Any, **kwargs: Any) -> Any:
        shares.append(args[1].budget_s)
        clock.now += 2.0
        return plain(*args, **kwargs)

    clock.stands_in(monkeypatch, graph_breaks)
    monkeypatch.setattr(graph_breaks, "best", slow)
    monkeypatch.setattr(graph_breaks.Pieces, "share", lambda self, key: max(0.0, self.left))
    model, x = nn.Sequential(*(Step(8 + i, 9 + i) for i in range(4))).eval(), torch.randn(4, 8)
    fast = tensorlogic.optimize(model, x, budget_s=1.0)
    assert shares == [1.0, 0.0]  # 1, -1, -3 s were left: twice the budget beyond it, no more
    assert [len(p.programs) for p in fast._program.pieces] == [1, 1, 1, 1]
    assert len(fast._program.programs) == 2
    close(fast(x), model(x))
