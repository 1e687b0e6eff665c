"""Everything that a call of a model gives or changes, as it is and in higher precision: what the model in pieces is held to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import check
from .copies import fresh
from .graphs import FAILURES
from .trace import first_line


def random_state() -> list[Any]:
    """Where PyTorch's default generators stand."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return [s.tolist() for s in states]


def outcome(
    call: Callable[..., Any],
    holder: nn.Module,
    training: bool,
    args: Any,
    kwargs: Any,
    dtype: Any = None,
) -> list[list[Tensor]]:
    """Everything that a call gives or changes: outputs, its inputs afterwards, gradients of parameters in training."""
    given = fresh(args, kwargs, dtype)
    outs = check.tensors_in(call(*given[0], **given[1]))
    after = check.tensors_in(given)
    wrt = [p for p in holder.parameters() if p.requires_grad]
    graded = [o for o in outs if o.requires_grad]
    grads = check.gradients(graded, wrt) if training and wrt and graded else []
    return [outs, after, grads]


def widely(model: nn.Module, training: bool, args: Any, kwargs: Any) -> list[list[Tensor]] | str:
    """`outcome` in higher precision, float32 where halves cannot be float64; where the model's own code insists on its
    dtype, what it says."""
    tensors = [*model.parameters(), *model.buffers(), *check.tensors_in((args, kwargs))]
    half = all(t.element_size() <= 2 for t in tensors if t.is_floating_point())
    for dtype in dict.fromkeys((check.wide_dtype(tensors), *(torch.float32,) * half)):
        twin = copy.deepcopy(model).to(dtype)
        try:
            return outcome(twin, twin, training, args, kwargs, dtype)
        except FAILURES as problem:
            why = f"in {dtype}: {first_line(problem)}"
    return why
