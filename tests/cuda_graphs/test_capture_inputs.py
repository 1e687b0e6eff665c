"""capture: inputs that no buffer can stand for are left to the function, expanded ones are captured, arguments are checked."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler.trace import exporter
from tensorlogic.core import policy
from tensorlogic.cuda_graphs import capture, host_rng
from tensorlogic.cuda_graphs.host_rng import drawn_once
from tensorlogic.cuda_graphs.keyword_calls import Words
from tensorlogic.cuda_graphs.static_buffers import once, static_like
from tensorlogic.guards.errors import MISS
from tensorlogic.guards.model_guard import Guard

from ..support.graphs import CUDA, DEVICE, PythonTape, captured, gradients, net, recorded

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
LINUX = sys.platform == "linux"  # it tells whether a thread has run
ALIVE = host_rng._others
OF_THE_PROCESS = {"random": host_rng.PYTHON, "numpy": host_rng.NUMPY, "torch": host_rng.TORCH}


@dataclass
class Own:
    """Generators from which no thread but a test's draws, in place of the process's own."""

    python: random.Random
    numpy: numpy.random.RandomState
    torch: torch.Generator

    def seed(self, number: int) -> None:
        for seed in (self.python.seed, self.numpy.seed, self.torch.manual_seed):
            seed(number)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> Own:
    """Recordings look at generators of the test's own, and know of no other thread that lives."""
    made = Own(random.Random(3), numpy.random.RandomState(3), torch.Generator().manual_seed(3))
    states = {
        "PYTHON": (made.python.getstate, made.python.setstate),
        "NUMPY": (lambda: made.numpy.get_state(legacy=False), lambda s: made.numpy.set_state(s)),
        "TORCH": (made.torch.get_state, made.torch.set_state),
    }
    for name, functions in states.items():
        own = (getattr(host_rng, name)[0], *functions)
        monkeypatch.setattr(host_rng, name, own)
        monkeypatch.setattr(exporter, name, own, raising=False)  # which optimize looks at
    monkeypatch.setattr(host_rng, "_others", lambda: [])
    return made


class Loader:
    """A thread that sleeps, but where it is given something to do."""

    def __init__(self) -> None:
        self.given, self.done = SimpleQueue[Any](), SimpleQueue[Any]()
        self.thread = threading.Thread(target=self._live, name="loader", daemon=True)
        self.thread.start()

    def _live(self) -> None:
        while (fn := self.given.get()) is not None:
            self.done.put(fn())

    def do(self, fn: Callable[[], object]) -> None:
        self.given.put(fn)
        self.done.get(timeout=20)

    def falls_asleep(self) -> None:
        until, before = time.monotonic() + 20, None
        while before is None or before != host_rng._sleep(self.thread):
            assert time.monotonic() < until
            before = host_rng._sleep(self.thread)
            time.sleep(0.02)


@pytest.fixture
def loader(own: Own, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loader]:
    """The only other thread that recordings know of."""
    made = Loader()
    monkeypatch.setattr(host_rng, "_others", lambda: [made.thread] * made.thread.is_alive())
    if LINUX:
        made.falls_asleep()
    yield made
    made.given.put(None)
    made.thread.join(20)


class Named(Tensor):
    """A subclass, as image libraries have them."""


def odd() -> dict[str, Tensor]:
    x = torch.randn(4, 8, device=DEVICE)
    return {
        "subclass": x.as_subclass(Named),
        "sparse": x.to_sparse(),
        "csr": x.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([x, x[:2]]),
        "jagged": torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
        "meta": x.to("meta"),
    }


@torch.no_grad()
@pytest.mark.parametrize("kind", ["subclass", "sparse", "csr", "nested", "jagged", "meta"])
def test_inputs_that_no_buffer_is_like_are_left_to_the_function(kind: str) -> None:
    fast, x = captured(lambda v: v * 2), torch.randn(4, 8, device=DEVICE)
    value: Any = odd()[kind]
    for _ in range(4):
        out = fast(value)
        assert type(out) is type(value * 2)
        assert out.layout == (value * 2).layout
        plain = fast(x)
        assert type(plain) is Tensor
        assert torch.equal(plain, x * 2)
    assert (fast.graphs, fast.reason) == (1, None)


