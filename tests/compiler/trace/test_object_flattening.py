"""optimize where calls are given, change or make objects that hold tensors: what a call does to them is repeated, and only that."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler.object_models import Apart
from tensorlogic.compiler.trace.object_flattening import Objects, Opaque
from tensorlogic.compiler.tune.region_tuner import Judge


@pytest.fixture(autouse=True)
def unrecorded(pays: None) -> Iterator[None]:
    """Whatever is right counts as faster; nothing records gradients."""
    with torch.no_grad():
        yield


class Layer:
    """Keys of one layer, and what is to be done with them."""

    scale = 1.0

    def __init__(self, rows: Tensor, gain: Any = 1.0) -> None:
        self.rows, self.gain = rows, gain

    def update(self, x: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, x], 1)
        return self.rows * self.scale


@dataclass
class Cache:
    """What a decoder keeps between its steps."""

    layers: list[Layer] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, cache: Cache | None = None, last: bool = True) -> dict[str, Any]:
        if cache is None:
            cache = Cache([Layer(x), Layer(x)])
        for lin, layer in zip((self.first, self.second), cache.layers, strict=True):
            x = F.relu(lin(x)) + layer.update(x).mean(1, keepdim=True) * layer.gain
        cache.seen["x"] = x
        return {"y": self.out(x), "cache": cache}


def filled(steps: int = 3, gain: Any = 1.0) -> Cache:
    return Cache([Layer(torch.randn(2, steps, 8), gain) for _ in range(2)])


def token() -> Tensor:
    return torch.randn(2, 1, 8)


def optimized(model: nn.Module, *given: Any, **named: Any) -> Any:
    """The model served by a program of the tensors in its arguments."""
    fast: Any = tensorlogic.optimize(model.eval(), named or given)
    assert isinstance(fast.__dict__.get("_program"), Apart), fast.report
    return fast


def served(fast: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether such a call is the program's; it is made on copies."""
    args, kwargs = copy.deepcopy((args, kwargs))
    return fast._program(args, kwargs) is not tensorlogic.guards.errors.MISS


def same(a: Any, b: Any) -> None:
    """Equal in everything that they hold, in who is whom, too."""
    left, right = Objects((a,), {}), Objects((b,), {})
    assert left.before == right.before
    for x, y in zip(left.taken((a,), {})[0], right.taken((b,), {})[0], strict=True):  # type: ignore[index]
        torch.testing.assert_close(x, y, rtol=2e-4, atol=1e-5)


def test_a_decoders_steps() -> None:
    model, cache = Decoder(), filled()
    fast = optimized(model, x=token(), cache=cache)
    assert cache.layers[0].rows.shape == (2, 3, 8)
    assert not cache.seen
    mine, theirs = copy.deepcopy(cache), copy.deepcopy(cache)
    assert served(fast, x=token(), cache=mine)
    for _ in range(3):  # the first step has the example's sizes, the others run as they are
        x, layer = token(), mine.layers[0]
        out, plain = fast(x, cache=mine), model(x, cache=theirs)
        assert out["cache"] is mine
        assert mine.layers[0] is layer
        same(out, plain)
    assert served(fast, token(), filled())  # by position, too
    assert served(fast, token(), cache=filled(), last=True)
    assert not served(fast, token())  # which makes a cache of its own
    fast.first.weight.mul_(-2)
    x, mine = token(), filled()
    theirs = copy.deepcopy(mine)
    same(fast(x=x, cache=mine), model(x=x, cache=theirs))


def test_objects_that_a_call_makes() -> None:
    model = Decoder()
    fast = optimized(model, token())
    assert served(fast, token())
    x = token()
    a, b = fast(x), fast(x)
    same(a, model(x))
    assert a["cache"] is not b["cache"]
    assert a["cache"].layers is not b["cache"].layers
    assert a["cache"].layers[0].rows.data_ptr() != b["cache"].layers[0].rows.data_ptr()
    assert type(a["cache"].layers[1]) is Layer


