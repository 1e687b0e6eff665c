"""PyTorch's own product, with a bias or bare, as a step among launches: another choice of algorithm than cuBLASLt's own at times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .gemm import GemmSpec


def torch_available(device: str) -> str | None:
    """None on a GPU; its 16-bit products on CPUs round more than once."""
    return None if device == "cuda" else "PyTorch's product among launches runs on CUDA devices"


def torch_refusal(spec: GemmSpec) -> str | None:
    """None, or why torch.mm cannot be `spec`."""
    plain = GemmSpec(spec.m, spec.n, spec.k, spec.x, spec.w, spec.y, bias=spec.bias)
    if replace(spec, align=plain.align, batch=1) != plain:
        return "nothing but a product and a bias is torch.addmm"
    if spec.batch != 1:
        return "a batch"
    if spec.y.columns != 1 or spec.y.rows != spec.n:
        return "rows of the output do not lie together"
    if {spec.x.dtype, spec.w.dtype, spec.bias or spec.x.dtype} != {spec.y.dtype}:
        return "dtypes differ"
    return None


def torch_configs(spec: GemmSpec) -> list[dict[str, Any]]:
    """PyTorch chooses."""
    del spec
    return [{}]


def torch_arguments(spec: GemmSpec) -> tuple[str, ...]:
    """Names of the tensors that the launcher takes, in order."""
    return ("x", "w", "bias", "y") if spec.bias else ("x", "w", "y")


def torch_launcher(
    spec: GemmSpec, config: Mapping[str, Any], device: torch.device
) -> Callable[..., bool]:
    """A callable (x, w[, bias], y) -> True on the current stream; y [..., N] is written, contiguous."""
    del config, device
    m, n, k, x_lies, w_lies = spec.m, spec.n, spec.k, spec.x, spec.w

    def matrices(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        left = x.as_strided((m, k), (x_lies.rows, x_lies.columns))
        return left, w.as_strided((k, n), (w_lies.rows, w_lies.columns))

    def bare(x: Tensor, w: Tensor, y: Tensor) -> bool:
        torch.mm(*matrices(x, w), out=y.view(m, n))
        return True

    def biased(x: Tensor, w: Tensor, bias: Tensor, y: Tensor) -> bool:
        torch.addmm(bias, *matrices(x, w), out=y.view(m, n))
        return True

    return biased if spec.bias else bare
