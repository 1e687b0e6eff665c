"""optimize where a call does what no replay of tensors and objects would: the model's own code serves, and the state is its own."""

from __future__ import annotations

import copy
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler.object_models import Apart
from tensorlogic.compiler.trace.object_flattening import Objects, Opaque

MADE: list[int] = []
LAST: deque[int] = deque(maxlen=9)
SET = 0


@pytest.fixture(autouse=True)
def unrecorded(pays: None) -> Iterator[None]:
    """Whatever is right counts as faster; nothing records gradients."""
    with torch.no_grad():
        yield


class Box:
    """Whatever a test puts into it."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Lid(Box):
    """Another class for one."""


class Counted:
    def __init__(self, rows: Tensor) -> None:
        MADE.append(1)
        self.rows = rows


class Minding:
    """Counts what is assigned to one of its attributes."""

    held: Any = None

    @property
    def rows(self) -> Any:
        return self.held

    @rows.setter
    def rows(self, rows: Tensor) -> None:
        global SET
        SET += 1
        self.held = rows


class Moved(namedtuple("Moved", "y x")):
    """Not made of what it holds."""

    def __new__(cls, y: Tensor, x: Tensor) -> Moved:
        return super().__new__(cls, y, x + 1)


class Doing(nn.Module):
    """Does one thing besides computing."""

    def __init__(self, what: Callable[..., Any]) -> None:
        super().__init__()
        self.lin, self.what = nn.Linear(8, 8), what
        self.box, self.last = Box(n=0, known=[0]), None

    def forward(self, x: Tensor, box: Any) -> Any:
        y = F.relu(self.lin(x))
        box.y = y
        return self.what(self, y, box)


def keeps(model: Any, y: Tensor, box: Any) -> Tensor:
    model.last = box
    return y


def counts(model: Any, y: Tensor, box: Any) -> Tensor:
    model.box.n += 1
    return y


def lists(model: Any, y: Tensor, box: Any) -> Tensor:
    model.box.known[0] += 1
    return y


def queues(model: Any, y: Tensor, box: Any) -> Tensor:
    LAST.append(len(LAST))
    return y


def seen(model: Any) -> Any:
    return model.box.n, [*model.box.known], model.last, len(LAST)


@pytest.mark.parametrize("what", [keeps, counts, lists, queues])
def test_what_a_call_leaves_elsewhere_is_left(what: Callable[..., Any]) -> None:
    fast: Any = tensorlogic.optimize(Doing(what).eval(), (torch.randn(2, 8), Box()))
    before, box = seen(fast), Box()
    fast(torch.randn(2, 8), box)
    assert seen(fast) != before
    assert fast.last in (None, box)


class Making(nn.Module):
    """Makes something of a linear layer's output."""

    def __init__(self, *known: str) -> None:
        super().__init__()
        self.lin, self.known = nn.Linear(8, 8), [*known]

    def forward(self, x: Tensor) -> Any:
        return Counted(F.relu(self.lin(x)))


def test_what_constructors_leave_elsewhere_is_left() -> None:
    fast: Any = tensorlogic.optimize(Making().eval(), (torch.randn(2, 8),))
    before = len(MADE)
    fast(torch.randn(2, 8))
    assert len(MADE) == before + 1


class Telling(Making):
    def forward(self, x: Tensor) -> Any:
        return F.relu(self.lin(x)), self.known


def test_lists_that_outlive_calls_are_handed_out_themselves() -> None:
    fast: Any = tensorlogic.optimize(Telling("a").eval(), (torch.randn(2, 8),))
    assert fast(torch.randn(2, 8))[1] is fast.known


def test_variables_of_functions_around_the_code_are_counted() -> None:
    def counter() -> tuple[Callable[[], None], Callable[[], int]]:
        calls = 0

        def count() -> None:
            nonlocal calls
            calls += 1

        return count, lambda: calls

    count, known = counter()

    def counting(self: Any, x: Tensor) -> Any:
        count()
        return F.relu(self.lin(x))

    model = type("Counting", (Making,), {"forward": counting})()
    fast: Any = tensorlogic.optimize(model.eval(), (torch.randn(2, 8),))
    before = known()
    fast(torch.randn(2, 8))
    assert known() == before + 1


