"""Streams on which captures are warmed up and recorded, and whose backward passes may still come there."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..system import capture_state

PROGRAMS, CALLS = "programs", "calls"  # what `optimize` records; what `capture` does
NON_BLOCKING = 1
_making = threading.Lock()


def stream(device: torch.device, use: str = PROGRAMS) -> Any:
    """The stream of a device for one use: a backward pass runs where its forward ran, so callers' calls have one of their own.

    It is no stream of PyTorch's pool, which gives the same ones to others after 32: their work would be recorded with ours.
    """
    with _making:  # one, of whichever thread asks first
        return _stream(device, use)


@functools.cache
def _stream(device: torch.device, _: str) -> Any:
    made = _created(torch.cuda.current_device() if device.index is None else device.index)
    return torch.cuda.ExternalStream(made, device) if made else torch.cuda.Stream(device)


def _created(index: int) -> int:
    """A stream by the driver, in the context that PyTorch uses, which a thread need not have yet; 0 where there is no such driver."""
    torch.cuda.init()
    context, made, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        if cuda.cuDeviceGet(ctypes.byref(device), index):
            return 0
        if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
            return 0
        if cuda.cuCtxPushCurrent_v2(context):
            return 0
        refused = cuda.cuStreamCreate(ctypes.byref(made), NON_BLOCKING)
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    except (OSError, AttributeError):  # no driver of NVIDIA's
        return 0
    return 0 if refused else made.value or 0


def warm(fn: Callable[[], Any], device: torch.device, times: int = 2, use: str = PROGRAMS) -> Any:
    """Run on a side stream, as a capture will, so that what is set up once is set up."""
    if device.type != "cuda":
        return [fn() for _ in range(times)][-1]
    side = stream(device, use)
    # What another thread records there meanwhile would hold this, too.
    with capture_state.capture_lock(), capture_state.uncached():
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(times):
                out = fn()
        torch.cuda.current_stream(device).wait_stream(side)
    return out


class Pending:
    """A call whose backward pass would run on the calls' stream; its autograd graph holds it, and nothing else does."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.thread = device, threading.get_ident()
        self.running, self.done = 0, False

    def begin(self, _: Any) -> None:
        """Before the first step of a backward pass. Raises RuntimeError where it would be recorded."""
        if capture_state.capturing(self.device):
            raise RuntimeError(
                "capture: a backward pass through a call that ran before its function was recorded begins while another thread "
                "records on the same stream; run backward once, on the thread that called forward"
            )
        self.running, self.done = self.running + 1, False
        torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        """After its last step."""
        self.running -= 1
        self.done = not self.running


_lock = threading.Lock()
_pending: list[weakref.ref[Pending]] = []


def wait_for(outs: Iterable[Any], device: torch.device) -> None:
    """Remember that a backward pass of these outputs, of this thread's call, may come."""
    nodes = {v.grad_fn for v in outs if isinstance(v, Tensor) and v.grad_fn is not None}
    if not nodes:
        return
    call = Pending(device)
    for node in nodes:
        node.register_prehook(call.begin)
    with _lock:
        _pending[:] = [p for p in _pending if (known := p()) is not None and not known.done]
        _pending.append(weakref.ref(call))


def awaited(device: torch.device) -> bool:
    """Whether a backward pass may begin on the calls' stream while this thread records there: another thread's is to come."""
    own = threading.get_ident()
    with _lock:
        calls = [p() for p in _pending]
    return any(
        c is not None and not c.done and c.device == device and c.thread != own for c in calls
    )


def shared(given: Iterable[Any], outs: Iterable[Any], side: Any, own: Any) -> None:
    """Memory of the caller's that `side` reads, now and in backward, and memory of its that the caller reads, is not given to
    others before both have done so."""
    for tensors, user in ((given, side), (outs, own)):
        for v in tensors:
            if isinstance(v, Tensor) and v.is_cuda:
                v.record_stream(user)
