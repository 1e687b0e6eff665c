"""layer_norm_linear in two launches: a Triton layer norm, then the vendor's product."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key
from ..common import triton_layer_norm, wiring
from . import LAYER_NORM_LINEAR, saves

Shape = tuple[int, int, str, str, tuple[int, ...], bool, bool, float, int, bool]


def describe(key: Key) -> Shape | str:
    """Contiguous rows of x."""
    x, gamma, beta = key.spec("x"), key.spec("gamma"), key.spec("beta")
    assert x is not None
    reason = wiring.one_dtype(key)
    if reason is not None:
        return reason
    rows = wiring.rows_of(x)
    if isinstance(rows, str):
        return rows
    if any(t is not None and prod(t.shape) != 1 and t.stride[0] != 1 for t in (gamma, beta)):
        return "gamma or beta is strided"
    return (
        *rows,
        x.dtype,
        x.dtype,
        x.shape,
        gamma is not None,
        beta is not None,
        key.flag("eps"),
        wiring.weakest(key),
        saves(key),
    )


def build(shape: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher over (x, gamma, beta, weight, bias)."""
    rows, columns, dtype, param, out, has_gamma, has_beta, eps, align, save = shape
    start = triton_layer_norm.layer_norm_launcher(
        rows,
        columns,
        (dtype, param, dtype),
        dict(config),
        device,
        has_gamma=has_gamma,
        has_beta=has_beta,
        save=save,
        align=align,
    )
    empty, stride, made = wiring.empty(device), wiring.contiguous(out), DTYPES[dtype]

    def launch(x: torch.Tensor, gamma: Any, beta: Any, weight: torch.Tensor, bias: Any) -> Any:
        normal = empty(out, stride, made)
        mean = empty((rows,), (1,), torch.float32) if save else x
        rstd = empty((rows,), (1,), torch.float32) if save else x
        if not start(
            x, x if gamma is None else gamma, x if beta is None else beta, normal, mean, rstd, eps
        ):
            return None
        y = F.linear(normal, weight, bias)
        return (y, normal, mean, rstd) if save else (y,)

    return launch


wiring.described(
    LAYER_NORM_LINEAR, "triton.rows", describe, lambda s: triton_layer_norm.layer_norm_configs(s[1], s[2]), build,
    (triton_layer_norm, sys.modules[__name__]),
)  # fmt: skip
