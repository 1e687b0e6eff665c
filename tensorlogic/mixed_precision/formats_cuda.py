"""Ways to compute a product on an NVIDIA GPU: cuBLASLt in float32, TF32 and halves, and float32 as sums of bfloat16 products."""

from __future__ import annotations

from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from ..core.key import Key, TensorSpec
from ..kernels.gemm.cublaslt import lt_available
from ..kernels.mixed_precision import (
    f64_gemm,
    f64_gemm_kernel,
    line_max,
    scaled_f16,
    split_planes,
)
from . import cublaslt_sequence
from .cublaslt_sequence import Planes, Prepared, Run, Step
from .number_formats import Way, in_f64, single

#: Which planes of left meet which of right, the smallest products first.
PLANES = {1: ((0,), (0,)), 3: ((1, 0, 0), (0, 1, 0))}
#: Of the inner dimension: a longer one loses more than a split in three or six keeps.
RUNS = {torch.float16: 384, torch.bfloat16: 512}
EVEN = 64  # what runs but the last are a multiple of
FULL_RATE = {(8, 0), (9, 0), (10, 0)}  # compute capabilities with tensor cores for float64
LIBRARY_US = 7.5  # of a caller's thread, for one call of cuBLASLt
# bytes of operands in another dtype that "f32" may keep where none are needed
COPIED = 1 << 20
RANKS = 3  # algorithms of the library's ranking that are worth timing


def _all(count: int, depth: int) -> list[Step]:
    """The sum of `count` half products, as one product of a longer inner dimension."""
    return [Step(0, count * depth)]


def _in_runs(count: int, run: int, lift: int, depth: int) -> list[Step]:
    """The same, the largest products added in runs short enough for what tensor cores lose: they truncate as they add."""
    small, end = (count - 1) * depth, count * depth
    even = ceil(depth / ceil(depth / run) / EVEN) * EVEN  # so that no short one is left
    runs = [Step(start, min(even, end - start)) for start in range(small, end, even)]
    return [Step(0, small, 2.0**-lift), *runs]


def _planes(dtype: torch.dtype, count: int, in_runs: bool) -> Any:
    """float16's lower planes are kept 2 ** 11 times larger, where its range has room for them."""
    lift = 11 if in_runs and dtype == torch.float16 else 0
    steps = partial(_in_runs, count, RUNS[dtype], lift) if in_runs else partial(_all, count)
    return Prepared(partial(cublaslt_sequence.planes, Planes(dtype, *PLANES[count], lift), steps))


_DIRECT = {name: Prepared(partial(cublaslt_sequence.direct, name)) for name in ("ieee", "tf32")}
_WIDENED = Prepared(cublaslt_sequence.widened)


def lt(a: Tensor, b: Tensor, precision: str = "ieee", rank: int = 0) -> Tensor:
    """a [M, K] · b [K, N] of one dtype in float32, by a library that no switch of PyTorch reaches."""
    a, b = (t if 1 in t.stride() else t.contiguous() for t in (a, b))
    return _DIRECT[precision](rank, a, b)


def f32(rank: int, a: Tensor, b: Tensor) -> Tensor:
    """float32; halves of one type as they are, whose products are exact in it."""
    if a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16):
        return lt(a, b, rank=rank)
    return lt(single(a), single(b), rank=rank)


def tf32(rank: int, a: Tensor, b: Tensor) -> Tensor:
    """TF32 of tensor cores: ten bits of significand, float32's range."""
    return lt(single(a), single(b), "tf32", rank)


def halved(dtype: torch.dtype, product: Any, rank: int, a: Tensor, b: Tensor) -> Tensor:
    """Operands rounded to a half dtype, which both may have already."""
    a, b = (t if t.dtype != dtype or 1 in t.stride() else t.contiguous() for t in (a, b))
    return lt(a, b, rank=rank) if a.dtype == b.dtype == dtype else product(rank, a, b)


def _direct_run(
    precision: str, dtypes: tuple[torch.dtype, ...], rank: int, a: Tensor, b: Tensor
) -> Run | None:
    """Of operands of one of these dtypes, multiplied as they lie."""
    served = a.dtype == b.dtype and a.dtype in dtypes and 1 in a.stride() and 1 in b.stride()
    return _DIRECT[precision].run(rank, a, b) if served else None


def _halved_run(dtype: torch.dtype, planes: Prepared, rank: int, a: Tensor, b: Tensor) -> Run | None:  # fmt: skip
    """Of what `halved` serves without a copy."""
    if any(t.dtype == dtype and 1 not in t.stride() for t in (a, b)):
        return None
    return _direct_run("ieee", (dtype,), rank, a, b) or planes.run(rank, a, b)


