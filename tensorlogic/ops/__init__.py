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
from .linear import precise

from .linear import torch_candidates  # noqa: F401  isort: skip
from .matmul import precise as _precise  # noqa: F401  isort: skip
from .pointwise import together  # noqa: F401  isort: skip
from .reduce import together as _extremes  # noqa: F401  isort: skip
from .softmax_cross_entropy import together as _together  # noqa: F401  isort: skip
from . import composed  # noqa: F401  isort: skip  of the ops above

# files beside the ops that register candidates with several of them
CANDIDATES = {"cpu": (), "cuda": ("few_rows", "precise_cuda"), "mps": ()}
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
