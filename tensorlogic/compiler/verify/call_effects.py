"""Everything that a call of a model gives or changes, as it is and in higher precision: what the model in pieces is held to."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...cuda_graphs.captured_graph import FAILURES
from ...guards import tensor_tree
from ...guards.errors import first_line
from ..trace import widening
from ..trace.model_copies import fresh
from . import equivalence


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
    outs = tensor_tree.tensors_in(call(*given[0], **given[1]))
    after = tensor_tree.tensors_in(given)
    wrt = [p for p in holder.parameters() if p.requires_grad]
    graded = [o for o in outs if o.requires_grad]
    grads = equivalence.gradients(graded, wrt) if training and wrt and graded else []
    return [outs, after, grads]


class _Wide(TorchFunctionMode):
    """float64 wherever code asks for float32."""

    def __torch_function__(
        self, fn: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if fn is Tensor.float:
            fn, args = Tensor.to, (args[0], torch.float64, *args[1:])
        args, kwargs = pytree.tree_map_only(
            torch.dtype,
            lambda dtype: torch.float64 if dtype is torch.float32 else dtype,
            (tuple(args), dict(kwargs or {})),
        )
        return fn(*args, **kwargs)


def widely(model: nn.Module, training: bool, args: Any, kwargs: Any) -> list[list[Tensor]] | str:
    """`outcome` in higher precision, float32 where halves cannot be float64; where the model's own code insists on its
    dtype, what it says."""
    tensors = [*model.parameters(), *model.buffers(), *tensor_tree.tensors_in((args, kwargs))]
    floats = [t for t in tensors if t.is_floating_point()]
    ways: list[tuple[torch.dtype, Any]] = [(widening.wide_dtype(tensors), contextlib.nullcontext())]
    if all(t.element_size() <= 2 for t in floats):
        ways.append((torch.float32, contextlib.nullcontext()))
    elif ways[0][0] is torch.float64 and all(t.dtype is torch.float32 for t in floats):
        ways.append((torch.float64, _Wide()))  # of what is float32 already, code may ask it again
    for dtype, mode in ways:
        twin = copy.deepcopy(model).to(dtype)
        try:
            with mode:
                return outcome(twin, twin, training, args, kwargs, dtype)
        except FAILURES as problem:
            why = f"in {dtype}: {first_line(problem)}"
    return why
