"""Calls by keyword and with plain values: on the short way to a replay where they are as before, never with another's result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler.runtime.program import Program
from tensorlogic.cuda_graphs.replay import Replay
from tensorlogic.guards.errors import MISS

from ..support.graphs import CUDA, DEVICE, PythonTape


class Named(nn.Module):
    """A tensor, another that may be missing, a flag and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, y: Tensor | None = None, twice: bool = False, scale: float = 1.0
    ) -> dict[str, Tensor]:
        out = torch.relu(self.lin(x)) * scale + (0 if y is None else y)
        return {"out": out * 2 if twice else out, "x": out + x}


FORMS: dict[str, Any] = {
    "keyword": {"x": 0},
    "keywords": {"y": 1, "x": 0},
    "keywords and a flag": {"x": 0, "twice": True},
    "keywords, none and a number": {"x": 0, "y": None, "scale": 0.5},
    "places and a flag": (0, 1, True),
    "places, none and a number": (0, None, False, 0.5),
}


def filled(form: Any, tensors: list[Tensor]) -> Any:
    """The form with tensors in the place of their numbers."""

    def value(v: Any) -> Any:
        return tensors[v] if type(v) is int else v

    if isinstance(form, dict):
        return {k: value(v) for k, v in form.items()}
    return tuple(map(value, form))


def called(model: Any, given: Any) -> dict[str, Tensor]:
    out: dict[str, Tensor] = model(**given) if isinstance(given, dict) else model(*given)
    return out


def tensors() -> list[Tensor]:
    return [torch.randn(3, 4, device=DEVICE) for _ in range(2)]


def optimized(given: Any) -> Any:
    """A model whose program is replayed, and has been called once."""
    fast: Any = tensorlogic.optimize(Named().to(DEVICE).eval(), given, budget_s=0.2)
    program: Program = fast._program
    if not CUDA:
        flat = list(given.values() if isinstance(given, dict) else given)
        program.replay = Replay(program.function.run, flat, torch.device(DEVICE), tape=PythonTape)
        program.pointers = program._where()
    called(fast, given)
    return fast


def short(fast: Any, given: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a call is served without the long way; its result is right in any case."""
    expected = called(lambda *a, **k: Named.forward(fast, *a, **k), given)
    torch.testing.assert_close(called(fast, given), expected)
    asked: list[Any] = []

    def context() -> bool:
        asked.append(1)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(fast._program, "_context", context)
        out = fast._program(*(((), given) if isinstance(given, dict) else (given, {})))
    if out is MISS:
        return False
    torch.testing.assert_close(out, expected)
    return not asked


@torch.no_grad()
@pytest.mark.parametrize("form", list(FORMS))
def test_calls_as_before_go_the_short_way(
    pays: None, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = optimized(filled(FORMS[form], tensors()))
    for _ in range(3):
        assert short(fast, filled(FORMS[form], tensors()), monkeypatch)


@torch.no_grad()
def test_other_words_and_values_do_not(pays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"x": 0, "y": 1, "twice": True, "scale": 1.0}
    fast = optimized(filled(form, tensors()))
    others: list[Any] = [
        {**form, "twice": False},
        {**form, "twice": 1.0},
        {**form, "scale": 2.0},
        {**form, "y": None},
        {"x": 0, "y": 1, "twice": True},
        {"x": 1, "twice": True, "y": 0, "scale": 1.0},
    ]
    for other in others:
        assert not short(fast, filled(other, tensors()), monkeypatch)
    assert short(fast, filled(form, tensors()), monkeypatch)


def served(fast: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the program serves a call; what it gives is right."""
    expected = Named.forward(fast, *args, **kwargs)
    torch.testing.assert_close(fast(*args, **kwargs), expected)
    out = fast._program(args, kwargs)
    if out is MISS:
        return False
    torch.testing.assert_close(out, expected)
    return True


@torch.no_grad()
@pytest.mark.parametrize("form", [{"x": 0, "y": 1}, (0, 1)])
def test_the_same_call_in_another_form_is_served(pays: None, form: Any) -> None:
    x, y = tensors()
    fast = optimized(filled(form, [x, y]))
    assert served(fast, x, y)
    assert served(fast, x=x, y=y)
    assert served(fast, y=y, x=x)
    assert served(fast, x, y=y)
    assert served(fast, x, y, False, 1.0)
    assert not served(fast, x, y, True)
    assert not served(fast, x, y, scale=1)  # equal to the default, of another type
    assert not served(fast, x)
    with pytest.raises(TypeError, match="multiple values"):
        fast(x, x=x)
    with pytest.raises(TypeError, match="unexpected"):
        fast(x, y, z=x)


@torch.no_grad()
def test_another_form_goes_the_short_way_the_second_time(
    pays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, given = optimized(filled({"x": 0, "y": 1}, tensors())), tensors()
    assert short(fast, tuple(given), monkeypatch)
    assert short(fast, {"x": given[0], "y": given[1]}, monkeypatch)
    fast(given[0], given[1], True)  # another call in between
    assert short(fast, tuple(given), monkeypatch)


class Open(nn.Module):
    """Takes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, *tensors: Tensor, **named: Tensor) -> Tensor:
        return torch.relu(self.lin(tensors[0] if tensors else named["x"]))


@torch.no_grad()
def test_arguments_without_names_have_one_form(pays: None) -> None:
    x = tensors()[0]
    fast: Any = tensorlogic.optimize(Open().to(DEVICE).eval(), {"x": x}, budget_s=0.2)
    assert fast._program((), {"x": x}) is not MISS
    assert fast._program((x,), {}) is MISS
    torch.testing.assert_close(fast(x), Open.forward(fast, x))
