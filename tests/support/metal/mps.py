"""A pretended Apple GPU: tensors that are on "mps" for PyTorch, in CPU memory, with shaders run by the stand-in.

What a Mac lacks is refused as a Mac refuses it: float64 above all. Autograd's engine does not run on it, because a PyTorch
built for CPUs knows no accelerator; what our backward calls does. Only for processes of their own: the device stays.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import standin as metal_standin

CPU, MPS = 0, 13  # numbers of the devices in PyTorch's C interface
BACKEND = """#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>
struct Memory : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = std::malloc(n ? n : 1);
    return {p, p, &std::free, c10::Device(c10::DeviceType::MPS, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
struct MPSHooks : at::MPSHooksInterface {
  template <class... A> MPSHooks(A...) {}
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Allocator* getMPSDeviceAllocator() const override { static Memory memory; return &memory; }
  void deviceSynchronize() const override {}
  c10::Device getDeviceFromPtr(void*) const override { return {c10::DeviceType::MPS, 0}; }
  bool isOnMacOSorNewer(unsigned, unsigned) const override { return true; }
};
namespace at { REGISTER_MPS_HOOKS(MPSHooks) }
namespace { C10_REGISTER_GUARD_IMPL(MPS, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS>) }
"""
VIEWS = {  # change nothing but what a tensor says of itself: PyTorch's CPU code serves any device
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::detach", "aten::alias", "aten::unfold",
}  # fmt: skip
COMPOSITE = ("copy_", "abs")  # PyTorch's code for all devices asks for a kernel of each
calls: list[str] = []  # of PyTorch's operators, for tests to count
_kept: list[Any] = []


class Event:
    """torch.mps.Event by the host's clock: the pretended device has finished when a call returns."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing, self.at = enable_timing, 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: Event) -> float:
        assert self.timing
        assert end.timing
        return (end.at - self.at) * 1e3


def install() -> None:
    """Make "mps" a device of this process."""
    _register()
    library = torch.library.Library("_", "IMPL")
    library.fallback(_served, "MPS")
    copies = torch.library.Library("aten", "IMPL")
    for name in COMPOSITE:
        copies.impl(name, functools.partial(_served, getattr(torch.ops.aten, name).default), "MPS")
    _kept.extend((library, copies))
    torch.mps.compile_shader = metal_standin.compile_shader
    torch.mps.synchronize = lambda: None
    torch.mps.Event = Event  # type: ignore[misc]
    torch.mps.current_allocated_memory = lambda: 1 << 20
    torch.mps.driver_allocated_memory = lambda: 1 << 22
    torch.mps.recommended_max_memory = lambda: 1 << 34
    torch.mps.empty_cache = lambda: None
    torch.mps.get_rng_state = lambda device="mps": torch.zeros(8, dtype=torch.uint8)
    torch.mps.set_rng_state = lambda state, device="mps": None
    torch.backends.mps.is_available = functools.cache(lambda: True)  # cached as PyTorch's own
    torch._C._mps_get_name = lambda: "Apple M4 Pro"  # type: ignore[attr-defined]
    torch._C._mps_get_core_count = lambda: 20  # type: ignore[attr-defined]


def _register() -> None:
    """What PyTorch asks of a device in C++: its streams, its memory."""
    folder = Path(torch.__file__).parent
    stamp = hashlib.sha256(f"{torch.__version__}{BACKEND}".encode()).hexdigest()[:16]
    target = metal_standin.FOLDER / f"{stamp}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        source = target.with_suffix(".cpp")
        source.write_text(BACKEND)
        subprocess.run(
            ["g++", "-std=c++20", "-O0", "-w", "-fPIC", "-shared", f"-I{folder / 'include'}", str(source),
             f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(target)], check=True,
        )  # fmt: skip
    _kept.append(ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL))


def _served(op: Any, *args: Any, **kwargs: Any) -> Any:
    """One operator on the pretended device: on CPU tensors that share the memory."""
    calls.append(op._schema.name)
    if op._schema.name == "aten::set_":
        raise NotImplementedError("storages of a pretended device are not handed around")
    if op._schema.name in VIEWS:
        return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
    shared: dict[int, Tensor] = {}  # id of a CPU tensor -> what it stands for

    def down(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == "mps":
            twin = _at(value, CPU)
            shared[id(twin)] = value
            return twin
        if isinstance(value, torch.device) and value.type == "mps":
            return torch.device("cpu")
        return value

    onto = any(
        (isinstance(a, torch.device) and a.type == "mps")
        for a in pytree.tree_leaves((args, kwargs))
    )
    off = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    inputs = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
    here = onto or (not off and any(a.device.type == "mps" for a in inputs))
    given = pytree.tree_map(down, (args, kwargs))
    out = op(*given[0], **given[1])

    def up(value: Any) -> Any:
        if not isinstance(value, Tensor) or not here:
            return value
        if id(value) in shared:
            return shared[id(value)]
        if any(value is a for a in inputs):  # an input of the CPU that was written to
            return value
        return _at(value, MPS)

    return pytree.tree_map(up, out)


_library = ctypes.PyDLL(
    str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
)  # keeps the lock
_delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_owners: dict[int, Any] = {}


@_delete
def _free(_data: int, context: int) -> None:
    _owners.pop(context, None)


_count = 0
_nothing = torch.zeros(1)  # where empty tensors lie
_library.torch_exception_get_what_without_backtrace.restype = ctypes.c_char_p


def _at(t: Tensor, device: int) -> Tensor:
    """A tensor of the same memory on the other device, which keeps it alive."""
    global _count
    if device == MPS and t.dtype in (torch.float64, torch.complex128):
        raise TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
            "Please use float32 instead."
        )
    _count += 1
    _owners[_count] = t
    handle = ctypes.c_void_p()
    numbers = ctypes.c_int64 * max(t.dim(), 1)
    failed = _library.torch_from_blob(
        ctypes.c_void_p(t.data_ptr() or _nothing.data_ptr()), ctypes.c_int64(t.dim()), numbers(*t.shape), numbers(*t.stride()),
        ctypes.c_int64(0), _dtype(t.dtype), device, 0 if device == MPS else -1, ctypes.byref(handle), 0, None,
        ctypes.c_int64(0), _free, ctypes.c_void_p(_count),
    )  # fmt: skip
    assert not failed, _library.torch_exception_get_what_without_backtrace()
    made = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle.value))
    if sys.getrefcount(made) > 2:  # PyTorch 2.13 leaves the handle to us, whatever the name says
        _library.aoti_torch_delete_tensor_object(handle)
    return made


def _dtype(dtype: torch.dtype) -> int:
    name = str(dtype).removeprefix("torch.")
    return int(getattr(_library, f"aoti_torch_dtype_{name}")())


ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _capsule(address: int | None) -> Any:
    return ctypes.pythonapi.PyCapsule_New(address, None, None)
