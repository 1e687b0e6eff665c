"""Ways to compute a product on an NVIDIA GPU in bytes: int8 and float8, a scale for each row of left and column of right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..core.key import Key
from ..kernels.gemm.cublaslt import lt_available
from ..kernels.mixed_precision import line_max, quantized_gemm, split_planes
from .number_formats import Way

# elements of a sum of int8 products that surely fit into 32 bits
DEEPEST = 1 << 16
LEAST = {"int8": (8, 0), "fp8": (8, 9)}  # compute capability whose tensor cores multiply them
HOST_US = 45.0  # of a caller's thread, for the launches of one product
LIBRARY = {"int8": (17, 8), "fp8": (1, 16)}  # fewest rows, and what columns must be a multiple of


def quantised(form: str, a: Tensor, b: Tensor) -> tuple[quantized_gemm.Quantised, quantized_gemm.Quantised]:  # fmt: skip
    """Rows of a and columns of b as bytes with scales."""
    return quantized_gemm.quantise(a, form), quantized_gemm.quantise(b.t(), form)


def tiled(form: str, rank: int, a: Tensor, b: Tensor) -> Tensor:
    """By our own kernel, which scales the sums back as it stores them."""
    return quantized_gemm.multiply(*quantised(form, a, b), form, rank)


def library(form: str, a: Tensor, b: Tensor) -> Tensor:
    """By PyTorch's calls of cuBLASLt: int8 sums that one more pass scales back, or float8 rounded to bfloat16 at the end."""
    left, right = quantised(form, a, b)
    rows, multiple = LIBRARY[form]
    if a.shape[0] < rows or b.shape[1] % multiple:
        return quantized_gemm.multiply(left, right, form)
    (x, x_scale), (w, w_scale) = left, right
    if form == "int8":
        return quantized_gemm.scaled(torch._int_mm(x, w.t()), x_scale, w_scale)
    return torch._scaled_mm(
        x, w.t(), scale_a=x_scale[:, None], scale_b=w_scale[None, :], out_dtype=torch.bfloat16, use_fast_accum=True
    )  # fmt: skip


def available(form: str, device: str) -> str | None:
    """None where the GPU's tensor cores multiply such bytes."""
    if (reason := lt_available(device)) is not None:
        return reason
    if not torch.cuda.is_available():
        return "no CUDA device is there"
    found = torch.cuda.get_device_capability()
    if found >= LEAST[form]:
        return None
    least, here = (".".join(map(str, c)) for c in (LEAST[form], found))
    return f"tensor cores multiply {form} from compute capability {least} on, this is {here}"


def _serves(form: str, key: Key) -> str | None:
    tensors = [t for t in key.tensors if t is not None]
    if form == "int8" and max(n for t in tensors for n in t.shape) > DEEPEST:
        return "sums of int8 products could leave 32 bits"
    return None


def _us(rate: float, after: float) -> Callable[[int, int, int, str], float]:
    """Expected time from multiply-adds a microsecond and bytes that follow an element of the product, at least a caller's own."""

    def us(m: int, n: int, k: int, dtype: str) -> float:
        read = 2 * {"f16": 2, "bf16": 2, "f64": 8}.get(dtype, 4) + 1
        device = 12 + m * n * k / rate + ((m * k + k * n) * read + m * n * after) / 3e6
        return max(device, HOST_US)

    return us


def found() -> list[Way]:
    """Every way; more exact for data without outliers first."""
    return [
        Way(
            f"{engine}.{form}", form, product, _us(rate, after), partial(available, form), partial(_serves, form),
            matrices=True, guarded=True, ranked=ranked, ranks=ranks, sources=(quantized_gemm, line_max, split_planes),
        )
        for form in ("int8", "fp8")
        for engine, product, ranked, ranks, rate, after in (
            ("cublaslt", partial(library, form), None, 1, 650e6, 8),
            ("triton", partial(tiled, form, 0), partial(tiled, form), len(quantized_gemm.TILES), 550e6, 0),
        )
    ]  # fmt: skip
