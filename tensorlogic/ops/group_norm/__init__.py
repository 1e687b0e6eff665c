"""Group norm as one step of a graph: PyTorch reads a group by one block; few and long groups are read by many here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.dtypes import NAMES
from ...core.rewrite_rule import Composite, Way, looking

MOST_ROWS = 65535  # of a grid's second dimension


def group_norm(
    x: Tensor, groups: int, gamma: Tensor | None, beta: Tensor | None, eps: float
) -> Tensor:
    """gamma · (x - mean) / sqrt(var + eps) + beta over each group of channels: x [B, C, ...], gamma and beta [C]."""
    return F.group_norm(x, groups, gamma, beta, eps)


@looking(group_norm)
def split(x: Tensor, groups: int, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Tensor:
    """The same by two kernels, in the layout of x: what each part of a group holds, then the norm."""
    last = not x.is_contiguous()
    if last and not (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        x, last = x.contiguous(), False
    given = [None if t is None else t.contiguous() for t in (gamma, beta)]
    params = [t for t in given if t is not None]
    y = torch.empty_like(x)
    align = min(16, *(t.data_ptr() & -t.data_ptr() or 16 for t in (x, y, *params)))
    has = (gamma is not None, beta is not None)
    shape = (x.shape[0], x.shape[1], x[0, 0].numel())
    launch, parts = _launcher(*shape, groups, NAMES[x.dtype], has, last, x.device, align)
    part = torch.empty(x.shape[0] * groups, parts, 2, dtype=torch.float32, device=x.device)
    return y if launch(x, part, *params, y, eps) else group_norm(x, groups, gamma, beta, eps)


@functools.lru_cache(256)
def _launcher(
    images: int, channels: int, pixels: int, groups: int, dtype: str, params: tuple[bool, bool], last: bool,
    device: torch.device, align: int,
) -> tuple[Callable[..., bool], int]:  # fmt: skip
    """What launches both kernels, and into how many parts a group is cut."""
    from ...kernels.norm import group_norm as norm_group_norm

    launch = norm_group_norm.group_norm_launcher(
        images, channels, pixels, groups, dtype, params, last, device, align
    )
    return launch, norm_group_norm.parts_of(images * groups, channels // groups * pixels)[0]


def _fits(args: tuple[Any, ...]) -> str | None:
    x, groups, gamma, beta = args[:4]
    if x.device.type != "cuda":
        return "a GPU only"
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32) or x.dim() < 3:
        return "images of halves or float32 only"
    if any(t is not None and t.dtype != x.dtype for t in (gamma, beta)):
        return "scale and shift of another dtype"
    if x.numel() == 0 or x.numel() // x.shape[0] >= 1 << 31 or x.shape[0] * groups > MOST_ROWS:
        return "nothing, or too much"
    return None


WAY = Way("triton.split", _fits, lambda emit, args: emit(split, *args), layout=True)
GROUP_NORM = Composite("group_norm", group_norm, (WAY,))
