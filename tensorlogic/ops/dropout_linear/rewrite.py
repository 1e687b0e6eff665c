"""Dropout before a linear layer: one call in training, nothing at all in evaluation."""

from __future__ import annotations

from ...core.rewrite_rule import Call, OneOf, Rule, Var, aten, example
from ..linear import linear
from . import dropout_linear

X = Var("x")
DROPOUT = (aten.dropout.default, aten.feature_dropout.default)
RULES = (
    Rule(
        "dropout_linear",
        Call((linear,), (Call((aten.dropout.default,), (X, Var("p"), True)), Var("w"), Var("b"))),
        lambda m, emit: emit(dropout_linear, m["x"], m["w"], m["b"], m["p"]),
        lambda m: m["p"] < 1,  # all dropped is no case of ours
    ),
)
EVALUATION = (
    Rule(
        "dropout",
        OneOf(  # type: ignore[arg-type]
            (Call(DROPOUT, (X, Var("p"), False)), Call(DROPOUT, (X, 0.0, Var("training"))))
        ),
        lambda m, emit: m["x"],
        lambda m: example(m.root) is not None,
        exact=True,
    ),
)
