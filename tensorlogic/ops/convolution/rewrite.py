"""Batch norm folded into what precedes it; convolution with bias, residual and activation as one step."""

from __future__ import annotations

from typing import Any

from ...rules import Call, Emit, Match, Rule, Var, aten, example, floating, parameters_like
from ..linear import linear
from . import CONVOLUTION, fold_bias, fold_weight

X, W, B, R = Var("x"), Var("w"), Var("b"), Var("r")
HOW = (Var("stride"), Var("padding"), Var("dilation"), Var("groups"))
STATS = (Var("gamma"), Var("beta"), Var("mean"), Var("var"), False, Var("_"), Var("eps"), Var("__"))
RELU = (aten.relu.default,)


def _norm(inner: Any) -> Call:
    return Call((aten.batch_norm.default,), (inner, *STATS))


def _sizes(value: Any, count: int) -> tuple[int, ...]:
    sizes = tuple(value)
    return sizes * count if len(sizes) == 1 else sizes


def _how(m: Match) -> tuple[Any, ...]:
    w = m.tensor("w")
    assert w is not None
    count = w.dim() - 2
    return (*(_sizes(m[n], count) for n in ("stride", "padding", "dilation")), m["groups"])


def _plain(m: Match, emit: Emit) -> Any:
    return emit(CONVOLUTION, m["x"], m["w"], m["b"], None, "none", *_how(m))


def _batched(m: Match) -> bool:
    x, w = m.tensor("x"), m.tensor("w")
    return x is not None and w is not None and x.dim() == w.dim() and floating(x, w)


def _constant(m: Match) -> bool:
    """Weights and statistics can be folded ahead, and the features lie where the fold puts them."""
    names = ("w", "b", "gamma", "beta", "mean", "var")
    return m["mean"] is not None and parameters_like(m, *names)


def _matrix(m: Match) -> bool:
    return _constant(m) and m.out.dim() == 2


def _folded(m: Match, emit: Emit) -> tuple[Any, Any]:
    stats = m["mean"], m["var"], m["eps"]
    w = emit(fold_weight, m["w"], m["gamma"], *stats[1:])
    return w, emit(fold_bias, m["w"], m["b"], m["gamma"], m["beta"], *stats)


def _fold(m: Match, emit: Emit) -> Any:
    return emit(CONVOLUTION, m["x"], *_folded(m, emit), None, "none", *_how(m))


def _fold_linear(m: Match, emit: Emit) -> Any:
    return emit(linear, m["x"], *_folded(m, emit))


def _same_shape(m: Match) -> bool:
    r, y = m.tensor("r"), m.tensor("y")
    return r is not None and y is not None and r.shape == y.shape and floating(r, y)


CONV = Call((CONVOLUTION,), (X, W, B, None, "none", *HOW), name="y")
ADDED = Call((CONVOLUTION,), (X, W, B, R, "none", *HOW))
RULES = (
    Rule(
        "convolution",
        Call((aten.conv1d.default, aten.conv2d.default, aten.conv3d.default), (X, W, B, *HOW)),
        _plain,
        _batched,
        exact=True,
    ),
    Rule("convolution", _norm(CONV), _fold, _constant, training=False),
    Rule("linear", _norm(Call((linear,), (X, W, B))), _fold_linear, _matrix, training=False),
    Rule(
        "convolution",
        Call((aten.add.Tensor,), (CONV, R), swap=True),
        lambda m, emit: emit(CONVOLUTION, m["x"], m["w"], m["b"], m["r"], "none", *_how(m)),
        _same_shape,
    ),
    Rule(
        "convolution",
        Call(RELU, (ADDED,)),
        lambda m, emit: emit(CONVOLUTION, m["x"], m["w"], m["b"], m["r"], "relu", *_how(m)),
        lambda m: example(m.root) is not None,
    ),
)
