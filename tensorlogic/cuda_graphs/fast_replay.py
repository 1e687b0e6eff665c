"""The short way to a replay: a call that looks like an earlier one reaches the graph through compiled checks alone, and where
calls are compiled in one call of C (`Way` in csrc/launch/graph_replay.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import copysign
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ..core import policy as policies
from ..guards import tensor_guard
from ..guards.errors import MISS
from ..guards.global_state import switches
from ..native import call_extension, cuda_driver
from ..system import function_modes
from .replay import GradientReplay, Replay, owned

Way = Callable[..., Any]
PLAIN = (type(None), bool, int, float, str)


def short(
    replay: Replay | GradientReplay,
    args: Sequence[Any],
    spec: Any,
    before: Callable[[], bool] | None = None,
    after: Callable[[], bool] | None = None,
) -> Way | None:
    """run(*args), giving the output or `MISS`, for tensors of the kind of `args` under today's modes; None where there is none.

    `before` must hold before anything is launched; where `after` does not hold, which is asked while the device works
    (before, where gradients are recorded), the result is thrown away. `spec` is the structure of the output.
    """
    if not args or any(type(v) is not Tensor for v in args):
        return None
    if isinstance(replay, Replay) and (replay.written or replay.expanded):
        return None
    if isinstance(replay, GradientReplay):  # a backward pass waits for what it gives
        return _recording(replay, _fits(args, replay.device, before or after), spec)
    fits = _fits(args, replay.device, before)
    return _compiled(replay, args, spec, before, after, _launching(replay, fits, spec, after))


def _compiled(
    replay: Replay,
    args: Sequence[Any],
    spec: Any,
    before: Callable[[], bool] | None,
    after: Callable[[], bool] | None,
    usual: Way,
) -> Way:
    """`usual` in C, where the driver's entry points are known; it stays for what is unusual there."""
    driver, index = cuda_driver.driver(replay.device), replay.device.index or 0
    if driver is None:
        return usual
    several = replay.device.type == "cuda" and torch.cuda.device_count() > 1
    level = torch._C._functorch.maybe_current_level
    now = policies.VARIABLE, policies.current(), vars(torch.compiler), level, vars(forward_ad)
    try:
        made: Way = call_extension.module().Way(
            driver, (index, several), getattr(replay.tape, "handle", 0), replay.tape, replay.line, now, tuple(args),
            tuple(replay.static), tuple(replay.out), _shape(spec, len(replay.out)), not replay.unsafe_views, before, after,
            MISS, usual,
        )  # fmt: skip
    except TypeError:  # no plain tensors, or too many
        return usual
    return made


def _shape(spec: Any, count: int) -> Any:
    """How outputs are handed out: None for one leaf, tuple, list, or what makes the rest of a list of leaves."""
    if spec.is_leaf():
        return None
    places = pytree.tree_unflatten(list(range(count)), spec)
    if type(places) in (tuple, list) and list(places) == list(range(count)):
        return type(places)
    return lambda leaves: pytree.tree_unflatten(leaves, spec)


def _fits(
    args: Sequence[Tensor], device: torch.device, before: Callable[[], bool] | None
) -> Callable[..., bool]:
    """Whether a call is of the kind of `args`: PyTorch's compiled guard tells type, shape, strides, dtype, device, autocast
    and inference mode."""
    check, count, grad = tensor_guard.guard(list(args)), len(args), torch.is_grad_enabled()
    cuda = device.type == "cuda"
    capturing = torch._C._cuda_isCurrentStreamCapturing if cuda else None
    is_grad, dispatching = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack
    intercepted, compiling = function_modes.intercepted, torch.compiler.is_compiling
    level, tracing = torch._C._functorch.maybe_current_level, torch._C._get_tracing_state
    policy, force = policies.current, policies.current().force
    known = switches()

    def fits(*given: Any) -> bool:
        return (
            len(given) == count
            and is_grad() is grad
            and not any(
                getattr(v, "is_nested", False) or vars(v) for v in given if type(v) is Tensor
            )
            and check(*given)
            and not dispatching()
            and not intercepted()
            and not compiling()
            and level() is None
            and tracing() is None
            and forward_ad._current_level < 0
            and policy().force == force
            and switches() == known
            and (capturing is None or not capturing())
            and (before is None or before())
        )

    return fits


def _launching(
    replay: Replay, fits: Callable[..., bool], spec: Any, after: Callable[[], bool] | None
) -> Way:
    line, tape, buffers = replay.line, replay.tape, replay.static
    acquire, release, turn = line.lock.acquire, line.lock.release, line.turn
    give, copy = _giver(replay, spec), buffers[0].copy_ if len(buffers) == 1 else None
    stream = torch._C._cuda_getCurrentRawStream if replay.device.type == "cuda" else None
    index, grad = replay.device.index or 0, torch.is_grad_enabled()
    set_grad = torch._C._set_grad_enabled

    def run(*given: Any) -> Any:
        if not fits(*given) or not acquire(False):
            return MISS
        try:
            if stream is not None and stream(index) != line.raw:
                turn()
            if grad:
                set_grad(False)
            if copy is not None:
                copy(given[0])
            else:
                for buffer, value in zip(buffers, given, strict=True):
                    buffer.copy_(value)
            tape.replay()
            return give() if after is None or after() else MISS
        finally:
            if grad:
                set_grad(True)
            release()

    return run


def _recording(replay: GradientReplay, fits: Callable[..., bool], spec: Any) -> Way:
    single = spec.is_leaf()

    def run(*given: Any) -> Any:
        out = replay(given) if fits(*given) else None
        if out is None:
            return MISS
        return out[0] if single else pytree.tree_unflatten(out, spec)

    return run


def _giver(replay: Replay, spec: Any) -> Callable[[], Any]:
    """What gives the outputs of the last launch: the graph's own where views were asked for, copies elsewhere."""
    views = replay.unsafe_views
    if spec.is_leaf():
        single = replay.out[0]
        if isinstance(single, Tensor) and not views:
            return single.clone
        return lambda: single
    if views:
        return lambda: pytree.tree_unflatten(list(replay.out), spec)
    return lambda: pytree.tree_unflatten(owned(replay.out), spec)


class Words:
    """Short way for calls with keywords or plain values like an earlier one's: the tensors alone go to `way`."""

    def __init__(self, way: Way, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        values = (*args, *kwargs.values())
        self.way, self.count, self.names = way, len(args), tuple(kwargs)
        self.tensors = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
        self.rest = [(i, v, type(v)) for i, v in enumerate(values) if not isinstance(v, Tensor)]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's output, or `MISS`: other names, another order of them, or other values that are no tensors."""
        if len(args) != self.count or tuple(kwargs) != self.names:
            return MISS
        values = (*args, *kwargs.values())
        if not self.rest:
            return self.way(*values)
        for i, known, kind in self.rest:
            value = values[i]
            if value is not known and (type(value) is not kind or value != known):
                return MISS
            if kind is float and copysign(1.0, value) != copysign(1.0, known):
                return MISS  # 0.0 is no -0.0
        return self.way(*[values[i] for i in self.tensors])


def leaves(values: Sequence[Any], flat: Sequence[Any]) -> bool:
    """True where a call's arguments are what they were flattened to: tensors and plain values, nothing that holds some."""
    return len(values) == len(flat) and all(
        v is f and (isinstance(v, Tensor) or type(v) in PLAIN)
        for v, f in zip(values, flat, strict=True)
    )
