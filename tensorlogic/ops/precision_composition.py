"""What the ops around a product do under a precision policy: their other steps by PyTorch, the product by the policy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.register import rows
from ..mixed_precision import number_formats
from .attention_scores import ATTENTION_SCORES, masked
from .dropout_linear import DROPOUT_LINEAR, dropped
from .gelu_linear import GELU_LINEAR
from .layer_norm_linear import LAYER_NORM_LINEAR
from .linear import linear
from .linear_batch_norm_relu import LINEAR_BATCH_NORM_RELU
from .matmul import matmul


def _as_the_result(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x in the dtype of the result: what is done to it before the product is not rounded to a narrower one."""
    return x.to(number_formats.result_dtype(x, weight, bias))


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """linear(gelu(x))."""
    x = _as_the_result(x, weight, bias)
    return linear(F.gelu(x, approximate=approximate), weight, bias)


def layer_norm_linear(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """linear(layer_norm(x))."""
    x = _as_the_result(x, weight, bias)
    scale, shift = (None if t is None else t.to(x.dtype) for t in (gamma, beta))
    return linear(F.layer_norm(x, x.shape[-1:], scale, shift, eps), weight, bias)


def dropout_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    p: float,
    seed: int,
    offset: int,
    state: Tensor | None,
) -> Tensor:
    """linear(dropout(x))."""
    x = _as_the_result(x, weight, bias)
    return linear(dropped(x, p, seed, offset, state), weight, bias)


def linear_batch_norm_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    training: bool,
    momentum: float,
) -> Tensor:
    """relu(batch_norm(linear(x)))."""
    z = linear(x, weight, bias)
    flat = rows(z)
    scale, shift = (None if t is None else t.to(z.dtype) for t in (gamma, beta))
    normal = F.batch_norm(flat, running_mean, running_var, scale, shift, training, momentum, eps)
    return torch.relu(normal).view(z.shape)


def attention_scores(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None, is_causal: bool
) -> Tensor:
    """softmax over the masked scores of matmul(q, kᵀ)."""
    return torch.softmax(masked(matmul(q, k.transpose(-1, -2)), scale, mask, is_causal), -1)


GELU_LINEAR.composed = gelu_linear
LAYER_NORM_LINEAR.composed = layer_norm_linear
DROPOUT_LINEAR.composed = dropout_linear
LINEAR_BATCH_NORM_RELU.composed = linear_batch_norm_relu
ATTENTION_SCORES.composed = attention_scores
