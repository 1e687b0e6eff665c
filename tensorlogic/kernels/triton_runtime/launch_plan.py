"""GPU launchers in C, where the compiled calls are built: kernels started, tensors allocated, whole launchers replayed as plans."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from tensorlogic.core.candidate import Launcher
from tensorlogic.core.key import Key
from tensorlogic.core.op import Op
from tensorlogic.native import call_extension

from ...native.cuda_driver import driver

MOST_MAPS = 512  # tensor maps of one matrix that are kept
MAP_BYTES = 128


def empty(device: torch.device) -> Any:
    """An allocator (shape, strides, dtype) -> tensor on `device`, or None where there is none in C."""
    found = driver(device)
    return None if found is None else call_extension.module().Empty(found, _index(device))


def start(
    usual: Callable[..., bool],
    device: torch.device,
    *,
    function: int,
    metadata: tuple[int, int, int],
    grid: tuple[int, int, int],
    flags: tuple[bool, bool],
    mask: int,
    scratch: int,
    several: bool,
    layout: str,
    constants: Sequence[int],
    maps: Sequence[Mapping[int, Any]],
) -> Callable[..., bool]:
    """`usual`, the start of a kernel, in C where that can be: see the module's `Start` for what is taken.

    `metadata`: warps, blocks of a cluster, shared bytes. `flags`: cooperative, dependent. `maps`: for each matrix that bulk
    copies use, Triton's tensor maps by address.
    """
    found, (warps, cluster, shared) = driver(device), metadata
    if found is None or cluster != 1:
        return usual
    made: Callable[..., bool] = call_extension.module().Start(
        usual, found, (_index(device), several), function, grid, (warps, shared), flags, (mask, scratch), layout,
        tuple(constants), tuple(Maps(m) for m in maps),
    )  # fmt: skip
    return made


def step(run: Callable[..., bool]) -> Callable[..., bool]:
    """A start that is no kernel of Triton's, which plans may hold, too."""
    module = call_extension.module()
    return run if module is None else cast(Callable[..., bool], module.Step(run))


def series(
    lib: Any, device: torch.device, several: bool, handle: int, parts: Sequence[tuple[int, ...]], kept: Any
) -> Callable[..., Any] | None:  # fmt: skip
    """Products of cuBLASLt as (x, w, y, workspace) -> True, or None where there is nothing in C to call it: see the module's `Series`."""
    found = driver(device)
    if found is None or not isinstance(lib, ctypes.CDLL):
        return None
    matmul = ctypes.cast(lib.cublasLtMatmul, ctypes.c_void_p).value
    made: Callable[..., Any] = call_extension.module().Series(
        found, (_index(device), several), matmul, handle, tuple(parts), kept
    )
    return made


def lasting(what: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """`what(*args)`, ever the same on one stream, which launchers that are noted may use."""
    module = call_extension.module()
    slot = None if module is None else module.noted(what, *args)
    return what(*args) if slot is None else cast(torch.Tensor, slot)


class Maps(dict[int, bytes]):
    """Triton's tensor maps by address, as the driver wants them."""

    def __init__(self, made: Mapping[int, Any]) -> None:
        self.made = made

    def __missing__(self, address: int) -> bytes:
        if len(self) >= MOST_MAPS:
            self.clear()
        held = self.made[address]
        last = id(held) + type(held).__basicsize__ - MAP_BYTES
        found = self[address] = ctypes.string_at(last, MAP_BYTES)
        return found


def plan(op: Op, key: Key, device: torch.device, launch: Launcher) -> Launcher:
    """`launch`, noted and replayed in C, where it only allocates by `wiring.empty` and `wiring.counters` and passes what it is given on to starts; else itself."""
    if driver(device) is None:
        return launch
    first = _noted(op, key, launch)
    if first is None or _text(first) != _text(cast(Any, _noted(op, key, launch))):
        return launch
    try:
        made: Launcher = call_extension.module().Plan(*first)
    except TypeError:  # it uses a tensor of its own
        return launch
    return made


def _noted(op: Op, key: Key, launch: Launcher) -> tuple[tuple[Any, ...], list[Any], Any] | None:
    """Slots, what `launch` did with them, what it returned; None where it did more than pass them on."""
    module, notes = call_extension.module(), list[Any]()
    absent = [p.is_tensor and key.spec(p.name) is None for p in op.dynamic]
    given = tuple(None if gone else module.Slot() for gone in absent)
    module.record(notes)
    try:
        outputs = launch(*given)
    except (TypeError, AttributeError, ValueError, RuntimeError):  # it computes with them
        return None
    finally:
        module.record(None)
    return None if outputs is None else (given, notes, outputs)


def _text(noted: tuple[tuple[Any, ...], list[Any], Any] | None) -> Any:
    """The same for launchers that do the same: slots by number."""
    if noted is None:
        return None
    given, notes, outputs = noted
    places = {id(slot): f"slot {i}" for i, slot in enumerate([*given, *(n[2] for n in notes)])}

    def place(value: Any) -> Any:
        return (
            places.get(id(value), value) if type(value) is call_extension.module().Slot else value
        )

    return [(n[0], *map(place, n[1])) for n in notes], [*map(place, outputs)]


def _index(device: torch.device) -> int:
    if device.index is not None or device.type != "cuda":
        return device.index or 0
    return torch.cuda.current_device()
