"""Root-mean-square norm as one step of a graph: models write it out in five calls, PyTorch has one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.rewrite_rule import Composite, Way


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """gamma · x / sqrt(mean(x², last dimension) + eps): x [..., D], gamma [D]; halves are normed in float32 and rounded."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gamma * y.to(x.dtype)


def fused(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """PyTorch's own, one kernel where it has one."""
    return F.rms_norm(x, (x.shape[-1],), gamma, eps)


WAY = Way("torch.rms_norm", lambda args: None, lambda emit, args: emit(fused, *args), training=True)
RMS_NORM = Composite("rms_norm", rms_norm, (WAY,))