BY = 2.0


def by(y: Tensor) -> Tensor:
    return y * BY


class Ruling:
    def rule(self, y: Tensor) -> Tensor:
        return by(y)


def rules(model: Any, y: Tensor, box: Any) -> Tensor:
    return model.how(y)


@pytest.mark.parametrize("how", [by, partial(by), Ruling().rule])
def test_functions_that_a_model_holds_are_followed(
    how: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Doing(rules).eval(), torch.randn(2, 8)
    model.how = how  # type: ignore[assignment]
    fast: Any = tensorlogic.optimize(copy.deepcopy(model), (x, Box()))
    assert isinstance(fast._program, Apart)
    monkeypatch.setitem(globals(), "BY", -3.0)
    torch.testing.assert_close(fast(x, Box()), model(x, Box()))


def asks_its_ruling(model: Any, y: Tensor, box: Any) -> Tensor:
    return model.ruling.rule(y)


def test_objects_that_a_model_holds_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Doing(asks_its_ruling).eval(), torch.randn(2, 8)
    model.ruling = Ruling()  # type: ignore[assignment]
    fast: Any = tensorlogic.optimize(copy.deepcopy(model), (x, Box()))
    assert isinstance(fast._program, Apart)
    monkeypatch.setitem(globals(), "BY", -3.0)
    torch.testing.assert_close(fast(x, Box()), model(x, Box()))


def assigns(model: Any, y: Tensor, box: Any) -> Tensor:
    box.rows = y
    return y


def test_setters_run() -> None:
    fast: Any = tensorlogic.optimize(Doing(assigns).eval(), (torch.randn(2, 8), Minding()))
    before = SET
    fast(torch.randn(2, 8), Minding())
    assert before + 1 == SET


OWN = Box(n=1)


def gives_its_own(model: Any, y: Tensor, box: Any) -> Any:
    return {"y": y, "own": model.box}


def gives_a_global(model: Any, y: Tensor, box: Any) -> Any:
    return [y, OWN]


@pytest.mark.parametrize("what", [gives_its_own, gives_a_global])
def test_objects_that_outlive_calls_are_handed_out_themselves(what: Callable[..., Any]) -> None:
    fast: Any = tensorlogic.optimize(Doing(what).eval(), (torch.randn(2, 8), Box()))
    own = fast(torch.randn(2, 8), Box())
    assert (own["own"] if isinstance(own, dict) else own[1]) in (fast.box, OWN)


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, known: list[Tensor]) -> Any:
        return {"y": F.relu(self.lin(x)), "known": known}


def test_a_list_that_is_handed_back_is_that_list() -> None:
    known = [torch.ones(2)]
    fast: Any = tensorlogic.optimize(Handing().eval(), (torch.randn(2, 8), [torch.ones(2)]))
    assert isinstance(fast._program, Apart)
    assert fast(torch.randn(2, 8), known)["known"] is known


def marks(model: Any, y: Tensor, box: Any) -> Tensor:
    y.tag = "made"  # type: ignore[attr-defined]
    return y


def asks_for_gradients(model: Any, y: Tensor, box: Any) -> Tensor:
    box.y = y.detach().requires_grad_()
    return box.y


def changes_the_class(model: Any, y: Tensor, box: Any) -> Tensor:
    box.__class__ = Lid
    return y


def moves(model: Any, y: Tensor, box: Any) -> Any:
    return Moved(y, y)


Pair = namedtuple("Pair", "y x")


class Noted(Pair):
    """Has attributes, too."""


def notes(model: Any, y: Tensor, box: Any) -> Any:
    pair = Noted(y, y)
    pair.note = "made"  # type: ignore[attr-defined]
    return pair


