"""Cached derivatives (packed, widened copies) of parameters and of tensors declared constant; never a stale one."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..system import process

T = TypeVar("T", bound=Tensor)

_LOCK = threading.RLock()
process.renew_after_fork(globals(), _LOCK=threading.RLock)
_CONSTANTS: dict[int, weakref.ref[Tensor]] = {}
_steps = 0  # of training that are pretended


def constant(tensor: T) -> T:
    """Declare that `tensor` is used like a parameter: what is derived from it may be kept until it changes.

    Args:
        tensor: any shape, dtype and device; changes PyTorch can see are noticed, see `invalidate` for the others.

    Returns:
        The same tensor.

    Raises:
        TypeError: not a tensor.

    Example:
        >>> import torch, tensorlogic
        >>> weight = tensorlogic.constant(torch.ones(4, 4))
    """
    _check("constant", tensor)
    key = id(tensor)
    _CONSTANTS[key] = weakref.ref(tensor, lambda _: _CONSTANTS.pop(key, None))
    return tensor


def _check(fn: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{fn}: tensor is {type(tensor).__name__}; a torch.Tensor is required")


def is_constant(tensor: Tensor) -> bool:
    """True for parameters and declared constants whose changes can be noticed (inference tensors have no version)."""
    if tensor.is_inference():
        return False
    if type(tensor) is torch.nn.Parameter:
        return True
    known = _CONSTANTS.get(id(tensor))
    return known is not None and known() is tensor


@dataclass
class _Entry:
    owner: weakref.ref[Tensor]
    stamp: tuple[Any, ...]
    value: Any
    nbytes: int


class DerivedCache:
    """What was computed from constant tensors, least recently used out first above `max_bytes`."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.hits = self.misses = 0
        self._entries: OrderedDict[tuple[int, str], _Entry] = OrderedDict()

    def get(
        self, tensor: Tensor, kind: str, make: Callable[[Tensor], Any], nbytes: Callable[[Any], int]
    ) -> Any:
        """`make(tensor)`, kept while the tensor is the same object with the same storage, version, dtype and strides."""
        key, stamp = (id(tensor), kind), _stamp(tensor)
        with _LOCK:
            entry = self._entries.get(key)
            if entry and _current(entry, tensor, stamp) and entry.value is not None:
                self._entries.move_to_end(key)
                self.hits += 1
                return entry.value
        with torch.no_grad():
            value = make(tensor.detach())
        if _stamp(tensor) != stamp:  # written to by another thread meanwhile
            return value
        with _LOCK:
            self.misses += 1
            self._drop(key)
            size = nbytes(value)
            if size <= self.max_bytes:
                owner = weakref.ref(tensor, lambda _: self._drop(key))
                self._entries[key] = _Entry(owner, stamp, value, size)
                self.nbytes += size
                while self.nbytes > self.max_bytes:
                    self._drop(next(iter(self._entries)))
        return value

    def settled(
        self,
        tensor: Tensor,
        kind: str,
        make: Callable[[Tensor], Any],
        bytes_of: Callable[[Tensor], int],
    ) -> Any | None:
        """As `get` from the second look at a constant tensor that has not changed since the first.

        None before, so that weights in training are not prepared anew for every step, and where `bytes_of(tensor)` more would push
        others out: weights that do not fit together would be prepared anew in every round.
        """
        key, stamp = (id(tensor), kind), _stamp(tensor)
        with _LOCK:
            entry = self._entries.get(key)
            known = _current(entry, tensor, stamp)
            if entry is not None and known and entry.value is not None:
                self._entries.move_to_end(key)
                self.hits += 1
                return entry.value
            if not known:
                self._drop(key)
            nbytes = bytes_of(tensor)
            if self.nbytes + nbytes > self.max_bytes or not is_constant(tensor):
                return None
            if not known:
                owner = weakref.ref(tensor, lambda _: self._drop(key))
                self._entries[key] = _Entry(owner, stamp, None, 0)
                return None
        return self.get(tensor, kind, make, lambda _: nbytes)

    def holds(self, tensor: Tensor, kind: str) -> bool:
        """Whether `get` would make nothing anew."""
        with _LOCK:
            entry = self._entries.get((id(tensor), kind))
            known = entry and _current(entry, tensor, _stamp(tensor))
            return bool(known and entry and entry.value is not None)

    def _drop(self, key: tuple[int, str]) -> None:
        with _LOCK:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self.nbytes -= entry.nbytes

    def invalidate(self, tensor: Tensor | None = None) -> None:
        """Forget what was derived from `tensor`, or everything."""
        with _LOCK:
            held = list(self._entries.items())
            for key in [k for k, e in held if tensor is None or e.owner() is tensor]:
                self._drop(key)

    def names(self) -> set[tuple[int, str]]:
        """What is held now, to be given to `only` later."""
        with _LOCK:
            return set(self._entries)

    def only(self, names: set[tuple[int, str]]) -> None:
        """Forget what is not among these: experiments leave copies that nobody may need."""
        with _LOCK:
            for key in self._entries.keys() - names:
                self._drop(key)

    def nbytes_on(self, device: str) -> int:
        """Bytes that belong to tensors on this type of device."""
        with _LOCK:
            owners = [(e.owner(), e.nbytes) for e in list(self._entries.values())]
        return sum(n for t, n in owners if t is not None and t.device.type == device)

    def nbytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes that belong to these tensors."""
        owners = {id(t) for t in tensors}
        with _LOCK:
            held = list(self._entries.items())
        return sum(e.nbytes for (owner, _), e in held if owner in owners)

    def configure(self, max_bytes: int) -> None:
        """Bound the cache; 0 switches it off."""
        if max_bytes < 0:
            raise ValueError(
                f"max_bytes is {max_bytes}; it must be at least 0 (0 switches the cache off)"
            )
        with _LOCK:
            self.max_bytes = max_bytes
            while self.nbytes > self.max_bytes:
                self._drop(next(iter(self._entries)))


def _current(entry: _Entry | None, tensor: Tensor, stamp: tuple[Any, ...]) -> bool:
    return entry is not None and entry.owner() is tensor and entry.stamp == stamp


def _stamp(tensor: Tensor) -> tuple[Any, ...]:
    where = (tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride())
    return (*where, _steps)


def pretend_step() -> None:
    """Every weight counts as changed, as after an optimizer's step, until `end_pretending`: timed training shall make its copies."""
    global _steps
    _steps += 1


def end_pretending() -> None:
    """What was derived before the first `pretend_step` is valid again."""
    global _steps
    _steps = 0


CACHE = DerivedCache()


def invalidate(tensor: Tensor) -> None:
    """Forget everything derived from `tensor`: call it after writes PyTorch cannot see (through `.data` or a NumPy alias).

    Optimised models compute anew what depends on it, too, and for PyTorch it counts as written to.

    Args:
        tensor: a parameter or a tensor declared constant; any shape, dtype and device.

    Raises:
        TypeError: not a tensor.

    Example:
        >>> import torch, tensorlogic
        >>> weight = torch.nn.Parameter(torch.ones(4, 4))
        >>> weight.data.mul_(2) is not None
        True
        >>> tensorlogic.invalidate(weight)
    """
    _check("invalidate", tensor)
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)  # programs look at it, and backward passes
    CACHE.invalidate(tensor)
