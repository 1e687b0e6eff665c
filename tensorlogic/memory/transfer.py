"""Transfers of ordinary memory to and from a GPU through a bounded pool of pinned buffers, several chunks in flight."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor

from ..core import argument_checks
from ..system import process
from .pinned_buffers import LEAST, STATS, stager

# by what callers name a device: one call of C
_QUICK: dict[str | torch.device, Callable[[Any], Tensor | None]] = {}
# PyTorch says what a child cannot do; the short way would not
process.in_children(_QUICK.clear)


@lru_cache
def _worker() -> ThreadPoolExecutor:
    """Where asynchronous transfers run."""
    return ThreadPoolExecutor(2, "tensorlogic-staging")


class Transfer:
    """A transfer under way: `wait()` gives the tensor, and orders the current stream behind the copy where it is on a GPU."""

    def __init__(self, result: Tensor, part: Any = None, kept: Any = None) -> None:
        self._result, self._part, self._kept = result, part, kept
        self._dtype = result.dtype

    def then(self, dtype: torch.dtype) -> None:
        """Have the tensor converted when it is there."""
        self._dtype = dtype

    def done(self) -> bool:
        """True when nothing is left to wait for on this side."""
        return not isinstance(self._part, Future) or self._part.done()

    def wait(self) -> Tensor:
        """The tensor, usable on the current stream (on a GPU) or at once (on a CPU)."""
        if isinstance(self._part, Future):
            self._part = self._part.result()
        self._kept = None
        if self._part is not None:
            stream = torch.cuda.current_stream(self._result.device)
            stream.wait_event(self._part)
            self._result.record_stream(stream)
        if self._result.dtype is not self._dtype:
            self._result = self._result.to(self._dtype)
            self._part = None if self._part is None else stream.record_event()
        return self._result


class OffersDLPack(Protocol):
    """What shares its memory by DLPack, such as arrays of other libraries."""

    def __dlpack__(self) -> Any: ...


class OffersArray(Protocol):
    """What makes a NumPy array of itself."""

    def __array__(self) -> Any: ...


TensorLike: TypeAlias = Tensor | OffersDLPack | OffersArray
Place: TypeAlias = torch.device | str
Dtype: TypeAlias = torch.dtype | None


def as_tensor(value: Any, name: str = "tensor") -> Tensor:
    """A tensor of what offers DLPack, NumPy's interface or `__array__`, sharing memory where it allows."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value if value.flags.writeable else value.copy())
        except (TypeError, ValueError) as problem:
            raise type(problem)(
                f"{name} is ndarray of {value.dtype} with shape {list(value.shape)} and strides {list(value.strides)}, of "
                f"which PyTorch makes no tensor ({problem}); an array of numbers in this machine's byte order, none of "
                f"whose strides is negative, is required: array.astype(numpy.float32), numpy.ascontiguousarray(array)"
            ) from problem
    if hasattr(value, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(value)
    if hasattr(value, "__array__"):
        return as_tensor(np.asarray(value), name)
    raise TypeError(
        f"{name} is {type(value).__name__}; a torch.Tensor, a NumPy array, or an object with __dlpack__ or __array__ "
        f"is required: wrap data with torch.as_tensor"
    )


def shared(t: Tensor) -> bool:
    """Whether a NumPy array may write to this memory unseen: PyTorch lets storages that it shares with one grow no more."""
    return t.device.type == "cpu" and not t.untyped_storage().resizable()


@overload
def to(
    tensor: TensorLike, device: Place, dtype: Dtype = None, *, asynchronous: Literal[False] = False
) -> Tensor: ...
@overload
def to(
    tensor: TensorLike, device: Place, dtype: Dtype = None, *, asynchronous: Literal[True]
) -> Transfer: ...
@overload
def to(
    tensor: TensorLike, device: Place, dtype: Dtype = None, *, asynchronous: bool
) -> Tensor | Transfer: ...
def to(
    tensor: TensorLike,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    *,
    asynchronous: bool = False,
) -> Tensor | Transfer:
    """Move a tensor to a device, ordinary memory to and from a GPU through pinned buffers with several chunks in flight.

    A conversion happens before the transfer where it makes fewer bytes, else after it. Pinned or small memory, other
    devices and tensors that record gradients take PyTorch's own `Tensor.to`.

    Args:
        tensor: any shape, dtype and device; NumPy arrays and objects with `__dlpack__` or `__array__` are taken without a copy.
        device: where to. dtype: of the result; the tensor's own if None.
        asynchronous: return a `Transfer` at once; its `wait()` gives the tensor. Until then leave the source alone.

    Returns:
        The tensor itself where nothing is to be done, else a new one with the same shape and strides (contiguous where
        the source's elements do not lie together).

    Raises:
        TypeError: no tensor and nothing that offers one, or device or dtype is none. ValueError: no device of that name.
            RuntimeError: it is not there.

    Example:
        >>> import numpy as np, torch, tensorlogic
        >>> tensorlogic.to(np.ones(3, dtype=np.float32), "cpu", torch.float16)
        tensor([1., 1., 1.], dtype=torch.float16)
        >>> tensorlogic.to(torch.ones(2), "cpu", asynchronous=True).wait()
        tensor([1., 1.])
    """
    quick = _QUICK.get(device) if isinstance(device, (str, torch.device)) else None
    if quick is not None and dtype is None and asynchronous is False:
        moved = quick(tensor)
        if moved is not None:
            STATS.transfers += 1
            STATS.bytes_moved += moved.nbytes
            return moved
    source, place = as_tensor(tensor, "to: tensor"), present(device, "to")
    argument_checks.flag("to", "asynchronous", asynchronous)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"to: dtype is {dtype!r}; a torch.dtype such as torch.float16, or None, is required"
        )
    wanted = source.dtype if dtype is None else dtype
    found = _staged(source, place, wanted, asynchronous)
    if found is None:
        found = source.to(place, wanted)
    elif quick is None and isinstance(found, Tensor) and isinstance(device, (str, torch.device)):
        made = stager((found if source.is_cpu else source).device.index, source.is_cpu).mover()
        if made is not None:
            _QUICK[device] = made
    if not asynchronous:
        return found
    if isinstance(found, Transfer):
        return found
    stream = torch.cuda.current_stream(found.device) if found.is_cuda else None
    return Transfer(found, None if stream is None else stream.record_event())


