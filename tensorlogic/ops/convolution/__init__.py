"""Convolution with bias, residual and activation as one step of a graph, and the ways PyTorch's libraries offer to run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.activations import activate_
from ...core.rewrite_rule import Composite, Emit, Way, looking
from ..linear import linear

CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)
Sizes = Sequence[int]
# times an image's size: turning such weights for adjacent channels at every call takes most of
# PyTorch's time on a CPU
TURNED = 4


def convolution(
    x: Tensor, w: Tensor, b: Tensor | None, r: Tensor | None, activation: str,
    stride: Sizes, padding: Sizes, dilation: Sizes, groups: int,
) -> Tensor:  # fmt: skip
    """activation(convolution(x, w) + b + r): x [B, C, ...], w [N, C/groups, ...], b [N], r as the output."""
    turned = x.device.type == "cpu" and w.is_contiguous() and not x.is_contiguous()
    if turned and w.numel() > TURNED * x.numel():
        x = x.contiguous()
    y: Tensor = CONVOLVE[w.dim() - 3](x, w, b, stride, padding, dilation, groups)
    if r is not None:
        y = y + r
    return activate_(y, activation) if activation != "none" else y


def _scale(w: Tensor, gamma: Tensor | None, var: Tensor, eps: float) -> tuple[torch.dtype, Tensor]:
    """The dtype to compute in, and each output's batch-norm scale."""
    wide = torch.promote_types(w.dtype, torch.float32)
    scale = torch.rsqrt(var.to(wide) + eps)
    return wide, scale if gamma is None else scale * gamma.to(wide)


