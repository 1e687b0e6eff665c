"""Linear layers by oneDNN with the weight in its own layout: for graphs, whose weights are packed once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.activations import activate_
from ...core.rewrite_rule import Emit, Way

FUSED = {  # not ReLU: oneDNN's makes 0 of NaN
    "none": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}


def pack(w: Tensor, rows: int) -> Tensor:
    """w [N, K] in the layout that oneDNN wants for products of so many rows."""
    return torch.ops.mkldnn._reorder_linear_weight(w.contiguous(), rows)


def run(x: Tensor, w: Tensor, b: Tensor | None, r: Tensor | None, activation: str) -> Tensor:
    """activation(x · wᵀ + b + r) with a packed w; r of the output's shape."""
    if b is not None:
        b = b.contiguous()  # oneDNN reads N numbers in a row, whatever the stride
    if r is None and activation in FUSED:
        name, algorithm = FUSED[activation]
        return torch.ops.mkldnn._linear_pointwise(x, w, b, name, [], algorithm)
    product = torch.ops.mkldnn._linear_pointwise
    y: Tensor = (
        product.binary(x, r, w, b, "add") if r is not None else product(x, w, b, "none", [], "")
    )
    return activate_(y, activation)


def fits(x: Tensor, w: Tensor) -> str | None:
    """None where oneDNN serves the product."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or w.dtype != torch.float32:
        return "float32 on a CPU only"
    if not torch.backends.mkldnn.is_available():
        return "PyTorch was built without oneDNN"
    if 0 in x.shape or 0 in w.shape or x.dim() < 2:
        return "empty, or a single row"
    return None


def emit_run(
    emit: Emit, like: Tensor, x: Any, w: Any, b: Any, r: Any, activation: str | None
) -> Any:
    """The packed weight, computed ahead, and the product; `like` is x's example."""
    rows = like.numel() // like.shape[-1]
    return emit(run, x, emit(pack, w, rows), b, r, activation or "none")


def _linear_fits(args: tuple[Any, ...]) -> str | None:
    x, w, _, r, _ = args
    if r is not None and tuple(r.shape) != (*x.shape[:-1], w.shape[0]):
        return "the residual is broadcast"
    return fits(x, w)


def _linear(emit: Emit, args: tuple[Any, ...]) -> Any:
    x, w, b, r, activation = args
    return emit_run(emit, x.meta["val"], x, w, b, r, activation)


def _gelu_linear(emit: Emit, args: tuple[Any, ...]) -> Any:
    x, w, b, approximate = args
    return emit_run(emit, x.meta["val"], emit(_gelu, x, approximate), w, b, None, None)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _layer_norm_linear(emit: Emit, args: tuple[Any, ...]) -> Any:
    x, gamma, beta, w, b, eps = args
    like = x.meta["val"]
    return emit_run(
        emit, like, emit(torch.layer_norm, x, (like.shape[-1],), gamma, beta, eps), w, b, None, None
    )


LINEAR = (Way("onednn.packed", _linear_fits, _linear),)
GELU_LINEAR = (Way("onednn.packed", lambda args: fits(args[0], args[1]), _gelu_linear),)
LAYER_NORM_LINEAR = (Way("onednn.packed", lambda args: fits(args[0], args[3]), _layer_norm_linear),)
