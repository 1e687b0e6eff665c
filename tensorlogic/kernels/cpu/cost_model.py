"""What a product is expected to take on this CPU, for keys that nobody has measured: fitted to times of one core of each kind."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...core.dtypes import DTYPES
from ...native import cpu_library
from . import calibration
from . import register as cpu_register

PASS = 0.4e-3  # microseconds an element of a further pass over memory
# microseconds that a compiled call takes less than those the lines below were fitted to
COMPILED = 1.2
# columns that a tile computes at least; microseconds a row of up to two such tiles
NARROW, ROW = (16, 10e-3)
GRAIN = 160 << 10  # multiply-adds from which a second thread pays
# where PyTorch's float32 product wakes one, and ours does not yet if it sleeps
SHARED_BY_BLAS = range(1 << 18, 5 << 18)
WAKES = 9.0  # microseconds of it
# multiply-adds up to which PyTorch's half-precision products do not go to oneDNN
SMALL_HALF = 4096
# from which its float32 products take BLAS's own preparations on AMD
BLAS_FROM = 6_000
# Nanoseconds an element of a weight that comes from further than the second-level cache: PyTorch's float32 products, ours.
FAR = {"torch": 0.2, "f32": 0.13, "f16": 0.06, "bf16": 0.06}
FEW = 12  # rows, up to which products wait for that
# microseconds a sum of fewer terms than a vector has, beyond what lanes of AVX-512 take
SHORT_SUM = 8e-3
# rows or columns up to which a product waits for memory, whatever it is computed by
MEMORY = 8


@dataclass(frozen=True)
class Line:
    """Microseconds a call, picoseconds a multiply-add, nanoseconds an element of [m, k], of [k, n] and of [m, n]."""

    call: float
    work: float
    left: float = 0.0
    right: float = 0.0
    out: float = 0.0

    def us(self, m: int, n: int, k: int, factor: float = 1.0) -> float:
        """A product [m, k] · [k, n], its multiply-adds taking `factor` times as long, shared by the threads that it is worth."""
        work = m * n * k
        shared = factor * work * self.work * 1e-3
        shared += m * k * self.left + k * n * self.right + m * n * self.out
        return self.call + shared * 1e-3 / threads(work)

    def parts(self, n: int) -> tuple[float, float]:
        """Microseconds of n × n matrices besides the multiply-adds, and theirs."""
        rest = self.us(n, n, n, 0.0)
        return rest, self.us(n, n, n) - rest


# Zen 4 (family 25), PyTorch 2.13; few rows of b [n, k], then of b [k, n].
ZEN = {
    "blocks": Line(1.8, 17.9, right=0.25),
    "pairs": Line(1.8, 8.9, right=0.143),
    "few linear": Line(1.8, 30.4, right=0.02),
    "few": Line(1.8, 53.6, right=0.02),
    "torch f32 small": Line(1.6, 0.0),
    "torch f32": Line(6.6, 19.6, right=0.536),
    "torch half": Line(15.0, 8.9, right=0.18),
    "pass": Line(0.0, 0.0, out=0.4),
}
# Sapphire Rapids (AMX, AVX-512 FP16), PyTorch 2.13.
INTEL = {
    "blocks": Line(2.3, 10.3, 0.08, 0.13, 0.1),
    "tiles f32": Line(2.0, 5.2, 0.35, 0.38, 0.15),
    "tiles f16": Line(2.0, 2.2, 0.3, 0.23, 0.27),
    "tiles wide": Line(2.0, 1.4, 0.3, 0.23, 0.27),  # float32 times bfloat16
    "tiles bf16": Line(2.0, 0.56, 0.11, 0.12, 0.2),
    "few linear": Line(2.0, 11.7, 0.14, 0.025, 1.7),
    "few linear f32": Line(2.0, 11.7, 0.14, 0.06, 1.7),
    "few": Line(1.8, 11.0, 0.9, 0.025, 0.3),
    "torch f32": Line(1.7, 9.0, 0.1, 0.02, 0.06),
    "torch f32 linear": Line(2.4, 10.8, 0.08, 0.06, 0.05),
    "torch f16": Line(15.1, 10.3, 0.23, 0.12, 0.06),
    "torch bf16": Line(15.8, 0.55, 0.06, 0.1, 0.12),
    "torch small": Line(1.4, 500.0, out=2.0),
    "torch small linear": Line(2.2, 480.0, out=2.1),
    "pass": Line(1.0, 0.0, out=0.15),
}
# Microseconds a call and nanoseconds an element of what comes before a product: PyTorch's in float32 and in
# halves, then ours in float32.
BEFORE = {
    "gelu": (Line(8.0, 0.0, 0.6), Line(8.0, 0.0, 0.6), Line(3.0, 0.0, 0.6)),
    "gelu_tanh": (Line(1.6, 0.0, 1.8), Line(1.6, 0.0, 1.8), Line(3.0, 0.0, 0.8)),
    "layer_norm": (Line(4.4, 0.0, 0.48), Line(4.6, 0.0, 0.55), Line(4.4, 0.0, 0.28)),
    "dropout": (Line(9.0, 0.0, 10.0), Line(9.0, 0.0, 10.0), Line(4.5, 0.0, 1.4)),
}
# Where halves have no hardware, PyTorch multiplies them one by one.
SCALAR, SCALAR_LINEAR = Line(1.6, 588.0), Line(3.6, 100.0)


@lru_cache
def features() -> frozenset[str]:
    """What the native library says of this machine; empty where it is absent."""
    return (
        frozenset()
        if cpu_library.available()
        else frozenset(cpu_library.op("features")().split(","))
    )


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
    return dtype == "bf16" and cpu_library.isa() == "avx512_bf16"


def threads(work: float) -> int:
    """How many share a product of so many multiply-adds."""
    return torch.get_num_threads() if work > GRAIN else 1


@lru_cache
def _sleeps() -> bool:
    """True where OpenMP's threads were told to sleep while they wait."""
    return os.environ.get("OMP_WAIT_POLICY", "").lower().startswith("p")


