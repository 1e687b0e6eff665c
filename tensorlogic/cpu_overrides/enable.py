"""`tensorlogic.enable()` and `disable()`: the one global switch, which changes only what PyTorch does badly on CPUs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import argument_checks, policy
from ..native import hook_extension
from ..native import hook_ops as native_hook_ops
from . import overrides
from .overrides import Repair

Kernel = Callable[..., Any]
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@dataclass(frozen=True)
class Override:
    """One PyTorch kernel at the CPU key, and the repair that serves its half-precision calls."""

    name: str  # with its overload: "addmm.out"
    repair: Repair
    # the argument that shows the dtype; the next one is multiplied by it
    first: int = 0
    grain: int = 0  # products of fewer multiplications are left to PyTorch

    def kernel(self, original: Kernel) -> Kernel:
        """The repair in front of `original`, for this overload."""
        if self.name.endswith(".out"):
            return _into_out(original, self.repair)
        return (_in_place if self.name.endswith("_") else _new)(original, self.repair)


def _overrides() -> tuple[Override, ...]:
    grain = overrides.GRAIN
    found = []
    for name in ("mm", "bmm"):
        found += [Override(name + s, getattr(overrides, name), 0, grain) for s in ("", ".out")]
    for name in ("addmm", "baddbmm", "addmv"):
        found += [Override(name + s, getattr(overrides, name), 1, grain) for s in ("", ".out", "_")]
    for suffix in ("", ".out"):
        found.append(Override(f"_addmm_activation{suffix}", overrides.addmm_activation, 1, grain))
    # elsewhere PyTorch's are fast, and nothing stands in front of them
    if overrides.no_float16():
        found += [Override(name, repair) for name, repair in overrides.WIDENED.items()]
    return tuple(found)


def _new(original: Kernel, repair: Repair) -> Kernel:
    def kernel(*args: Any, **rest: Any) -> Any:
        y = repair(*args, **rest)
        return original(CPU, *args, **rest) if y is None else y

    return kernel


def _into_out(original: Kernel, repair: Repair) -> Kernel:
    def kernel(*args: Any, out: Tensor, **rest: Any) -> Tensor:
        y = repair(*args, **rest) if out.dtype == args[0].dtype and out.is_cpu else None
        if y is None or (out.shape != y.shape and out.numel()):  # PyTorch warns of the latter
            return original(CPU, *args, out=out, **rest)
        return out.resize_(y.shape).copy_(y)

    return kernel


def _in_place(original: Kernel, repair: Repair) -> Kernel:
    def kernel(c: Tensor, *args: Any, **rest: Any) -> Tensor:
        y = repair(c, *args, **rest)
        if y is None or y.shape != c.shape:  # PyTorch refuses the latter
            return original(CPU, c, *args, **rest)
        return c.copy_(y)

    return kernel


# what stands at the CPU key -----------------------------------------------------------------------------------------


def _original(name: str) -> Kernel:
    """PyTorch's kernel by its handle, as it is before ours is registered; to be called with the keys first."""
    return torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed


def _install_compiled(libraries: list[torch.library.Library]) -> None:
    """The hooks' guards, which call the repairs as operators: other dtypes do not meet Python."""
    library = torch.library.Library("tensorlogic_repaired", "DEF")
    libraries.append(library)
    guard = native_hook_ops.op("guard")
    for override in _overrides():
        name, _, overload = override.name.partition(".")
        schema = getattr(getattr(torch.ops.aten, name), overload or "default")._schema
        library.define(str(schema).removeprefix("aten::"))
        library.impl(override.name, override.kernel(_original(override.name)), "CPU")
        guard(name, overload, override.first, override.grain)


def _install_python(libraries: list[torch.library.Library]) -> None:
    """Guards in Python, for a PyTorch without hooks: other dtypes pay for the way through it."""
    library = torch.library.Library("aten", "IMPL")
    libraries.append(library)
    with warnings.catch_warnings():  # that these operators have a kernel already is the point
        warnings.simplefilter("ignore", UserWarning)
        for override in _overrides():
            original = _original(override.name)
            kernel = _guarded(override.first, original, override.kernel(original))
            library.impl(override.name, kernel, "CPU")


def _guarded(first: int, original: Kernel, repaired: Kernel) -> Kernel:
    f16, bf16 = torch.float16, torch.bfloat16

    def kernel(*args: Any, **rest: Any) -> Any:
        dtype = args[first].dtype
        if (dtype is f16 or dtype is bf16) and not hook_extension.is_suspended():
            with native_hook_ops.suspended():
                return repaired(*args, **rest)
        return original(CPU, *args, **rest) if rest else original(CPU, *args)

    return kernel


# the switch ---------------------------------------------------------------------------------------------------------

_LOCK = threading.RLock()
_LIBRARIES: list[torch.library.Library] = []
policy.ON_CHANGE += (hook_extension.count_policies,)  # under a policy the guards ask in every call
policy.ON_FORGET += (hook_extension.forget,)


def enable(*, pool: bool = False) -> None:
    """Repair what PyTorch does badly on CPUs, for every program of this process, until `disable`.

    Half-precision products (mm, addmm, bmm, baddbmm, mv, addmv, fused attention, convolutions, and so linear layers and
    everything that is built of these, forward and backward) go to the candidates that `tensorlogic` chooses; results lie
    within the rounding of their dtype. Other dtypes and devices are untouched. Calling it again changes nothing.

    Args:
        pool: also give every CPU tensor of 64 KiB and more memory from `tensorlogic.pool`.

    Raises:
        TypeError: `pool` is no bool. RuntimeError: `pool` is asked for and the hooks for this version of PyTorch are not built; nothing is changed then.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.enable()
        >>> y = torch.ones(64, 64).half() @ torch.ones(64, 64).half()
        >>> tensorlogic.disable()
        >>> y[0, 0].item()
        64.0
    """
    if argument_checks.flag("enable", "pool", pool) and (reason := native_hook_ops.available()):
        raise RuntimeError(
            f"enable: pool=True needs the hooks, and {reason}. Without them, preload tcmalloc: "
            f"LD_PRELOAD=libtcmalloc.so.4 python ..."
        )
    with _LOCK:
        if not _LIBRARIES:
            hook_extension.enabled = True
            (_install_python if native_hook_ops.available() else _install_compiled)(_LIBRARIES)
        if pool:
            native_hook_ops.op("pool_all")(True)


def disable() -> None:
    """Undo `enable`: PyTorch's own kernels and allocator serve again; tensors from the pool stay valid.

    Not while other threads are inside products: PyTorch replaces kernels without waiting for them.

    Example:
        >>> import tensorlogic
        >>> tensorlogic.disable()  # nothing to undo
    """
    with _LOCK:
        if hook_extension.loaded():
            native_hook_ops.op("pool_all")(False)
            native_hook_ops.op("unguard")()
        for library in _LIBRARIES:
            library._destroy()
        _LIBRARIES.clear()
        hook_extension.enabled = False


def enabled() -> bool:
    """True between `enable` and `disable`."""
    return hook_extension.enabled