class Remembering(nn.Module):
    """Writes to the list and the dict that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, known: list[Any], words: dict[str, Any]) -> Tensor:
        y = F.relu(self.lin(x))
        known.append(y)
        words.pop("old")
        words["new"] = {"y": y, "known": known}
        return y


def test_lists_and_dicts_that_a_call_changes() -> None:
    model = Remembering()

    def given() -> list[Any]:
        return [torch.ones(2, 8), [torch.zeros(3)], {"old": 1, "kept": "x"}]

    fast = optimized(model, *given())
    mine, theirs = given(), given()
    assert served(fast, *mine)
    ours, plain = fast(*mine), model(*theirs)
    assert mine[1][1] is ours
    assert mine[2]["new"]["known"] is mine[1]
    same((mine, ours), (theirs, plain))


class Gaining(Layer): ...


def test_other_objects_are_the_models_own_business(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shared = Decoder(), Layer(torch.randn(2, 3, 8))
    more, other, twice, again = filled(), filled(), filled(), filled()
    more.seen["y"] = 1
    other.layers[1] = Gaining(torch.randn(2, 3, 8))
    twice.layers = [shared, shared]
    again.layers[0].rows = again.layers[1].rows
    extra = filled()
    extra.layers[0].note = 1  # type: ignore[attr-defined]
    fast = optimized(model, x=token(), cache=filled(gain=0.0))
    for cache in (filled(gain=-0.0), filled(gain=0), filled(gain=2.0), filled(4)):
        assert not served(fast, x=token(), cache=cache)
    fast = optimized(model, x=token(), cache=filled(gain=1))
    assert not served(fast, x=token(), cache=filled(gain=True))
    fast = optimized(model, x=token(), cache=filled())
    assert served(fast, x=token(), cache=filled())
    for cache in (more, other, twice, again, extra):
        assert not served(fast, x=token(), cache=cache)
        x, theirs = token(), copy.deepcopy(cache)
        same(fast(x=x, cache=cache), model(x=x, cache=theirs))


class Scaled:
    by = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, rule: Any) -> Tensor:
        return F.relu(self.lin(rule(x)))


def test_what_methods_of_objects_read_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Asking(), torch.randn(2, 8)
    fast = optimized(model, x, Scaled())
    assert served(fast, x, Scaled())
    monkeypatch.setattr(Scaled, "by", -3.0)
    same(fast(x, Scaled()), model(x, Scaled()))
    monkeypatch.undo()
    monkeypatch.setattr(Scaled, "__call__", lambda self, x: x + 1)
    same(fast(x, Scaled()), model(x, Scaled()))


def test_two_that_are_one_in_the_example_stay_so() -> None:
    model, layer = Decoder(), Layer(torch.randn(2, 1, 8))

    def given(one: bool) -> Cache:
        cache = Cache([Layer(layer.rows), Layer(layer.rows)])
        if not one:
            cache.layers[1].rows = layer.rows.clone()
        return cache

    fast = optimized(model, x=token(), cache=given(True))
    x, mine, theirs = token(), given(True), given(True)
    assert served(fast, x=x, cache=mine)
    assert not served(fast, x=x, cache=given(False))
    same(fast(x=x, cache=mine), model(x=x, cache=theirs))


Pair = namedtuple("Pair", "y both")


class Nesting(nn.Module):
    """Makes everything that can be nested."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, box: Any) -> Any:
        y = F.relu(self.lin(x))
        layer = Layer(y, gain=float("-inf"))
        layer.me = (layer, [layer])  # type: ignore[attr-defined]
        box["made"] = layer
        return Pair(y, OrderedDict(b=(layer, x), a=[torch.float16, None, "t", y + 1]))


def test_everything_that_can_be_nested() -> None:
    model, x = Nesting(), torch.randn(2, 8)
    fast = optimized(model, x, {})
    box: dict[str, Any] = {}
    assert served(fast, x, {})
    out = fast(x, box)
    layer = out.both["b"][0]
    assert type(out) is Pair
    assert list(out.both) == ["b", "a"]
    assert out.both["b"][1] is x
    assert layer is box["made"]
    assert layer.me[0] is layer is layer.me[1][0]
    assert layer.gain == float("-inf")
    assert layer.rows is out.y
    assert out.both["a"][:3] == [torch.float16, None, "t"]
    torch.testing.assert_close(out.both["a"][3], model(x, {}).both["a"][3])


class Slotted:
    __slots__ = ("rows",)

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


class Told:
    """Keeps what is assigned to it elsewhere."""

    class Elsewhere:
        held: Any = None

        def __get__(self, owner: Any, kind: Any) -> Any:
            return self.held

        def __set__(self, owner: Any, value: Any) -> None:
            type(self).held = value

    rows = Elsewhere()


