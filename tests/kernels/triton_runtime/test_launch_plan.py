"""GPU kernels started in C, against a stand-in for the driver: what Triton's own launcher would pass, bit for bit; plans of launchers."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton")

from tensorlogic.kernels import register
from tensorlogic.kernels.triton_runtime import launch_plan, scratch
from tensorlogic.native import call_extension, cpu_library
from tests.support.driver.standin import (
    CPU,
    Device,
    Launch,
    add_relu,
    launcher,
    made,
    noted,
)
from tests.support.driver.standin import device as device  # a fixture

pytestmark = [
    pytest.mark.skipif(
        cpu_library.calls_available() is not None, reason=str(cpu_library.calls_available())
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is the real one here"),
]


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True), (True, True)])
def test_a_start_passes_what_tritons_launcher_passes(
    device: Device, flags: tuple[bool, bool]
) -> None:
    start = made(device, "ppiLfl", {"M": 70000, "N": 2**40}, flags=flags)
    x, y = torch.zeros(64), torch.zeros(64)
    for numbers in ((0.1, 2**33 + 5), (-3, -1), (1e300, 0), (float("nan"), 7)):
        assert start(x, y, *numbers) is True
        assert start.usual(x, y, *numbers) is True
        ours, tritons = device.launches()
        assert ours == tritons
    last = Launch.from_buffer_copy(ours)
    assert (list(last.grid), list(last.block), last.shared) == ([3, 2, 5], [128, 1, 1], 1024)
    assert (last.stream, last.attributes) == (0x705, sum(flags))
    assert last.bytes == 8 + 8 + 4 + 8 + 4 + 8 + 16


def tensor_maps(device: Device, address: int) -> Any:
    fill = device.triton.fill_tma_descriptor_tiled
    return fill(address, 3, 2, 6, [64, 32], [128, 96], [96, 1], 0)


class Descriptors(dict[int, Any]):
    def __init__(self, device: Device) -> None:
        self.device = device

    def __missing__(self, address: int) -> Any:
        found = self[address] = tensor_maps(self.device, address)
        return found


def test_a_start_passes_tensor_maps_as_triton_does(device: Device) -> None:
    maps = [(Descriptors(device), 128, 96, 96), (Descriptors(device), 64, 2**31 - 1, 2**33)]
    start = made(device, "miiLLmiiLLpi", {"K": 77}, maps=maps)
    x, w, y = (torch.zeros(64) for _ in range(3))
    for given in ((x, w, y), (w, x, y)):
        assert start(*given) is True
        assert start.usual(*given) is True
        ours, tritons = device.launches()
        assert ours == tritons
        assert Launch.from_buffer_copy(ours).bytes == 2 * (128 + 4 + 4 + 8 + 8) + 8 + 4 + 16
        assert not start(w[1:], *given[1:])
    assert device.launches() == []


def test_a_start_declines_pointers_less_aligned(device: Device) -> None:
    x, y = torch.zeros(65), torch.zeros(64)
    assert made(device, "pp", {})(x[1:], y) is False
    assert device.launches() == []
    assert made(device, "pp", {}, mask=3)(x[1:], y) is True
    assert made(device, "pp", {}, mask=0)(x.view(torch.uint8)[1:], y) is True
    first, second = map(Launch.from_buffer_copy, device.launches())
    assert bytes(first.arguments[:8]) == x[1:].data_ptr().to_bytes(8, "little")
    assert bytes(second.arguments[:8]) == (x.data_ptr() + 1).to_bytes(8, "little")


def test_the_stream_is_the_one_of_the_call(device: Device) -> None:
    start, x = made(device, "p", {}), torch.zeros(4)
    start(x)
    device.set("stream_of_device", 0x900)
    try:
        start(x)
    finally:
        device.set("stream_of_device", 0x700)
    assert [Launch.from_buffer_copy(n).stream for n in device.launches()] == [0x705, 0x905]


def test_of_several_devices_the_kernels_own_is_made_current(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    start = made(device, "p", {})
    assert start(torch.zeros(4)) is True
    assert device.last().stream == 0x705


def test_scratch_lives_for_the_launch(device: Device) -> None:
    start = made(device, "p", {}, scratch=100)
    assert start(torch.zeros(4))
    last = device.last()
    space, profile = (int.from_bytes(last.arguments[at : at + 8], "little") for at in (8, 16))
    assert space
    assert not profile


def test_what_the_driver_refuses_triton_says(device: Device) -> None:
    start, x = made(device, "p", {}), torch.zeros(4)
    device.set("refuse", 700)
    for run in (start.usual, start):
        with pytest.raises(RuntimeError, match=r"^Triton Error \[CUDA\]: the stand-in refuses$"):
            run(x)
    device.set("refuse", 0)
    assert start(x) is True


def test_what_is_no_plain_tensor_goes_the_usual_way(device: Device) -> None:
    start = made(device, "pf", {})
    seen: list[Any] = []
    usual = lambda *given: seen.append(given)  # noqa: E731
    ours = call_extension.module().Start(
        usual, device.driver, (0, False), 1, (1, 1, 1), (1, 0), (False, False), (0, 0), "pf", (), ()
    )

    class Own(Tensor):
        pass

    x = torch.zeros(4).as_subclass(Own)
    assert ours(x, 1.0) is False  # as falsy as what the usual way returned
    assert seen == [(x, 1.0)]
    with pytest.raises(AttributeError):
        start(3, 1.0)
    with pytest.raises(TypeError, match="of 2 arguments was given 1"):
        start(torch.zeros(4))
    with pytest.raises(TypeError):
        start(torch.zeros(4), "no number")
    assert device.launches() == []


def test_layouts_that_cannot_be_are_refused(device: Device) -> None:
    def tried(layout: str, constants: tuple[Any, ...] = (), maps: tuple[Any, ...] = ()) -> None:
        call_extension.module().Start(
            print, device.driver, (0, False), 1, (1, 1, 1), (1, 0), (False, False), (0, 0), layout, constants, maps
        )  # fmt: skip

    for bad in (("x",), ("i",), ("p", (1,)), ("m",), ("p" * 100,), ("m" * 9, (), ({},) * 9)):
        with pytest.raises(ValueError, match=r"laid out|constants"):
            tried(*bad)
    with pytest.raises(TypeError):
        tried("i", ("one",))
    with pytest.raises(ValueError, match="functions"):
        call_extension.module().Driver(0, 0, 0, 0)


def test_calls_keep_nothing_alive(device: Device) -> None:
    start = made(device, "pf", {})
    x = torch.zeros(4)
    before = sys.getrefcount(x)
    for _ in range(50):
        start(x, 1.0)
    assert sys.getrefcount(x) == before


# plans ----------------------------------------------------------------------------------------------------------------


def test_a_plan_does_what_the_launcher_does(device: Device) -> None:
    launch = launcher(device)
    plan = noted(launch)
    assert isinstance(plan, call_extension.module().Plan)
    a, b = torch.randn(6, 5), torch.randn(6, 5)
    for run in (launch, plan):
        (y,) = run(a, b)
        torch.testing.assert_close(y, torch.relu(a + b), rtol=0, atol=0)
        assert y.shape == (6, 5)
    assert plan(torch.randn(31)[1:].view(6, 5), b) is None
    with pytest.raises(TypeError, match="of 2 arguments was given 1"):
        plan(a)
    with torch.inference_mode():
        assert plan(a, b)[0].is_inference()
    assert not plan(a, b)[0].is_inference()


def test_a_plan_of_several_steps(device: Device) -> None:
    start, empty, counters = add_relu(device, 4), register.empty(CPU), scratch.counters
    seen: list[Tensor] = []

    def third(a: Tensor, n: int) -> bool:
        seen.append(a)
        return n == 7

    third_step = launch_plan.step(third)

    def launch(a: Tensor, b: Tensor | None, scale: float) -> Any:
        first = empty((4,), (1,), torch.float32)
        second = empty((2, 2), (2, 1), torch.float32)
        if not start(a, a if b is None else b, first):
            return None
        if not start(first, counters(CPU, 4, torch.float32), second):
            return None
        return (second, None, a, scale) if third_step(second, 7) else None

    for b in (torch.randn(4), None):
        plan = compiled(launch, [torch.randn(4), b, 2.0])
        assert isinstance(plan, call_extension.module().Plan)
        a = torch.randn(4)
        y, none, same, scale = plan(a, b, 2.5)
        torch.testing.assert_close(y.view(-1), torch.relu(a + (a if b is None else b)))
        assert none is None
        assert same is a
        assert scale == 2.5
        assert seen.pop() is y


def compiled(launch: Callable[..., Any], given: Sequence[Any]) -> Any:
    """As `plan` would, of no op in particular."""
    module, notes = call_extension.module(), list[Any]()
    slots = tuple(None if g is None else module.Slot() for g in given)
    module.record(notes)
    try:
        return module.Plan(slots, notes, launch(*slots))
    finally:
        module.record(None)


def test_launchers_that_do_more_than_pass_things_on_stay_as_they_are(device: Device) -> None:
    start, empty = add_relu(device, 30), register.empty(CPU)
    own, numbers = torch.zeros(6, 5), iter(range(100))

    def made() -> Any:
        return empty((6, 5), (5, 1), torch.float32)

    def reads(a: Tensor, b: Tensor) -> Any:
        return (a.clone(),)

    def decides(a: Tensor, b: Tensor) -> Any:
        y = made()
        return (y,) if start(a, b if b else a, y) else None

    def compares(a: Tensor, b: Tensor) -> Any:
        y = made()
        return (y,) if a != b and start(a, b, y) else None

    def keeps(a: Tensor, b: Tensor) -> Any:
        return (own,) if start(a, b, own) else None

    def draws(a: Tensor, b: Tensor) -> Any:
        y = made()
        return (y,) if third(a, b, y, next(numbers)) else None

    def declines(a: Tensor, b: Tensor) -> Any:
        return None

    def returns(a: Tensor, b: Tensor) -> Any:
        return (own,)

    third = launch_plan.step(lambda *given: True)
    for launch in (reads, decides, compares, keeps, draws, declines, returns):
        assert noted(launch) is launch
    with pytest.raises(ZeroDivisionError):
        noted(lambda a, b: 1 / 0)
    assert not device.launches()


def test_plans_come_from_threads_apart(device: Device) -> None:
    """What one thread notes, another may run meanwhile."""
    launch, module = launcher(device), call_extension.module()
    module.record([])
    found: list[Any] = []
    a = torch.randn(6, 5)
    try:
        thread = threading.Thread(target=lambda: found.append(launch(a, a)))
        thread.start()
        thread.join()
    finally:
        module.record(None)
    torch.testing.assert_close(found[0][0], torch.relu(a + a))


def test_a_plan_keeps_no_tensor_alive_and_is_freed(device: Device) -> None:
    plan = noted(launcher(device))
    a = torch.randn(6, 5)
    before = sys.getrefcount(a)
    for _ in range(50):
        plan(a, a)
        plan(torch.randn(31)[1:].view(6, 5), a)
    assert sys.getrefcount(a) == before
    called: list[Any] = []
    watched = plan.watched(lambda *given: (called.append(given), plan(*given))[1], 2)
    for _ in range(4):
        watched(a, a)
    assert len(called) == 2
    watched.left = 1
    watched(a, a)
    assert len(called) == 2


def test_a_failing_start_is_the_callers(device: Device) -> None:
    plan, a = noted(launcher(device)), torch.randn(6, 5)
    device.set("refuse", 700)
    with pytest.raises(RuntimeError, match="the stand-in refuses"):
        plan(a, a)
    device.set("refuse", 0)
    assert plan(a, a) is not None


def test_counters_are_asked_for_once_a_stream_and_anew_in_captures(device: Device) -> None:
    start, empty, module = add_relu(device, 4), register.empty(CPU), call_extension.module()
    asked: list[int] = []

    def counters(count: int) -> Any:
        if (slot := module.noted(counters, count)) is not None:
            return slot
        asked.append(count)
        return torch.full((4,), float(len(asked)))

    def launch(a: Tensor) -> Any:
        y = empty((4,), (1,), torch.float32)
        return (y,) if start(a, counters(4), y) else None

    plan, zeros = compiled(launch, [torch.zeros(4)]), torch.zeros(4)
    assert asked == []
    assert [plan(zeros)[0][0].item() for _ in range(3)] == [1, 1, 1]
    device.set("stream_of_device", 0x900)
    try:
        assert [plan(zeros)[0][0].item() for _ in range(2)] == [2, 2]
    finally:
        device.set("stream_of_device", 0x700)
    device.set("status_of_capture", 1)
    assert [plan(zeros)[0][0].item() for _ in range(2)] == [3, 4]
    device.set("status_of_capture", 0)
    assert plan(zeros)[0][0].item() == 1
    assert asked == [4] * 4