@lru_cache
def _is_amd() -> bool:
    return "amd" in features()


def pass_us(elements: int) -> float:
    """One more of eager's passes over so many elements."""
    line = (ZEN if _is_amd() else INTEL)["pass"]
    return line.call + elements * line.out * 1e-3 / threads(elements * 8)


def before_us(kind: str, m: int, k: int, dtype: str) -> tuple[float, float]:
    """PyTorch's time and ours for what comes before a product, over its left operand [m, k]."""
    f32, half, ours = BEFORE[kind]
    theirs, shared = f32 if dtype == "f32" else half, m * k * 1e-3 / threads(m * k * 8)
    return theirs.call + theirs.left * shared, ours.call + ours.left * shared


def native_us(m: int, n: int, k: int, dtype: str, linear: bool, wide: bool = False) -> float:
    """Our product [m, k] · [k, n]; `wide` where the left operand comes in float32."""
    lines = ZEN if _is_amd() else INTEL
    saved = COMPILED if cpu_library.calls_available() is None else 0.0
    paired = pairs(dtype) and not wide
    turned = _turned(m, n, k, dtype, wide, paired)
    if turned:
        m, n, linear = n, m, True
    if m <= few_rows(dtype, linear, paired, k, turned):
        few = "few linear" if linear else "few"
        line = lines.get(f"{few} {dtype}", lines[few])
        few_terms = k < NARROW and cpu_register.narrow()
        short = m * n * SHORT_SUM / threads(m * n * k) if few_terms else 0.0
        return line.us(m, n, k) - saved + (short if linear else _far_us(n, k, dtype, dtype))
    short = m * ROW if n <= 2 * NARROW else 0.0
    n = max(n, NARROW)
    kind = "pairs" if paired else "blocks"
    if cpu_library.isa() == "amx" and _tiles_pay(m, n, k, dtype, wide):
        kind = "tiles wide" if wide and dtype == "bf16" else f"tiles {dtype}"
    line = lines.get(kind, lines["blocks"])  # pairs without tiles were never fitted on Intel's
    return line.us(m, n, k, native_factor(paired)) + short - saved


