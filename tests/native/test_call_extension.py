"""Compiled calls: past the dispatcher only where it would do nothing, with its results; and everything without them."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tensorlogic
from tensorlogic.autotune import background_tuning
from tensorlogic.core import policy
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import dispatcher, fast_path
from tensorlogic.dispatch.bound_call import bind
from tensorlogic.native import call_extension, cpu_library
from tensorlogic.plans import open_stores

pytestmark = pytest.mark.skipif(
    cpu_library.calls_available() is not None, reason=str(cpu_library.calls_available())
)

X, Y, W, B = torch.randn(6, 5), torch.randn(6, 5), torch.randn(4, 5), torch.randn(4)
H = torch.float16
CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "one tensor": ("relu", (X,)),
    "two": ("add", (X, Y)),
    "a default": ("gelu", (X,)),
    "bool": ("gelu", (X, True)),
    "ints": ("sum", (X, 0, 1, True)),
    "dtype": ("convert", (X, H)),
    "absent": ("linear", (X, W, None, None, 1)),
    "present": ("linear", (X, W, B)),
    "float": ("softmax", (X, None, 0.5, False, torch.float32)),
    "two outputs": ("matmul_pre", (X, W.t(), 2)),
    "many outputs": ("layer_norm", (X, None, None, 1e-5, torch.float32)),
    "number for a float": ("softmax", (X, None, 1, False, torch.float32)),
    "transposed": ("matmul", (X.t(), Y)),
}


def through_the_dispatcher(name: str) -> Any:
    return getattr(torch.ops.tensorlogic_native, name)


@pytest.mark.parametrize("name", CALLS)
def test_a_direct_call_gives_what_the_dispatcher_gives(name: str) -> None:
    op, args = CALLS[name]
    assert isinstance(cpu_library.op(op), call_extension.module().Native)
    given, expected = cpu_library.op(op)(*args), through_the_dispatcher(op)(*args)
    torch.testing.assert_close(given, expected, rtol=0, atol=0)
    assert type(given) is type(expected)


def test_nothing_is_returned_where_a_tensor_is_changed() -> None:
    x = X.clone()
    assert cpu_library.op("softmax_")(x, None, 1.0, False) is None
    torch.testing.assert_close(x, X.softmax(-1))


@pytest.mark.parametrize(
    "args",
    [
        (),
        (X, Y, X),
        (X, "y"),
        (X, Y.to_sparse()),
        (X, torch.empty(6, 5, device="meta")),
        (X, Y.t()),
    ],
    ids=("none", "many", "text", "sparse", "meta", "shape"),
)
def test_bad_arguments_fail_as_they_did(args: tuple[Any, ...]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as expected:
        torch.ops.tensorlogic_native.add.default._op(*args)
    with pytest.raises(type(expected.value)) as problem:
        cpu_library.op("add")(*args)
    assert str(problem.value).splitlines()[0] == str(expected.value).splitlines()[0]


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_who_watches_the_dispatcher_sees_the_call() -> None:
    with Names() as mode:
        cpu_library.op("relu")(X)
    assert mode.seen == ["tensorlogic_native.relu.default"]
    launch = cpu_library.launcher("relu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cpu_library.op("relu")(X)
        launch(X)
    names = [e.name for e in profile.events()]
    assert names.count("tensorlogic_native::relu") == 2


def test_negated_views_and_subclasses_go_the_usual_way() -> None:
    negative = torch._neg_view(X)
    torch.testing.assert_close(cpu_library.op("relu")(negative), (-X).relu())

    class Own(Tensor):
        pass

    assert type(cpu_library.op("relu")(X.as_subclass(Own))) is Own


def test_inference_tensors_come_out_of_inference_mode() -> None:
    with torch.inference_mode():
        assert cpu_library.op("relu")(X).is_inference()
    assert not cpu_library.op("relu")(X).is_inference()


def test_a_launcher_declines_other_counts_of_arguments_and_names_what_cannot_be_fixed() -> None:
    launch = cpu_library.launcher("add")
    (y,) = launch(X, Y)
    torch.testing.assert_close(y, X + Y)
    with pytest.raises(TypeError, match="of 2 arguments was given 1"):
        launch(X)
    with pytest.raises(TypeError, match="argument 1 cannot be fixed to 'no'"):
        cpu_library.launcher("gelu", "no")
    with pytest.raises(LookupError, match="no direct call of nothing"):
        call_extension.module().Native("nothing", print, ())


def test_calls_keep_no_tensor_alive() -> None:
    x, launch = torch.randn(8), cpu_library.launcher("relu")
    with tensorlogic.policy(force="cpu.fused"):
        tensorlogic.add_relu(x, x)
        gc.collect()
        before = sys.getrefcount(x), torch.ops.tensorlogic_native.pool_stats()[2]
        for _ in range(100):
            launch(x), cpu_library.op("add")(x, x), tensorlogic.add_relu(x, x)
        assert (sys.getrefcount(x), torch.ops.tensorlogic_native.pool_stats()[2]) == before


# fronts ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which calls the compiled fronts left to the slow road."""
    slow: list[str] = []
    usual = dispatcher.call

    def call(op: Any, *rest: Any) -> Any:
        slow.append(op.name)
        return usual(op, *rest)

    monkeypatch.setattr(dispatcher, "call", call)
    policy.forget_entries()
    yield slow
    policy.forget_entries()


