"""GPU launchers in C against a stand-in for the driver: what Triton's own launcher would pass, bit for bit; plans; fronts."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import runpy
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

triton = pytest.importorskip("triton")

import tensorlogic  # noqa: E402
from tensorlogic import binding, calls, dispatch, front, policies, selector  # noqa: E402
from tensorlogic.op import OPS, Candidate  # noqa: E402
from tensorlogic.ops.common import compiled_launch, triton_launch, wiring  # noqa: E402

pytestmark = [
    pytest.mark.skipif(calls.available() is not None, reason=str(calls.available())),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is the real one here"),
]
CPU = torch.device("cpu")
BACKEND = Path(next(iter(importlib.import_module("triton.backends.nvidia").__path__)))


class Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("attributes", ctypes.c_uint32), ("ids", ctypes.c_uint32 * 4), ("values", ctypes.c_int32 * 4),
        ("stream", ctypes.c_uint64), ("bytes", ctypes.c_uint32), ("arguments", ctypes.c_ubyte * 2048),
    )  # fmt: skip


class Kernel(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int32), ("sizes", ctypes.c_int32 * 64), ("run", ctypes.c_void_p))


SIZES = {"m": 128, "p": 8, "i": 4, "f": 4, "l": 8, "L": 8}
TYPES = {"m": "nvTmaDesc", "p": "*fp16", "i": "i32", "f": "fp32", "l": "i64", "L": "i64"}


@dataclass
class Device:
    """The stand-in, and Triton's launcher built on it."""

    lib: ctypes.CDLL
    triton: ModuleType
    driver: Any
    alive: list[Any]

    def kernel(self, layout: str, run: str | None = None) -> int:
        """The handle of a kernel of these arguments, and of the scratch pointers behind them."""
        sizes = [SIZES[letter] for letter in layout] + [8, 8]
        made = Kernel(len(sizes), (ctypes.c_int32 * 64)(*sizes), None)
        made.run = ctypes.cast(self.lib[run], ctypes.c_void_p).value if run else None
        self.alive.append(made)
        return ctypes.addressof(made)

    def launches(self) -> list[bytes]:
        """What was launched since the last question."""
        count = ctypes.c_int.in_dll(self.lib, "launched")
        noted = (Launch * 64).in_dll(self.lib, "launches")
        found = [bytes(noted[i]) for i in range(count.value)]
        count.value = 0
        return found

    def last(self) -> Launch:
        return Launch.from_buffer_copy(self.launches()[-1])

    def set(self, name: str, value: int) -> None:
        kind = ctypes.c_uint64 if name == "stream_of_device" else ctypes.c_int
        kind.in_dll(self.lib, name).value = value

    def binary(self, layout: str, **changes: Any) -> triton_launch._Binary:
        types = self.triton.build_signature_metadata([TYPES[letter] for letter in layout])
        kernel_arg = self.triton.PyKernelArg(nested_tuple=None, type=self.triton.ARG_KERNEL)
        about: dict[str, Any] = {
            "launch": self.triton.launch, "function": self.kernel(layout), "metadata": (4, 1, 1024), "flags": (False, False),
            "scratch": 0, "tiles": (), "described": ([kernel_arg] * len(layout), types),
        }  # fmt: skip
        return triton_launch._Binary(**(about | changes))


def built(command: Sequence[str], output: Path) -> Path:
    done = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Device:
    if not hasattr(importlib.import_module("triton.backends.nvidia.driver"), "PyKernelArg"):
        pytest.skip("Triton 3.7's launcher is what is compared with")
    builder = runpy.run_path(str(Path(__file__).parent.parent / "tools" / "build_native.py"))
    try:
        cxx = builder["compiler"]()
    except builder["BuildError"] as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("driver")
    shared = ["-shared", "-fPIC", "-O1", "-w", f"-I{BACKEND / 'include'}"]
    source = Path(__file__).parent / "driver" / "driver.cpp"
    path = built([cxx, *shared, "-Wl,-soname,libcuda.so.1", str(source)], folder / "libcuda.so.1")
    lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    python = f"-I{sysconfig.get_path('include')}"
    launcher = built(
        ["cc", *shared, "-Wl,-z,lazy", python, str(BACKEND / "driver.c")], folder / "cuda_utils.so"
    )
    loader = importlib.machinery.ExtensionFileLoader("cuda_utils", str(launcher))
    spec = importlib.util.spec_from_loader("cuda_utils", loader)
    assert spec is not None
    usual = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # it names more of the driver than a launch needs
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    finally:
        sys.setdlopenflags(usual)
    calls.load()
    names = ("cuLaunchKernelEx", "current_stream", "cuStreamIsCapturing")
    found = [ctypes.cast(lib[name], ctypes.c_void_p).value for name in names]
    return Device(lib, module, calls.module().Driver(*found, 0), [])


