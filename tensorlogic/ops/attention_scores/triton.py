"""attention_scores by Triton: scores held or computed twice by one kernel, or one pass behind PyTorch's product, and before backward's."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...core.argument_checks import broadcast
from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.attention_scores import after_gemm, recompute
from ...kernels.row_access import contiguous as contiguous_rows
from ...kernels.softmax import rows
from ...kernels.triton_runtime import device_math
from . import ATTENTION_SCORES, ATTENTION_SCORES_BACKWARD, shapes
from .shapes import Shape, describe


def configs(x: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    _, _, s, t, d = x.sizes
    return recompute.attention_scores_configs(s, t, d, x.dtype, x.mask, x.causal)


def build(x: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher over (q, k, scale, mask)."""
    start = recompute.attention_scores_launcher(
        x.sizes, x.dtype, x.dtype, x.q, x.k, x.mask, x.mask_dtype, x.mask_strides, x.causal, dict(config), device, align=x.align,
    )  # fmt: skip
    empty, stride, dtype = register.empty(device), register.contiguous(x.out), DTYPES[x.dtype]

    def launch(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Any:
        y = empty(x.out, stride, dtype)
        return (y,) if start(q, k, q if mask is None else mask, y, scale) else None

    return launch


@dataclass(frozen=True)
class Rows:
    """Scores as rows: (B, H, S, T), their shape, dtype and mask, and what backward is asked for."""

    sizes: tuple[int, int, int, int]
    out: tuple[int, ...]
    dtype: str
    mask: tuple[str, str, shapes.Strides]
    causal: bool
    align: int
    needs: str = ""


def describe_rows(key: Key) -> Rows | str:
    """At most two leading dimensions; how q and k lie is the product's concern."""
    q, k, mask = key.present("q"), key.present("k"), key.spec("mask")
    reason = register.one_dtype(key, "q", "k")
    if reason is not None:
        return reason
    if 0 in (*q.shape, *k.shape):
        return "empty"
    lead = broadcast(q.shape[:-2], k.shape[:-2])
    if len(lead) > 2 and mask is not None:
        return "a mask of more than two leading dimensions"
    b, h = (1, 1, *lead)[-2:] if len(lead) <= 2 else (prod(lead), 1)
    found = shapes.mask_of(mask, (b, h), q.dtype)
    if isinstance(found, str):
        return found
    s, t = q.shape[-2], k.shape[-2]
    return Rows((b, h, s, t), (*lead, s, t), q.dtype, found, key.flag("is_causal"), register.weakest(key))  # fmt: skip


def rows_configs(x: Rows) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return after_gemm.scores_rows_configs(x.sizes[3], x.dtype)


def build_rows(x: Rows, config: Config, device: torch.device) -> Launcher:
    """The launcher over (q, k, scale, mask)."""
    start = after_gemm.scores_rows_launcher(
        x.sizes, x.dtype, *x.mask, x.causal, dict(config), device, x.align
    )

    def launch(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Any:
        y = (q @ k.mT).contiguous()
        return (y,) if start(y, y if mask is None else mask, scale) else None

    return launch


def describe_backward(key: Key) -> Rows | str:
    """Contiguous scores of q and k with equal leading dimensions, whose mask needs no gradient."""
    q, k, dy, y = map(key.present, ("q", "k", "dy", "y"))
    if key.flag("needs")[2] == "1":
        return "the mask needs a gradient"
    if q.shape[:-2] != k.shape[:-2]:
        return "leading dimensions of q and k differ"
    if not (register.is_contiguous(dy) and register.is_contiguous(y)):
        return "dy or y is not contiguous"
    reason = register.one_dtype(key, "dy", "q", "k", "y")
    x = describe_rows(key) if reason is None else reason
    if isinstance(x, str):
        return x
    mask = x.mask if x.mask[0] == "bool" else ("none", x.dtype, (0, 0, 0, 0))
    return Rows(x.sizes, x.out, x.dtype, mask, x.causal, x.align, key.flag("needs"))


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a [..., M, K] @ b [..., K, N] of equal leading dimensions, scaled before it is rounded."""
    nothing = a.new_empty(1)
    if a.dim() == 2:
        return torch.addmm(nothing, a, b, beta=0, alpha=scale)
    product = torch.baddbmm(
        nothing, a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), beta=0, alpha=scale
    )
    return product.view(*a.shape[:-1], b.shape[-1])


def build_backward(x: Rows, config: Config, device: torch.device) -> Launcher:
    """The launcher over (dy, q, k, y, scale, mask)."""
    start = after_gemm.scores_rows_backward_launcher(
        x.sizes, x.dtype, *x.mask, x.causal, dict(config), device, x.align
    )
    empty, stride, dtype = register.empty(device), register.contiguous(x.out), DTYPES[x.dtype]
    hides, to_q, to_k = x.mask[0] == "bool", x.needs[0] == "1", x.needs[1] == "1"

    def launch(dy: Tensor, q: Tensor, k: Tensor, y: Tensor, scale: float, mask: Tensor | None) -> Any:  # fmt: skip
        ds = empty(x.out, stride, dtype)
        if not start(y, dy, mask if hides else y, ds):
            return None
        dq = scaled_product(ds, k, scale) if to_q else None
        return dq, scaled_product(ds.mT, q, scale) if to_k else None, None

    return launch


_ROWS = (after_gemm, rows, contiguous_rows, device_math, shapes, sys.modules[__name__])
register.described(
    ATTENTION_SCORES, "triton.scores", describe, configs, build, (recompute, shapes, sys.modules[__name__])
)  # fmt: skip
register.described(
    ATTENTION_SCORES, "triton.after_product", describe_rows, rows_configs, build_rows, _ROWS
)
register.described(
    ATTENTION_SCORES_BACKWARD, "triton.products", describe_backward, rows_configs, build_backward, _ROWS
)  # fmt: skip