def _turned(m: int, n: int, k: int, dtype: str, wide: bool, paired: bool) -> bool:
    """Few columns are the few rows of the transposed product, where the left operand's rows are contiguous."""
    if n == 1 < m:
        return True
    few = 5 if paired or m <= few_rows(dtype, False, paired, k) else 12
    tiles = cpu_library.isa() == "amx" and _tiles_pay(m, n, k, dtype, wide)
    return n <= few and m >= 4 and k >= 64 and not tiles


def few_rows(dtype: str, linear: bool, paired: bool, k: int, turned: bool = False) -> int:
    """Up to how many rows the native library reads a weight [n, k], or [k, n], as it lies."""
    if paired:
        return 5 if linear else 4
    if linear:
        most = 12 if dtype == "f32" or cpu_library.isa() == "amx" else 16
        return most if turned else min(most, max(k // (8 if cpu_register.narrow() else 16), 4))
    if cpu_library.isa() == "amx":
        return 6 if dtype == "bf16" else 12
    return 16


def _far_us(n: int, k: int, dtype: str, who: str) -> float:
    """What few rows wait for a weight [k, n] that the second-level cache does not hold."""
    if _is_amd() or n * k * DTYPES[dtype].itemsize <= cpu_register.CACHE_BYTES:
        return 0.0
    return n * k * FAR[who] * 1e-3 / threads(n * k * FEW)


def _tiles_pay(m: int, n: int, k: int, dtype: str, wide: bool) -> bool:
    """As the native library decides."""
    work = m * n * k
    if dtype == "f32":
        return min(m, n, k) >= 48 and work >= 1 << 22
    if dtype == "f16" or wide:
        return m >= 14 and work >= 1 << 20
    return work >= 1 << 19


def torch_us(m: int, n: int, k: int, dtype: str, linear: bool) -> float:
    """PyTorch's own product."""
    if half_is_slow(dtype):
        return (SCALAR_LINEAR if linear else SCALAR).us(m, n, k)
    if n == 1 < m:
        m, n, linear = n, m, True
    compute = min(m, n) > MEMORY and m * n * k > GRAIN
    line = _torch_line(m * n * k, dtype, linear)
    far = _far_us(n, k, dtype, "torch") if m <= FEW and dtype == "f32" and not linear else 0.0
    woken = WAKES if dtype == "f32" and m * n * k in SHARED_BY_BLAS and _sleeps() else 0.0
    return line.us(m, n, k, torch_factor(dtype) if compute else 1.0) + far + woken


def _torch_line(work: int, dtype: str, linear: bool) -> Line:
    if _is_amd():
        if dtype != "f32":
            return ZEN["torch half"]
        return ZEN["torch f32 small" if work < BLAS_FROM else "torch f32"]
    if dtype == "f32":
        return INTEL["torch f32 linear" if linear else "torch f32"]
    if work <= SMALL_HALF:
        return INTEL["torch small linear" if linear else "torch small"]
    return INTEL[f"torch {dtype}"]


def torch_factor(dtype: str) -> float:
    """How much longer PyTorch's work takes here: MKL gives AMD's processors its AVX2 code, bfloat16 may have no hardware."""
    return _factors(dtype)[0]


def native_factor(paired: bool) -> float:
    """How much longer our blocks take here."""
    return _factors("bf16" if paired else "f32")[1]


def torch_into(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """PyTorch's product in memory that is there: pages of fresh memory may take as long as the product."""
    return torch.mm(a, b, out=out)


def _factors(dtype: str) -> tuple[float, ...]:
    """PyTorch's and ours. Not where there are tiles: one kind of processor has them, and they slow down for seconds."""
    if cpu_library.available() or cpu_library.isa() == "amx":
        return 1.0, 1.0
    lines = ZEN if _is_amd() else INTEL
    ours = lines.get("pairs" if pairs(dtype) else "blocks", lines["blocks"])
    matmul = cpu_library.op("matmul")
    products = [calibration.Product(lambda a, b, out: matmul(a, b), ours.parts)]
    if not half_is_slow(dtype):
        theirs = calibration.Product(
            torch_into, lambda n: _torch_line(n * n * n, dtype, False).parts(n)
        )
        products.insert(0, theirs)
    found = calibration.factors(
        f"{dtype} by torch and {cpu_library.isa()}", DTYPES[dtype], products
    )
    return found if len(found) == 2 else (1.0, *found)
