"""Products on CPUs in float32 with a native epilogue: what the linear family's cpu.epilogue candidates share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ... import derived, native
from ...numerics import DTYPES
from ...op import Candidate, Config, Launcher, Op
from ...plans import Key
from . import native_wiring, products, wiring

POOLED = 1 << 20  # bytes from which a fresh product comes from the pool


def supports(key: Key, x: str = "x", weight: str = "weight") -> str | None:
    """None for contiguous x (and residual) and a two-dimensional weight of one dtype."""
    w = key.spec(weight)
    assert w is not None
    if len(w.shape) != 2 or 0 in w.shape:
        return "weight is empty or not two-dimensional"
    names = [n for n in (x, "residual", "bias") if n in key.names and key.spec(n) is not None]
    return native_wiring.contiguous(key, *names) or wiring.one_dtype(key)


def configs(key: Key) -> list[Config]:
    """By PyTorch's own float32 product, or by oneDNN's."""
    found: list[Config] = [{"product": "torch"}]
    if products.onednn_available("cpu") is None:
        found.append({"product": "onednn"})
    return found


def widened(t: Tensor) -> Tensor:
    """t in float32."""
    return t if t.dtype == torch.float32 else native.op("convert")(t.contiguous(), torch.float32)


def weight32(weight: Tensor) -> Tensor:
    """The weight in float32, kept while it does not change if it is a parameter or declared constant."""
    if weight.dtype == torch.float32:
        return weight
    if derived.is_constant(weight):
        return derived.CACHE.get(weight, "f32", lambda w: w.float(), lambda w: w.numel() * 4)
    return (
        widened(weight)
        if weight.is_contiguous()
        else widened(weight.t()).t()
        if weight.t().is_contiguous()
        else weight.float()
    )


def product(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """product(x [..., K] f32, weight [N, K] f32) -> [rows, N] f32 that nobody else holds."""
    if config["product"] == "onednn":
        return lambda x, w: products.onednn(x.reshape(-1, x.shape[-1]), w, None, "none")
    empty = native.op("empty")

    def by_torch(x: Tensor, w: Tensor) -> Tensor:
        rows, n = x.numel() // x.shape[-1], w.shape[0]
        flat = x.reshape(rows, x.shape[-1])
        if rows * n * 4 < POOLED:
            return torch.mm(flat, w.t())
        return torch.mm(flat, w.t(), out=empty([rows, n], torch.float32))

    return by_torch


def half_guess(key: Key, x: str = "x", weight: str = "weight") -> float:
    """Where halves have no hardware, float32 is many times faster; otherwise it costs twice the bytes."""
    w, a = key.spec(weight), key.spec(x)
    assert w is not None and a is not None
    if a.dtype == "f32":
        return 1.0
    work = prod(a.shape) * w.shape[0]
    if a.dtype == "f16" and native_wiring.half_is_slow():
        return 0.1 if work > 1 << 15 else 1.0
    return 1.0


def linear_shape(key: Key) -> tuple[int, ...]:
    """[..., N] of x [..., K] and weight [N, K]."""
    x, weight = key.spec("x"), key.spec("weight")
    assert x is not None and weight is not None
    return (*x.shape[:-1], weight.shape[0])


def add(
    op: Op,
    id: str,
    build: Callable[[Key, Config], Launcher],
    module: str,
    supports: Callable[[Key], str | None] = supports,
    guess: Callable[[Key], float] = half_guess,
) -> None:
    """Register a candidate around a float32 product, by PyTorch's or by oneDNN's."""
    op.add(
        Candidate(
            id,
            bind=lambda key, config, device: build(key, config),
            supports=supports,
            configs=configs,
            available=native_wiring.cpu_only,
            sources=(sys.modules[module], sys.modules[__name__], native_wiring.LIBRARY),
            guess=guess,
            trusted=True,
        )
    )


def finish(
    key: Key, outputs: tuple[int, ...], x: str = "x"
) -> Callable[[Tensor, Any, Any], Tensor]:
    """epilogue(acc, bias, residual) -> y of the op's shape and dtype: bias, residual, activation in one pass."""
    dtype = DTYPES[native_wiring.dtype_of(key, x)]
    code = native.ACTIVATIONS[dict(key.flags).get("activation")]
    in_place, out_of_place = native.op("epilogue_"), native.op("epilogue")
    n = outputs[-1]

    def f32(acc: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if bias is not None or residual is not None or code:
            in_place(acc, bias, None if residual is None else residual.reshape(-1, n), code)
        return acc.view(outputs)

    def half(acc: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        flat = None if residual is None else residual.reshape(-1, n)
        return out_of_place(acc, bias, flat, code, dtype).view(outputs)

    return f32 if dtype == torch.float32 else half
