"""The way from a public call to a launcher: warm where it may be, another road where it must be, PyTorch's result on each."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.core.candidate import EAGER
from tensorlogic.dispatch import call_cache as dispatch_call_cache
from tensorlogic.dispatch import dispatcher, torch_library

Roads = Counter[str]


@pytest.fixture
def roads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Roads]:
    """How often each road off the fast path was taken."""
    seen: Roads = Counter()

    def counted(place: Any, name: str) -> None:
        usual = getattr(place, name)

        def road(*args: Any, **named: Any) -> Any:
            seen[name] += 1
            return usual(*args, **named)

        monkeypatch.setattr(place, name, road)

    for place, name in (
        (dispatcher, "call"),
        (dispatcher, "composition"),
        (torch_library, "traced"),
    ):
        counted(place, name)
    policy.forget_entries()
    yield seen
    policy.forget_entries()


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return tensorlogic.linear(x, w, b, activation="relu")


def plain(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return torch.relu(F.linear(x, w, b))


def test_second_call_is_fast(roads: Roads) -> None:
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    for _ in range(4):
        torch.testing.assert_close(linear(x, w, b), plain(x, w, b))
        torch.testing.assert_close(linear(x + 1, w, b), plain(x + 1, w, b))
    assert roads == {"call": 1}


VARIANTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "other shape": lambda: (torch.randn(2, 4), torch.randn(5, 4)),
    "transposed": lambda: (torch.randn(4, 3).t(), torch.randn(5, 4)),
    "zero stride": lambda: (torch.randn(4).expand(3, 4), torch.randn(5, 4)),
    "strided": lambda: (torch.randn(3, 8)[:, ::2], torch.randn(5, 4)),
    "dtype": lambda: (torch.randn(3, 4).double(), torch.randn(5, 4).double()),
    "parameter": lambda: (torch.randn(3, 4), torch.nn.Parameter(torch.randn(5, 4))),
    "requires grad": lambda: (torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)),
    "bias": lambda: (torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)),
    "same twice": lambda: (s := torch.randn(4, 4), s),
    "square": lambda: (torch.randn(4, 4), torch.randn(4, 4)),
    "same thrice": lambda: (s := torch.randn(1, 1), s, s[0]),
    "leading": lambda: (torch.randn(2, 3, 4), torch.randn(5, 4)),
    "vector": lambda: (torch.randn(4), torch.randn(5, 4)),
    "empty": lambda: (torch.randn(0, 4), torch.randn(5, 4)),
}


def test_variants_share_names_but_not_launchers(roads: Roads) -> None:
    """Every variant is warm after its first call, and none is served by another's entry."""
    made = {name: make() for name, make in VARIANTS.items()}
    for _ in range(3):
        for name, args in made.items():
            out = linear(*args)
            torch.testing.assert_close(out, plain(*args), msg=name)
            assert out.requires_grad == plain(*args).requires_grad, name
    assert roads == {"call": len(made)}


class Plus(torch.Tensor):
    """A subclass that changes nothing."""


