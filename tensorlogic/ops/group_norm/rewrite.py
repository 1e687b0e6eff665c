"""Group norm by its name."""

from __future__ import annotations

from ...core.rewrite_rule import Call, Match, Rule, Var, aten, floating
from . import GROUP_NORM


def _fits(m: Match) -> bool:
    return m.tensor("x") is not None and floating(*(m.tensor(n) for n in ("x", "gamma", "beta")))


RULES = (
    Rule(
        "group_norm",
        Call(
            (aten.group_norm.default,),
            (Var("x"), Var("groups"), Var("gamma"), Var("beta"), Var("eps"), Var("_")),
        ),
        lambda m, emit: emit(GROUP_NORM, m["x"], m["groups"], m["gamma"], m["beta"], m["eps"]),
        _fits,
        exact=True,
    ),
)
