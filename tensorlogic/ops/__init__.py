"""Every op of the library, imported in the order of the data flow of a model; importing registers."""

from __future__ import annotations

import sys

from ..dispatch import candidate_loading
from . import (
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

# what is registered before any provider's candidates, PyTorch's own first
from .linear import precision, eager  # noqa: F401  isort: skip
from .matmul import precision as _precise  # noqa: F401  isort: skip
from .pointwise import joint_backward  # noqa: F401  isort: skip
from .reduce import joint_backward as _extremes  # noqa: F401  isort: skip
from .softmax_cross_entropy import joint_backward as _together  # noqa: F401  isort: skip
from . import precision_composition  # noqa: F401  isort: skip  of the ops above

# files beside the ops that register candidates with several of them
CANDIDATES = {"cpu": (), "cuda": ("shared_precision",), "mps": ()}
candidate_loading.FOLDERS += [
    (
        linear,
        matmul,
        gelu_linear,
        layer_norm_linear,
        linear_batch_norm_relu,
        dropout_linear,
        sys.modules[__name__],
    ),
    (pointwise,),
    (reduce,),
    (softmax,),
    (softmax_cross_entropy,),
    (attention_scores,),
]