class Function(TorchFunctionMode):
    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fn(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fn(*args, **(kwargs or {}))


@contextlib.contextmanager
def dual(x: Tensor) -> Iterator[Tensor]:
    with forward_ad.dual_level():
        yield forward_ad.make_dual(x, torch.ones_like(x))


MODES: dict[str, tuple[Callable[[], Any], str]] = {
    "autocast": (lambda: torch.autocast("cpu"), "call"),
    "function mode": (Function, "traced"),
    "dispatch mode": (Dispatch, "traced"),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_leave_the_fast_path(roads: Roads, mode: str) -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    linear(x, w)
    make, road = MODES[mode]
    roads.clear()
    with make():
        got, want = linear(x, w), plain(x, w)
    torch.testing.assert_close(got, want)
    assert roads == {road: 1}
    linear(x, w)
    assert roads == {road: 1}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_modes_have_entries_of_their_own(roads: Roads, mode: Any) -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    for _ in range(3):
        assert linear(x, w).requires_grad
        with mode():
            out = linear(x, w)
            assert not out.requires_grad
            assert out.is_inference() == (mode is torch.inference_mode)
    assert roads == {"call": 2}


@pytest.mark.parametrize("kind", ["subclass", "meta", "conj", "sparse", "dual", "vmap", "grad"])
def test_unusual_tensors_take_their_road(roads: Roads, kind: str) -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    linear(x, w)
    roads.clear()
    if kind == "subclass":
        out = linear(x.as_subclass(Plus), w)
        assert type(out) is Plus
        torch.testing.assert_close(out.as_subclass(Tensor), plain(x, w))
    elif kind == "meta":
        out = linear(x.to("meta"), w.to("meta"))
        assert (out.shape, out.device.type) == ((3, 5), "meta")
    elif kind == "conj":
        c = torch.randn(3, 4, dtype=torch.complex64).conj()
        torch.testing.assert_close(tensorlogic.add(c, c), c + c)
    elif kind == "sparse":
        out = tensorlogic.relu(x.to_sparse())
        torch.testing.assert_close(out.to_dense(), torch.relu(x))
    elif kind == "dual":
        with dual(x) as d:
            tangent = forward_ad.unpack_dual(linear(d, w)).tangent
            torch.testing.assert_close(tangent, forward_ad.unpack_dual(plain(d, w)).tangent)
    elif kind == "vmap":
        torch.testing.assert_close(torch.vmap(linear, (0, None))(x, w), plain(x, w))
    else:
        got = torch.func.grad(lambda t: linear(t, w).sum())(x)
        torch.testing.assert_close(got, torch.func.grad(lambda t: plain(t, w).sum())(x))
    expected = "traced" if kind in ("subclass", "meta") else "composition"
    assert set(roads) == {expected}


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = torch.nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * tensorlogic.gelu_linear(tensorlogic.add(x, 2), self.l.weight, self.l.bias)


def test_symbolic_traces_hold_calls(roads: Roads) -> None:
    """What torch.fx notes is the public function, with its defaults; the graph runs, has gradients and can be printed."""
    model, x = Doubled(), torch.randn(3, 4)
    for _ in range(2):  # also where the keys are warm
        graph = torch.fx.symbolic_trace(model)
        torch.testing.assert_close(graph(x), model(x))
        graph(x).sum().backward()
        assert model.l.weight.grad is not None
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert tensorlogic.gelu_linear in targets
    assert "gelu_linear" in graph.code
    with (
        tensorlogic.precision("f32"),
        pytest.raises(TypeError, match="Proxy under a precision"),
    ):
        torch.fx.symbolic_trace(model)


@pytest.mark.parametrize(
    "context",
    [lambda: tensorlogic.policy(force=EAGER), lambda: tensorlogic.precision("f32"), lambda: tensorlogic.placement("cpu")],
)  # fmt: skip
def test_policies_break_graphs_and_say_so(context: Callable[[], Any]) -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        with context():
            return tensorlogic.linear(x + 1, w)

    fn.__code__ = fn.__code__.replace(co_name="fresh")  # Dynamo skips code that broke before
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a policy of tensorlogic holds"):
        torch.compile(fn, backend="eager", fullgraph=True)(x, w)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend="eager")(x, w), fn(x, w))


