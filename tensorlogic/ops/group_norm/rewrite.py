"""Group norm by its name."""

from __future__ import annotations

from ...core.rewrite_rule import Call, Match, Rule, Var, aten, floating
from . import GROUP_NORM


def _fits(m: Match) -> bool:
    return m.tensor("x") is not None and floating(*(m.tensor(n) for n in ("x", "gamma", "beta")))


NAMES = ("x", "groups", "gamma", "beta", "eps")
RULES = (
    Rule(
        "group_norm",
        Call((aten.group_norm.default,), (*map(Var, NAMES), Var("_"))),
        lambda m, emit: emit(GROUP_NORM, *(m[n] for n in NAMES)),
        _fits,
        exact=True,
    ),
)
