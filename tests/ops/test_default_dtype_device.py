"""What new tensors are by default, dtype and device, is the program's affair: no result, and no refusal, depends on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tensorlogic
from tensorlogic.autotune import tune
from tensorlogic.bench import measure_case
from tensorlogic.core import policy
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import dispatcher, fast_path, torch_library
from tensorlogic.measure.verification import Checker
from tensorlogic.system import function_modes

from ..support.helpers import PUBLIC, cases


@pytest.fixture(params=[torch.float64, torch.float16], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", PUBLIC)
def test_no_candidate_is_refused_for_it(name: str, default: torch.dtype) -> None:
    op = OPS[name]
    kinds = {tuple(a for a in case if not isinstance(a, Tensor)): case for case in cases(op, torch.float32)}  # fmt: skip
    torch.set_default_dtype(default)

    def step(*case: object) -> None:
        leaves = [a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in case]  # fmt: skip
        tune._backward(dispatcher.call(op, leaves))

    for case in kinds.values():
        for its, key, device in measure_case.meet(step, tuple(case)):
            checker = Checker(its, key, device)
            for c in its.candidates.values():
                if c.id == EAGER or c.id.startswith("triton.") or c.unfit(key):
                    continue
                with torch.no_grad():
                    verdict = checker.check(c.bind(key, c.configs(key)[0], device))
                assert verdict, f"{c.id} on {key.text}: {verdict.reason}"


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_what_a_loss_keeps_is_float32(reduction: str, default: torch.dtype) -> None:
    logits, target = torch.randn(7, 13).half(), torch.arange(7)
    torch.set_default_dtype(default)
    args = (logits, target, -100, 0.0, reduction, True)
    for id in (EAGER, "cpu.fused"):
        with tensorlogic.policy(force=id):
            outs = torch.ops.tensorlogic.softmax_cross_entropy(*args)
        assert [o.dtype for o in outs] == [torch.float16, torch.float32, torch.float32], id


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """New tensors lie on another device unless told otherwise; this one holds no data, so that using one shows."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def _dropped(x: Tensor, b: Tensor) -> Tensor:
    return tensorlogic.dropout_linear(x, x, None, p=0.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, b: tensorlogic.affine(x, 2.0, b),
        lambda x, b: tensorlogic.affine(b, 2, 1.5),  # no dimensions: promoted as numbers are
        lambda x, b: tensorlogic.add_relu(x, -1),
        lambda x, b: tensorlogic.softmax_cross_entropy(x, b.long().expand(8), reduction="none"),
        _dropped,
    ],
)
def test_nothing_of_ours_goes_where_new_tensors_go(
    call: Callable[[Tensor, Tensor], Tensor], elsewhere: None
) -> None:
    x, b = torch.ones(8, 8, device="cpu"), torch.ones((), device="cpu")
    torch.manual_seed(3)
    out = call(x.requires_grad_(), b.requires_grad_())
    out.backward(torch.ones_like(out))
    assert out.device.type == "cpu"
    torch.set_default_device(None)
    torch.manual_seed(3)
    if call is not _dropped:  # the registered op draws its seed otherwise
        assert torch.equal(out, call(x, b))


@contextlib.contextmanager
def globally(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def nested(device: str) -> Iterator[None]:
    with globally("cpu"), torch.device(device):
        yield


WAYS = {"globally": globally, "here": torch.device, "one in another": nested}


@pytest.fixture(params=[True, False], ids=["compiled fronts", "fronts in Python"])
def slowly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of ops that were served past their warm entries."""
    seen: list[str] = []
    if not request.param:
        for _, scope in fast_path._SCOPES.values():
            monkeypatch.setitem(scope, "compiled", None)
    for place, name in ((dispatcher, "call"), (torch_library, "traced")):
        usual = getattr(place, name)

        def slow(op: Any, *args: Any, usual: Any = usual, name: str = name) -> Any:
            seen.append(f"{name} {op.name}")
            return usual(op, *args)

        monkeypatch.setattr(place, name, slow)
    policy.forget_entries()
    yield seen
    policy.forget_entries()


@pytest.mark.parametrize("way", WAYS)
def test_a_default_device_changes_neither_road_nor_entry(way: str, slowly: list[str]) -> None:
    """Gradients, too; what the caller makes meanwhile lies where the caller wants it."""
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    want = torch.relu(x @ w.t())
    (grad,) = torch.autograd.grad(want.sum(), x)
    for context in (WAYS[way]("meta"), contextlib.nullcontext(), WAYS[way]("meta")):
        with context:
            before = torch.empty(1).device.type
            got = tensorlogic.linear(x, w, activation="relu")
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(torch.autograd.grad(got.sum(), x), (grad,))
            assert torch.empty(1).device.type == before
            assert not function_modes.intercepted()
    assert [s for s in slowly if s.endswith(" linear")] == ["call linear"]
    assert not [s for s in slowly if s.startswith("traced")]


class Seeing(TorchFunctionMode):
    """Notes what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(fn))
        return fn(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [True, False])
def test_a_mode_beside_a_default_device_sees_the_call(inside: bool) -> None:
    x = torch.ones(3, device="cpu")
    tensorlogic.relu(x)
    outer, inner = (torch.device("meta"), Seeing()) if inside else (Seeing(), torch.device("meta"))
    with outer, inner:
        assert function_modes.intercepted()
        assert tensorlogic.relu(x).device.type == "cpu"
    mode = inner if inside else outer
    assert isinstance(mode, Seeing)
    assert any("tensorlogic" in name for name in mode.seen)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_called_under_a_default_device_is_measured(way: str) -> None:
    x, places = torch.randn(6, 7, dtype=torch.float64), []

    def step(x: Tensor) -> Tensor:
        places.append(torch.empty(1).device.type)
        return tensorlogic.softmax(x, -1)

    with WAYS[way]("meta"):
        learned = tensorlogic.tune(step, x.requires_grad_())
        with tensorlogic.policy(tune="full"):
            tensorlogic.add_relu(x.detach(), x.detach())
        found = tensorlogic.explain(tensorlogic.add_relu, x.detach(), x.detach())
    assert places == ["meta"]
    assert [p.key.op for p in learned.plans] == ["softmax", "softmax_backward"]
    assert "from: plan" in str(found)


def test_tune_refuses_what_watches_and_sees_into_compiled_functions() -> None:
    x = torch.randn(5, 6)
    with Seeing(), pytest.raises(RuntimeError, match="mode of PyTorch is active"):
        tensorlogic.tune(tensorlogic.relu, x)
    compiled = torch.compile(lambda x: tensorlogic.relu(x), backend="eager")
    assert [k.op for k in tensorlogic.tune(compiled, x).keys] == ["relu"]
