"""Linear layer, batch norm and ReLU: with the batch's own statistics in training, with the running ones where they cannot be folded."""

from __future__ import annotations

from ...core.rewrite_rule import Call, Match, Rule, Var, aten
from ..linear import linear
from . import linear_batch_norm_relu

NORM = Call(
    (aten.batch_norm.default,),
    (
        Call((linear,), (Var("x"), Var("w"), Var("b"))),
        *(Var(n) for n in ("gamma", "beta", "mean", "var", "training", "momentum", "eps", "_")),
    ),
)


def _fits(m: Match) -> bool:
    stats = m["mean"] is not None or m["training"]
    return m.out.dim() == 2 and m.out.shape[0] > 1 and stats and m["momentum"] is not None


RULES = (
    Rule(
        "linear_batch_norm_relu",
        Call((aten.relu.default,), (NORM,)),
        lambda m, emit: emit(
            linear_batch_norm_relu,
            *(m[n] for n in ("x", "w", "b", "mean", "var", "gamma", "beta", "eps", "training")),
            m["momentum"],
        ),
        _fits,
    ),
)
