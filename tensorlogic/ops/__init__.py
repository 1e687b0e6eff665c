"""Every op of the library, imported in the order of the data flow of a model; importing registers."""

from __future__ import annotations

from . import (  # noqa: F401
    attention_scores,
    dropout_linear,
    gelu_linear,
    layer_norm_linear,
    linear,
    linear_batch_norm_relu,
    matmul,
    pointwise,
    reduce,
    softmax,
    softmax_cross_entropy,
)

from .pointwise import together  # noqa: F401  isort: skip
from .reduce import together as _extremes  # noqa: F401  isort: skip
from .softmax_cross_entropy import together as _together  # noqa: F401  isort: skip
from . import composed  # noqa: F401  isort: skip  of the ops above
