"""What PyTorch ships for products on CPUs: oneDNN in float32, and half products widened to float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import weight_cache
from ...core.key import Key, TensorSpec

_ONEDNN = {
    "none": ("none", None),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", None),
}


def onednn_available(device: str) -> str | None:
    """None where oneDNN's fused linear exists."""
    if device != "cpu":
        return "oneDNN runs on CPUs"
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return "this build of PyTorch has no oneDNN"
    return None


def onednn_weight(weight: TensorSpec) -> str | None:
    """None for a matrix without gaps, as it lies or transposed: others go to a kernel that takes 600 to 900 times as long."""
    rows, columns = weight.shape
    return (
        None
        if weight.stride in ((columns, 1), (1, rows))
        else "oneDNN has no fast product of a weight with gaps"
    )


def onednn_f32(key: Key) -> str | None:
    """None for non-empty float32 products of at least two dimensions by a weight without gaps."""
    x, w = key.spec("x"), key.spec("weight")
    if x is None or w is None or x.dtype != "f32" or w.dtype != "f32":
        return "float32 only"
    if 0 in x.shape or 0 in w.shape or len(x.shape) < 2 or len(w.shape) != 2:
        return "empty or one-dimensional"
    return onednn_weight(w)


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """activation(x · weightᵀ + bias) by oneDNN, but for ReLU: its own makes 0 of NaN."""
    name, algorithm = _ONEDNN.get(activation, _ONEDNN["none"])
    if bias is not None:
        bias = bias.contiguous()  # it reads N numbers in a row, whatever the stride
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, name, [], algorithm)
    return y.relu_() if activation == "relu" else y


def widened(key: Key, first: str = "x") -> str | None:
    """None for half precision on a CPU."""
    x = key.spec(first)
    if key.device != "cpu":
        return "for CPUs"
    return None if x is not None and x.dtype in ("f16", "bf16") else "for half precision"


def wide_weight(weight: Tensor) -> Tensor:
    """The weight in float32; kept while it does not change if it is a parameter or declared constant."""
    if weight_cache.is_constant(weight):
        return weight_cache.CACHE.get(weight, "f32", lambda w: w.float(), lambda w: w.numel() * 4)
    return weight.float()
