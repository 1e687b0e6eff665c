"""Ways to compute a product on an NVIDIA GPU: cuBLASLt in float32, TF32 and halves, and float32 as sums of half products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from ..core.key import SIZES, Key, TensorSpec
from ..kernels.gemm.cublaslt import lt_available
from ..kernels.mixed_precision import f64_gemm, f64_gemm_kernel, line_max, scaled_f16, split_planes
from . import cublaslt_sequence
from .cublaslt_sequence import Planes, Prepared, Run, Step
from .number_formats import Way, in_f64, single

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: Which planes of left meet which of right, the smallest products first.
PLANES = {1: ((0,), (0,)), 3: ((1, 0, 0), (0, 1, 0))}
# binary exponents by which float16's lower planes are larger, where its range has room for them
LIFT = 11
RUN = 384  # of the inner dimension: a longer one loses digits
EVEN = 64  # what runs but the last are a multiple of
FULL_RATE = {(8, 0), (9, 0), (10, 0)}  # compute capabilities with tensor cores for float64
LIBRARY_US = 7.5  # of a caller's thread, for one call of cuBLASLt
# bytes of operands in another dtype that "f32" may keep where none are needed
COPIED = 1 << 20
RANKS = 3  # algorithms of the library's ranking that are worth timing


def _all(count: int, depth: int) -> list[Step]:
    """The sum of `count` half products, as one product of a longer inner dimension."""
    return [Step(0, count * depth)]


def _in_runs(depth: int) -> list[Step]:
    """That of three, the largest products added in runs short enough for what tensor cores lose: they truncate as they add."""
    even = ceil(depth / ceil(depth / RUN) / EVEN) * EVEN  # so that no short one is left
    small, end = 2 * depth, 3 * depth
    runs = [Step(start, min(even, end - start)) for start in range(small, end, even)]
    return [Step(0, small, 2.0**-LIFT), *runs]


def _planes(dtype: torch.dtype, count: int) -> Prepared:
    """As one product of the planes of both operands."""
    return Prepared(partial(cublaslt_sequence.planes, Planes(dtype, *PLANES[count]), partial(_all, count)))  # fmt: skip


_DIRECT = {name: Prepared(partial(cublaslt_sequence.direct, name)) for name in ("ieee", "tf32")}
_ONE = {dtype: _planes(dtype, 1) for dtype in (F16, BF16)}
_BF16X3 = _planes(BF16, 3)
_F16X3 = Prepared(partial(cublaslt_sequence.planes, Planes(F16, *PLANES[3], LIFT), _in_runs))
_WIDENED = Prepared(cublaslt_sequence.widened)


def lt(a: Tensor, b: Tensor, precision: str = "ieee", rank: int = 0) -> Tensor:
    """a [M, K] · b [K, N] of one dtype in float32, by a library that no switch of PyTorch reaches."""
    a, b = (t if 1 in t.stride() else t.contiguous() for t in (a, b))
    return _DIRECT[precision](a, b, rank)


def f32(a: Tensor, b: Tensor, rank: int = 0) -> Tensor:
    """float32; halves of one type as they are, whose products are exact in it."""
    exact = a.dtype == b.dtype and a.dtype in (F16, BF16)
    return lt(a, b, rank=rank) if exact else lt(single(a), single(b), rank=rank)


def tf32(a: Tensor, b: Tensor, rank: int = 0) -> Tensor:
    """TF32 of tensor cores: ten bits of significand, float32's range."""
    return lt(single(a), single(b), "tf32", rank)


def halved(dtype: torch.dtype, a: Tensor, b: Tensor, rank: int = 0) -> Tensor:
    """Operands rounded to a half dtype, which both may have already."""
    a, b = (t if t.dtype != dtype or 1 in t.stride() else t.contiguous() for t in (a, b))
    return lt(a, b, rank=rank) if a.dtype == b.dtype == dtype else _ONE[dtype](a, b, rank)


def _direct_run(
    precision: str, dtypes: tuple[torch.dtype, ...], a: Tensor, b: Tensor, rank: int
) -> Run | None:
    """Of operands of one of these dtypes, multiplied as they lie."""
    served = a.dtype == b.dtype and a.dtype in dtypes and 1 in a.stride() and 1 in b.stride()
    return _DIRECT[precision].run(a, b, rank) if served else None


def _halved_run(dtype: torch.dtype, a: Tensor, b: Tensor, rank: int) -> Run | None:
    """Of what `halved` serves without a copy."""
    if any(t.dtype == dtype and 1 not in t.stride() for t in (a, b)):
        return None
    return _direct_run("ieee", (dtype,), a, b, rank) or _ONE[dtype].run(a, b, rank)


def f64(a: Tensor, b: Tensor) -> Tensor:
    """float64, narrower operands widened in one launch."""
    return _WIDENED(a, b)


