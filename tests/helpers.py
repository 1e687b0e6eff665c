"""What the generated tests share: cases of an op at a dtype, float64 references, plain calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic import dispatch, numerics, policies, registry
from tensorlogic.op import OPS, Op

registry.ready("cuda" if torch.cuda.is_available() else "cpu")
PUBLIC = sorted(name for name, op in OPS.items() if not op.internal)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cast(args: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The case on the device under test, its floating tensors in `dtype`."""

    def moved(a: Tensor) -> Tensor:
        made = torch.empty_strided(
            a.shape, a.stride(), dtype=dtype if a.is_floating_point() else a.dtype, device=DEVICE
        )
        return made.copy_(a)

    return [moved(a) if isinstance(a, Tensor) else a for a in args]


def cases(op: Op, dtype: torch.dtype) -> list[list[Any]]:
    """All example cases of an op."""
    torch.manual_seed(7)
    return [cast(case, dtype) for case in op.cases()]


def full(op: Op, case: Sequence[Any], save: bool = False) -> list[Any]:
    """Op-level arguments."""
    return [*case, save] if op.gradient is not None else list(case)


def call(op: Op, case: Sequence[Any], force: str | None = None) -> Tensor:
    """One public-like call through the mechanism, with a forced candidate or as the selector likes."""
    if force is None:
        return dispatch.call(op, tuple(case))
    with tensorlogic.policy(force=force):
        return dispatch.call(op, tuple(case))


def reference(op: Op, case: Sequence[Any]) -> Tensor:
    """The first output of the float64 reference."""
    wide = [numerics.wide(a).clone() if isinstance(a, Tensor) else a for a in full(op, case)]
    outs = op.reference(*wide)
    return outs[0]


def eager(op: Op, case: Sequence[Any]) -> Tensor:
    """The first output of the same arithmetic in the case's own dtype."""
    copies = [a.clone() if isinstance(a, Tensor) else a for a in full(op, case)]
    fn = op.baseline or op.reference
    return fn(*copies)[0]


def runnable(op: Op, case: Sequence[Any], id: str, save: bool = False) -> bool:
    """Whether a candidate admits this case here."""
    key = op.key(full(op, case, save), "forward" if save else "inference")
    candidate = op.candidates[id]
    return candidate.available(key.device) is None and candidate.supports(key) is None


__all__ = [
    "FLOATS",
    "PUBLIC",
    "call",
    "cases",
    "cast",
    "eager",
    "full",
    "policies",
    "reference",
    "runnable",
]


def far_rows(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of logits far from 0, all alike or in part, and targets, whose smoothed losses are small or finite all the same."""
    largest = torch.finfo(dtype).max
    x, t = torch.randn(7, columns).to(dtype), torch.arange(7) % columns
    x[0], x[1] = -largest, largest
    x[2, columns // 2 :] = -largest
    t[3], x[3, columns // 2 :] = columns - 1, -largest
    x[4] += largest / 8 if dtype == torch.float16 else 1e6
    x[5], x[5, 0], t[5] = -largest, largest, 1  # more than the type holds
    x[6, 1:], t[6] = float("-inf"), 0
    return x, t


def guessed_best(monkeypatch: pytest.MonkeyPatch, op: Op, id: str, device: torch.device) -> None:
    """A candidate that keys nobody has measured take: it is expected to be ten times as fast as PyTorch."""
    registry.ready(device.type)
    likely = replace(op.candidates[id], guess=lambda key: 0.1)
    monkeypatch.setitem(op.candidates, id, likely)
