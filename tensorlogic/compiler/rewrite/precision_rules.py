"""Which rules rewrite products, and so follow a precision policy."""

from __future__ import annotations

from ...core.rewrite_rule import Rule
from ...ops.dropout_linear.rewrite import EVALUATION
from ...ops.dropout_linear.rewrite import RULES as DROPOUT
from ...ops.gelu_linear.rewrite import RULES as GELU_LINEAR
from ...ops.layer_norm_linear.rewrite import RULES as LAYER_NORM_LINEAR
from ...ops.linear.rewrite import RULES as LINEAR
from ...ops.linear_batch_norm_relu.rewrite import RULES as BATCH_NORM
from ...ops.pointwise.rewrite import ACTIVATIONS

PRODUCTS: tuple[Rule, ...] = (
    *EVALUATION,
    *ACTIVATIONS,
    *LINEAR[:4],
    *DROPOUT,
    *BATCH_NORM,
    *LINEAR[4:],
    *LAYER_NORM_LINEAR,
    *GELU_LINEAR,
)
