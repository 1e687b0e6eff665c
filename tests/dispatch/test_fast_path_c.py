"""Public calls served by GPU launchers in C, against a stand-in for the driver: warm, captured, out of memory, recorded."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton")

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.core.candidate import Candidate
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import autograd, bound_call, dispatcher, fast_path
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.kernels import register
from tensorlogic.kernels.triton_runtime import launch_plan
from tensorlogic.native import call_extension, cpu_library
from tests.support.driver.standin import (
    CPU,
    Device,
    add_relu,
    launcher,
    noted,
)
from tests.support.driver.standin import device as device  # a fixture

pytestmark = [
    pytest.mark.skipif(
        cpu_library.calls_available() is not None, reason=str(cpu_library.calls_available())
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is the real one here"),
]


# fronts ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The op add_relu with a candidate `fake.plan`, made of the stand-in's kernel; what was built and who was slow."""
    op, seen = OPS["add_relu"], {"slow": 0, "built": []}

    def bind(key: Any, config: Any, where: torch.device) -> Any:
        found = launch_plan.plan(op, key, where, seen.get("launch") or launcher(device))
        seen["built"].append(found)
        return found

    fake = Candidate("fake.plan", bind=bind, trusted=True)
    candidates = {**op.candidates, "fake.plan": fake}
    monkeypatch.setattr(op, "candidates", candidates)
    usual = dispatcher.call

    def slow(*args: Any) -> Any:
        seen["slow"] += 1
        return usual(*args)

    monkeypatch.setattr(dispatcher, "call", slow)
    policy.forget_entries()
    with tensorlogic.policy(force="fake.plan"):
        yield seen
    policy.forget_entries()


def quick(fn: Callable[..., Any]) -> Any:
    """The compiled front of a public function."""
    found = [s for p, (_, s) in fast_path._SCOPES.items() if fast_path.FRONTS[p] is fn]
    return found[0]["compiled"]


def test_a_warm_call_is_a_plans(device: Device, served: dict[str, Any]) -> None:
    a, b = torch.randn(6, 5), torch.randn(6, 5)
    for _ in range(3):
        torch.testing.assert_close(tensorlogic.add_relu(a, b), torch.relu(a + b))
    assert call_extension.is_plan(served["built"][0])
    assert served["slow"] == 1
    torch.testing.assert_close(quick(tensorlogic.add_relu)(a, b), torch.relu(a + b))
    assert len(device.launches()) == 4
    moved = torch.randn(31)[1:].view(6, 5)
    assert quick(tensorlogic.add_relu)(moved, b) is None  # declined: less aligned
    torch.testing.assert_close(tensorlogic.add_relu(moved, b), torch.relu(moved + b))
    assert served["slow"] == 2


