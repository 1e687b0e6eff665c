"""What the ops around the product of a linear layer share: costs and samples, checks, and their reference in float32 as a candidate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.key import Key
from ...core.op import Op
from ...kernels.cpu import onednn
from . import canonical_keys, costs, sample_inputs, tensor_checks

Needs = tuple[bool, ...]  # which tensors need a gradient
Values = tuple[Any, ...]


def op(reference: Callable[..., Any], **about: Any) -> Op:
    """An op from x [..., K] and weight [N, K] to [..., N]."""
    alike = {
        "normal": canonical_keys.flat_rows("x"),
        "flops": costs.linear_flops,
        "traffic": costs.linear_traffic,
        "sample": sample_inputs.scaled({"weight": 1}),
        "autocast": "lower",
    }
    return Op(reference=reference, **{**alike, **about})


def backward_op(reference: Callable[..., Any], *rows: str, **about: Any) -> Op:
    """The gradients of such an op, two products; `rows` names its arguments that are [..., columns]."""
    alike = {
        "normal": canonical_keys.flat_rows(*rows),
        "flops": lambda key: 2 * costs.linear_flops(key),
        "traffic": lambda key: 2 * costs.inputs(key),
        "sample": sample_inputs.scaled({"weight": 1}),
        "internal": True,
    }
    return Op(reference=reference, **{**alike, **about})


def operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K], weight [N, K] and bias [N] of a case."""
    return torch.randn(m, k), torch.randn(n, k) * k**-0.5, torch.randn(n)


def checked(fn: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise where these are no operands of a linear layer."""
    tensor_checks.tensors(fn, {"x": x, "weight": weight}, {"bias": bias})
    tensor_checks.floating(fn, {"x": x, "weight": weight, "bias": bias}, autocast=True)
    tensor_checks.linear_shapes(fn, x, weight, bias)


def add_widened(op: Op, refusal: Callable[[Key], str | None] = lambda key: None) -> None:
    """Register the reference of halves in float32 on CPUs, rounded at the end; forward's weight is widened once and kept."""
    reference, first = op.reference, op.params[0].name
    names = [p.name for p in op.params]
    kept = names.index("weight") if not op.internal else -1
    others = [i for i, p in enumerate(op.params) if p.is_tensor and i != kept]

    @functools.wraps(reference)
    def widened(*args: Any) -> tuple[Tensor | None, ...]:
        wide = list(args)
        for i in others:
            if wide[i] is not None:
                wide[i] = wide[i].float()
        if kept >= 0:
            wide[kept] = onednn.wide_weight(wide[kept])
        dtype = args[0].dtype
        return tuple([t if t is None else t.to(dtype) for t in reference(*wide)])

    op.candidate(
        "torch.widened",
        supports=lambda key: onednn.widened(key, first) or refusal(key),
        sources=(reference, add_widened),
        trusted=True,
    )(widened)
