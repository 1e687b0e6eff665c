"""What a product is expected to take on this CPU, for keys that nobody has measured: rates seen on one core of a Zen 4."""

from __future__ import annotations

from functools import lru_cache

import torch

from ... import native

CYCLES = 3500.0  # a microsecond
VECTOR = 16  # elements
GRAIN = 160 << 10  # multiply-adds from which a second thread pays
BY_MEMORY = 3.5  # cycles a vector of weights, where they are read once
NATIVE_CALL, TORCH_CALL, ONEDNN_CALL = 1.8, 1.6, 15.0  # microseconds
BLAS_CALL, BLAS_FROM = (
    5.0,
    6_000,
)  # what PyTorch's float32 product takes beyond so many multiply-adds
HALF_LINEAR = 2.0  # what its half-precision linear takes more than matmul
SCALAR_MM, SCALAR_LINEAR = (
    1_700.0,
    10_000.0,
)  # multiply-adds a microsecond where halves have no hardware
PASS = 0.4e-3  # microseconds an element of a further pass over the output


@lru_cache
def features() -> frozenset[str]:
    """What the native library says of this machine; empty where it is absent."""
    return frozenset() if native.available() else frozenset(native.op("features")().split(","))


@lru_cache
def half_is_slow(dtype: str) -> bool:
    """True where PyTorch multiplies this half type without hardware for it."""
    name = {"f16": "_is_mkldnn_fp16_supported", "bf16": "_is_mkldnn_bf16_supported"}.get(dtype)
    if name is None:
        return False
    supported = getattr(torch.ops.mkldnn, name, None)
    return supported is None or not supported()


def pairs(dtype: str) -> bool:
    """True where two bfloat16 products cost one of float32."""
    return dtype == "bf16" and "avx512_bf16" in features()


def threads(work: float) -> int:
    """How many share a product of so many multiply-adds."""
    return torch.get_num_threads() if work > GRAIN else 1


def native_us(m: int, n: int, k: int, dtype: str, linear: bool) -> float:
    """Our product [m, k] · [k, n]: arithmetic, and packing unless m is small."""
    per_vector = min(
        m / 2 + 8 if pairs(dtype) else m + 14, max(m * (1.7 if linear else 3.0), BY_MEMORY)
    )
    return NATIVE_CALL + n * k / VECTOR * per_vector / CYCLES / threads(m * n * k)


def torch_us(m: int, n: int, k: int, dtype: str, linear: bool) -> float:
    """PyTorch's own product."""
    work = m * n * k
    if half_is_slow(dtype):
        if linear:
            return TORCH_CALL + HALF_LINEAR + work / (SCALAR_LINEAR * threads(work))
        return TORCH_CALL + work / SCALAR_MM
    vectors = n * k / VECTOR / threads(work)
    if dtype == "f32":
        if work < BLAS_FROM:
            return TORCH_CALL
        return BLAS_CALL + vectors * (m * f32_gain() + 30) / CYCLES
    twice = dtype == "f16" or pairs(dtype)
    return ONEDNN_CALL + vectors * (m / 2 + 10 if twice else m + 14) / CYCLES


@lru_cache
def f32_gain() -> float:
    """Our float32 rate over PyTorch's: MKL gives AMD's processors its AVX2 code, half of what a Zen 5 can do."""
    have = features()
    if "amd" not in have or not torch.backends.mkl.is_available():
        return 0.95
    return 1.9 if "zen5" in have and "avx512" in have else 1.1