@pytest.mark.parametrize("what", [marks, asks_for_gradients, changes_the_class, moves, notes])
def test_tensors_and_objects_are_those_that_the_model_makes(what: Callable[..., Any]) -> None:
    model, x = Doing(what).eval(), torch.randn(2, 8)
    fast: Any = tensorlogic.optimize(copy.deepcopy(model), (x, Box()))
    mine, theirs = Box(), Box()
    ours, plain = fast(x, mine), model(x, theirs)
    assert type(mine) is type(theirs)
    assert mine.y.requires_grad is theirs.y.requires_grad
    assert vars(mine.y) == vars(theirs.y)
    assert getattr(ours, "note", "") == getattr(plain, "note", "")
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_advice_to_a_compiler_is_no_attribute() -> None:
    def advises(model: Any, y: Tensor, box: Any) -> Tensor:
        y._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
        return y

    fast: Any = tensorlogic.optimize(Doing(advises).eval(), (torch.randn(2, 8), Box()))
    assert isinstance(fast._program, Apart)


def hands_weights(model: Any, y: Tensor, box: Any) -> Tensor:
    box.w = model.lin.weight.t()
    return y


def test_views_of_parameters_are_handed_out() -> None:
    fast: Any = tensorlogic.optimize(Doing(hands_weights).eval(), (torch.randn(2, 8), Box()))
    assert isinstance(fast._program, Apart)
    box = Box()
    fast(torch.randn(2, 8), box)
    assert box.w.data_ptr() == fast.lin.weight.data_ptr()


def looks_up(model: Any, y: Tensor, box: Any) -> Tensor:
    box.before = y
    return F.embedding(box.at, y)


def test_a_call_that_fails_gets_as_far_as_the_model_does() -> None:
    x, mine = torch.randn(2, 8), Box(at=torch.tensor([5]))
    fast: Any = tensorlogic.optimize(Doing(looks_up).eval(), (x, Box(at=torch.tensor([1]))))
    assert isinstance(fast._program, Apart)
    with pytest.raises(IndexError):
        fast(x, mine)
    assert mine.before.shape == (2, 8)


class Rekeying(Making):
    def forward(self, x: Tensor, known: dict[Any, Any]) -> Any:
        y, known[False] = F.relu(self.lin(x)), known.pop(0)
        return y


@pytest.mark.parametrize("value", [1, torch.ones(2)])
def test_keys_that_are_equal_are_not_the_same(value: Any) -> None:
    fast: Any = tensorlogic.optimize(Rekeying().eval(), (torch.randn(2, 8), {0: value}))
    known = {0: value}
    fast(torch.randn(2, 8), known)
    assert next(iter(known)) is False


class Kind:
    by = 2.0


def scales(model: Any, y: Tensor, box: Any) -> Tensor:
    return y * box.kind.by


def test_classes_that_objects_hold_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Doing(scales).eval(), torch.randn(2, 8)
    fast: Any = tensorlogic.optimize(copy.deepcopy(model), (x, Box(kind=Kind)))
    assert isinstance(fast._program, Apart)
    monkeypatch.setattr(Kind, "by", -3.0)
    torch.testing.assert_close(fast(x, Box(kind=Kind)), model(x, Box(kind=Kind)))


def turns(model: Any, y: Tensor, box: Any) -> Tensor:
    box.w = (model.lin.weight * 2 + 1).t()
    return y @ box.w


def test_views_of_what_is_kept_are_not_handed_out() -> None:
    model, x, mine = Doing(turns).eval(), torch.randn(2, 8), Box()
    fast: Any = tensorlogic.optimize(copy.deepcopy(model), (x, Box()))
    assert isinstance(fast._program, Apart)
    fast(x, mine)
    mine.w.zero_()
    mine, theirs = Box(), Box()
    torch.testing.assert_close(fast(x, mine), model(x, theirs))
    torch.testing.assert_close(mine.w, theirs.w)


def test_keys_are_told_apart_by_their_kind_first() -> None:
    objects = Objects(({0: torch.ones(2)},), {})
    assert objects.taken(({torch.ones(2): torch.ones(2)},), {}) is None
    with pytest.raises(Opaque):
        Objects((Noted(torch.ones(2), Moved(torch.ones(2), torch.ones(2))),), {})
