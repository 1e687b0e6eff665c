"""Whether a graph's gradients are the model's: tracing sees what a model computes, not the gradients that it makes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...cuda_graphs.captured_graph import FAILURES
from ...guards.errors import Untraceable, first_line
from ...guards.tensor_tree import steps_of
from ..trace import graph_facts
from ..trace.model_copies import fresh, sharing, undisturbed, unwritten
from ..trace.traced_graph import Trace
from . import equivalence
from .whole_model import expected_inputs

# whose functions have the gradients of what they compute
OWN = ("tensorlogic", "torch.utils.checkpoint")
HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
SEED = 20


class _Hooked(TorchFunctionMode):
    """Notes hooks that a forward pass puts on tensors."""

    name = ""

    def __torch_function__(
        self, fn: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(fn, "__name__", "") in HOOKS:
            self.name = fn.__name__
        return fn(*args, **(kwargs or {}))


def written_by_hand(outs: Sequence[Tensor]) -> str:
    """A torch.autograd.Function that these outputs went through, by its name; "" where there is none."""
    steps = (n for n in steps_of(outs) if isinstance(n, torch.autograd.function.BackwardCFunction))
    kinds = (getattr(type(node), "_forward_cls", type(node)) for node in steps)
    return next((str(k.__qualname__) for k in kinds if not k.__module__.startswith(OWN)), "")


def opaque(graph: fx.GraphModule) -> str:
    """A call of one of Dynamo's graphs whose gradient is not that of what it computes, by its name; "" where there is none."""
    graphs = (m.graph for m in graph.modules() if isinstance(m, fx.GraphModule))
    names = (str(n.target) for g in graphs for n in g.nodes if n.op == "call_function")
    return next((n for n in names if "autograd_function" in n), "")


def same(traced: Trace, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Compare the graph's gradients with those of the model's own code, on the example, with the same random numbers.

    Raises:
        Untraceable: they differ, or may for other numbers. Nothing is left changed.
    """
    twin = sharing(model, buffers=False)
    names = [n for n, (_, t) in traced.state.items() if t.requires_grad]
    with undisturbed(), unwritten(twin):
        given = fresh(args, kwargs)
        inputs = [v for v in pytree.tree_leaves(given) if isinstance(v, Tensor) and v.requires_grad]
        torch.manual_seed(SEED)
        try:
            with _Hooked() as hooks:
                outs = _recorded(twin(*given[0], **given[1]))
            wrt = [*(traced.state[n][1] for n in names), *inputs]
            theirs = _gradients(outs, wrt)
        except FAILURES as problem:  # gradients that the model's own code does not allow
            raise Untraceable(f"the model's gradients: {first_line(problem)}") from problem
        if name := hooks.name or written_by_hand(outs):
            raise Untraceable(f"the model makes gradients of its own ({name}), which no graph has")
        values = expected_inputs(traced)
        for name, v in zip(traced.inputs, traced.example, strict=True):
            if isinstance(v, Tensor):
                values[name] = v.detach().clone().requires_grad_(v.requires_grad)
        asking = [values[n] for n in traced.inputs if isinstance(values[n], Tensor)]
        torch.manual_seed(SEED)
        with torch.enable_grad():
            made = _recorded(equivalence.run(traced, values, dropping=True))
        wrt = [*(values[n] for n in names), *(v for v in asking if v.requires_grad)]
        ours = _gradients(made, wrt)
    if not equivalence.close(made, outs):
        if _draws(traced.graph):  # in another order, so that nothing can be compared
            return
        raise Untraceable("the graph's outputs are not the model's")
    if not equivalence.close(ours, theirs):
        raise Untraceable("the graph's gradients are not the model's")


def _recorded(value: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor) and v.requires_grad]


def _gradients(outs: Sequence[Tensor], wrt: Sequence[Tensor]) -> list[Tensor]:
    """Of each output, weighted by a wave, with respect to all; zeros where nothing is reached."""
    if not outs or not wrt:
        return []
    found = torch.autograd.grad(outs, wrt, graph_facts.seeds(outs), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wrt, strict=True)]


def _draws(graph: fx.Graph) -> bool:
    return any(
        equivalence.draws(n) or equivalence.dropping(n.target) is not None for n in graph.nodes
    )