def compiled(fn: Callable[..., Any]) -> Any:
    """The compiled front of a public function."""
    found = [s for p, (_, s) in fast_path._SCOPES.items() if fast_path.FRONTS[p] is fn]
    return found[0]["compiled"]


def test_a_warm_call_never_reaches_python(
    served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tensorlogic.policy(force="cpu.fused"):
        for _ in range(3):
            torch.testing.assert_close(tensorlogic.add_relu(X, Y), torch.relu(X + Y))
        assert served == ["add_relu"]
        torch.testing.assert_close(compiled(tensorlogic.add_relu)(X, Y), torch.relu(X + Y))
        policy.forget_entries()
        assert compiled(tensorlogic.add_relu)(X, Y) is None


def test_what_a_key_tells_apart_the_compiled_front_does(served: list[str]) -> None:
    base = torch.randn(6, 6)
    variants: list[tuple[Tensor, Tensor]] = [
        (base, base + 1),
        (base, base),
        (base.t(), base),
        (base.half(), base.half()),
        (base, torch.nn.Parameter(base)),
        (base.clone().requires_grad_(), base),
        (base[:3], base[:3]),
        (base[::2], base[:3]),
    ]
    quick = compiled(tensorlogic.add_relu)
    for a, b in variants:
        assert quick(a, b) is None
        y = tensorlogic.add_relu(a, b)
        again = quick(a, b)
        torch.testing.assert_close(again, y)
        assert again.requires_grad == y.requires_grad
    with torch.no_grad():
        assert quick(*variants[0]) is None
    with tensorlogic.policy(deterministic=True):
        assert quick(*variants[0]) is None
    with Names():
        assert quick(*variants[0]) is None
    assert quick(base, 1.0) is None
    assert quick(base) is None


def test_flags_are_equal_only_within_their_type(served: list[str]) -> None:
    quick = compiled(tensorlogic.sum)
    tensorlogic.sum(X, 1, False)
    torch.testing.assert_close(quick(X, 1, False), X.sum(1))
    assert quick(X, True, False) is None
    assert quick(X, 0, False) is None
    tensorlogic.sum(X, (0, 1))
    torch.testing.assert_close(quick(X, (0, 1), False), X.sum())
    assert quick(X, (0, -1), False) is None


def test_scalars_must_be_finite_numbers(served: list[str]) -> None:
    q = torch.randn(2, 3, 4)
    quick = compiled(tensorlogic.attention_scores)
    tensorlogic.attention_scores(q, q, 0.5)
    for scale in (0.25, 2):
        expected = torch.softmax(scale * (q @ q.mT), -1)
        torch.testing.assert_close(quick(q, q, scale, None, False), expected)
    for odd in (float("nan"), float("inf"), True, torch.tensor(0.5)):
        assert quick(q, q, odd, None, False) is None


def test_a_launcher_that_is_watched_counts_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def looked(self: background_tuning.Watch, launch: Any, dynamic: Any) -> Any:
        looks.append(self.calls)
        self.look_at = self.calls + 5
        return launch(*dynamic)

    monkeypatch.setattr(background_tuning.Watch, "_look", looked)
    open_stores.forget()
    with tensorlogic.policy(tune="auto"):
        key = OPS["add_relu"].key((X, Y, False), "inference")
        watch = background_tuning.Watch(OPS["add_relu"], key, torch.device("cpu"))
        launch = watch.wrap(cpu_library.launcher("add_relu"))
        for _ in range(30):
            torch.testing.assert_close(launch(X, Y), (torch.relu(X + Y),))
        assert looks == [8, 13, 18, 23, 28]
        watch.done = True
        for _ in range(10):
            launch(X, Y)
        assert looks == [8, 13, 18, 23, 28]


def test_a_call_without_a_launcher_of_ours_is_watched_as_cheaply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's own call stays what a front calls; every so often one is looked at."""
    looks: list[int] = []

    def looked(self: background_tuning.Watch, serve: Any, dynamic: Any) -> Any:
        looks.append(self.calls)
        self.look_at = self.calls + 5
        return serve(*dynamic)

    monkeypatch.setattr(background_tuning.Watch, "_look", looked)
    open_stores.forget()
    x = torch.randn(3, 4).double()
    with tensorlogic.policy(tune="auto"):
        run = bind(OPS["relu"], (x, False), policy.current(), False).shortest[0]
        assert type(run) is call_extension.module().Counted
        for _ in range(30):
            assert torch.equal(run(x), torch.relu(x))
        assert looks == [8, 13, 18, 23, 28]
        with pytest.raises(TypeError):
            run(x, x)


def test_threads_may_forget_while_others_call() -> None:
    wrong: list[float] = []
    stop = threading.Event()

    def forgetting() -> None:
        while not stop.is_set():
            policy.forget_entries()

    other = threading.Thread(target=forgetting)
    other.start()
    try:
        for i in range(400):
            x = torch.full((3, 4), float(i))
            wrong += [float(i)] * (not torch.equal(tensorlogic.add_relu(x, x), x + x))
    finally:
        stop.set()
        other.join()
    assert not wrong


def test_without_the_module_everything_is_the_same(
    served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_extension, "_state", ["not built"])
    for _, scope in fast_path._SCOPES.values():
        monkeypatch.setitem(scope, "compiled", None)
    cpu_library._op.cache_clear()
    try:
        assert cpu_library.calls_available() == "not built"
        assert not call_extension.is_launcher(cpu_library.launcher("relu"))
        for _ in range(3):
            torch.testing.assert_close(tensorlogic.add_relu(X, Y), torch.relu(X + Y))
            torch.testing.assert_close(tensorlogic.linear(X, W, B), F.linear(X, W, B))
        assert served == ["add_relu", "linear"]
    finally:
        cpu_library._op.cache_clear()


def test_a_module_of_other_sources_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_extension, "REVISION", -1)
    reason = call_extension._load()
    assert isinstance(reason, str)
    assert "built from other sources: run" in reason


