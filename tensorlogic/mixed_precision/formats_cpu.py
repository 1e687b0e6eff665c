"""Ways to compute a product on a CPU: our own kernels in float32, PyTorch's in float64, float32 and halves."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..core.key import Key
from ..kernels.cpu import cost_model
from ..kernels.cpu import register as cpu_register
from ..native import cpu_library
from . import error_statistics, number_formats
from .number_formats import Way, single, wide

BLOCK = 512  # rows and columns narrowed at a time
# binary exponent of peaks beside which float32 still has smaller numbers
LOWEST = -100


def cpu(device: str) -> str | None:
    """None on a CPU."""
    return None if device == "cpu" else "for CPUs"


def half_hardware(device: str) -> str | None:
    """None where PyTorch multiplies float16 in hardware."""
    slow = cpu(device) is None and cost_model.half_is_slow("f16")
    return "PyTorch has no hardware for float16 here" if slow else cpu(device)


@lru_cache
def tiles() -> bool:
    """True where PyTorch multiplies tiles of halves and bytes: the processor has them (AMX), and oneDNN is not held to less."""
    known = getattr(torch.cpu, "_is_amx_tile_supported", None)
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    held = limit not in ("", "ALL", "DEFAULT") and "AMX" not in limit
    return bool(known is not None and known()) and not held


@lru_cache
def own_tiles() -> bool:
    """True where our own kernels multiply in them."""
    return cpu_library.isa() == "amx"


def ieee() -> bool:
    """Whether PyTorch's float32 products are in float32 as its switches stand now."""
    switch = getattr(torch.backends.mkldnn, "matmul", None)
    chosen = getattr(switch, "fp32_precision", "none")
    return torch.get_float32_matmul_precision() == "highest" and chosen in ("none", "ieee")


def narrowed(a: Tensor, b: Tensor) -> Tensor:
    """PyTorch's float32 product of float64 operands, of which only a block at a time exists in float32."""
    m, n = a.shape[-2], b.shape[-1]
    if a.dim() != 2 or b.dim() != 2 or max(m, n) <= BLOCK:
        return torch.matmul(single(a), single(b))
    c = torch.empty(m, n, dtype=torch.float32, device="cpu")
    for j in range(0, n, BLOCK):
        right = single(b[:, j : j + BLOCK])
        for i in range(0, m, BLOCK):
            c[i : i + BLOCK, j : j + BLOCK] = torch.matmul(single(a[i : i + BLOCK]), right)
    return c


def native_f32(a: Tensor, b: Tensor) -> Tensor:
    """Halves are widened, float64 narrowed while they are packed."""
    return in_parts(3, a, b)


def torch_f32(a: Tensor, b: Tensor) -> Tensor:
    """PyTorch's float32 product; under switches that lower it, our own, or float64."""
    if not ieee():
        ours = cpu_library.available() is None
        return kept(native_f32, a, b) if ours else number_formats.in_f64(a, b)
    if torch.float64 in (a.dtype, b.dtype):
        return _kept(narrowed(a, b), a, b)
    return torch.matmul(single(a), single(b))


