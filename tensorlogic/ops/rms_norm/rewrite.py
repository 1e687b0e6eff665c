"""Root-mean-square norm by its name, or written out with and without a detour through float32."""

from __future__ import annotations

from typing import Any

import torch

from ...core.rewrite_rule import Call, Match, OneOf, Rule, Var, aten, floating
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
    return (
        x is not None
        and gamma is not None
        and gamma.shape == x.shape[-1:]
        and floating(x, gamma)
        and isinstance(m["eps"], float)
        and m.out.dtype == x.dtype
        and m.get("dtype", x.dtype) == x.dtype
    )


def _named(m: Match) -> bool:
    return _fits(m) and list(m["shape"]) == [m.out.shape[-1]]


RULES = (
    Rule(
        "rms_norm",
        Call((aten.rms_norm.default,), (X, Var("shape"), G, Var("eps"))),
        lambda m, emit: emit(RMS_NORM, m["x"], m["gamma"], m["eps"]),
        _named,
        exact=True,
    ),
    *(
        Rule(
            "rms_norm", pattern, lambda m, emit: emit(RMS_NORM, m["x"], m["gamma"], m["eps"]), _fits
        )
        for pattern in (
            _scaled(_rounded(_normed(WIDE, WIDE))),
            _scaled(_rounded(_normed(X, WIDE))),
            _scaled(_normed(X, X)),
        )
    ),
)
