"""optimize: what the code of a model reads besides its own attributes may change, however it gets there; copies that know themselves."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.guards.model_guard import Watch
from tensorlogic.guards.python_globals import Reach

FACTOR = 1.0
SHIFT = torch.zeros(4)


def helper(x: Tensor) -> Tensor:
    return deeper(x) + SHIFT


def deeper(x: Tensor) -> Tensor:
    return x * FACTOR


class Defaults:
    """A configuration whose values lie on its class, and a namespace that is global."""

    power = 1.0
    inner: ClassVar[dict[str, dict[str, float]]] = {"a": {"b": 1.0}}


class Base(nn.Module):
    """What another class of the user's begins from."""

    gain = 1.0
    table: ClassVar[dict[str, float]] = {"a": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.config = Defaults()

    def body(self, x: Tensor) -> Tensor:
        return torch.relu(self.lin(x)) + 1

    @property
    def scale(self) -> float:
        return FACTOR + 1


def enclosed() -> tuple[type[nn.Module], Callable[[float], None]]:
    extra = 1.0

    class Model(Base):
        """Reads globals of helpers, attributes of classes, a property, and a variable of the function around it."""

        def forward(self, x: Tensor) -> Tensor:
            y = helper(self.body(x)) * self.gain * self.scale * self.table["a"]
            return y * self.config.power * Defaults.inner["a"]["b"] * extra

    def put(value: float) -> None:
        nonlocal extra
        extra = value

    return Model, put


class Narrow(nn.Linear):
    """Stands in for a layer by its class alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


# what is changed, given the model, its class and the setter of the variable around it
CHANGES: dict[str, Callable[[Any, Any, Any, pytest.MonkeyPatch], Any]] = {
    "global of a helper's helper": lambda m, c, put, p: p.setitem(globals(), "FACTOR", 3.0),
    "helper": lambda m, c, put, p: p.setitem(globals(), "helper", lambda x: x * 5),
    "helper's helper": lambda m, c, put, p: p.setitem(globals(), "deeper", lambda x: x * 5),
    "global tensor": lambda m, c, put, p: p.setitem(globals(), "SHIFT", torch.ones(4)),
    "class attribute": lambda m, c, put, p: p.setattr(Base, "gain", 3.0),
    "class attribute below": lambda m, c, put, p: setattr(c, "gain", 3.0),
    "content of a class attribute": lambda m, c, put, p: p.setitem(Base.table, "a", 3.0),
    "method": lambda m, c, put, p: p.setattr(Base, "body", lambda self, x: self.lin(x)),
    "method below": lambda m, c, put, p: setattr(c, "body", lambda self, x: self.lin(x)),
    "forward": lambda m, c, put, p: setattr(c, "forward", lambda self, x: self.lin(x)),
    "property": lambda m, c, put, p: p.setattr(Base, "scale", property(lambda self: 7.0)),
    "default of a configuration": lambda m, c, put, p: p.setattr(Defaults, "power", 3.0),
    "content of a global class": lambda m, c, put, p: p.setitem(Defaults.inner["a"], "b", 3.0),
    "variable around": lambda m, c, put, p: put(3.0),
    "class of a layer": lambda m, c, put, p: setattr(m.lin, "__class__", Narrow),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_what_code_reads_may_change(
    pays: None, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, put = enclosed()
    x = torch.ones(2, 4)
    fast: Any = tensorlogic.optimize(kind().eval(), x)
    assert fast.report.outcome == "rewritten", fast.report.reason
    before = fast(x).clone()
    CHANGES[change](fast, kind, put, monkeypatch)
    torch.testing.assert_close(fast(x), kind.forward(fast, x))
    assert not torch.equal(fast(x), before)


@torch.no_grad()
def test_the_default_dtype_may_change(pays: None) -> None:
    class Made(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + torch.ones(4)

    x = torch.ones(2, 4)
    fast = tensorlogic.optimize(Made().eval(), x)
    assert fast(x).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert fast(x).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_counters_of_classes_are_seen() -> None:
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            Counts.calls += 1
            return super().forward(x) * self.calls

    model = Counts(4, 4)
    assert tensorlogic.optimize(model, torch.ones(2, 4)) is model
    assert "changes global Counts.calls" in model.report.reason
    assert Counts.calls == 0


CALLS = 0


def test_what_counts_calls_has_counted_none_of_ours() -> None:
    told = "not"

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            global CALLS
            nonlocal told
            CALLS += 1
            told += "e"
            return super().forward(x) * CALLS

    model = Counts(4, 4)
    assert tensorlogic.optimize(model, torch.ones(2, 4)) is model
    assert "changes global CALLS" in model.report.reason
    assert CALLS == 0
    assert told == "not"


def test_installed_code_and_plain_models_cost_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(8, 2))
    reach = Reach(model)
    assert not reach.scopes
    assert not reach.classes
    assert not reach.cells
    assert Watch(model).holds()


class Called(Base):
    """Adds one outside of its forward."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 1  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@torch.no_grad()
def test_a_model_that_is_called_in_its_own_way(pays: None) -> None:
    model, x = Called().eval(), torch.ones(2, 4)
    want = model(x)
    fast = tensorlogic.optimize(model, x)
    assert fast is model
    assert "__call__" in fast.report.reason
    inner = nn.Sequential(model, nn.ReLU())
    for _ in range(2):
        torch.testing.assert_close(tensorlogic.optimize(inner, x)(x), torch.relu(want))


class Knots(Base):
    """Holds itself, as wrappers of layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.owners = [self]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Copied(Base):
    """Says itself how it is copied."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def __deepcopy__(self, memo: Any) -> Copied:
        made = Copied()
        made.load_state_dict(self.state_dict())
        return made.train(self.training)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Knots, Copied])
def test_copies_of_models_that_hold_themselves(pays: None, kind: Any) -> None:
    x = torch.ones(2, 4)
    fast: Any = tensorlogic.optimize(kind().eval(), x)
    if kind is Knots:
        assert fast.report.outcome == "rewritten"
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert type(again) is kind
        torch.testing.assert_close(again(x), fast(x))
        assert all(owner is again for owner in getattr(again, "owners", ()))
    fast.forward = types.MethodType(lambda self, x: x, fast)
    assert torch.equal(fast(x), x)
    if kind is Knots:
        assert copy.deepcopy(fast).forward.__self__ is not fast


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_is_captured_as_any_module() -> None:
    x = torch.ones(2, 4)
    made = [torch.jit.trace(nn.Linear(4, 4), x), torch.jit.script(nn.Linear(4, 4))]
    for module in (*made, nn.Sequential(*made)):
        fast = tensorlogic.capture(module)
        for _ in range(4):
            torch.testing.assert_close(fast(x), module(x))


@torch.no_grad()
def test_a_copy_of_what_is_captured_captures_for_itself() -> None:
    x, model = torch.ones(2, 4), nn.Linear(4, 4)
    fast = tensorlogic.capture(model, max_graphs=3, batch=0, buckets=[8, 4])
    want = fast(x)
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert again.fn is not model
        assert (again.max_graphs, again.batch, again.buckets) == (3, 0, [4, 8])
        torch.testing.assert_close(again(x), want)
