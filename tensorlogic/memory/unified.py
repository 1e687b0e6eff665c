"""`unified`: one tensor with copies on a CPU and on devices, each moved only when another one is newer."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from . import transfer


@dataclass(frozen=True)
class UnifiedStats:
    """Transfers of one unified tensor: how many, their bytes, and the bytes that a valid copy has saved."""

    transfers: int
    bytes_moved: int
    bytes_saved: int


# To a type checker it is a tensor, as our functions take it for one.
if TYPE_CHECKING:
    _Taken = Tensor
else:
    _Taken = object


class Unified(_Taken):
    """A tensor that is wherever it is needed. Our functions take it; their results are unified, and stay where they were made."""

    def __init__(self, value: Any, made: bool = False) -> None:
        """`made`: the value is a result of ours, whose memory may look like a NumPy array's."""
        tensor = transfer.as_tensor(value, "unified: tensor")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise TypeError(
                f"unified: tensor is {'nested' if tensor.is_nested else tensor.layout}; a dense tensor is required: "
                f"tensor.to_dense() or tensor.to_padded_tensor(0)"
            )
        self._home = tensor.device
        self._copies: dict[torch.device, tuple[Tensor, int]] = {}
        #: Memory that others can write unseen: a NumPy array given or handed out, while it lives.
        self._aliases: list[weakref.ref[Any]] = []
        self._frozen = _frozen(value)
        self._foreign = not isinstance(value, Tensor) and not self._frozen
        self._transfers = self._moved = self._saved = 0
        self._newest(tensor)
        #: Whether arrays of others would show: not once we have handed one out ourselves.
        self._telling = not (made and transfer.shared(tensor))

    def _newest(self, tensor: Tensor) -> None:
        self._home = tensor.device
        self._copies = {tensor.device: (tensor, _version(tensor))}

    def _check(self) -> None:
        """Find the copy that was written to since it was last looked at: it is the only one that is valid."""
        changed = [t for t, version in self._copies.values() if _version(t) != version]
        if len(changed) > 1:
            raise RuntimeError(
                f"unified: the copies on {' and '.join(str(t.device) for t in changed)} were both written to since they "
                f"were last equal; write to one, read the other through .on(device)"
            )
        if changed:
            self._newest(changed[0])

    @property
    def _exposed(self) -> bool:
        """Whether somebody may write to the CPU's copy without PyTorch seeing it."""
        self._aliases = [a for a in self._aliases if a() is not None]
        cpu = self._copies.get(torch.device("cpu")) if self._telling else None
        alien = cpu is not None and transfer.shared(cpu[0]) and not self._frozen
        return self._foreign or bool(self._aliases) or alien

    def on(self, device: torch.device | str) -> Tensor:
        """The tensor on a device, moved only if no valid copy is there.

        Writes by PyTorch's in-place operations are seen. While a NumPy array of this memory lives, given or handed out, the
        CPU's copy counts as written to at every call; so it does once somebody has taken an array of the tensor. Writes through
        `.data` or DLPack are not seen: call `invalidate`.
        """
        place = _place(device)
        self._check()
        cpu = torch.device("cpu")
        if self._exposed and cpu in self._copies and place != cpu:
            self._newest(self._copies[cpu][0])
        found = self._copies.get(place)
        source = self._copies[self._home][0]
        nbytes = source.numel() * source.element_size()
        if found is not None:
            if place != self._home:
                self._saved += nbytes
            return found[0]
        copy: Tensor = transfer.to(source, place)
        self._transfers += 1
        self._moved += nbytes
        self._copies[place] = (copy, _version(copy))
        if place.type == "cpu":
            self._telling = not transfer.shared(copy)
        return copy

    def has(self, device: torch.device | str) -> bool:
        """Whether a valid copy is on the device."""
        self._check()
        place = _place(device)
        return place in self._copies and not (self._exposed and place.type != "cpu")

    def invalidate(self, device: torch.device | str = "cpu") -> None:
        """Declare that the copy on `device` was written to in a way that PyTorch cannot see: the others are forgotten."""
        self._newest(self.on(device))

    def numpy(self) -> np.ndarray[Any, Any]:  # type: ignore[override]
        """The CPU's memory as an array, without a copy; while the array lives, copies elsewhere are made anew at every use."""
        tensor = self.on("cpu")
        self._telling &= transfer.shared(tensor)
        array = tensor.detach().numpy()
        self._newest(tensor)
        self._aliases.append(weakref.ref(array))
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        if copy or (dtype is not None and np.dtype(dtype) != array.dtype):
            return np.array(array, dtype=dtype)
        return array

    def __dlpack__(self, **options: Any) -> Any:
        self._foreign = True  # whoever takes it may write to it at any time
        return self.on(self._home).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.on(self._home).__dlpack_device__()

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """As the tensor's."""
        return self._copies[self._home][0].shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """As the tensor's."""
        return self._copies[self._home][0].dtype

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where valid copies are, the newest first."""
        self._check()
        return (self._home, *(d for d in self._copies if d != self._home))

    @property
    def stats(self) -> UnifiedStats:
        """Transfers so far."""
        return UnifiedStats(self._transfers, self._moved, self._saved)

    def __repr__(self) -> str:  # type: ignore[override]
        where = ", ".join(str(d) for d in self.devices)
        return f"unified({self.dtype}, {list(self.shape)}, on {where})"


def unified(tensor: transfer.TensorLike) -> Unified:
    """A tensor with copies on CPU and devices, of which only stale ones are moved; our functions take it as an argument.

    Args:
        tensor: any tensor, NumPy array, or object with `__dlpack__` or `__array__`. It is not copied: writes to a tensor by
            PyTorch's in-place operations are seen; a NumPy array that can be written to is moved anew at every use. One
            that cannot be written to is copied once: what its base becomes later is not seen.

    Returns:
        An object with `on(device)`, `has(device)`, `invalidate(device)`, `numpy()`, `devices`, `stats`.

    Raises:
        TypeError: no tensor and nothing that offers one, or one that is sparse or nested.

    Example:
        >>> import torch, tensorlogic
        >>> x = tensorlogic.unified(torch.ones(2, 2))
        >>> y = tensorlogic.matmul(x, x)
        >>> y.on("cpu")
        tensor([[2., 2.],
                [2., 2.]])
    """
    return Unified(tensor)


def _place(device: torch.device | str) -> torch.device:
    place = transfer.present(device, "unified")
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def _frozen(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not value.flags.writeable


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version
