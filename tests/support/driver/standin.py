"""A stand-in for NVIDIA's driver on a machine without one, and Triton's own launcher built on it."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorlogic.core.op import OPS
from tensorlogic.kernels import register
from tensorlogic.kernels.triton_runtime import kernel_start, launch_plan
from tensorlogic.native import call_extension, cuda_driver

CPU = torch.device("cpu")


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
        found = [bytes(noted[i]) for i in range(min(count.value, 64))]
        count.value = 0
        return found

    def last(self) -> Launch:
        return Launch.from_buffer_copy(self.launches()[-1])

    def set(self, name: str, value: int) -> None:
        kind = ctypes.c_uint64 if name == "stream_of_device" else ctypes.c_int
        kind.in_dll(self.lib, name).value = value

    def binary(self, layout: str, **changes: Any) -> kernel_start.Binary:
        types = self.triton.build_signature_metadata([TYPES[letter] for letter in layout])
        kernel_arg = self.triton.PyKernelArg(nested_tuple=None, type=self.triton.ARG_KERNEL)
        about: dict[str, Any] = {
            "launch": self.triton.launch, "function": self.kernel(layout), "metadata": (4, 1, 1024), "flags": (False, False),
            "scratch": 0, "tiles": (), "described": ([kernel_arg] * len(layout), types),
        }  # fmt: skip
        return kernel_start.Binary(**(about | changes))


def built(command: Sequence[str], output: Path) -> Path:
    done = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


@functools.cache
def stand_in() -> Device:
    """The one of this process: libraries are known by their names, so that there cannot be two."""
    backend = Path(next(iter(importlib.import_module("triton.backends.nvidia").__path__)))
    if not hasattr(importlib.import_module("triton.backends.nvidia.driver"), "PyKernelArg"):
        pytest.skip("Triton 3.7's launcher is what is compared with")
    builder = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "build_native.py"))
    try:
        cxx = builder["compiler"]()
    except builder["BuildError"] as error:
        pytest.skip(str(error))
    if shutil.which("cc") is None:
        pytest.skip("Triton's launcher needs a C compiler, cc")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared = ["-shared", "-fPIC", "-O1", "-w", f"-I{backend / 'include'}"]
        source = Path(__file__).parent / "driver.cpp"
        path = built(
            [cxx, *shared, "-Wl,-soname,libcuda.so.1", str(source)], folder / "libcuda.so.1"
        )
        lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        python = f"-I{sysconfig.get_path('include')}"
        launcher = built(
            ["cc", *shared, "-Wl,-z,lazy", python, str(backend / "driver.c")],
            folder / "cuda_utils.so",
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
    call_extension.load()
    names = ("cuLaunchKernelEx", "current_stream", "cuStreamIsCapturing")
    found = [ctypes.cast(lib[name], ctypes.c_void_p).value for name in names]
    return Device(lib, module, call_extension.module().Driver(*found, 0), [])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Launchers for the CPU go to the stand-in, as those for a GPU would to its driver."""
    standin = stand_in()
    for owner in (cuda_driver, launch_plan):
        monkeypatch.setattr(owner, "driver", lambda device: standin.driver)
    monkeypatch.setattr(launch_plan, "_index", lambda device: device.index or 0)
    stream = lambda index: 0x700 + index  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, raising=False)
    kernel_start.closure.cache_clear()
    standin.launches()
    yield standin
    standin.set("refuse", 0)
    standin.set("status_of_capture", 0)
    kernel_start.closure.cache_clear()


def made(
    device: Device, layout: str, integers: dict[str, int], mask: int = 15, **about: Any
) -> Any:
    """The start of a kernel with one matrix for each m."""
    maps = about.pop("maps", [])
    binary = device.binary(layout, **about)
    counts = [layout.count(letter) for letter in "pfl"]
    return kernel_start.started(binary, (3, 2, 5), 5, mask, integers, maps, *counts)


def add_relu(device: Device, n: int, **about: Any) -> Any:
    """A start of the stand-in's own kernel: (a, b, y)."""
    function = device.kernel("pppi", "add_relu")
    return made(device, "pppi", {"n": n}, function=function, **about)


def launcher(device: Device, **about: Any) -> Any:
    start, empty = add_relu(device, 30, **about), register.empty(CPU)

    def launch(a: Tensor, b: Tensor) -> Any:
        y = empty((6, 5), (5, 1), torch.float32)
        return (y,) if start(a, b, y) else None

    return launch


def noted(launch: Callable[..., Any], shape: tuple[int, ...] = (6, 5)) -> Any:
    """What becomes of a launcher of add_relu for two tensors of this shape."""
    x = torch.randn(shape)
    op = OPS["add_relu"]
    return launch_plan.plan(op, op.key([x, x, False], "inference"), CPU, launch)