def f64_widened(a: Tensor, b: Tensor, rank: int = 0) -> Tensor:
    """float64, narrower operands widened as they are multiplied; where they lie oddly, before."""
    found = f64_gemm.product(rank, a, b)
    return in_f64(a, b) if found is None else found


def scaled(a: Tensor, b: Tensor, rank: int = 0) -> Tensor:
    """float16 with rows of a and columns of b brought into its range by powers of two; what is not finite stays so."""
    (left, rows), (right, columns) = _halves(a), _halves(b.t())
    wide = torch.float64 in (a.dtype, b.dtype)
    return scaled_f16.scaled_back(lt(left, right.t(), rank=rank), rows, columns, wide)


def _halves(t: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows in float16, and the exponents by which they were scaled down: None for what is float16 already."""
    return (t, None) if t.dtype == F16 else scaled_f16.halves(t)


def _narrowing(key: Key) -> str | None:
    """None, or why float64 inputs are better served as they are: their range, at no cost."""
    kinds = {t.dtype for t in _operands(key)}
    if kinds not in ({"f16"}, {"bf16"}) and (reason := _copying(key, 4)) is not None:
        return reason
    if key.precision != "f32" or "f64" not in kinds or not torch.cuda.is_available():
        return None
    quick = torch.cuda.get_device_capability() in FULL_RATE
    return "float64 is no slower on this GPU, and keeps its range" if quick else None


def _widening(key: Key) -> str | None:
    """None, or why torch.eager serves as well."""
    wide = any(t is None or t.dtype not in ("f16", "bf16", "f32", "c64") for t in key.tensors[:2])
    if wide:
        return "for operands that are to be widened"
    return _copying(key, 8)


def _operands(key: Key) -> list[TensorSpec]:
    """Of the products of a call."""
    count = 3 if key.direction == "backward" else 2
    return [t for t in key.tensors[:count] if t is not None]


def _in_registers(key: Key) -> str | None:
    """None, or why operands cannot be widened as they are multiplied, or need not be."""
    kinds = {t.dtype for t in _operands(key)}
    if kinds == {"f64"} or not kinds <= set(SIZES):
        return "for real operands that are to be widened"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "for Hopper's bulk copies"
    return None


def _copying(key: Key, width: int) -> str | None:
    """None, or why converted copies of so many bytes an element are more than "f32" keeps where none is needed."""
    narrow = [t for t in _operands(key) if SIZES.get(t.dtype, width) != width]
    copied = sum(width * prod(t.shape) for t in narrow)
    if key.precision != "f32" or copied <= COPIED or _in_registers(key) is not None:
        return None
    return "it would keep a converted copy"


def _us(rate: float, converted: float, host: float = 21, run: int = 0) -> Callable[[int, int, int, str], float]:  # fmt: skip
    """Expected time from multiply-adds a microsecond and bytes of conversions an element; at least what a caller's thread takes, with
    a library call more for every `run` of the inner dimension."""

    def us(m: int, n: int, k: int, dtype: str) -> float:
        device = 4 + m * n * k / rate + (m * k + k * n) * converted / 3e6
        return max(device, host + (LIBRARY_US * ceil(k / run) if run else 0.0))

    return us


def found() -> list[Way]:
    """Every way, most accurate first."""
    gpu: dict[str, Any] = {"available": lt_available, "matrices": True}
    library = gpu | {
        "ranks": RANKS,
        "sources": (split_planes, scaled_f16, line_max, cublaslt_sequence),
    }
    return [
        Way("triton.f64", f64, _us(25e6, 16, host=41), serves=_widening, sources=(split_planes, cublaslt_sequence), **gpu),
        Way("triton.f64_widened", f64_widened, _us(28e6, 0), serves=_in_registers, ranks=f64_gemm.RANKS, sources=(f64_gemm, f64_gemm_kernel), **gpu),
        Way("cublaslt.f32", f32, _us(25e6, 0), serves=_narrowing, run=partial(_direct_run, "ieee", (F32, F16, BF16)), **library),
        Way("cublaslt.f16x3", _F16X3, _us(80e6, 10, 25, RUN), guarded=True, run=_F16X3.run, **library),
        Way("cublaslt.bf16x3", _BF16X3, _us(110e6, 10, 25), run=_BF16X3.run, **library),
        Way("cublaslt.tf32", tf32, _us(190e6, 0), run=partial(_direct_run, "tf32", (F32,)), **library),
        Way("cublaslt.f16", scaled, _us(330e6, 10, 75), **library),
        Way("cublaslt.f16_unscaled", partial(halved, F16), _us(330e6, 6, 26), guarded=True, run=partial(_halved_run, F16), **library),
        Way("cublaslt.bf16", partial(halved, BF16), _us(330e6, 6, 26), run=partial(_halved_run, BF16), **library),
    ]  # fmt: skip
