"""All rules, in the order in which they are tried, and ways to run what they make; each lies beside its op."""

from __future__ import annotations

from typing import Any

from ...core.rewrite_rule import Rule, Way
from ...ops.attention.rewrite import RULES as ATTENTION
from ...ops.attention_scores.rewrite import RULES as ATTENTION_SCORES
from ...ops.convolution.rewrite import RULES as CONVOLUTION
from ...ops.dropout_linear.rewrite import RULES as DROPOUT
from ...ops.gelu_linear import gelu_linear
from ...ops.gelu_linear.rewrite import RULES as GELU_LINEAR
from ...ops.group_norm.rewrite import RULES as GROUP_NORM
from ...ops.layer_norm_linear import layer_norm_linear
from ...ops.layer_norm_linear.rewrite import RULES as LAYER_NORM_LINEAR
from ...ops.linear import linear, prepacked
from ...ops.linear.rewrite import RULES as LINEAR
from ...ops.linear_batch_norm_relu.rewrite import RULES as BATCH_NORM
from ...ops.pointwise.rewrite import ACTIVATIONS
from ...ops.pointwise.rewrite import RULES as POINTWISE
from ...ops.rms_norm.rewrite import RULES as RMS_NORM
from ...ops.softmax_cross_entropy.rewrite import RULES as CROSS_ENTROPY
from ...ops.swiglu.rewrite import RULES as SWIGLU

WAYS: dict[Any, tuple[Way, ...]] = {
    gelu_linear: prepacked.GELU_LINEAR,
    layer_norm_linear: prepacked.LAYER_NORM_LINEAR,
    linear: prepacked.LINEAR,
}
RULES: tuple[Rule, ...] = (
    *ACTIVATIONS,
    *ATTENTION,
    *ATTENTION_SCORES,
    *CROSS_ENTROPY,
    *RMS_NORM,
    *GROUP_NORM,
    *LINEAR[:4],
    *DROPOUT,
    *CONVOLUTION,
    *BATCH_NORM,
    *LINEAR[4:],
    *SWIGLU,
    *LAYER_NORM_LINEAR,
    *GELU_LINEAR,
    *POINTWISE,
)
