"""Root-mean-square norm by its name, or written out with and without a detour through float32."""

from __future__ import annotations

from typing import Any

import torch

from ...core.rewrite_rule import Call, Emit, Match, OneOf, Rule, Var, aten, floating
from . import RMS_NORM

X, G = Var("x"), Var("gamma")
WIDE = Call((aten.to.dtype,), (X, torch.float32))


def _normed(times: Any, of: Any) -> Call:
    """times · rsqrt(mean(of²) + eps)."""
    square = OneOf((Call((aten.pow.Tensor_Scalar,), (of, 2)), Call((aten.mul.Tensor,), (of, of))))
    mean = Call((aten.mean.dim,), (square, [-1], True))
    root = Call((aten.rsqrt.default,), (Call((aten.add.Tensor,), (mean, Var("eps"))),))
    return Call((aten.mul.Tensor,), (times, root), swap=True)


def _rounded(inner: Call) -> Call:
    return Call((aten.to.dtype,), (inner, Var("dtype")))


def _scaled(inner: Call) -> Call:
    return Call((aten.mul.Tensor,), (G, inner), swap=True)


def _fits(m: Match) -> bool:
    """One dtype, a scale for every column, a number added; rounding, where there is some, to the input's dtype."""
    x, gamma = m.tensor("x"), m.tensor("gamma")
    if x is None or gamma is None or gamma.shape != x.shape[-1:] or not floating(x, gamma):
        return False
    rounded = m.out.dtype == x.dtype and m.get("dtype", x.dtype) == x.dtype
    return rounded and isinstance(m["eps"], float)


def _named(m: Match) -> bool:
    return _fits(m) and list(m["shape"]) == [m.out.shape[-1]]


def _norm(m: Match, emit: Emit) -> Any:
    return emit(RMS_NORM, m["x"], m["gamma"], m["eps"])


NAMED = Call((aten.rms_norm.default,), (X, Var("shape"), G, Var("eps")))
WRITTEN = (_rounded(_normed(WIDE, WIDE)), _rounded(_normed(X, WIDE)), _normed(X, X))
RULES = (
    Rule("rms_norm", NAMED, _norm, _named, exact=True),
    *(Rule("rms_norm", _scaled(inner), _norm, _fits) for inner in WRITTEN),
)