DIRECT: dict[str, tuple[Any, ...]] = {
    "add": (torch.randn(3, 4), torch.randn(4)),
    "sub": (torch.randn(3, 4), torch.randn(3, 4)),
    "mul": (torch.randn(3, 4), torch.randn(3, 4)),
    "div": (torch.randn(3, 4), torch.randn(3, 4)),
    "relu": (torch.randn(3, 4),),
    "gelu": (torch.randn(3, 4), "tanh"),
    "silu": (torch.randn(3, 4),),
    "add_relu": (torch.randn(3, 4), torch.randn(3, 4)),
    "mul_relu": (torch.randn(3, 4), torch.randn(3, 4)),
    "affine": (torch.randn(3, 4), torch.randn(4), torch.randn(4)),
    "sum": (torch.randn(3, 4), (1,), True),
    "mean": (torch.randn(3, 4), (0,), False),
    "max": (torch.randn(3, 4), (0, 1), False),
    "min": (torch.randn(3, 4), (1,), False),
    "softmax": (torch.randn(3, 4), 0),
    "matmul": (torch.randn(3, 4), torch.randn(4, 5), "none"),
    "linear": (torch.randn(3, 4), torch.randn(5, 4), torch.randn(5), None, "none"),
    "gelu_linear": (torch.randn(3, 4), torch.randn(5, 4), torch.randn(5), "tanh"),
}


@pytest.mark.parametrize("name", DIRECT)
def test_what_pytorch_serves_is_called_without_our_frames(name: str) -> None:
    op, args = OPS[name], (*DIRECT[name], False)
    dynamic = [a for p, a in zip(op.params, args, strict=True) if p.is_dynamic]
    with tensorlogic.policy(force="torch.eager", tune="off"):
        bound = bind(op, args, policy.current(), False)
        run = bound.shortest[0]
        assert run is bound.choice.direct
        assert torch.equal(run(*dynamic), bound.run(*dynamic))


def test_neither_watched_calls_nor_fused_ones_go_past_their_launcher() -> None:
    x = torch.randn(3, 4).double()
    with tensorlogic.policy(tune="auto"):
        bound = bind(OPS["relu"], (x, False), policy.current(), False)
    assert bound.choice.candidate.id == "torch.eager"
    assert bound.shortest[0] is not torch.relu
    with tensorlogic.policy(force="torch.eager", tune="off"):
        args = (x, x[:, :4], None, None, "silu", False)
        assert bind(OPS["linear"], args, policy.current(), False).choice.direct is None
