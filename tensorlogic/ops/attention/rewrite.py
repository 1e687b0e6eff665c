"""Attention that models call by name or write out as products and a softmax."""

from __future__ import annotations

from typing import Any

import torch

from ...core.rewrite_rule import Call, Emit, Match, OneOf, Rule, Var, aten, example, floating
from . import ATTENTION

Q, K, V, S, M = Var("q"), Var("k"), Var("v"), Var("s"), Var("m")
PRODUCT = (aten.matmul.default, aten.bmm.default)
SOFTMAX = (aten.softmax.int, aten._softmax.default)
LAST = [d for n in (0, 3, 4) for d in ((n - 2, n - 1), (n - 1, n - 2))]
KT = OneOf(
    (
        *(Call((aten.transpose.int,), (K, *dims)) for dims in LAST),
        Call((aten.permute.default,), (K, [0, 1, 3, 2])),
        Call((aten.mT.default,), (K,)),
    )
)
QK, SCALED = Call(PRODUCT, (Q, KT)), (((aten.mul.Tensor,), S), ((aten.div.Tensor,), Var("divisor")))
SCORES = OneOf(
    (
        *(Call(op, (QK, by)) for op, by in SCALED),
        *(Call(PRODUCT, (Call(op, (Q, by)), KT)) for op, by in SCALED),
        QK,
    )
)


def _weights(scores: Any) -> OneOf:
    softmax = tuple(Call(SOFTMAX, (scores, d, Var("dtype"))) for d in (-1, 3, 2))
    return OneOf(
        tuple(Call((aten.dropout.default,), (s, 0.0, Var("_"))) for s in softmax) + softmax
    )


def scale(m: Match) -> float | None:
    """The number that the scores are multiplied by; None where it is no number."""
    if "s" in m:
        return m["s"] if isinstance(m["s"], (int, float)) else None
    if "divisor" in m:
        divisor = m["divisor"]
        return 1 / divisor if isinstance(divisor, (int, float)) and divisor else None
    return 1.0


def scores_fit(m: Match) -> bool:
    """Queries and keys of one floating dtype, at least three-dimensional, and a mask that broadcasts."""
    q, k = m.tensor("q"), m.tensor("k")
    if q is None or k is None or q.dim() < 3 or q.dim() != k.dim() or not floating(q, k):
        return False
    if scale(m) is None or m.get("dtype") not in (None, False, q.dtype):
        return False
    if not isinstance(m.get("k"), torch.fx.Node) or k.shape[:-2] != q.shape[:-2]:
        return False
    mask = m.tensor("m")
    return "m" not in m or (mask is not None and mask.dtype in (torch.bool, q.dtype))


def _fits(m: Match) -> bool:
    q, v = m.tensor("q"), m.tensor("v")
    if not scores_fit(m) or q is None or v is None or not floating(q, v) or v.dim() != q.dim():
        return False
    return v.shape[:-2] == q.shape[:-2] and m.out.shape == (*q.shape[:-1], v.shape[-1])


def _attention(m: Match, emit: Emit) -> Any:
    return emit(ATTENTION, m["q"], m["k"], m["v"], m.get("m"), False, scale(m), False)


MASKED = Call((aten.add.Tensor,), (SCORES, M), swap=True)
HOW = ("causal", "scale", "gqa")
RULES = (
    Rule(
        "attention",
        Call((aten.scaled_dot_product_attention.default,), (Q, K, V, M, 0.0, *map(Var, HOW))),
        lambda m, emit: emit(ATTENTION, *(m[n] for n in ("q", "k", "v", "m", *HOW))),
        lambda m: example(m.root) is not None,
        exact=True,
    ),
    Rule("attention", Call(PRODUCT, (_weights(MASKED), V)), _attention, _fits),
    Rule("attention", Call(PRODUCT, (_weights(SCORES), V)), _attention, _fits),
)
