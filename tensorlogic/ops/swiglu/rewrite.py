"""Two linear layers of the same input, one through SiLU, multiplied."""

from __future__ import annotations

from ...core.rewrite_rule import Call, Match, Rule, Var, aten
from ..linear import linear
from . import SWIGLU

X = Var("x")


def _alike(m: Match) -> bool:
    w, v = m.tensor("w"), m.tensor("v")
    return w is not None and v is not None and w.shape == v.shape


GATE = Call((linear,), (X, Var("w"), Var("b"), None, "silu"))
OTHER = Call((linear,), (X, Var("v"), Var("c")))
RULES = (
    Rule(
        "swiglu",
        Call((aten.mul.Tensor,), (GATE, OTHER), swap=True),
        lambda m, emit: emit(SWIGLU, *(m[n] for n in ("x", "w", "b", "v", "c"))),
        _alike,
    ),
)