def _like_weight(w: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(w)


def _like_mean(w: Tensor, b: Any, gamma: Any, beta: Any, mean: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(mean, dtype=w.dtype)


@looking(_like_weight)
def fold_weight(w: Tensor, gamma: Tensor | None, var: Tensor, eps: float) -> Tensor:
    """w [N, ...] with each output's batch-norm scale in it, computed in at least float32."""
    wide, scale = _scale(w, gamma, var, eps)
    return (w.to(wide) * scale.reshape(-1, *[1] * (w.dim() - 1))).to(w.dtype)


@looking(_like_mean)
def fold_bias(
    w: Tensor, b: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:  # fmt: skip
    """The bias [N] that belongs to `fold_weight`, in w's dtype."""
    wide, scale = _scale(w, gamma, var, eps)
    shift = -mean.to(wide) if b is None else b.to(wide) - mean.to(wide)
    shift = shift * scale
    return (shift if beta is None else shift + beta.to(wide)).to(w.dtype)


def _like_bias(b: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(b)


@looking(_like_weight)
def scale_weight(w: Tensor, s: Tensor) -> Tensor:
    """w [N, ...] with each output's factor s (N numbers) in it, computed in at least float32."""
    wide = torch.promote_types(w.dtype, torch.float32)
    return (w.to(wide) * s.to(wide).reshape(-1, *[1] * (w.dim() - 1))).to(w.dtype)


@looking(_like_bias)
def scale_bias(b: Tensor, s: Tensor) -> Tensor:
    """The bias [N] that belongs to `scale_weight`."""
    return scale_weight(b, s)


def channels_last(t: Tensor) -> Tensor:
    """t [B, C, H, W] with its channels adjacent in memory; itself where they are already."""
    return t.contiguous(memory_format=torch.channels_last)


def in_place(x: Tensor, w: Tensor, b: Any, r: Any, activation: str, *how: Any) -> Tensor:
    """The convolution, then residual and activation into its own memory."""
    y: Tensor = CONVOLVE[w.dim() - 3](x, w, b, *how)
    return activate_(y if r is None else y.add_(r), activation)


def cudnn(x: Tensor, w: Tensor, b: Tensor | None, r: Any, *how: Any) -> Tensor:
    """cuDNN's fused convolution, bias, residual and ReLU."""
    if r is None:
        return torch.cudnn_convolution_relu(x, w, b, *how)
    return torch.cudnn_convolution_add_relu(x, w, r, 1.0, b, *how)


def pack(w: Tensor, stride: Any, padding: Any, dilation: Any, groups: int, shape: Any) -> Tensor:
    """The weight in the layout that oneDNN wants for inputs of this shape."""
    reorder = torch.ops.mkldnn._reorder_convolution_weight
    return reorder(w, padding, stride, dilation, groups, shape)


def onednn(
    x: Tensor, w: Tensor, b: Any, r: Any, activation: str, stride: Any, padding: Any, *how: Any
) -> Tensor:
    """oneDNN's convolution with bias and residual in one call; its ReLU would make 0 of NaN."""
    run = torch.ops.mkldnn._convolution_pointwise
    # oneDNN reads N numbers in a row, whatever the stride
    b = None if b is None else b.contiguous()
    if r is None:
        y: Tensor = run(x, w, b, padding, stride, *how, "none", [], "")
    else:
        y = run.binary(x, r, w, b, padding, stride, *how, "add", 1.0, None, [], "")
    return activate_(y, activation)


def as_rows(x: Tensor, stride: Sizes) -> Tensor:
    """x [B, C, H, W] as [B, H, W, C], strided as a 1×1 convolution reads it."""
    return x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1)


def as_image(y: Tensor) -> Tensor:
    """[B, H, W, N] as [B, N, H, W], channels adjacent."""
    return y.permute(0, 3, 1, 2)


def _two_dimensional(args: tuple[Any, ...]) -> str | None:
    x, r = args[0], args[3]
    if args[1].dim() != 4 or x.dim() != 4:
        return "two-dimensional convolutions only"
    if any(isinstance(p, str) for p in args[6]):
        return "padding by name"
    if r is not None and r.shape[2:] == (1, 1):
        return "the residual is broadcast"
    return None


def _rest(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[5], args[6], args[7], args[8]


def _channels_last(emit: Emit, args: tuple[Any, ...]) -> Any:
    x, w, b, r, act = args[:5]
    near = [None if t is None else emit(channels_last, t) for t in (x, w)]
    return emit(in_place, near[0], near[1], b, r, act, *_rest(args))


def _cudnn(emit: Emit, args: tuple[Any, ...]) -> Any:
    x, w, r = (None if t is None else emit(channels_last, t) for t in (*args[:2], args[3]))
    return emit(cudnn, x, w, args[2], r, *_rest(args))


def _cudnn_fits(args: tuple[Any, ...]) -> str | None:
    if args[0].device.type != "cuda" or args[0].dtype not in (torch.float16, torch.bfloat16):
        return "halves on a GPU only"
    return _two_dimensional(args) or (None if args[4] == "relu" else "ends in ReLU only")


def _onednn_fits(args: tuple[Any, ...]) -> str | None:
    if args[0].device.type != "cpu" or args[0].dtype != torch.float32:
        return "float32 on a CPU only"
    if not torch.backends.mkldnn.is_available():
        return "PyTorch was built without oneDNN"
    return _two_dimensional(args)


def _onednn(emit: Emit, args: tuple[Any, ...]) -> Any:
    x, w, b, r, act = args[:5]
    shape = tuple(x.meta["val"].shape)
    near = emit(channels_last, x)
    packed = emit(pack, w, *_rest(args), shape)
    other = None if r is None else emit(channels_last, r)
    stride, padding, dilation, groups = _rest(args)
    return emit(onednn, near, packed, b, other, act, stride, padding, dilation, groups)


def _pointwise_fits(args: tuple[Any, ...]) -> str | None:
    w = args[1]
    reason = _two_dimensional(args)
    if reason:
        return reason
    if tuple(w.shape[2:]) != (1, 1) or any(args[6]) or args[8] != 1:
        return "1×1 without padding or groups only"
    return None


def _pointwise(emit: Emit, args: tuple[Any, ...]) -> Any:
    x, w, b, r, act = args[:5]
    rows = emit(as_rows, emit(channels_last, x), args[5])
    matrix = emit(torch.flatten, w, 1)
    other = None if r is None else emit(as_rows, emit(channels_last, r), (1, 1))
    y = emit(linear, rows, matrix, b, other, None if act == "none" else act)
    return emit(as_image, y)


CONVOLUTION = Composite(
    "convolution",
    convolution,
    (
        Way("torch.channels_last", _two_dimensional, _channels_last, layout=True, training=True),
        Way("cudnn.fused", _cudnn_fits, _cudnn, layout=True),
        Way("onednn.packed", _onednn_fits, _onednn, layout=True),
        Way("tensorlogic.linear", _pointwise_fits, _pointwise, layout=True),
    ),
)
