"""Pairs of element-wise calls, and activations that models write out."""

from __future__ import annotations

import math

from ...core.rewrite_rule import Call, Match, OneOf, Rule, Var, aten, example, floating
from . import add_relu, affine, mul_relu

A, B, X = Var("a"), Var("b"), Var("x")


def _pair(m: Match) -> bool:
    a, b = m.tensor("a"), m.tensor("b")
    return a is not None and b is not None and floating(a, b)


def _affine(m: Match) -> bool:
    x, s, b = m.tensor("x"), m.tensor("scale"), m.tensor("bias")
    return x is not None and s is not None and b is not None and floating(x, s, b)


def _close(m: Match) -> bool:
    return (
        example(m.root) is not None
        and abs(m["c"] - 0.044715) < 1e-6
        and abs(m["s"] - math.sqrt(2 / math.pi)) < 1e-4
    )


def _erf(m: Match) -> bool:
    divided = "d" in m and isinstance(m["d"], (int, float)) and abs(m["d"] - math.sqrt(2)) < 1e-4
    times = "s" in m and isinstance(m["s"], (int, float)) and abs(m["s"] - math.sqrt(0.5)) < 1e-4
    return example(m.root) is not None and (divided or times)


def _mul(a: object, b: object) -> Call:
    return Call((aten.mul.Tensor,), (a, b), swap=True)


def _add(a: object, b: object) -> Call:
    return Call((aten.add.Tensor,), (a, b), swap=True)


CUBE = Call((aten.pow.Tensor_Scalar,), (X, 3.0))
TANH = _add(Call((aten.tanh.default,), (_mul(_add(X, _mul(CUBE, Var("c"))), Var("s")),)), 1.0)
ERF = _add(
    Call(
        (aten.erf.default,), (OneOf((Call((aten.div.Tensor,), (X, Var("d"))), _mul(X, Var("s")))),)
    ),
    1.0,
)
GELUS = ((TANH, "tanh", _close), (ERF, "none", _erf))
ACTIVATIONS = (
    *(
        Rule(
            "gelu",
            pattern,
            lambda m, emit, kind=kind: emit(aten.gelu.default, m["x"], approximate=kind),  # type: ignore[misc]
            guard,
            exact=True,
        )
        for inner, kind, guard in GELUS
        for pattern in (_mul(_mul(X, 0.5), inner), _mul(_mul(X, inner), 0.5))
    ),
    Rule(
        "silu",
        _mul(X, Call((aten.sigmoid.default,), (X,))),
        lambda m, emit: emit(aten.silu.default, m["x"]),
        lambda m: floating(m.tensor("x")),
        exact=True,
    ),
    Rule(
        "relu",
        OneOf(  # type: ignore[arg-type]
            (
                Call((aten.clamp_min.default,), (X, 0)),
                Call((aten.clamp.default,), (X, 0)),
                Call((aten.threshold.default,), (X, 0, 0)),
            )
        ),
        lambda m, emit: emit(aten.relu.default, m["x"]),
        lambda m: floating(m.tensor("x")),
        exact=True,
    ),
)
RULES = (
    Rule(
        "add_relu",
        Call((aten.relu.default,), (Call((aten.add.Tensor,), (A, B)),)),
        lambda m, emit: emit(add_relu, m["a"], m["b"]),
        _pair,
    ),
    Rule(
        "mul_relu",
        Call((aten.relu.default,), (Call((aten.mul.Tensor,), (A, B)),)),
        lambda m, emit: emit(mul_relu, m["a"], m["b"]),
        _pair,
    ),
    Rule(
        "affine",
        _add(_mul(X, Var("scale")), Var("bias")),
        lambda m, emit: emit(affine, m["x"], m["scale"], m["bias"]),
        lambda m: _affine(m) and m.out.shape == m.tensor("x").shape,  # type: ignore[union-attr]
    ),
)
