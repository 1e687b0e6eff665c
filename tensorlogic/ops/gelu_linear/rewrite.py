"""GELU before a linear layer; the layer's own residual or activation, where it has one, stays with the linear op."""

from __future__ import annotations

from typing import Any

from ...core.rewrite_rule import Call, Match, Rule, Var, aten
from ..linear import linear
from . import gelu_linear


def _approximate(m: Match) -> Any:
    return m["approximate"]


RULES = (
    Rule(
        "gelu_linear",
        Call(
            (linear,),
            (Call((aten.gelu.default,), (Var("x"), Var("approximate"))), Var("w"), Var("b")),
        ),
        lambda m, emit: emit(gelu_linear, m["x"], m["w"], m["b"], _approximate(m)),
    ),
)
