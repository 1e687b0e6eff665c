"""Layer norm over the last dimension, with scale and shift, before a linear layer."""

from __future__ import annotations

from ...core.rewrite_rule import Call, Match, Rule, Var, aten, floating
from ..linear import linear
from . import layer_norm_linear

NORM = Call(
    (aten.layer_norm.default,),
    (Var("x"), Var("shape"), Var("gamma"), Var("beta"), Var("eps"), Var("...")),
)


def _last_dimension(m: Match) -> bool:
    x, gamma, beta = m.tensor("x"), m.tensor("gamma"), m.tensor("beta")
    return (
        x is not None
        and gamma is not None
        and beta is not None
        and list(m["shape"]) == [x.shape[-1]]
        and floating(x, gamma, beta)
    )


RULES = (
    Rule(
        "layer_norm_linear",
        Call((linear,), (NORM, Var("w"), Var("b"))),
        lambda m, emit: emit(
            layer_norm_linear, m["x"], m["gamma"], m["beta"], m["w"], m["b"], m["eps"]
        ),
        _last_dimension,
    ),
)
