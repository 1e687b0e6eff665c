"""What tests of the native kernels share: instruction sets forced in turn, exact functions, comparisons to the last bits, layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorlogic.native import cpu_library

LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF, NAN = float("inf"), float("nan")
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.special.expit(x),
    "gelu": lambda x: x * 0.5 * torch.special.erfc(-x * math.sqrt(0.5)),
    "gelu_tanh": lambda x: (
        x * torch.special.expit(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    ),
}


def forced(level: str) -> Iterator[Any]:
    """The operators with one instruction set forced."""
    if level not in cpu_library.op("features")().split(","):
        pytest.skip(f"this machine has no {level}")
    cpu_library.op("set_isa")(level)
    yield torch.ops.tensorlogic_native
    cpu_library.op("set_isa")("auto")


@pytest.fixture(params=LEVELS)
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each instruction set in turn."""
    yield from forced(request.param)


def ulps_of(ops: Any) -> int:
    """The accuracy promised for activations; without a fused multiply-add one ulp more."""
    return 3 if ops.isa() == "portable" else 2


def spacing(reference: Tensor, dtype: torch.dtype) -> Tensor:
    """One ulp of `dtype` at each reference value."""
    info = torch.finfo(dtype)
    return torch.exp2(torch.floor(torch.log2(reference.abs().clamp(min=info.tiny)))) * info.eps


def assert_ulps(y: Tensor, reference: Tensor, ulps: float) -> None:
    """y is within `ulps` of the float64 reference; where that is not finite in y's dtype, y equals it."""
    rounded = reference.to(y.dtype)
    finite = torch.isfinite(rounded)
    torch.testing.assert_close(y[~finite], rounded[~finite], rtol=0, atol=0, equal_nan=True)
    gone = (y == 0) & (
        reference.abs() < 2**-112
    )  # an exponential that is hardly a normal number is 0, whatever x it is multiplied by
    finite = finite & ~gone
    error = (y.double() - reference)[finite].abs() / spacing(reference[finite], y.dtype)
    assert error.numel() == 0 or error.max() <= ulps, f"{error.max():.2f} ulp"


def stepped(t: Tensor) -> Tensor:
    """The same values, neighbours in neither dimension."""
    wide = t.new_full((*t.shape[:-1], t.shape[-1] * 2 + 1), NAN)
    wide[..., 1::2] = t
    return wide[..., 1::2]


LAYOUTS = (lambda t: t, lambda t: t.mT.contiguous().mT, stepped)


def expected(dtype: torch.dtype, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The product, and what one rounding of the result and float32 sums may cost, element by element."""
    ref, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    return ref, torch.finfo(dtype).eps * ref.abs() + 3e-7 * a.shape[-1] ** 0.5 * size + 1e-7


def assert_near(y: Tensor, ref: Tensor, bound: Tensor) -> None:
    error = (y.double() - ref).abs()
    assert y.shape == ref.shape
    assert bool((error <= bound).all()), f"{(error / bound).max()}"


def assert_product(y: Tensor, a: Tensor, b: Tensor) -> None:
    assert_near(y, *expected(y.dtype, a, b))