def f64(a: Tensor, b: Tensor) -> Tensor:
    """float64, narrower operands widened in one launch."""
    return _WIDENED(0, a, b)


def f64_widened(rank: int, a: Tensor, b: Tensor) -> Tensor:
    """float64, narrower operands widened as they are multiplied; where they lie oddly, before."""
    found = f64_gemm.product(rank, a, b)
    return in_f64(a, b) if found is None else found


def scaled(rank: int, a: Tensor, b: Tensor) -> Tensor:
    """float16 with rows of a and columns of b brought into its range by powers of two; what is not finite stays so."""
    left, row_exponents = _halves(a)
    right, column_exponents = _halves(b.t())
    c = lt(left, right.t(), rank=rank)
    wide = torch.float64 in (a.dtype, b.dtype)
    return scaled_f16.scaled_back(c, row_exponents, column_exponents, wide)


def _halves(t: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows in float16, and the exponents by which they were scaled down: None for what is float16 already."""
    return (t, None) if t.dtype == torch.float16 else scaled_f16.halves(t)


def _cuda(device: str) -> str | None:
    return lt_available(device)


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
    if kinds == {"f64"} or not kinds <= set(f64_gemm.SIZES):
        return "for real operands that are to be widened"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "for Hopper's bulk copies"
    return None


def _copying(key: Key, width: int) -> str | None:
    """None, or why converted copies of so many bytes an element are more than "f32" keeps where none is needed."""
    narrow = [t for t in _operands(key) if f64_gemm.SIZES.get(t.dtype, width) != width]
    copied = sum(width * prod(t.shape) for t in narrow)
    if key.precision != "f32" or copied <= COPIED or _in_registers(key) is not None:
        return None
    return "it would keep a converted copy"


def _us(rate: float, converted: float, host: float = 21, run: int = 0) -> Any:
    """Expected time from multiply-adds a microsecond and bytes of conversions an element; at least what a caller's thread takes, with
    a library call more for every `run` of the inner dimension."""

    def us(m: int, n: int, k: int, dtype: str) -> float:
        device = 4 + m * n * k / rate + (m * k + k * n) * converted / 3e6
        return max(device, host + (LIBRARY_US * ceil(k / run) if run else 0.0))

    return us


def found() -> list[Way]:
    """Every way, most accurate first."""

    def way(name: str, form: str, product: Any, us: Any, **more: Any) -> Way:
        return Way(
            name, form, partial(product, 0), us, _cuda, matrices=True,
            ranked=product, ranks=RANKS, sources=(split_planes, scaled_f16, line_max, cublaslt_sequence), **more,
        )  # fmt: skip

    bf16, f16, single = torch.bfloat16, torch.float16, torch.float32
    f16x3, bf16x3 = _planes(f16, 3, True), _planes(bf16, 3, False)
    one_f16, one_bf16 = _planes(f16, 1, False), _planes(bf16, 1, False)

    def direct(precision: str, *dtypes: torch.dtype) -> Any:
        return partial(_direct_run, precision, dtypes)

    return [
        Way(
            "triton.f64",
            "f64",
            f64,
            _us(25e6, 16, host=41),
            _cuda,
            serves=_widening,
            matrices=True,
            sources=(split_planes, cublaslt_sequence),
        ),
        Way(
            "triton.f64_widened",
            "f64",
            partial(f64_widened, 0),
            _us(28e6, 0),
            _cuda,
            serves=_in_registers,
            matrices=True,
            ranked=f64_widened,
            ranks=f64_gemm.RANKS,
            sources=(f64_gemm, f64_gemm_kernel),
        ),
        way(
            "cublaslt.f32",
            "f32",
            f32,
            _us(25e6, 0),
            serves=_narrowing,
            run=direct("ieee", single, f16, bf16),
        ),
        way(
            "cublaslt.f16x3",
            "f16x3",
            f16x3,
            _us(80e6, 10, 25, RUNS[f16]),
            guarded=True,
            run=f16x3.run,
        ),
        way("cublaslt.bf16x3", "bf16x3", bf16x3, _us(110e6, 10, 25), run=bf16x3.run),
        way("cublaslt.tf32", "tf32", tf32, _us(190e6, 0), run=direct("tf32", single)),
        way("cublaslt.f16", "f16", scaled, _us(330e6, 10, 75)),
        way(
            "cublaslt.f16_unscaled",
            "f16",
            partial(halved, f16, one_f16),
            _us(330e6, 6, 26),
            guarded=True,
            run=partial(_halved_run, f16, one_f16),
        ),
        way(
            "cublaslt.bf16",
            "bf16",
            partial(halved, bf16, one_bf16),
            _us(330e6, 6, 26),
            run=partial(_halved_run, bf16, one_bf16),
        ),
    ]
