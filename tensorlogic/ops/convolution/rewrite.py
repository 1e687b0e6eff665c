"""Batch norm and layer scale folded into what precedes them; convolution with bias, residual and activation as one step."""

from __future__ import annotations

from typing import Any

from ...core.rewrite_rule import (
    Call,
    Emit,
    Match,
    Rule,
    Var,
    aten,
    example,
    floating,
    parameters_like,
)
from ..linear import linear
from ..linear.rewrite import activation_of
from . import CONVOLUTION, fold_bias, fold_weight, scale_bias, scale_weight

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


def _channels(m: Match) -> bool:
    """A constant factor for each output: [N], followed by as many ones as an image has dimensions; nothing else is broadcast."""
    s, w, y = m.tensor("s"), m.tensor("w"), m.tensor("y")
    if s is None or w is None or y is None or not floating(s, y) or m.out.shape != y.shape:
        return False
    tail = (w.shape[0], *[1] * (w.dim() - 2))
    shape = tuple(s.shape)
    plain = shape[-len(tail) :] == tail and s.numel() == w.shape[0]
    return plain and parameters_like(m, "w", "b", "s")


def _scaled(m: Match, emit: Emit) -> tuple[Any, Any]:
    b = None if m["b"] is None else emit(scale_bias, m["b"], m["s"])
    return emit(scale_weight, m["w"], m["s"]), b


def _scale(m: Match, emit: Emit) -> Any:
    return emit(CONVOLUTION, m["x"], *_scaled(m, emit), None, "none", *_how(m))


def _scale_linear(m: Match, emit: Emit) -> Any:
    return emit(linear, m["x"], *_scaled(m, emit))


def _same_shape(m: Match) -> bool:
    r, y = m.tensor("r"), m.tensor("y")
    return r is not None and y is not None and r.shape == y.shape and floating(r, y)


def _joined(m: Match, emit: Emit, activation: str) -> Any:
    return emit(CONVOLUTION, m["x"], m["w"], m["b"], m["r"], activation, *_how(m))


def _any(m: Match) -> bool:
    return example(m.root) is not None


NAMED = Call((aten.conv1d.default, aten.conv2d.default, aten.conv3d.default), (X, W, B, *HOW))
CONV = Call((CONVOLUTION,), (X, W, B, None, "none", *HOW), name="y")
LINEAR = Call((linear,), (X, W, B), name="y")
ADDED = Call((CONVOLUTION,), (X, W, B, R, "none", *HOW))
SMOOTH = Call((aten.silu.default, aten.gelu.default), (ADDED, Var("...")))


def _times(inner: Call) -> Call:
    return Call((aten.mul.Tensor,), (inner, Var("s")), swap=True)


RULES = (
    Rule("convolution", NAMED, _plain, _batched, exact=True),
    Rule("convolution", _norm(CONV), _fold, _constant, training=False),
    Rule("linear", _norm(LINEAR), _fold_linear, _matrix, training=False),
    Rule("convolution", _times(CONV), _scale, _channels, training=False),
    Rule("linear", _times(LINEAR), _scale_linear, _channels, training=False),
    Rule(
        "convolution",
        Call((aten.add.Tensor,), (CONV, R), swap=True),
        lambda m, emit: _joined(m, emit, "none"),
        _same_shape,
    ),
    Rule("convolution", Call(RELU, (ADDED,)), lambda m, emit: _joined(m, emit, "relu"), _any),
    Rule(
        "convolution",
        SMOOTH,
        lambda m, emit: _joined(m, emit, activation_of(m.root)),
        _any,
        training=False,
    ),
)
