"""Warm keys: a policy's entries, each a check of the tensors and what runs where it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import policy
from ..core.op import Op

Run = Callable[..., Any]
MOST_ENTRIES = 8192  # warm keys of one policy


def keep(chosen: policy.Policy, where: Any, check: Callable[..., bool], run: Run) -> None:
    """Make `run` serve the calls under `where` that pass `check`."""
    entries = chosen.entries
    if len(entries) >= MOST_ENTRIES:  # shapes without end: start again rather than grow
        entries.clear()
    entries.setdefault(where, []).append((check, run))


def present(op: Op, args: Sequence[Any]) -> list[Tensor]:
    return [a for p, a in zip(op.params, args, strict=False) if p.is_tensor and a is not None]


def device_of(args: Sequence[Any]) -> torch.device:
    return next(a.device for a in args if isinstance(a, Tensor))
