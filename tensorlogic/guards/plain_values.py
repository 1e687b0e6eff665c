"""Which values are compared as they are, and which objects are nothing but their attributes."""

from __future__ import annotations

from enum import Enum
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
ROUNDED = (float, complex)  # whose equality knows no sign of zero
HEAP = 1 << 9  # the flag of classes that Python code has made
STATE = ("__reduce__", "__reduce_ex__", "__getstate__", "__deepcopy__", "__copy__", "__new__")


def plain(kind: type) -> bool:
    return kind in PLAIN or issubclass(kind, (Enum, type))


def plain_object(kind: type) -> bool:
    """Whether all that an object of a class holds is in its attributes, so that another one can be made of those."""
    bases = kind.__mro__[:-1]
    return (
        all(b.__flags__ & HEAP and not vars(b).get("__slots__") for b in bases)
        and not any(name in vars(b) for b in bases for name in STATE)
        and not any(map(_hides, (v for b in bases for v in vars(b).values())))
        and kind.__dictoffset__ != 0
        and kind not in pytree.SUPPORTED_NODES
        and not issubclass(kind, nn.Module)
    )


def _hides(value: Any) -> bool:
    """Whether what stands in a class may keep an attribute's value elsewhere."""
    return hasattr(type(value), "__set__") and not isinstance(value, (property, GetSetDescriptorType))  # fmt: skip
