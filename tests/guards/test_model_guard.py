"""What asks in C whether a model is as it was, against the same in Python: after every kind of change both say the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorlogic.guards.model_guard import Kept, Watch, still
from tensorlogic.native import call_extension, cpu_library

pytestmark = pytest.mark.skipif(
    cpu_library.calls_available() is not None, reason=str(cpu_library.calls_available())
)


OFFSET = 1.0


class Own(nn.BatchNorm1d):
    pass


class Model(nn.Module):
    """Attributes of many kinds."""

    rate = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.one, self.scale, self.zero = nn.Parameter(torch.ones(1)), 2.0, 0.0
        self.config = SimpleNamespace(depth=3, inner=SimpleNamespace(wide=False))
        self.items: list[Any] = [1, "two", [3.0]]
        self.table = {"a": 1, "b": (2, 3)}
        self.names = {"x", "y"}
        self.first.register_forward_hook(lambda module, args, out: out)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x)) * self.rate + OFFSET
        return y


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda m: setattr(m, "scale", 3.0),
    "an equal number": lambda m: setattr(m, "scale", float("2")),
    "an equal number of another type": lambda m: setattr(m, "scale", 2),
    "the sign of zero": lambda m: setattr(m, "zero", -0.0),
    "an equal item of another type": lambda m: m.items.__setitem__(0, True),
    "an equal entry of another type": lambda m: m.table.update(a=1.0),
    "within an entry": lambda m: m.table.update(b=(2.0, 3)),
    "an entry like it": lambda m: m.table.update(b=(2, int("3"))),
    "an attribute more": lambda m: setattr(m, "more", 1),
    "an attribute less": lambda m: delattr(m, "scale"),
    "deep in a configuration": lambda m: setattr(m.config.inner, "wide", True),
    "an item": lambda m: m.items[2].append(4),
    "an entry": lambda m: m.table.update(a=2),
    "a set": lambda m: m.names.add("z"),
    "another parameter": lambda m: setattr(
        m.first, "weight", nn.Parameter(m.first.weight.detach())
    ),
    "another of one element": lambda m: setattr(m, "one", nn.Parameter(torch.ones(1))),
    "no parameter": lambda m: setattr(m.first, "bias", None),
    "a buffer more": lambda m: m.register_buffer("mask", torch.ones(2)),
    "mode": lambda m: m.norm.eval(),
    "hook": lambda m: m.norm.register_forward_pre_hook(lambda module, args: None),
    "another hook": lambda m: m.first.register_forward_hook(lambda module, args, out: out),
    "written to": lambda m: m.first.weight.data.mul_(2),
    "another class": lambda m: setattr(m.norm, "__class__", Own),
    "an attribute of the class": lambda m: setattr(Model, "rate", 2.5),
    "a global": lambda m: globals().update(OFFSET=2.0),
    "a global less": lambda m: globals().pop("OFFSET"),
    "the default dtype": lambda m: torch.set_default_dtype(torch.float64),
    "nothing": lambda m: None,
}


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    Model.rate = 1.5
    globals().update(OFFSET=1.0)
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("change", list(CHANGES))
def test_changes_of_attributes_are_seen_in_c_as_in_python(change: str) -> None:
    model = Model()
    watch = Watch(model)
    check = watch.check()
    assert type(check) is call_extension.module().Unchanged
    assert (check(), watch.holds()) == (True, True)
    CHANGES[change](model)
    expected = change in ("an equal number", "an entry like it", "written to", "nothing")
    assert (check(), watch.holds()) == (expected, expected)


class Odd:
    """Its equality fails, or says what it likes."""

    def __init__(self, says: Any) -> None:
        self.says = says

    def __eq__(self, other: object) -> Any:
        if isinstance(self.says, type):
            raise self.says("equality")
        return self.says

    __hash__ = None  # type: ignore[assignment]


def test_equality_that_fails_counts_as_a_change_or_is_raised() -> None:
    for says, expected in (
        (True, True),
        (False, False),
        (ValueError, False),
        (RuntimeError, False),
    ):
        model: Any = nn.Linear(2, 2)
        model.odd = [Odd(says)]
        watch = Watch(model)
        check = watch.check()
        assert check()  # the same object is equal to itself
        model.odd[0] = Odd(True)
        assert (check(), watch.holds()) == (expected, expected)
    model.odd = Odd(ZeroDivisionError)
    watch = Watch(model)
    check = watch.check()
    model.odd = Odd(True)
    for ask in (check, watch.holds):
        with pytest.raises(ZeroDivisionError):
            ask()


def tensors() -> list[Tensor]:
    return [nn.Parameter(torch.randn(4, 4)), torch.zeros(3), torch.randn(2, 3).t(), torch.ones(1)]


def another(t: Tensor, data: Tensor) -> None:
    t.data = data


MOVES: dict[str, Callable[[list[Tensor]], Any]] = {
    "written to": lambda ts: ts[0].detach().mul_(2),
    "another address": lambda ts: another(ts[0], torch.randn(4, 4)),
    "other strides": lambda ts: another(ts[0], ts[0].data.t()),
    "another shape": lambda ts: another(ts[1], ts[1].data[:2]),
    "another dtype": lambda ts: another(ts[3], ts[3].data.view(torch.int32)),
    "memory away": lambda ts: ts[2].untyped_storage().resize_(0),
    "frozen": lambda ts: ts[0].requires_grad_(False),
    "nothing": lambda ts: None,
}


@pytest.mark.parametrize("move", list(MOVES))
def test_moves_of_tensors_are_seen_in_c_as_in_python(move: str) -> None:
    held = tensors()
    kept, where, versions = Kept(held), [t.data_ptr() for t in held], [t._version for t in held]
    wants = [*where, *(t.requires_grad for t in held)]
    ways = [still(held, where), still(held, wants), still(held, where, held, versions)]
    assert all(w is not None and type(w) is call_extension.module().Still and w() for w in ways)
    MOVES[move](held)
    lies = kept.holds() and [t.data_ptr() for t in held] == where
    assert lies is (move in ("written to", "frozen", "nothing"))
    expected = [lies, lies and move != "frozen", lies and move != "written to"]
    for mode in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with mode:
            assert [w() for w in ways if w is not None] == expected


def test_what_has_no_plain_memory_is_left_to_python() -> None:
    class Own(Tensor):
        pass

    for odd in (torch.eye(2).to_sparse(), torch.ones(2).as_subclass(Own)):
        assert still([torch.ones(1), odd], [0, 0]) is None
    with torch.inference_mode():
        lasting = torch.ones(2)
    way = still([lasting], [lasting.data_ptr()])
    assert way is not None
    assert way()
    assert still([lasting], [1, 2, 3]) is None


def test_what_asks_is_freed_with_what_it_asks_of() -> None:
    model: Any = Model()
    gone = weakref.ref(model)
    model.check = Watch(model).check()
    model.still = still([*model.parameters()], [p.data_ptr() for p in model.parameters()])
    assert not model.check()  # two attributes more
    assert model.still()
    del model
    gc.collect()
    assert gone() is None
