"""How models write linear layers: products, biases, residuals and activations, in any order, become one call."""

from __future__ import annotations

from typing import Any

import torch

from ...core.rewrite_rule import Call, Emit, Match, OneOf, Rule, Var, aten, example, floating
from . import linear

X, W, B, R, A = Var("x"), Var("w"), Var("b"), Var("r"), Var("a")
TRANSPOSED = OneOf(
    (
        Call((aten.t.default, aten.numpy_T.default), (W,)),
        Call((aten.transpose.int,), (W, 0, 1)),
        Call((aten.transpose.int,), (W, 1, 0)),
        Call((aten.transpose.int,), (W, -1, -2)),
        Call((aten.transpose.int,), (W, -2, -1)),
        Call((aten.permute.default,), (W, [1, 0])),
    )
)
PLAIN = Call((linear,), (X, W, B))
ADD = (aten.add.Tensor,)


def product(m: Match) -> bool:
    """A floating product with a matrix, bias or none, all of one dtype."""
    x, w, b = m.tensor("x"), m.tensor("w"), m.tensor("b")
    return (
        x is not None
        and w is not None
        and w.dim() == 2
        and x.dim() >= 1
        and floating(x, w, b)
        and (m.get("b") is None or (b is not None and b.shape == m.out.shape[-1:]))
    )


def _residual(m: Match) -> bool:
    """What is added has the product's dtype, and the sum the product's shape."""
    r, y = m.tensor("r"), m.tensor("y")
    return r is not None and y is not None and floating(r, y) and m.out.shape == y.shape


def activation_of(node: Any) -> str:
    """The name of an activation that a graph calls."""
    if node.target is aten.gelu.default:
        tanh = "tanh" in (*node.args[1:], *node.kwargs.values())
        return "gelu_tanh" if tanh else "gelu"
    return {aten.relu.default: "relu", aten.silu.default: "silu"}[node.target]


def _add(m: Match, emit: Emit) -> Any:
    """A vector added to a product without bias is its bias; anything else a residual."""
    r = m.tensor("r")
    assert r is not None
    if m["b"] is None and r.dim() == 1 and r.shape == m.out.shape[-1:]:
        return emit(linear, m["x"], m["w"], m["r"])
    return emit(linear, m["x"], m["w"], m["b"], m["r"])


RULES = (
    Rule(
        "linear",
        Call((aten.linear.default,), (X, W, B)),
        lambda m, emit: emit(linear, m["x"], m["w"], m["b"]),
        product,
    ),
    Rule(
        "linear",
        Call((aten.addmm.default,), (B, X, TRANSPOSED)),
        lambda m, emit: emit(linear, m["x"], m["w"], m["b"]),
        product,
    ),
    Rule(
        "linear",
        Call((aten.matmul.default, aten.mm.default), (X, TRANSPOSED)),
        lambda m, emit: emit(linear, m["x"], m["w"], None),
        product,
    ),
    Rule(
        "linear",
        Call((aten.addmm.default,), (B, X, W)),
        lambda m, emit: emit(linear, m["x"], emit(torch.t, m["w"]), m["b"]),
        product,
    ),
    Rule(
        "linear", Call(ADD, (Call((linear,), (X, W, B), name="y"), R), swap=True), _add, _residual
    ),
    Rule(
        "linear",
        Call(
            (aten.relu.default, aten.silu.default, aten.gelu.default),
            (Call((linear,), (X, W, B, R)), Var("...")),
        ),
        lambda m, emit: emit(linear, m["x"], m["w"], m["b"], m["r"], activation_of(m.root)),
        lambda m: example(m.root) is not None,
    ),
)