def test_a_warm_key_does_not_admit_what_a_cold_one_refuses(roads: Roads) -> None:
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    for _ in range(2):
        linear(x, w, b)
        tensorlogic.attention_scores(x, x, 0.5)
    with pytest.raises(TypeError, match="x is ndarray"):
        linear(np.zeros((3, 4), dtype=np.float32), w, b)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"bias is float 3\.0"):
        linear(x, w, 3.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x is list"):
        linear([[0.0] * 4] * 3, w, b)  # type: ignore[arg-type]
    for scale in (math.nan, math.inf, True, "1"):
        with pytest.raises((TypeError, ValueError), match="scale is"):
            tensorlogic.attention_scores(x, x, scale)  # type: ignore[arg-type]
    assert roads == {"call": 2}


@pytest.mark.parametrize("scale", [2, 2.0, -0.0, 1e30, np.float64(0.5)])
def test_scalars_are_taken_at_run_time(roads: Roads, scale: float) -> None:
    q = torch.randn(3, 4)
    tensorlogic.attention_scores(q, q, 0.5)
    out = tensorlogic.attention_scores(q, q, scale)
    torch.testing.assert_close(out, torch.softmax(q @ q.t() * float(scale), -1))
    assert roads["call"] <= 2
    if type(scale) in (int, float):
        assert roads["call"] == 1


def test_flags_belong_to_the_key(roads: Roads) -> None:
    x = torch.randn(6)
    for _ in range(2):
        torch.testing.assert_close(tensorlogic.gelu(x), F.gelu(x))
        torch.testing.assert_close(tensorlogic.gelu(x, "tanh"), F.gelu(x, approximate="tanh"))
        assert tensorlogic.sum(x, keepdim=True).shape == (1,)
        assert tensorlogic.sum(x).shape == ()
        assert tensorlogic.sum(x, [0]).shape == ()  # type: ignore[arg-type]
    assert roads == {"call": 5}  # a list cannot be a key, the tuple made of it is one


def test_inputs_that_were_converted_are_not_mistaken_for_the_converted(roads: Roads) -> None:
    x = torch.randn(4)
    for _ in range(2):
        assert tensorlogic.add(x, 2).tolist() == (x + 2).tolist()
        assert tensorlogic.add(x, 3).tolist() == (x + 3).tolist()
    logits, target = torch.randn(2, 5, 3), torch.randint(5, (2, 3))
    for _ in range(2):
        for smoothing in (0, 0.1):
            torch.testing.assert_close(
                tensorlogic.softmax_cross_entropy(logits, target, label_smoothing=smoothing),
                F.cross_entropy(logits, target, label_smoothing=smoothing),
            )


def test_many_shapes_do_not_grow_without_end(roads: Roads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_call_cache, "MOST_ENTRIES", 32)
    entries = policy.current().entries
    for n in range(100):
        assert tensorlogic.relu(torch.ones(n)).shape == (n,)
        assert len(entries) <= 32
    assert roads["call"] == 100


def test_changes_to_the_arguments_show_at_once(roads: Roads) -> None:
    x = torch.randn(4)
    assert not tensorlogic.relu(x).requires_grad
    x.requires_grad_()
    assert tensorlogic.relu(x).requires_grad
    x.requires_grad_(False)
    x.resize_(6).fill_(2.0)
    assert tensorlogic.relu(x).tolist() == [2.0] * 6
    x.data = torch.full((6,), 3.0, dtype=torch.float64)
    assert tensorlogic.relu(x).dtype is torch.float64


def test_eight_threads_meet_the_same_keys() -> None:
    policy.forget_entries()
    problems: list[str] = []
    start = threading.Barrier(8)
    given = [(torch.randn(m, 16), torch.randn(n, 16)) for m in range(1, 6) for n in range(1, 6)]
    want = [plain(*args) for args in given]

    def work(seed: int) -> None:
        start.wait()
        for i in range(200):
            j = (i * 7 + seed) % len(given)
            if i % 50 == seed:
                policy.forget_entries()
            if not torch.allclose(linear(*given[j]), want[j], atol=1e-5):
                problems.append(f"{j}")

    threads = [threading.Thread(target=work, args=(s,)) for s in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert problems == []


def test_signature_and_documentation_survive() -> None:
    import inspect

    assert list(inspect.signature(tensorlogic.linear).parameters) == [
        "x",
        "weight",
        "bias",
        "residual",
        "activation",
        "precision",
    ]
    assert "accumulated in float32" in (tensorlogic.linear.__doc__ or "")
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    torch.testing.assert_close(tensorlogic.linear(weight=w, x=x), F.linear(x, w))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'weight'"):
        tensorlogic.linear(x)  # type: ignore[call-arg]


def test_the_warm_way_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    """Least of many rounds of the whole call over the bare launcher, in this thread's own time."""
    x, w, b = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)

    def round_us(call: Callable[[], Any], calls: int = 300) -> float:
        begin = time.thread_time()
        for _ in range(calls):
            call()
        return (time.thread_time() - begin) / calls * 1e6

    with torch.no_grad(), tensorlogic.policy(force=EAGER, tune="off"):
        tensorlogic.linear(x, w, b)
        ours = min(round_us(lambda: tensorlogic.linear(x, w, b)) for _ in range(25))
        bare = min(round_us(lambda: F.linear(x, w, b)) for _ in range(25))
    with capsys.disabled():
        print(f" [warm way: {ours - bare:.2f} us over F.linear's {bare:.2f}] ", end="")
    assert ours - bare < 15.0