@torch.no_grad()
def test_expanded_inputs_are_captured() -> None:
    """Masks are expanded over a batch everywhere."""
    fast = captured(lambda v, mask: v.masked_fill(mask, 0.0) + mask)
    for _ in range(6):
        x = torch.randn(4, 8, device=DEVICE)
        mask = (torch.randn(1, 8, device=DEVICE) > 0).expand(4, 8)
        torch.testing.assert_close(fast(x, mask), x.masked_fill(mask, 0.0) + mask)
    assert (fast.graphs, fast.reason) == (1, None)
    alone = captured(lambda v: v.sum(0))
    for n in range(6):
        x = torch.full((), float(n), device=DEVICE).expand(3, 2)
        assert torch.equal(alone(x), x.sum(0))
    assert alone.graphs == 1


@gradients
def test_gradients_of_expanded_inputs() -> None:
    fast = captured(lambda v, w: v * w)
    for _ in range(5):
        x = torch.randn(1, 8, device=DEVICE).expand(4, 8)
        w = torch.randn(4, 8, device=DEVICE, requires_grad=True)
        (dw,) = torch.autograd.grad(fast(x, w).sum(), w)
        assert torch.equal(dw, x)


def test_a_buffer_lies_as_its_tensor() -> None:
    for x in (torch.randn(3, 1, 5).expand(3, 4, 5), torch.randn(6, 4).t(), torch.randn(0, 3)):
        made = static_like(x)
        assert torch.equal(made, x)
        assert made.stride() == x.stride()
        assert made.untyped_storage().nbytes() == 4 * once(x).numel()


@torch.no_grad()
def test_an_optimised_model_leaves_them_to_its_own_code(pays: None) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval().to(DEVICE), odd()
    dense = torch.randn(4, 8, device=DEVICE)
    fast = tensorlogic.optimize(model, dense)
    assert fast.report.outcome != "original"
    for kind in ("nested", "csr", "sparse", "jagged"):
        for _ in range(2):
            assert type(fast(x[kind])) is type(model(x[kind]))
            torch.testing.assert_close(fast(dense), model(dense))
    for kind in ("nested", "csr"):
        assert tensorlogic.optimize(model, x[kind]).report.outcome == "original"


class Letter(int, Enum):
    """Equal to a number, and something else."""

    A = 1


@torch.no_grad()
def test_values_that_are_equal_are_not_the_same() -> None:
    def fn(v: Tensor, by: Any) -> Tensor:
        return v + 10 if by is True else v - 1 if isinstance(by, Letter) else v / (v * 0 + by)

    fast, x = captured(fn), torch.arange(1, 4, device=DEVICE)
    for by in (1, 1.0, True, Letter.A, 0.0, -0.0, [1], [1.0]):
        given = by[0] if isinstance(by, list) else by
        for _ in range(4):
            out, want = fast(x, given), fn(x, given)
            assert out.dtype == want.dtype
            assert torch.equal(out, want)
    assert fast.graphs == 6


def test_the_sign_of_zero_tells_calls_apart() -> None:
    x = torch.randn(3)
    words = Words(lambda v: v, (x,), {"by": 0.0})
    assert Guard((x, 0.0), False).holds((x, 0.0))
    assert not Guard((x, 0.0), False).holds((x, -0.0))
    assert words((x,), {"by": 0.0}) is x
    assert words((x,), {"by": -0.0}) is MISS


class Still(PythonTape):
    """Gives what was recorded, as a graph does that was recorded under another policy."""

    def replay(self) -> None:
        pass


