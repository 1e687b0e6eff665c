"""Pairs of element-wise calls, and activations that models write out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...core.rewrite_rule import Call, Emit, Match, OneOf, Rule, Var, aten, example, floating
from . import add_relu, affine, mul_relu

A, B, X = Var("a"), Var("b"), Var("x")


def _all(m: Match, *names: str) -> bool:
    found = [m.tensor(name) for name in names]
    return all(t is not None for t in found) and floating(*found)


def _unary(m: Match) -> bool:
    return floating(m.tensor("x"))


def _close(m: Match) -> bool:
    near = abs(m["c"] - 0.044715) < 1e-6 and abs(m["s"] - math.sqrt(2 / math.pi)) < 1e-4
    return example(m.root) is not None and near


def _erf(m: Match) -> bool:
    def near(name: str, wanted: float) -> bool:
        return name in m and isinstance(m[name], (int, float)) and abs(m[name] - wanted) < 1e-4

    return example(m.root) is not None and (near("d", math.sqrt(2)) or near("s", math.sqrt(0.5)))


def _mul(a: object, b: object) -> Call:
    return Call((aten.mul.Tensor,), (a, b), swap=True)


def _add(a: object, b: object) -> Call:
    return Call((aten.add.Tensor,), (a, b), swap=True)


CUBE = Call((aten.pow.Tensor_Scalar,), (X, 3.0))
TANH = _add(Call((aten.tanh.default,), (_mul(_add(X, _mul(CUBE, Var("c"))), Var("s")),)), 1.0)
HALVED = OneOf((Call((aten.div.Tensor,), (X, Var("d"))), _mul(X, Var("s"))))
ERF = _add(Call((aten.erf.default,), (HALVED,)), 1.0)
GELUS = ((TANH, "tanh", _close), (ERF, "none", _erf))
CLIPPED = OneOf(
    (
        Call((aten.clamp_min.default,), (X, 0)),
        Call((aten.clamp.default,), (X, 0)),
        Call((aten.threshold.default,), (X, 0, 0)),
    )
)
SWISH = _mul(X, Call((aten.sigmoid.default,), (X,)))


def _by_name(op: Any, **how: str) -> Callable[[Match, Emit], Any]:
    return lambda m, emit: emit(op, m["x"], **how)


ACTIVATIONS = (
    *(
        Rule("gelu", pattern, _by_name(aten.gelu.default, approximate=kind), guard, exact=True)
        for inner, kind, guard in GELUS
        for pattern in (_mul(_mul(X, 0.5), inner), _mul(_mul(X, inner), 0.5))
    ),
    Rule("silu", SWISH, _by_name(aten.silu.default), _unary, exact=True),
    Rule("relu", CLIPPED, _by_name(aten.relu.default), _unary, exact=True),  # type: ignore[arg-type]
)
RULES = (
    *(
        Rule(
            op.__name__,
            Call((aten.relu.default,), (Call((inner,), (A, B)),)),
            lambda m, emit, op=op: emit(op, m["a"], m["b"]),  # type: ignore[misc]
            lambda m: _all(m, "a", "b"),
        )
        for op, inner in ((add_relu, aten.add.Tensor), (mul_relu, aten.mul.Tensor))
    ),
    Rule(
        "affine",
        _add(_mul(X, Var("scale")), Var("bias")),
        lambda m, emit: emit(affine, m["x"], m["scale"], m["bias"]),
        lambda m: _all(m, "x", "scale", "bias") and m.out.shape == m.tensor("x").shape,  # type: ignore[union-attr]
    ),
)
