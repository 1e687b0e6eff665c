"""Which products of a call a GPU can judge by itself, and where in the call they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.candidate import Outputs
from ..core.dtypes import DTYPES
from ..core.key import Key
from ..core.op import Op
from .error_statistics import Part

WATCHED_ROWS = 1 << 16  # rows and columns together that it judges


@dataclass(frozen=True)
class Place:
    """Where a product's tensors are in a call: which arguments that are not flags, which output."""

    left: int
    right: int
    out: int


def places(op: Op, key: Key, outs: Outputs) -> list[Place]:
    """Those of every product, where all operands are arguments, if laid out differently: found on tensors without memory."""
    assert op.measure is not None
    specs = dict(zip(key.names, key.tensors, strict=True))
    dynamic: list[Any] = [1.0] * len(op.dynamic)
    owners: dict[int, int] = {}
    for i, param in enumerate(op.dynamic):
        s = specs.get(param.name)
        if param.is_tensor:
            dynamic[i] = None
        if s is not None:
            t = torch.empty_strided(s.shape, s.stride, dtype=DTYPES[s.dtype], device="meta")
            dynamic[i], owners[t.untyped_storage()._cdata] = t, i
    found = []
    for o, (part, out) in enumerate(zip(op.measure(*op.full(key, dynamic)), outs, strict=False)):
        if part is None or out is None:
            continue
        operands = (part.left, part.right)
        left, right = (owners.get(t.untyped_storage()._cdata, -1) for t in operands)
        if min(left, right) < 0 or any(t.storage_offset() for t in operands):
            return []
        found.append(Place(left, right, o))
    return found


def plain(
    parts: Sequence[Part | None], outs: Outputs
) -> list[tuple[Tensor, Tensor, Tensor]] | None:
    """(left, right, out) of every part, where all are products of real matrices that nothing was added to."""
    found = []
    for part, out in zip(parts, outs, strict=False):
        if part is None or out is None:
            continue
        left, right = part.left, part.right
        if part.bias is not None or part.residual is not None or part.activation != "none":
            return None
        if left.dim() != 2 or right.dim() != 2 or left.is_complex() or right.is_complex():
            return None
        if not (out.is_contiguous() and out.numel() and left.numel()):
            return None
        found.append((left, right, out.view(left.shape[0], right.shape[1])))
    return found or None


def sited(
    op: Op, key: Key, dynamic: Sequence[Any], outs: Outputs
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], list[Place]] | None:
    """(left, right, out) and the place of every product of a call; None where one is not of matrices that are arguments, or not alone."""
    assert op.measure is not None
    products, found = plain(op.measure(*op.full(key, dynamic)), outs), places(op, key, outs)
    return None if products is None or len(found) != len(products) else (products, found)


def watchable(key: Key) -> bool:
    """Whether a GPU can judge and mend: a product of real matrices of a size it can look at, and nothing around it."""
    tensors = [t for t in key.tensors if t is not None]
    rows = sum(math.prod(t.shape[:-1]) for t in tensors) + tensors[-1].shape[-1]
    return alone(key) and rows < WATCHED_ROWS


def alone(key: Key) -> bool:
    """Whether a call on a GPU is a product of real matrices, and nothing around it."""
    tensors = [t for t in key.tensors if t is not None]
    around = any(
        t is not None and name in ("bias", "residual")
        for name, t in zip(key.names, key.tensors, strict=True)
    )
    return (
        key.device == "cuda"
        and not around
        and dict(key.flags).get("activation", "none") == "none"
        and all(len(t.shape) >= 2 and t.dtype[0] != "c" for t in tensors)
    )


EAGER_RATE = {"cpu": 5e4, "cuda": 5e7}  # operations a microsecond in float64, until some were timed
EAGER_HOST_US = {False: 14.0, True: 40.0}  # of a caller's thread, by whether operands are widened


def eager_us(key: Key, flops: float) -> float:
    """What so many operations are expected to take in float64: on a GPU at least what a caller's thread does."""
    us = 8 + flops / EAGER_RATE.get(key.device, EAGER_RATE["cpu"])
    if key.device != "cuda":
        return us
    narrow = any(t is not None and t.dtype not in ("f64", "c128") for t in key.tensors)
    return max(us, EAGER_HOST_US[narrow])