@torch.no_grad()
def test_a_policy_has_a_graph_of_its_own() -> None:
    def fn(v: Tensor) -> Tensor:
        return v * (2 if policy.current().precision is None else 3)

    x, fast = torch.randn(3), tensorlogic.capture(fn)
    fast.tape = Still
    for _ in range(8):
        assert torch.equal(fast(x), x * 2)
        with tensorlogic.precision("adaptive", rtol=1e-3):
            assert torch.equal(fast(x), x * 3)
        with tensorlogic.policy(tune="off"):
            assert torch.equal(fast(x), x * 2)
    assert fast.graphs == 2


@dataclass
class Batch:
    x: Tensor


@torch.no_grad()
def test_objects_that_hold_tensors_are_left_to_the_function() -> None:
    """The next one lies where the last one was, and a graph would read what that held."""
    fast = captured(lambda batch, scale: batch.x * scale)
    for n in range(6):
        x = torch.full((2,), float(n), device=DEVICE)
        assert torch.equal(fast(Batch(x), 2), x * 2)
        assert fast.graphs == 0
    plain = captured(lambda v, how: how(v))
    x = torch.randn(3, device=DEVICE)
    for _ in range(5):
        assert torch.equal(plain(x, torch.relu), x.relu())
    assert plain.graphs == 1
    assert "an argument is a Batch" in str(fast.reason)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"max_graphs": None}, TypeError, "max_graphs is NoneType; a whole number"),
        ({"max_graphs": torch.ones(2)}, TypeError, "max_graphs is f32"),
        ({"max_graphs": 1.5}, TypeError, "max_graphs is float 1.5"),
        ({"batch": "x", "buckets": [4]}, TypeError, "batch is str 'x'; a whole number"),
        ({"batch": -1, "buckets": [4]}, ValueError, "batch is -1; a dimension from 0"),
        ({"batch": 0, "buckets": 8}, TypeError, "buckets is int 8; a list of sizes"),
        ({"batch": 0, "buckets": torch.ones(2)}, TypeError, "buckets is f32"),
        ({"batch": 0, "buckets": [4, None]}, TypeError, "buckets is NoneType; a whole number"),
        ({"unsafe_views": "yes"}, TypeError, "unsafe_views is str 'yes'; True or False"),
    ],
)
def test_arguments_are_named(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        tensorlogic.capture(torch.relu, **given)


@torch.no_grad()
def test_calls_in_a_row_that_no_graph_may_serve_are_seldom_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call with a CPU's tensors was taken apart where there is a GPU: 7.6 us of a function, 24 of a module."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def step(x: Tensor, thing: object = None) -> Tensor:
        return x + 1

    fast, one, two = tensorlogic.capture(step), torch.ones(2), torch.full((2,), 2.0)
    looked: list[int] = []
    suits = fast._suits

    def counted(flat: Sequence[Any]) -> Any:
        looked.append(1)
        return suits(flat)

    monkeypatch.setattr(fast, "_suits", counted)
    for _ in range(10 * capture.PAUSE):
        assert torch.equal(fast(one), two)
    assert "cpu" in str(fast.reason)
    assert len(looked) <= 15
    fast.tape = PythonTape  # a device that can: found out within a pause
    for _ in range(capture.PAUSE + capture.EAGER_CALLS):
        assert torch.equal(fast(one), two)
    assert (fast.graphs, fast.reason) == (1, None)
    for _ in range(5):  # one call between others costs the others nothing
        assert torch.equal(fast(one, object()), two)
        assert "object" in str(fast.reason)
        assert torch.equal(fast(one), two)
        assert fast.reason is None


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("across", [False, True])
def test_outputs_that_a_kernel_of_ones_own_writes(dtype: torch.dtype, across: bool) -> None:
    """PyTorch counts no version of what it does not write; `.data` stands for such a kernel here."""

    def double(x: Tensor, out: Tensor) -> Tensor:
        out.data.copy_(x if dtype is torch.bool else x * 2)
        return x.sum()

    def given() -> Tensor:
        made = torch.randint(2, (4, 6), device=DEVICE).to(dtype)
        return made.t() if across else made

    fast, out = captured(double), given() * 0
    for turn in range(40):
        x = given()
        fast(x, out)
        assert torch.equal(out, x if dtype is torch.bool else x * 2), turn
    assert fast.graphs == 0
    assert "written to" in str(fast.reason)
    nans = torch.full((4,), float("nan"), device=DEVICE)
    plainly = captured(lambda x: x + 1)
    for _ in range(4):
        plainly(nans)
    assert (plainly.graphs, plainly.reason) == (1, None)  # no number equals itself less for it


def test_inference_mode() -> None:
    """Models and inputs made in it, inputs that are written to, and outputs that are inference tensors as the function's own."""
    with torch.inference_mode():
        own = net()
    for model in (net(), own):
        fast = recorded(model)
        outside = torch.randn(3, 4, device=DEVICE)
        with torch.inference_mode():
            for count in range(6):
                x = outside if count % 2 else torch.randn(3, 4, device=DEVICE)
                out = fast(x)
                torch.testing.assert_close(out, model(x))
                assert out.is_inference()
            assert (fast.graphs, fast.reason) == (1, None)
            next(model.parameters()).mul_(2)
            torch.testing.assert_close(fast(outside), model(outside))
        with torch.no_grad():
            for _ in range(4):
                out = fast(outside)
                torch.testing.assert_close(out, model(outside))
                assert not out.is_inference()
        assert fast.graphs == 2

    def add(x: Tensor, sums: Tensor) -> Tensor:
        sums += x
        return sums * 2

    fast = recorded(add)
    with torch.inference_mode():
        mine = torch.zeros(4, device=DEVICE)
        theirs = mine.clone()
        for _ in range(6):
            x = torch.randn(4, device=DEVICE)
            torch.testing.assert_close(fast(x, mine), add(x, theirs))
            torch.testing.assert_close(mine, theirs)
    assert fast.graphs == 1


@pytest.mark.parametrize("name", ["random", "numpy", "torch", "none"])
@torch.no_grad()
def test_numbers_drawn_on_the_host(name: str, own: Own) -> None:
    """Layers that are dropped by chance: a graph would drop the same ones in every call."""
    draws = {
        "random": own.python.random,
        "numpy": own.numpy.rand,
        "torch": lambda: float(torch.rand((), generator=own.torch)),
        "none": lambda: 0.9,
    }[name]
    model = net()

    def dropping(x: Tensor) -> Tensor:
        return model(x) if draws() < 0.5 else x + 1

    def outs(call: Any) -> list[Tensor]:
        own.seed(3)
        return [call(x) for x in given]

    given = [torch.randn(3, 4, device=DEVICE) for _ in range(12)]
    fast = recorded(dropping)
    if name == "torch" and not CUDA:  # whose generator is the graph's own there
        with pytest.raises(RuntimeError, match="of the CPU"), drawn_once(torch.device("cuda")):
            dropping(given[0])
        return
    found, wanted = outs(fast), outs(dropping)
    torch.testing.assert_close(found, wanted)
    assert (fast.graphs, fast.reason is None) == ((1, True) if name == "none" else (0, False))


@pytest.mark.parametrize("name", OF_THE_PROCESS)
def test_the_generators_are_those_of_the_process(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else draws meanwhile: each generator that moved is named."""
    attribute = {"random": "PYTHON", "numpy": "NUMPY", "torch": "TORCH"}[name]
    monkeypatch.setattr(host_rng, attribute, OF_THE_PROCESS[name])
    draw = {"random": random.random, "numpy": numpy.random.rand, "torch": lambda: torch.rand(3)}
    said = f"draws from .*{OF_THE_PROCESS[name][0]}"
    with pytest.raises(RuntimeError, match=said), drawn_once(torch.device("cuda")):
        draw[name]()


def broken(own: Own, meanwhile: Callable[[], object] = lambda: None) -> tuple[bool, bool]:
    """Which generators stand where they stood, after a recording that draws from them and breaks."""

    def record() -> None:
        own.python.random()
        torch.rand(3, generator=own.torch)
        meanwhile()
        raise ValueError("broken")

    python, host = own.python.getstate(), own.torch.get_state()
    with pytest.raises(ValueError, match="broken"), drawn_once(torch.device("cuda")):
        record()
    return python == own.python.getstate(), torch.equal(host, own.torch.get_state())


def test_what_a_broken_recording_drew_is_drawn_again(own: Own) -> None:
    assert broken(own) == (True, True)


def test_threads_that_sleep_have_drawn_nothing(own: Own, loader: Loader) -> None:
    """Notebooks and data loaders have some; what ran meanwhile may have drawn, and nothing is given out twice."""
    assert broken(own) == (LINUX, LINUX)
    assert broken(own, lambda: loader.do(int)) == (False, False)
    assert broken(own, lambda: loader.given.put(None) or loader.thread.join(20)) == (False, False)
    assert broken(own) == (True, True)


def test_threads_that_began_meanwhile_may_have_drawn(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    began: list[Loader] = []
    monkeypatch.setattr(host_rng, "_others", lambda: [loader.thread for loader in began])
    assert broken(own, lambda: began.append(Loader())) == (False, False)
    began[0].given.put(None)


def test_all_threads_but_this_one_are_known(loader: Loader) -> None:
    known = ALIVE()
    assert loader.thread in known
    assert threading.current_thread() not in known


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_without_a_version(mode: Any) -> None:
    """By a kernel of one's own, as `.data` stands for here; tensors of inference mode have no versions at all."""

    def fn(x: Tensor, sums: Tensor) -> Tensor:
        sums.data.add_(x)
        return x + 1

    fast = recorded(fn)
    with mode():
        sums = torch.zeros(4, device=DEVICE)
        for count in range(6):
            x = torch.full((4,), float(count + 1), device=DEVICE)
            sums.zero_()
            torch.testing.assert_close(fast(x, sums), x + 1)
            torch.testing.assert_close(sums, x)
    assert (fast.graphs, "written to" in str(fast.reason)) == (0, True)


@torch.no_grad()
def test_numbers_that_another_thread_draws_are_given_out_once(own: Own, loader: Loader) -> None:
    model, drawn, calls = net(), list[float](), list[int]()

    def draw() -> None:
        drawn.extend(own.python.random() for _ in range(3))

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:  # which is recorded
            loader.do(draw)
        return model(x)

    fast = recorded(fn)
    for _ in range(4):
        x = torch.randn(3, 4, device=DEVICE)
        torch.testing.assert_close(fast(x), model(x))
    assert fast.reason is not None
    assert "draws from Python's random, or the thread 'loader' does" in fast.reason
    assert [own.python.random() for _ in range(3)] != drawn


@torch.no_grad()
@pytest.mark.skipif(not LINUX, reason="only Linux tells whether a thread has run")
def test_a_thread_that_sleeps_is_not_accused(own: Own, loader: Loader) -> None:
    fast = recorded(lambda x: x + own.python.random() + own.numpy.rand())
    for _ in range(3):
        fast(torch.randn(3, 4, device=DEVICE))
    assert fast.reason is not None
    assert "draws from Python's random and numpy.random, and a graph" in fast.reason


@torch.no_grad()
def test_another_generator_of_numpy(own: Own) -> None:
    own.numpy = numpy.random.RandomState(numpy.random.PCG64(3))
    fast = recorded(net())
    for _ in range(4):
        fast(torch.randn(3, 4, device=DEVICE))
    assert fast.graphs == 1
    fast = recorded(lambda x: x + own.numpy.rand())
    for _ in range(4):
        fast(torch.randn(3, 4, device=DEVICE))
    assert "numpy" in str(fast.reason)
