"""Cross-entropy of logits and class indices, by its own name or as log-softmax and negative log-likelihood."""

from __future__ import annotations

from typing import Any

import torch

from ...core.rewrite_rule import Call, Emit, Match, Rule, Var, aten
from . import softmax_cross_entropy

REDUCTIONS = ("none", "mean", "sum")


def _indices(m: Match) -> bool:
    logits, target = m.tensor("logits"), m.tensor("target")
    return (
        logits is not None
        and target is not None
        and logits.is_floating_point()
        and target.dtype == torch.int64
        and m.get("weight") is None
        and logits.dim() in (1, 2)
        and target.dim() == logits.dim() - 1
    )


def _loss(m: Match, emit: Emit) -> Any:
    return emit(
        softmax_cross_entropy,
        m["logits"],
        m["target"],
        m["ignore"],
        m.get("smoothing", 0.0),
        REDUCTIONS[m["reduction"]],
    )


COMMON = (Var("target"), Var("weight"), Var("reduction"), Var("ignore"))
RULES = (
    Rule(
        "softmax_cross_entropy",
        Call((aten.cross_entropy_loss.default,), (Var("logits"), *COMMON, Var("smoothing"))),
        _loss,
        _indices,
    ),
    *(
        Rule(
            "softmax_cross_entropy",
            Call(
                (aten.nll_loss.default, aten.nll_loss_nd.default),
                (Call((aten.log_softmax.int,), (Var("logits"), dim)), *COMMON),
            ),
            _loss,
            _indices,
        )
        for dim in (1, -1)
    ),
)