@pytest.mark.parametrize("inner", [Slotted(torch.ones(2)), Told(), object(), len, nn.ReLU(), iter([])])  # fmt: skip
def test_what_cannot_be_taken_apart(inner: Any) -> None:
    with pytest.raises(Opaque):
        Objects(({"in": [inner]},), {})


class Pretending(nn.Module):
    """Does something else while it is traced."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.lin, self.what = nn.Linear(8, 8), what

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        tracing = type(x) is not Tensor
        y = F.relu(self.lin(x)) * (2 if tracing and self.what == "numbers" else 1)
        cache.seen["y"] = y
        cache.seen["by"] = "a tracer" if tracing and self.what == "objects" else "a call"
        return y


@pytest.mark.parametrize("what", ["numbers", "objects"])
def test_a_graph_that_does_something_else_serves_nobody(what: str) -> None:
    model, x = Pretending(what).eval(), torch.randn(2, 8)
    fast: Any = tensorlogic.optimize(model, (x, Cache()))
    assert not isinstance(fast.__dict__.get("_program"), Apart)
    mine, theirs = Cache(), Cache()
    same((fast(x, mine), mine), (model(x, theirs), theirs))


class Counting(nn.Module):
    """Writes where a tensor of the object says, one further at each call: more calls on one object than it has room would fail."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Layer) -> Tensor:
        cache.rows.index_copy_(1, cache.gain, F.relu(self.lin(x)))
        cache.gain.add_(1)
        return F.relu(self.lin(cache.rows.sum(1)))


def test_calls_on_trial_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Judge.decide

    def twice(self: Judge, regions: Any, values: Any) -> Any:
        assert [*self._walk({r.root: r for r in regions}, regions, values)]
        return decide(self, regions, values)

    def full() -> Layer:
        return Layer(torch.ones(2, 4, 8), torch.tensor([3]))

    monkeypatch.setattr(Judge, "decide", twice)
    model, mine, theirs = Counting(), full(), full()
    fast = optimized(model, token(), full())
    x = token()
    assert served(fast, x, mine)
    same((fast(x, mine), mine), (model(x, theirs), theirs))
    with pytest.raises(IndexError):
        fast(x, mine)


class Static(nn.Module):
    """Writes into the memory that an object keeps, and counts steps in it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, at: Tensor, cache: Layer) -> Tensor:
        cache.rows.index_copy_(1, at, F.relu(self.lin(x)))
        cache.view = cache.rows[:, :2]  # type: ignore[attr-defined]
        return cache.rows.sum(1)


def test_memory_that_a_call_writes_to() -> None:
    model, at = Static(), torch.tensor([1])
    cache = Layer(torch.zeros(2, 4, 8))
    fast = optimized(model, token(), at, cache)
    assert not cache.rows.any()
    assert not hasattr(cache, "view")
    mine, theirs = Layer(torch.zeros(2, 4, 8)), Layer(torch.zeros(2, 4, 8))
    rows = mine.rows
    assert served(fast, token(), at, mine)
    for step in (1, 3):  # in the second the object has one attribute more
        x, at = token(), torch.tensor([step])
        same((fast(x, at, mine), mine), (model(x, at, theirs), theirs))
        assert mine.rows is rows
        assert mine.view.data_ptr() == rows.data_ptr()  # type: ignore[attr-defined]


def test_a_later_process_takes_the_graph_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorlogic.compiler import trace_cache

    model, cache = Decoder(), filled()
    optimized(model, x=token(), cache=cache)
    monkeypatch.setattr(trace_cache, "trace", lambda *_: pytest.fail("traced once more"))
    fast = optimized(model, x=token(), cache=filled())
    x, mine = token(), filled()
    theirs = copy.deepcopy(mine)
    assert served(fast, x=x, cache=mine)
    same(fast(x=x, cache=mine), model(x, theirs))
    monkeypatch.undo()
    torch._dynamo.reset()
    given = filled(gain=2.0)  # another value makes another graph
    slow: Any = tensorlogic.optimize(model, {"x": x, "cache": copy.deepcopy(given)})
    theirs = copy.deepcopy(given)
    same(slow(x=x, cache=given), model(x, theirs))