def test_under_capture_the_choice_for_captures_serves(
    device: Device, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = torch.randn(6, 5)
    chosen: list[str] = []
    usual = dispatch_selector.choose

    def choose(*args: Any, **about: Any) -> Any:
        choice = usual(*args, **about)
        other = replace(
            choice, launch=lambda *given: (chosen.append("captured"), choice.launch(*given))[1]
        )
        choice.captured = other
        return choice

    monkeypatch.setattr(dispatch_selector, "choose", choose)
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    tensorlogic.add_relu(a, a)
    tensorlogic.add_relu(a, a)
    assert chosen == []
    capturing[0] = True
    device.set("status_of_capture", 1)
    torch.testing.assert_close(tensorlogic.add_relu(a, a), torch.relu(a + a))
    assert chosen == ["captured"]
    capturing[0] = False
    device.set("status_of_capture", 0)
    tensorlogic.add_relu(a, a)
    assert chosen == ["captured"]
    assert served["slow"] == 1


def test_out_of_memory_is_eagers(device: Device, served: dict[str, Any]) -> None:
    full = [False]

    def fill(*given: Any) -> bool:
        if full[0]:
            raise torch.OutOfMemoryError("no memory")
        return True

    start, step = add_relu(device, 30), launch_plan.step(fill)
    empty = register.empty(CPU)

    def launch(a: Tensor, b: Tensor) -> Any:
        y = empty((6, 5), (5, 1), torch.float32)
        return (y,) if step(y) and start(a, b, y) else None

    served["launch"] = launch
    a = torch.randn(6, 5)
    tensorlogic.add_relu(a, a)
    assert call_extension.is_plan(served["built"][0])
    full[0] = True
    torch.testing.assert_close(tensorlogic.add_relu(a, a), torch.relu(a + a))
    full[0] = False
    torch.testing.assert_close(tensorlogic.add_relu(a, a), torch.relu(a + a))
    assert served["slow"] == 1


def test_gradients_are_recorded_around_a_plan(device: Device, served: dict[str, Any]) -> None:
    a, b = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    for _ in range(3):
        y = tensorlogic.add_relu(a, b)
        (g,) = torch.autograd.grad(y.sum(), a)
        torch.testing.assert_close(g, (a + b > 0).float())
    assert served["slow"] == 2  # forward and backward, once each


def recording(fn: Callable[..., Any], *given: Tensor) -> bool:
    """Whether the compiled front of `fn` serves these and records."""
    with torch.enable_grad():
        y = quick(fn)(*given)
    return y is not None and y.grad_fn is not None


def test_a_recorded_call_is_served_in_c_with_the_same_graph(
    device: Device, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    first, monkey = tensorlogic.add_relu(a, b), monkeypatch
    assert recording(tensorlogic.add_relu, a, b)
    monkey.setattr(autograd.Recording, "forward", None)  # no Python from here on
    second = tensorlogic.add_relu(a, b)
    assert first.grad_fn is not None
    assert second.grad_fn is not None
    assert type(first.grad_fn) is type(second.grad_fn)
    assert second.grad_fn.name() == "RecordedBackward"
    assert len(second.grad_fn.next_functions) == len(first.grad_fn.next_functions)
    for ours, expected in zip(
        second.grad_fn.saved_tensors, first.grad_fn.saved_tensors, strict=True
    ):
        assert (ours is None) == (expected is None)
        if ours is not None:
            torch.testing.assert_close(ours, expected)
    second.sum().backward(retain_graph=True)
    second.sum().backward()
    assert a.grad is not None
    torch.testing.assert_close(a.grad, 2 * (a + b > 0).float())
    with pytest.raises(RuntimeError, match="second time"):
        second.sum().backward()
    third = tensorlogic.add_relu(a, b)
    with torch.no_grad():
        third.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        third.sum().backward()
    with pytest.raises(RuntimeError, match="double backward is not available"):
        torch.autograd.grad(tensorlogic.add_relu(a, b).sum(), a, create_graph=True)


def test_recorded_calls_that_need_another_way_get_it(
    device: Device, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    tensorlogic.add_relu(a, b)
    moved = torch.randn(31)[1:].view(6, 5).requires_grad_()  # declined: less aligned
    (g,) = torch.autograd.grad(tensorlogic.add_relu(moved, b).sum(), moved)
    torch.testing.assert_close(g, (moved + b > 0).float())
    device.set("refuse", 700)
    with pytest.raises(RuntimeError, match="the stand-in refuses"):
        tensorlogic.add_relu(a, b)
    device.set("refuse", 0)
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        y = tensorlogic.add_relu(a, b)
    assert seen
    (g,) = torch.autograd.grad(y.sum(), a)
    torch.testing.assert_close(g, (a + b > 0).float())


def test_only_calls_that_a_launcher_served_show_what_is_kept(
    device: Device, served: dict[str, Any]
) -> None:
    """What eager's outputs are at another's place may be something else than the launcher's."""
    op, b = OPS["add_relu"], torch.randn(6, 5)
    moved = torch.randn(31)[1:].view(6, 5).requires_grad_()
    aligned = torch.randn(6, 5, requires_grad=True)
    bound = bound_call.bind(op, [aligned, b, True], policy.current(), True)
    assert isinstance(bound.outside, autograd.Recording)
    bound.run(moved, b)  # declined: less aligned
    assert bound.outside.places is None
    assert bound.shortest == (bound.run, 0)
    y = bound.run(aligned, b)
    assert bound.outside.places == (-1, -1, -1, 2)
    assert isinstance(bound.shortest[0], call_extension.module().Recording)
    for out, x in ((y, aligned), (bound.shortest[0](moved, b), moved)):
        (g,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(g, (x + b > 0).float())


def test_recorded_calls_under_capture_take_the_other_choice(
    device: Device, served: dict[str, Any]
) -> None:
    plan = noted(launcher(device))
    apply: list[Any] = []
    for two_ways, expected in ((True, 0), (False, 1)):
        run = call_extension.module().Recording(
            None, lambda *given: apply.append(given), plan, (), (), two_ways
        )
        device.set("status_of_capture", 1)
        assert run(torch.zeros(1)) is None
        assert len(apply) == expected
        device.set("status_of_capture", 0)
        run(torch.zeros(1))
        assert len(apply) == expected + 1
        apply.clear()
    with pytest.raises(TypeError, match="only a plan knows"):
        call_extension.module().Recording(None, print, print, (), (), True)


def test_recorded_calls_keep_nothing_alive(device: Device, served: dict[str, Any]) -> None:
    a, b = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    for _ in range(3):
        tensorlogic.add_relu(a, b)
    before = sys.getrefcount(a), sys.getrefcount(b)
    for _ in range(50):
        tensorlogic.add_relu(a, b)
    assert (sys.getrefcount(a), sys.getrefcount(b)) == before
    y = tensorlogic.add_relu(a, b)
    gone = weakref.ref(y.grad_fn)
    del y
    assert gone() is None


def test_plans_run_while_entries_are_forgotten(device: Device, served: dict[str, Any]) -> None:
    """A launch lets other threads run: what it came from may be gone before it returns."""
    usual, wrong = sys.getswitchinterval(), list[int]()
    sys.setswitchinterval(1e-5)

    def work() -> None:
        a, b = torch.randn(6, 5), torch.randn(6, 5)
        leaf, expected = a.clone().requires_grad_(), torch.relu(a + b)
        with tensorlogic.policy(force="fake.plan"):
            for _ in range(3000):
                with torch.no_grad():
                    wrong.append(int(not torch.equal(tensorlogic.add_relu(a, b), expected)))
                wrong.append(int(not torch.equal(tensorlogic.add_relu(leaf, b), expected)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            policy.forget_entries()
            time.sleep(0.001)
    finally:
        sys.setswitchinterval(usual)
    assert len(wrong) == 18000
    assert sum(wrong) == 0
