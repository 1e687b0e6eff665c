"""Cross-entropy of logits and class indices, by its own name or as log-softmax and negative log-likelihood."""

from __future__ import annotations

from typing import Any

import torch

from ...core.rewrite_rule import Call, Emit, Match, Rule, Var, aten
from . import softmax_cross_entropy

REDUCTIONS = ("none", "mean", "sum")


def _indices(m: Match) -> bool:
    logits, target = m.tensor("logits"), m.tensor("target")
    if logits is None or target is None or m.get("weight") is not None:
        return False
    typed = logits.is_floating_point() and target.dtype == torch.int64
    return typed and logits.dim() in (1, 2) and target.dim() == logits.dim() - 1


def _loss(m: Match, emit: Emit) -> Any:
    flags = (m["ignore"], m.get("smoothing", 0.0), REDUCTIONS[m["reduction"]])
    return emit(softmax_cross_entropy, m["logits"], m["target"], *flags)


COMMON = (Var("target"), Var("weight"), Var("reduction"), Var("ignore"))
NAMED = Call((aten.cross_entropy_loss.default,), (Var("logits"), *COMMON, Var("smoothing")))
LOGS = tuple(Call((aten.log_softmax.int,), (Var("logits"), dim)) for dim in (1, -1))
LIKELIHOODS = (aten.nll_loss.default, aten.nll_loss_nd.default)
RULES = tuple(
    Rule("softmax_cross_entropy", pattern, _loss, _indices)
    for pattern in (NAMED, *(Call(LIKELIHOODS, (logs, *COMMON)) for logs in LOGS))
)