def _kept(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """c, or the product in float64 where rows or columns beyond float32's range have spoilt c, or vanished in it."""
    good = number_formats.finite(c) and not _vanishing(a, b, c)
    return c if good else number_formats.in_f64(a, b)


def _vanishing(a: Tensor, b: Tensor, c: Tensor) -> bool:
    """Whether rows of a or columns of b, in float64, are too small for float32, by a sketch of each."""
    if torch.float64 not in (a.dtype, b.dtype) or not c.numel() or not a.numel():
        return False
    if min(a.dim(), b.dim()) > 1 and max(a.dim(), b.dim()) == 2:
        now = error_statistics.statistics([error_statistics.Part(a, b)], [c])
        return not now.usable or now.low < LOWEST
    peaks = [t.abs().amax(dim) for t, dim in ((a, -1), (b, -2 if b.dim() > 1 else -1))]
    return any(bool(((p > 0) & (p < 2.0**LOWEST)).any()) for p in peaks)


def torch_bf16(a: Tensor, b: Tensor) -> Tensor:
    """PyTorch's bfloat16 product, rounded to it at the end."""
    c = torch.matmul(a.to(torch.bfloat16), b.to(torch.bfloat16))
    return _kept(c, a, b)


def native_bf16(a: Tensor, b: Tensor) -> Tensor:
    """bfloat16 products, added and kept in float32, of operands that are rounded while they are packed; without hardware for them
    they are rounded before."""
    if own_tiles():
        return in_parts(1, a, b)
    # a guard sees what has left the range of float32's exponents: whole rows or columns
    if cost_model.pairs("bf16"):
        return kept(partial(in_parts, 1), a, b)
    c: Tensor = cpu_library.op("matmul_f32")(a.to(torch.bfloat16), b.to(torch.bfloat16))
    return _kept(c, a, b)


def in_parts(parts: int, a: Tensor, b: Tensor) -> Tensor:
    """Operands as sums of so many bfloat16, made while they are packed; what has none is multiplied in float32."""
    c: Tensor = cpu_library.op("matmul_f32")(a, b, False, parts)
    return c


def native_i16(a: Tensor, b: Tensor) -> Tensor:
    """Runs of rows and columns scaled to 2364 steps to either side, multiplied as pairs of 16 bits; float32 where a largest element is
    beyond 14 times its run's mean size."""
    return in_parts(0, a, b)


def kept(product: number_formats.Product, a: Tensor, b: Tensor) -> Tensor:
    """The product, float64 operands that float32 does not hold in float64."""
    c = product(a, b)
    return _kept(c, a, b) if torch.float64 in (a.dtype, b.dtype) else c


def row_scale(t: Tensor, dim: int, top: float) -> Tensor:
    """Powers of two [.., 1, ..] that bring the largest element along `dim` to `top` / 2 .. `top`; 1 for a row of zeros."""
    largest = t.abs().amax(dim, keepdim=True).to(torch.float64)
    exponent = torch.frexp(torch.where(largest == 0, top, largest)).exponent
    return torch.exp2(math.log2(top) - exponent.to(torch.float64))


def torch_f16(a: Tensor, b: Tensor) -> Tensor:
    """PyTorch's float16 product of rows of a and columns of b scaled by powers of two so that neither they nor it leave its range."""
    top = 2.0 ** ((15 - int(math.log2(max(a.shape[-1], 1))) - 1) // 2)
    scales: list[Tensor] = []
    halves: list[Tensor] = []
    for t, dim in ((a, -1), (b, -2)):
        if t.dtype != torch.float16 and t.numel():
            scale = row_scale(t, dim, top)
            if not _moderate(scale):
                return number_formats.in_f64(a, b)
            scales.append(scale)
            t = wide(t) * scale if t.dtype == torch.float64 else t * scale.to(torch.float32)
        halves.append(t.to(torch.float16))
    c = torch.matmul(*halves)
    if not number_formats.finite(c):
        return number_formats.in_f64(a, b)
    double = torch.float64 in (a.dtype, b.dtype)
    for scale in scales:
        c = wide(c) / scale if double else single(c) / scale.to(torch.float32)
    return c


def parts_of(id: str) -> int | None:
    """The bfloat16 parts that a way asks our kernels for where a guard looks at the data; None where it does anything besides."""
    if id == "cpu.bf16" and not (own_tiles() or cost_model.pairs("bf16")):
        return None
    return {"cpu.f32": 3, "cpu.bf16x3": 2, "cpu.bf16": 1, "cpu.i16": 0}.get(id)


def native_f16(a: Tensor, b: Tensor) -> Tensor:
    """Halves as tiles or float32's units hold them, wider operands as two bfloat16 parts or as they are, made while they are packed:
    float16's digits or more, and float32's range, so that nothing is read to be scaled."""
    return kept(partial(in_parts, 2), a, b)


def _moderate(scale: Tensor) -> bool:
    """Whether scales are finite and can be multiplied with each other and with sums."""
    low, high = torch.aminmax(scale)
    return bool((low > 2.0**-60) & (high < 2.0**60))


def _tiled(device: str) -> str | None:
    """None where our own kernels multiply in tiles."""
    tiled = "the native library multiplies without tiles"
    return cpu_register.cpu_only(device) or (None if own_tiles() else tiled)


def _steps(device: str) -> str | None:
    """None where pairs of 16 bits are multiplied faster than float32."""
    if (reason := cpu_register.cpu_only(device)) is not None:
        return reason
    level = str(cpu_library.isa())
    quick = level == "avx2" or (level.startswith("avx512") and "vnni" in cost_model.features())
    return None if quick else "16 bits are multiplied no faster than float32"


def _f16_only(key: Key) -> str | None:
    return None if key.precision == "f16" else "cpu.bf16x3, or without tiles cpu.f32, is the same"


def _rate(per_us: float, passes: float, call: float) -> Callable[[int, int, int, str], float]:
    """Expected time from multiply-adds a microsecond and thread, passes over the operands, and a call's cost."""

    def us(m: int, n: int, k: int, dtype: str) -> float:
        work = m * n * k
        moved = (m * k + k * n + m * n) * passes * cost_model.PASS
        return call + (work / per_us + moved) / cost_model.threads(work)

    return us


def _native_us(dtype: str, share: float = 1.0) -> Callable[[int, int, int, str], float]:
    """That of our own kernels in one dtype, or a share of it."""
    return lambda m, n, k, _: share * cost_model.native_us(m, n, k, dtype, False)


def _torch_f32_us(m: int, n: int, k: int, dtype: str) -> float:
    converted = 0.0 if dtype == "f32" else (m * k + k * n + m * n) * cost_model.PASS
    return cost_model.torch_us(m, n, k, "f32", False) + converted


def _narrowing_us(m: int, n: int, k: int) -> float:
    """Both operands rounded by a pass each."""
    return 6 + (m * k + k * n) * cost_model.PASS / cost_model.threads(m * n * k)


def _torch_bf16_us(m: int, n: int, k: int, dtype: str) -> float:
    if tiles():
        return _rate(250e3, 2, 12)(m, n, k, dtype)
    return cost_model.torch_us(m, n, k, "bf16", False) + _narrowing_us(m, n, k)


def _native_bf16_us(m: int, n: int, k: int, dtype: str) -> float:
    if own_tiles():
        return _rate(380e3, 0.3, 8)(m, n, k, dtype)
    rounded = 0.0 if cost_model.pairs("bf16") else _narrowing_us(m, n, k)
    return cost_model.native_us(m, n, k, "bf16", False) + rounded


def _native_f16_us(m: int, n: int, k: int, dtype: str) -> float:
    return (_rate(220e3, 0.3, 8) if own_tiles() else _native_us("f32"))(m, n, k, dtype)


def found() -> list[Way]:
    """Every way on a CPU, in the order in which ties are broken."""
    library = (cpu_register.LIBRARY,)
    return [
        Way("torch.f32", torch_f32, _torch_f32_us, cpu),
        Way("cpu.f32", native_f32, _native_us("f32"), cpu_register.cpu_only, unwatched=partial(kept, native_f32), sources=library),
        Way("torch.f16", torch_f16, _rate(60e3, 6, 60), half_hardware),
        Way("cpu.f16", native_f16, _native_f16_us, cpu_register.cpu_only, _f16_only, sources=library),
        Way("torch.bf16", torch_bf16, _torch_bf16_us, cpu),
        Way("cpu.bf16", native_bf16, _native_bf16_us, cpu_register.cpu_only, sources=library),
        Way("cpu.bf16x3", partial(in_parts, 2), _rate(220e3, 0.3, 8), _tiled, sources=library),
        Way("cpu.i16", native_i16, _native_us("f32", 0.65), _steps, sources=library),
    ]  # fmt: skip
