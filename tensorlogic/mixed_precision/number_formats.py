"""Ways to compute a product under a precision policy: each is one form of numbers on one engine, for any floating inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.candidate import EAGER
from ..core.key import Key
from .error_statistics import UNITS

Product = Callable[[Tensor, Tensor], Tensor]  # a [..., M, K], b [..., K, N] -> [..., M, N], wide

# what adding in float32 brings, a root of K times; tensor cores truncate
SUMS = 2.0**-24
#: Which forms may serve a mode.
SERVING = {"f32": ("f32", "f64"), "f16": ("f16",), "adaptive": tuple(UNITS)}


def anywhere(_: Any) -> None:
    """No objection."""


@dataclass(frozen=True)
class Way:
    """One form of numbers on one engine; `us(m, n, k, dtype)` is its expected time in microseconds."""

    id: str
    product: Callable[..., Tensor]  # also of rank=..., where there are several
    us: Callable[[int, int, int, str], float]
    available: Callable[[str], str | None] = anywhere
    serves: Callable[[Key], str | None] = anywhere
    matrices: bool = False  # serves two-dimensional operands only
    # right only where somebody looks at the data, as for "adaptive"
    guarded: bool = False
    unwatched: Product | None = None  # in its place where no guard looks at the data
    ranks: int = 1
    #: run(a, b, rank): the product of real matrices that lie like these in float32, where that only allocates and starts kernels; or None
    run: Callable[[Tensor, Tensor, int], Product | None] | None = None
    sources: tuple[Any, ...] = ()

    @property
    def form(self) -> str:
        """The form of numbers."""
        return form_of(self.id)


def form_of(id: str) -> str:
    """The form of numbers of a candidate."""
    return "f64" if id == EAGER else id.split(".")[1].partition("_")[0]


def coarse(form: str, key: Key) -> float:
    """The relative error that a form may have on normal inputs of this key."""
    depth = max((n for t in key.tensors if t is not None for n in t.shape), default=1)
    sums = 0.0 if form == "f64" else SUMS * max(math.sqrt(depth), depth / 16)
    return UNITS[form] + sums


def result_dtype(*tensors: Tensor | None) -> torch.dtype:
    """What floating (or complex) inputs promote to."""
    dtypes = [t.dtype for t in tensors if t is not None]
    found = dtypes[0]
    for dtype in dtypes[1:]:
        found = torch.promote_types(found, dtype)
    return found


def wide(t: Tensor) -> Tensor:
    """t in float64 (complex128)."""
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def single(t: Tensor) -> Tensor:
    """t in float32 (complex64)."""
    return t.to(torch.complex64 if t.is_complex() else torch.float32)


def single_at_least(t: Tensor) -> Tensor:
    """t, halves in float32."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def in_f64(a: Tensor, b: Tensor) -> Tensor:
    """The product in float64, which no switch of PyTorch touches."""
    a, b = wide(a), wide(b)
    dtype = torch.promote_types(a.dtype, b.dtype)
    return torch.matmul(a.to(dtype), b.to(dtype))


def by_parts(product: Product) -> Product:
    """The same for complex operands too: real and imaginary parts side by side make one real product."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        if not (a.is_complex() or b.is_complex()):
            return product(a, b)
        if not b.is_complex():
            c = single_at_least(product(torch.cat((a.real, a.imag), -2), b))
            m = a.shape[-2]
            return torch.complex(c[..., :m, :], c[..., m:, :])
        n = b.shape[-1]
        if not a.is_complex():
            c = product(a, torch.cat((b.real, b.imag), -1))
        else:
            right = (torch.cat((b.real, b.imag), -1), torch.cat((-b.imag, b.real), -1))
            c = product(torch.cat((a.real, a.imag), -1), torch.cat(right, -2))
        c = single_at_least(c)
        return torch.complex(c[..., :n].contiguous(), c[..., n:].contiguous())

    return run


def finite(c: Tensor) -> bool:
    """Whether a product has neither NaN nor infinities (or a sum beyond float32, which is rare and harmless)."""
    half = c.dtype in (torch.float16, torch.bfloat16)
    return math.isfinite(float(c.sum(dtype=torch.float32) if half else c.sum()))


WAYS: dict[str, Way] = {}  # by the id of their candidates
