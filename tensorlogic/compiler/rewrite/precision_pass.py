"""optimize under a precision policy: every product of a traced model goes through our functions, under the model's own policy."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.numeric_mode import Precision
from ...core.precision_policy import under
from ...guards.errors import MISS, Untraceable
from ...measure import timer
from ...ops.linear import linear
from ...ops.matmul import matmul
from ..reporting.report import Row
from ..runtime.program import Program
from ..trace.traced_graph import Trace
from ..verify.whole_model import Original, confirmed

aten: Any = torch.ops.aten


class Kept:
    """A program that always runs under the policy it was made with, and refuses what it was not made for."""

    def __init__(self, program: Program, asked: Precision) -> None:
        self.program, self.asked = program, asked
        self.model, self.nbytes = program.model, program.nbytes
        program.patient = False

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's output; the model's own code would not keep the precision."""
        with under(self.asked):
            out = self.program(args, kwargs)
        if out is MISS:
            recorded = torch.is_grad_enabled() and not self.program.training
            raise RuntimeError(
                f"optimize: the model was optimised for {self.asked} and other inputs (shapes, dtypes, devices), or has "
                f"changed since: optimise it again with inputs like these"
                + (", with training=True, or call it under torch.no_grad()" if recorded else "")
            )
        return out


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a · b under the policy."""
    return matmul(a, b)


def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta c + alpha a · b, of matrices or batches of them, or of a matrix and a vector."""
    y = matmul(a, b)
    y = y if alpha == 1 else y * alpha
    return y if beta == 0 else y + (c if beta == 1 else c * beta)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(scale q · kᵀ + mask) · v, both products under the policy, the softmax in at least float32."""
    if enable_gqa:
        shared = q.shape[-3] // k.shape[-3]
        k, v = (t.repeat_interleave(shared, -3) for t in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = matmul(q, k.mT).to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
        shares = torch.softmax(scores, -1).masked_fill(~mask.any(-1, keepdim=True), 0.0)
    else:
        shares = torch.softmax(scores if mask is None else scores + mask, -1)
    return matmul(F.dropout(shares, dropout_p), v).to(q.dtype)


def conv2d(
    x: Tensor, w: Tensor, b: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1
) -> Tensor:  # fmt: skip
    """A convolution without groups as one product of its patches, [B·H·W, C·kh·kw] of them in memory."""
    if x.dim() == 3:
        return conv2d(x.unsqueeze(0), w, b, stride, padding, dilation).squeeze(0)
    stride, padding, dilation = (_pair(v) for v in (stride, padding, dilation))
    height, width = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(x.shape[2:], padding, dilation, w.shape[2:], stride, strict=True)
    )
    if tuple(w.shape[2:]) == (1, 1) and not any(padding):
        rows = x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1)
    else:
        patches = F.unfold(x, w.shape[2:], dilation, padding, stride)  # [B, C·kh·kw, H·W]
        rows = patches.mT.reshape(x.shape[0], height, width, -1)
    return linear(rows, w.flatten(1), b).permute(0, 3, 1, 2)


def conv1d(
    x: Tensor, w: Tensor, b: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1
) -> Tensor:  # fmt: skip
    """Likewise, as a convolution of height one."""
    how = ([first, *_pair(v)[1:]] for first, v in ((1, stride), (0, padding), (1, dilation)))
    return conv2d(x.unsqueeze(-2), w.unsqueeze(-2), b, *how).squeeze(-2)


def _pair(value: Any) -> list[int]:
    values = [*value] if isinstance(value, (list, tuple)) else [value]
    return values * 2 if len(values) == 1 else values


def in_f64(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """fn in float64, of which every policy's result is an approximation; results in the dtype that the inputs promote to."""
    tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    floating = [t for t in tensors if t.is_floating_point()]
    dtype = floating[0].dtype
    for t in floating[1:]:
        dtype = torch.promote_types(dtype, t.dtype)

    def cast(to: torch.dtype, value: Any) -> Any:
        return torch.utils._pytree.tree_map_only(
            Tensor, lambda t: t.to(to) if t.is_floating_point() else t, value
        )

    return cast(dtype, fn(*cast(torch.float64, args), **cast(torch.float64, kwargs)))


#: What computes products, and what computes them under a policy.
PRODUCTS: dict[Any, Callable[..., Any]] = {
    aten.linear.default: linear,
    aten.matmul.default: mm,
    aten.mm.default: mm,
    aten.bmm.default: mm,
    aten.mv.default: mm,
    aten.dot.default: mm,
    aten.addmm.default: addmm,
    aten.baddbmm.default: addmm,
    aten.addmv.default: addmm,
    aten.scaled_dot_product_attention.default: attention,
    aten.conv1d.default: conv1d,
    aten.conv2d.default: conv2d,
}
#: Names of other functions with products inside: these are computed in float64.
OTHERS = ("einsum", "bilinear", "conv", "lstm", "gru", "rnn", "cdist", "tensordot", "inner", "addbmm", "chain_matmul", "linalg_multi_dot")  # fmt: skip


def precisely(traced: Trace, original: Original, asked: Precision) -> Kept:
    """The traced model with its products replaced; the original is timed beside it for the report."""
    training, report = original.training, original.report
    if traced.theirs is not None:
        confirmed(traced, training)
    graph = copy.deepcopy(traced.graph)
    found: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        if any(isinstance(a, torch.fx.Node) and a.op == "get_attr" for a in node.args):
            raise Untraceable(f"{name} holds graphs of its own")
        grouped = name.startswith("conv") and node.args[6:7] not in ((), (1,))
        if (ours := PRODUCTS.get(node.target)) is not None and not grouped:
            node.target, node.args = ours, node.args[: 6 if name.startswith("conv") else None]
            found[name, str(asked)] += 1
        elif name.startswith(OTHERS):
            node.args, node.target = (node.target, *node.args), in_f64
            found[name, "float64"] += 1
    report.rows = [Row(name, name, how, count) for (name, how), count in found.items()]
    with under(asked):
        program = Program(traced, graph, {}, training, original.model)
        if asked.mode != "adaptive":  # what is replayed cannot look at the data
            program.capture()
    kept = Kept(program, asked)
    times = timer.wall_samples(
        {"before": original.call, "after": lambda: kept(*original.given)},
        program.device, 0.3, rounds=20,
    )  # fmt: skip
    report.before_us, report.after_us = times.median("before"), times.median("after")
    report.ratio, report.outcome = times.ratio("after", "before"), "precise"
    report.reason = f"products as {asked} asks, whatever that takes"
    return kept