def present(device: torch.device | str, fn: str) -> torch.device:
    """The device; raises ValueError where there is no such kind, RuntimeError where it is a GPU and there is none."""
    place = argument_checks.device(fn, device)
    if place.type == "cuda" and not available():
        raise RuntimeError(
            f"{fn}: device is {str(device)!r}, which is not there: PyTorch finds no CUDA device; use 'cpu'"
        )
    return place


def _staged(
    source: Tensor, place: torch.device, dtype: torch.dtype, asynchronous: bool
) -> Tensor | Transfer | None:
    """What was moved through buffers, or is being moved; None where PyTorch's own transfer is as good."""
    up, kind = source.is_cpu, place.type
    if kind != ("cuda" if up else "cpu") or not (up or source.is_cuda):
        return None
    if (source.requires_grad and torch.is_grad_enabled()) or type(source) not in _PLAIN:
        return None
    nbytes = source.numel() * source.element_size()
    if nbytes < LEAST or source.layout is not torch.strided or (up and source.is_pinned()):
        return None
    if not torch.cuda.is_initialized():
        torch.cuda.init()
    if torch.cuda.is_current_stream_capturing():
        return None
    if source.requires_grad:
        source = source.detach()
    if source.is_conj() or source.is_neg():
        source = source.resolve_conj().resolve_neg()
    if dtype is not source.dtype and dtype.itemsize < source.element_size():
        source = source.to(dtype)
        nbytes = source.numel() * source.element_size()
    if not (source.is_contiguous() or _dense(source)):
        source = source.contiguous()
    asked, here = place.index if up else source.device.index, torch._C._cuda_getDevice()
    index = here if asked is None else asked
    STATS.transfers += 1
    STATS.bytes_moved += nbytes
    if index == here and not asynchronous:
        moved = _moved(source, place, index, up)
    else:
        with torch.cuda.device(index):
            moved = _moved(source, place, index, up, asynchronous)
    if isinstance(moved, Transfer):
        moved.then(dtype)
        return moved
    return moved if moved.dtype == dtype else moved.to(dtype)


def _moved(source: Tensor, place: torch.device, index: int, up: bool, later: bool = False) -> Any:
    """On the device of that index, which is the current one."""
    mover, target = stager(index, up), _fresh(source, place)
    if not later:
        mover.here(source, target, up)
        return target
    ready = torch.cuda.Event()
    ready.record()
    for t in (source, target):
        # its memory must not be given away before this stream is done with it
        if t.is_cuda:
            t.record_stream(mover.stream)
    return Transfer(target, _worker().submit(mover.aside, source, target, up, ready), source)


_PLAIN = (Tensor, torch.nn.Parameter)


def _dense(t: Tensor) -> bool:
    """Whether the elements lie together in some order of the dimensions."""
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True


def _fresh(like: Tensor, place: torch.device) -> Tensor:
    """Memory of the same layout there; on a CPU from the pool, whose pages are there already."""
    from tensorlogic.native import cpu_library

    if place.type == "cpu" and like.is_contiguous() and cpu_library.available() is None:
        made: Tensor = cpu_library.op("empty")(like.shape, like.dtype)
        return made
    return torch.empty_like(like, device=place)  # dense, as it lies


@lru_cache
def available(kind: str = "cuda") -> bool:
    """Whether a device of this kind is there."""
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
