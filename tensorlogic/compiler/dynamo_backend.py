"""The torch.compile backend "tensorlogic": the same rewrites on Dynamo's graphs, what is left to Inductor or to PyTorch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from ..guards.errors import first_line
from ..ops.attention.rewrite import RULES as ATTENTION
from ..ops.dropout_linear.rewrite import EVALUATION
from ..ops.dropout_linear.rewrite import RULES as DROPOUT
from ..ops.gelu_linear.rewrite import RULES as GELU_LINEAR
from ..ops.layer_norm_linear.rewrite import RULES as LAYER_NORM_LINEAR
from ..ops.linear.rewrite import RULES as LINEAR
from ..ops.linear_batch_norm_relu.rewrite import RULES as BATCH_NORM
from ..ops.pointwise.rewrite import ACTIVATIONS
from ..ops.softmax_cross_entropy.rewrite import RULES as CROSS_ENTROPY
from .rewrite.matcher import rewrite
from .trace.graph_facts import writes
from .verify.gradients import opaque

LOG = logging.getLogger("tensorlogic")
LEFTOVERS = ("inductor", "eager")
# products and attention: element-wise chains are what Inductor does well
RULES = (
    *ATTENTION, *CROSS_ENTROPY, *EVALUATION, *ACTIVATIONS, *LINEAR[:4], *DROPOUT, *BATCH_NORM, *LINEAR[4:],
    *LAYER_NORM_LINEAR, *GELU_LINEAR,
)  # fmt: skip
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    NotImplementedError,
    AttributeError,
    AssertionError,
    # gradient checkpointing, whose regions make_fx does not keep
    KeyError,
)


def backend(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs; found by name through PyTorch's entry point, so nothing need be imported.

    Args:
        graph: PyTorch calls, parameters among its inputs. inputs: example (fake) tensors and symbolic sizes.
        options: {"leftovers": "inductor" | "eager"}: who compiles what no rule replaces; "inductor" by default.

    Returns:
        A function of the graph's inputs, with gradients; shapes may be dynamic.

    Raises:
        ValueError: unknown options.

    Example:
        >>> import torch
        >>> fast = torch.compile(torch.nn.Linear(4, 4), backend="tensorlogic", options={"leftovers": "eager"})
        >>> fast(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    given = dict(options or {})
    leftovers = given.pop("leftovers", "inductor")
    if given or leftovers not in LEFTOVERS:
        raise ValueError(
            f"backend tensorlogic: options is {dict(options or {})}; 'leftovers' with one of {', '.join(LEFTOVERS)} is allowed"
        )
    ready = rewritten(graph, inputs)
    if leftovers == "inductor":
        from torch._inductor.compile_fx import compile_fx

        return cast(Callable[..., Any], compile_fx(ready, list(inputs)))
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(ready, list(inputs))


def rewritten(graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph as ATen calls with our ops in it; as it was where it cannot be traced again, writes in place, or holds gradients
    that it makes itself."""
    if name := opaque(graph):
        LOG.info("tensorlogic: a graph with gradients of its own (%s) is compiled as it is", name)
        return graph
    mode: Any = contextlib.nullcontext()
    if any(isinstance(v, torch.SymInt) for v in inputs):
        inputs = _symbolic(graph)
        mode = next((v.fake_mode for v in inputs if isinstance(v, FakeTensor)), mode)
    try:
        with mode, torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad():
            copies = [v.detach().clone() if isinstance(v, Tensor) else v for v in inputs]
            traced = make_fx(graph, pre_dispatch=True, _allow_non_fake_inputs=True)(*copies)
    except FAILURES as problem:
        # calls that make_fx does not know, such as nested compiled regions
        LOG.info("tensorlogic: a graph is compiled as it is: %s", first_line(problem))
        return graph
    plain = (n for n in traced.graph.nodes if hasattr(n.target, "_schema"))
    if any(n.op == "call_function" and writes(n) for n in plain):
        LOG.info("tensorlogic: a graph that writes in place is compiled as it is")
        return graph
    found = rewrite(traced.graph, RULES)
    LOG.info("tensorlogic: %d regions: %s", len(found), ", ".join(r.op for r in found))
    traced.recompile()
    return traced


def _symbolic(graph: fx.GraphModule) -> list[Any]:
    """Dynamo's own inputs of its graph, sizes as symbols: real ones would leave their numbers in what is traced."""
    return [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
