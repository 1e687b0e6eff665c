"""Attention weights whose product with the values is not taken at once: softmax of scaled scores, with or without a mask."""

from __future__ import annotations

from typing import Any

from ...core.rewrite_rule import Call, Emit, Match, OneOf, Rule, Var
from ..attention.rewrite import MASKED, SCORES, SOFTMAX, scale, scores_fit
from . import attention_scores


def _scores(m: Match, emit: Emit) -> Any:
    return emit(attention_scores, m["q"], m["k"], scale(m), m.get("m"))


PATTERNS = (Call(SOFTMAX, (OneOf((MASKED, SCORES)), dim, Var("dtype"))) for dim in (-1, 3, 2))
RULES = tuple(Rule("attention_scores", pattern, _scores, scores_fit) for pattern in PATTERNS)
