"""The short way to a graph in C, against stand-ins of the driver's functions: what is copied and launched, when, and where."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import tensorlogic
from tensorlogic.cuda_graphs import fast_replay as cuda_graphs_fast_replay
from tensorlogic.cuda_graphs.fast_replay import short
from tensorlogic.cuda_graphs.replay import Line, Replay
from tensorlogic.guards.errors import MISS
from tensorlogic.native import cpu_library, cuda_driver

from ..support.driver.replaying import STREAM, Driver, captured, replay_of, tape

pytestmark = pytest.mark.skipif(
    cpu_library.calls_available() is not None, reason=str(cpu_library.calls_available())
)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(cuda_driver, "driver", lambda device: made.driver)

    def turn(self: Line) -> None:
        made.done.append(("turn", self.raw))
        self.raw = made.stream

    monkeypatch.setattr(Line, "turn", turn)
    yield made
    made.tapes.clear()


@torch.no_grad()
def test_views_take_one_copy_and_one_launch(driver: Driver) -> None:
    xs = [torch.randn(3, 4) for _ in range(3)]
    fast = captured(driver, lambda x: x * 2, xs[0], unsafe_views=True)
    static, handle = replay_of(fast).static[0], replay_of(fast).tape.handle
    for x in xs:
        out = fast(x)
        assert out is replay_of(fast).out[0]
        assert torch.equal(out, x * 2)
        assert driver.done == [
            ("copy", static.data_ptr(), x.data_ptr(), 48, STREAM),
            ("graph", handle, STREAM),
        ]
        driver.done.clear()
    assert replay_of(fast).tape.asked == 1  # by the call that recorded


def test_owned_outputs_are_copied_once_and_kept(driver: Driver) -> None:
    xs = [torch.randn(3, 4) for _ in range(4)]
    for grad in (False, True):  # gradients may be recorded around, for what needs none
        with torch.set_grad_enabled(grad):
            fast = captured(driver, lambda x: (x * 2).t(), xs[0])
            outs = [fast(x) for x in xs]
            assert driver.kinds() == ["copy", "graph", "copy"] * 4
            assert torch.is_grad_enabled() is grad
        for x, out in zip(xs, outs, strict=True):
            assert torch.equal(out, (x * 2).t())
            assert out.stride() == (1, 4)
            assert not out.requires_grad
            assert out.is_leaf
        assert len({o.data_ptr() for o in outs} | {replay_of(fast).out[0].data_ptr()}) == 5


@torch.no_grad()
def test_inputs_with_gaps_or_lazy_numbers_are_pytorchs_to_copy(driver: Driver) -> None:
    base = torch.randn(4, 6)
    lazy = torch.randn(4, 6, dtype=torch.complex64)
    kinds: dict[str, tuple[Tensor, bool]] = {
        "dense": (base, True),
        "transposed": (base.t(), True),
        "part": (base[1:3], True),
        "with gaps": (base[:, ::2], False),
        "conjugate": (lazy.conj(), False),
        "negative": (lazy.conj().imag, False),
        "empty": (base[:0], False),
        "scalar": (torch.tensor(3.0), True),
    }
    for name, (x, lies) in kinds.items():
        fast = captured(driver, lambda v: v + v.resolve_conj(), x, unsafe_views=True)
        y = x * 3 if lies else x
        torch.testing.assert_close(fast(y), y + y)
        assert driver.kinds() == ["copy"] * lies + ["graph"], name


@torch.no_grad()
def test_several_inputs_are_all_in_before_the_launch(driver: Driver) -> None:
    x, y, z = torch.randn(3), torch.randn(3, 2), torch.randn(4, 6)[:, ::2]
    fast = captured(driver, lambda a, b, c: (a @ b, c.sum()), x, y, z)
    a, b = torch.randn(3), torch.randn(3, 2)
    out = fast(a, b, z)
    assert driver.kinds() == ["copy", "copy", "graph", "copy", "copy"]
    torch.testing.assert_close(out, (a @ b, z.sum()))
    static = replay_of(fast).static
    assert fast(static[0], static[1], z)[0].shape == (2,)  # the buffers themselves
    assert driver.kinds() == ["graph", "copy", "copy"]


@torch.no_grad()
def test_structures_and_what_is_handed_out_twice(driver: Driver) -> None:
    x = torch.randn(3)

    def twice(v: Tensor) -> Any:
        y = v + 1
        return [y, "text", v * 2, y]

    functions: list[Callable[[Tensor], Any]] = [
        twice,
        lambda v: (v + 1,),
        lambda v: (v + 1, (v, v * 2)[1]),
        lambda v: {"a": v + 1, "b": [v * 2, 3]},
        lambda v: torch.max(v.view(1, 3) + 1, 1),
        lambda v: None,
        lambda v: (),
    ]
    for fn in functions:
        for views in (False, True):
            fast = captured(driver, fn, x, unsafe_views=views)
            for given in (x, x * 2):
                got, want = fast(given), fn(given)
                assert type(got) is type(want)
                assert str(got) == str(want)
                assert driver.kinds()[:2] == ["copy", "graph"]
    replay = Replay(twice, [x], x.device, tape=tape(driver))
    replay([x])
    way: Any = short(replay, [x], pytree.tree_structure([0, 0, 0, 0]))
    got = way(x)
    assert driver.kinds().count("copy") == 3  # one in, one for each of two tensors
    assert got[0] is got[3]
    assert torch.equal(got[0], x + 1)


class Watching(TorchFunctionMode):
    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fn(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fn(*args, **(kwargs or {}))


class Own(Tensor):
    pass


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_calls_unlike_the_last_one_touch_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with torch.no_grad():
        fast = captured(driver, lambda a, b: a + b, x, y)
        way: Any = fast.way[0]
        others: list[tuple[Any, ...]] = [
            (x, x), (x,), (), (x, y, y), (x[:2], y), (x.double(), y), (torch.empty(4, 3).t(), y), (None, y), (x, 3.0),
            (nn.Parameter(x), y), (x.as_subclass(Own), y), (x.clone().requires_grad_(), y), (x.to_sparse(), y),
            (x.to("meta"), y), (torch.complex(x, x).conj().imag, y),
        ]  # fmt: skip
        assert all(way(*args) is MISS for args in others)
        with torch.inference_mode():
            assert way(x.clone(), y.clone()) is MISS
        modes: list[Any] = [Watching(), Dispatched(), torch.autocast("cpu", torch.bfloat16)]
        modes += [
            torch.enable_grad(),
            torch.inference_mode(),
            tensorlogic.policy(force="torch.eager"),
        ]
        for mode in modes:
            with mode:
                assert way(x, y) is MISS
        with forward_ad.dual_level():
            assert way(forward_ad.make_dual(x, y), y) is MISS
        found: list[Any] = []

        def inside(v: Tensor) -> Tensor:
            found.append(way(x, y))
            return v * 2

        torch.vmap(inside)(x)
        torch.jit.trace(inside, (x,), check_trace=False)
        assert found == [MISS, MISS]
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "_is_compiling_flag", True)
            assert way(x, y) is MISS
        driver.capturing = 1
        assert way(x, y) is MISS
        driver.capturing = 0
        with pytest.raises(TypeError):
            fast(a=x)
        assert driver.done == []
        with torch.device("meta"), tensorlogic.policy(tune="off"):  # of these nobody watches
            assert torch.equal(way(x, y), x + y)
        assert driver.kinds() == ["copy", "copy", "graph", "copy"]
    assert way(x, y) is MISS


@torch.no_grad()
def test_one_tensor_given_twice_is_a_kind_of_its_own(driver: Driver) -> None:
    x, y = torch.randn(3), torch.randn(3)
    fast = captured(driver, lambda a, b: a - 2 * b, x, x)
    way: Any = fast.way[0]
    assert way(x, y) is MISS
    assert torch.equal(way(y, y), y - 2 * y)


@torch.no_grad()
def test_streams_take_turns(driver: Driver) -> None:
    x = torch.randn(3)
    fast = captured(driver, lambda v: v + 1, x)
    for stream in (0x900, 0x900, STREAM):
        driver.stream = stream
        turning = stream != replay_of(fast).line.raw
        fast(x)
        assert {d[-1] for d in driver.done if d[0] != "turn"} == {stream}
        assert driver.kinds() == ["turn"] * turning + ["copy", "graph", "copy"]


@torch.no_grad()
def test_another_thread_has_the_buffers(driver: Driver) -> None:
    x = torch.randn(3)
    fast = captured(driver, lambda v: v + 1, x)
    way: Any = fast.way[0]
    lock = replay_of(fast).line.lock
    with lock:
        assert way(x) is MISS
        assert torch.equal(fast(x), x + 1)
        assert driver.done == []
    assert way(x) is not MISS
    assert not lock.locked()
    seen: list[bool] = []
    plain, handle = driver.tapes[replay_of(fast).tape.handle], replay_of(fast).tape.handle

    def slow() -> None:
        other = threading.Thread(target=lambda: seen.append(torch.no_grad()(way)(x) is MISS))
        other.start()  # runs while the driver is at work
        other.join(20)
        plain()

    driver.tapes[handle] = slow
    assert torch.equal(way(x), x + 1)
    assert seen == [True]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["stream", "capturing", "copy", "graph"])
def test_what_the_driver_refuses_is_done_or_said_by_pytorch(driver: Driver, kind: str) -> None:
    x = torch.randn(3)
    fast = captured(driver, lambda v: v + 1, x)
    entry = replay_of(fast)
    driver.refuse[kind] = 201
    asked = entry.tape.asked
    assert torch.equal(fast(x), x + 1)
    assert entry.tape.asked == asked + 1
    entry.tape.fails = True
    with pytest.raises(RuntimeError, match="what PyTorch says"):
        fast(x)
    assert not entry.line.lock.locked()
    driver.refuse.clear()
    driver.kinds()
    assert torch.equal(fast(x), x + 1)
    assert driver.kinds() == ["copy", "graph", "copy"]


@torch.no_grad()
def test_a_refused_copy_out_is_made_up_for(driver: Driver) -> None:
    x = torch.randn(3)
    fast = captured(driver, lambda v: v + 1, x)
    handle = replay_of(fast).tape.handle
    plain = driver.tapes[handle]
    driver.tapes[handle] = lambda: (plain(), driver.refuse.update(copy=700))[0]
    assert torch.equal(fast(x), x + 1)
    assert not replay_of(fast).line.lock.locked()


@torch.no_grad()
def test_memory_that_is_away_is_left_to_pytorch(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, gone = torch.randn(3), torch.randn(3)
    gone.untyped_storage().resize_(0)
    monkeypatch.setattr(cuda_graphs_fast_replay, "_launching", lambda *_: lambda v: ("usual", v))
    way: Any = captured(driver, lambda v: v + 1, x).way[0]
    assert way(gone) == ("usual", gone)
    assert driver.kinds() == []
    assert torch.equal(way(x), x + 1)


def test_graphs_of_random_numbers_are_launched_by_pytorch(driver: Driver) -> None:
    x = torch.randn(3)
    fast = captured(driver, lambda v: v + 1, x, handle=False)
    asked = replay_of(fast).tape.asked
    assert torch.equal(fast(x), x + 1)
    assert driver.kinds() == ["copy", "copy"]
    assert replay_of(fast).tape.asked == asked + 1
    replay_of(fast).tape.fails = True
    with pytest.raises(RuntimeError, match="what PyTorch says"):
        fast(x)
    assert torch.is_grad_enabled()
    assert not replay_of(fast).line.lock.locked()


@torch.no_grad()
def test_who_profiles_sees_pytorchs_own_calls(driver: Driver) -> None:
    x = torch.randn(3)
    fast = captured(driver, lambda v: v + 1, x)
    with profile() as seen:
        assert torch.equal(fast(x), x + 1)
    assert any(e.key == "aten::copy_" for e in seen.key_averages())
    assert driver.done == []


@torch.no_grad()
def test_conditions_are_asked_before_and_after(driver: Driver) -> None:
    x, order = torch.randn(3), list[str]()
    said: dict[str, bool | None] = {"before": True, "after": True}

    def condition(name: str) -> bool:
        order.append(name + "".join(f" {k}" for k in driver.kinds()))
        holds = said[name]
        if holds is None:
            raise KeyError(name)
        return holds

    replay = Replay(lambda v: [v + 1], [x], x.device, tape=tape(driver))
    replay([x])
    before, after = functools.partial(condition, "before"), functools.partial(condition, "after")
    way: Any = short(replay, [x], pytree.tree_structure(0), before, after)
    way(x)
    order.clear()
    driver.kinds()
    assert torch.equal(way(x), x + 1)
    assert (order, driver.kinds()) == (["before", "after copy graph"], ["copy"])
    for name in said:
        for value in (False, None):
            said[name] = value
            if value is None:
                with pytest.raises(KeyError, match=name):
                    way(x)
            else:
                assert way(x) is MISS
            assert driver.kinds() == []
            assert not replay.line.lock.locked()
        said[name] = True
    assert order[2:] == ["before"] * 2 + ["before", "after copy graph"] * 2
    assert torch.equal(way(x), x + 1)
    with torch.enable_grad():  # nothing is recorded inside
        way = short(
            replay, [x], pytree.tree_structure(0), None, lambda: not torch.is_grad_enabled()
        )
        assert torch.equal(way(x), x + 1)
        assert torch.is_grad_enabled()


@pytest.mark.slow
@torch.no_grad()
def test_ways_and_what_they_lead_to_are_freed(driver: Driver) -> None:
    x = torch.randn(3)
    fast = captured(driver, nn.Linear(3, 3), x)
    gone = [weakref.ref(fast), weakref.ref(replay_of(fast)), weakref.ref(replay_of(fast).tape)]
    fast.own = fast.way  # type: ignore[attr-defined]
    driver.tapes.clear()
    del fast
    gc.collect()
    assert [g() for g in gone] == [None] * 3
    fast = captured(driver, lambda v: v + 1, x)
    fast(x)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(50):
        fast(x)
    gc.collect()
    assert abs(len(gc.get_objects()) - before) < 20


@torch.no_grad()
def test_compiled_functions_may_call_one_that_is_captured(driver: Driver) -> None:
    x = torch.randn(3)
    fast = captured(driver, lambda v: v + 1, x)
    compiled = torch.compile(lambda v: fast(v * 2) * 3, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(x), (x * 2 + 1) * 3)
    assert driver.kinds() == ["copy", "graph", "copy"] * 3