@pytest.fixture
def device(standin: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(compiled_launch, "driver", lambda device: standin.driver)
    monkeypatch.setattr(compiled_launch, "_index", lambda device: device.index or 0)
    stream = lambda index: 0x700 + index  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, raising=False)
    triton_launch._closure.cache_clear()
    standin.launches()
    yield standin
    standin.set("refuse", 0)
    standin.set("status_of_capture", 0)
    triton_launch._closure.cache_clear()


def made(
    device: Device, layout: str, integers: dict[str, int], mask: int = 15, **about: Any
) -> Any:
    """The start of a kernel with one matrix for each m."""
    maps = about.pop("maps", [])
    binary = device.binary(layout, **about)
    counts = [layout.count(letter) for letter in "pfl"]
    return triton_launch.started(binary, (3, 2, 5), 5, mask, integers, maps, *counts)


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
    ours = calls.module().Start(
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
        calls.module().Start(
            print, device.driver, (0, False), 1, (1, 1, 1), (1, 0), (False, False), (0, 0), layout, constants, maps
        )  # fmt: skip

    for bad in (("x",), ("i",), ("p", (1,)), ("m",), ("p" * 100,), ("m" * 9, (), ({},) * 9)):
        with pytest.raises(ValueError, match=r"laid out|constants"):
            tried(*bad)
    with pytest.raises(TypeError):
        tried("i", ("one",))
    with pytest.raises(ValueError, match="functions"):
        calls.module().Driver(0, 0, 0, 0)


def test_calls_keep_nothing_alive(device: Device) -> None:
    start = made(device, "pf", {})
    x = torch.zeros(4)
    before = sys.getrefcount(x)
    for _ in range(50):
        start(x, 1.0)
    assert sys.getrefcount(x) == before


# plans ----------------------------------------------------------------------------------------------------------------


def add_relu(device: Device, n: int, **about: Any) -> Any:
    """A start of the stand-in's own kernel: (a, b, y)."""
    function = device.kernel("pppi", "add_relu")
    return made(device, "pppi", {"n": n}, function=function, **about)


def noted(launch: Callable[..., Any], shape: tuple[int, ...] = (6, 5)) -> Any:
    """What becomes of a launcher of add_relu for two tensors of this shape."""
    x = torch.randn(shape)
    op = OPS["add_relu"]
    return compiled_launch.plan(op, op.key([x, x, False], "inference"), CPU, launch)


def launcher(device: Device, **about: Any) -> Any:
    start, empty = add_relu(device, 30, **about), wiring.empty(CPU)

    def launch(a: Tensor, b: Tensor) -> Any:
        y = empty((6, 5), (5, 1), torch.float32)
        return (y,) if start(a, b, y) else None

    return launch


def test_a_plan_does_what_the_launcher_does(device: Device) -> None:
    launch = launcher(device)
    plan = noted(launch)
    assert isinstance(plan, calls.module().Plan)
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
    start, empty, counters = add_relu(device, 4), wiring.empty(CPU), wiring.counters
    seen: list[Tensor] = []

    def third(a: Tensor, n: int) -> bool:
        seen.append(a)
        return n == 7

    third_step = compiled_launch.step(third)

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
        assert isinstance(plan, calls.module().Plan)
        a = torch.randn(4)
        y, none, same, scale = plan(a, b, 2.5)
        torch.testing.assert_close(y.view(-1), torch.relu(a + (a if b is None else b)))
        assert none is None
        assert same is a
        assert scale == 2.5
        assert seen.pop() is y


def compiled(launch: Callable[..., Any], given: Sequence[Any]) -> Any:
    """As `plan` would, of no op in particular."""
    module, notes = calls.module(), list[Any]()
    slots = tuple(None if g is None else module.Slot() for g in given)
    module.record(notes)
    try:
        return module.Plan(slots, notes, launch(*slots))
    finally:
        module.record(None)


def test_launchers_that_do_more_than_pass_things_on_stay_as_they_are(device: Device) -> None:
    start, empty = add_relu(device, 30), wiring.empty(CPU)
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

    third = compiled_launch.step(lambda *given: True)
    for launch in (reads, decides, compares, keeps, draws, declines, returns):
        assert noted(launch) is launch
    with pytest.raises(ZeroDivisionError):
        noted(lambda a, b: 1 / 0)
    assert not device.launches()


def test_plans_come_from_threads_apart(device: Device) -> None:
    """What one thread notes, another may run meanwhile."""
    launch, module = launcher(device), calls.module()
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


# fronts ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The op add_relu with a candidate `fake.plan`, made of the stand-in's kernel; what was built and who was slow."""
    op, seen = OPS["add_relu"], {"slow": 0, "built": []}

    def bind(key: Any, config: Any, where: torch.device) -> Any:
        found = compiled_launch.plan(op, key, where, seen.get("launch") or launcher(device))
        seen["built"].append(found)
        return found

    fake = Candidate("fake.plan", bind=bind, trusted=True)
    candidates = {**op.candidates, "fake.plan": fake}
    monkeypatch.setattr(op, "candidates", candidates)
    usual = dispatch.call

    def slow(*args: Any) -> Any:
        seen["slow"] += 1
        return usual(*args)

    monkeypatch.setattr(dispatch, "call", slow)
    policies.forget_entries()
    with tensorlogic.policy(force="fake.plan"):
        yield seen
    policies.forget_entries()


def quick(fn: Callable[..., Any]) -> Any:
    """The compiled front of a public function."""
    found = [s for p, (_, s) in front._SCOPES.items() if front.FRONTS[p] is fn]
    return found[0]["compiled"]


def test_a_warm_call_is_a_plans(device: Device, served: dict[str, Any]) -> None:
    a, b = torch.randn(6, 5), torch.randn(6, 5)
    for _ in range(3):
        torch.testing.assert_close(tensorlogic.add_relu(a, b), torch.relu(a + b))
    assert calls.is_plan(served["built"][0])
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
    usual = selector.choose

    def choose(*args: Any, **about: Any) -> Any:
        choice = usual(*args, **about)
        other = replace(
            choice, launch=lambda *given: (chosen.append("captured"), choice.launch(*given))[1]
        )
        choice.captured = other
        return choice

    monkeypatch.setattr(selector, "choose", choose)
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

    start, step = add_relu(device, 30), compiled_launch.step(fill)
    empty = wiring.empty(CPU)

    def launch(a: Tensor, b: Tensor) -> Any:
        y = empty((6, 5), (5, 1), torch.float32)
        return (y,) if step(y) and start(a, b, y) else None

    served["launch"] = launch
    a = torch.randn(6, 5)
    tensorlogic.add_relu(a, a)
    assert calls.is_plan(served["built"][0])
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
    monkey.setattr(binding.Recording, "forward", None)  # no Python from here on
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


def test_a_first_call_that_eager_saved_teaches_nothing(
    device: Device, served: dict[str, Any]
) -> None:
    """What it kept is eager's: the launcher's outputs may be others."""
    served["launch"] = launcher(device)
    moved = torch.randn(31)[1:].view(6, 5).requires_grad_()
    b = torch.randn(6, 5)
    tensorlogic.add_relu(moved, b)
    assert not recording(tensorlogic.add_relu, moved, b) or served["slow"]
    aligned = torch.randn(6, 5, requires_grad=True)
    for _ in range(3):
        (g,) = torch.autograd.grad(tensorlogic.add_relu(aligned, b).sum(), aligned)
        torch.testing.assert_close(g, (aligned + b > 0).float())


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


def test_counters_are_asked_for_once_a_stream_and_anew_in_captures(device: Device) -> None:
    start, empty, module = add_relu(device, 4), wiring.empty(CPU), calls.module()
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
