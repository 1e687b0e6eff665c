"""Host side of the product of a float32 and a float16 operand: which it can be, its configurations, its launch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..gemm.spec import Operand
from ..triton_runtime.launch import Start, prepare
from ..triton_runtime.tma_descriptors import Tiled
from . import mixed_gemm_kernel, split_planes

ROWS = 64  # of the float32 operand that a warpgroup multiplies
# CONSUMERS, BLOCK_N, BLOCK_K, STAGES
SHAPES = (
    (2, 256, 64, 3), (2, 256, 32, 6), (1, 128, 64, 6), (2, 64, 64, 5), (1, 64, 128, 4), (1, 64, 64, 8),
)  # fmt: skip
RANKS = 3  # of them that are worth timing
# multiply-adds below which a pass and a library call start sooner
LEAST = 2**24
_REGISTERS = {1: 24, 2: 232}  # a thread's, of the second consumer
SIZES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}  # bytes of an element


def configs(m: int, n: int, k: int, sm_count: int) -> list[tuple[int, int, int, int]]:
    """Those worth timing, best guess first: rounds of tiles, each step the slower of arithmetic and reading level 2."""

    def clocks(shape: tuple[int, int, int, int]) -> float:
        consumers, block_n, block_k, _ = shape
        block_m = ROWS * consumers
        rounds = math.ceil(math.ceil(m / block_m) * math.ceil(n / block_n) / sm_count)
        arithmetic = block_m * block_n * block_k / (2048 if consumers > 1 else 1400)
        reading = (4 * min(block_m, m) + 2 * min(block_n, n)) * block_k / 64
        return rounds * (math.ceil(k / block_k) * max(arithmetic, reading) + 1500)

    return sorted(SHAPES, key=clocks)[:RANKS]


def line(o: Operand, rows: int, columns: int) -> int | None:
    """Elements from one line that lies together to the next; None where bulk copies cannot read the matrix."""
    unit = 16 // SIZES[o.dtype]
    if o.columns == 1:
        count, length, step = rows, columns, o.rows
    elif o.rows == 1:
        count, length, step = columns, rows, o.columns
    else:
        return None
    if count == 1:
        step = max(step, math.ceil(length / unit) * unit)
    return step if step >= length and step % unit == 0 else None


def described(
    sizes: tuple[int, int, int], x: Operand, w: Operand, out: tuple[int, int], shape: tuple[int, int, int, int], sm_count: int
) -> dict[str, Any] | None:  # fmt: skip
    """What `prepare` and `compile_job` want to know of x [M, K] in float32 and w [K, N] in float16, both as they lie; None where it cannot be."""
    (m, n, k), (consumers, block_n, block_k, stages) = sizes, shape
    across, down = x.columns == 1, w.columns != 1
    x_line, w_line = line(x, m, k), line(w, k, n)
    if x_line is None or w_line is None:
        return None
    tiles = math.ceil(m / (ROWS * consumers)) * math.ceil(n / block_n)
    return {
        "grid": (min(tiles, sm_count), 1, 1),
        "tiled": {
            "x_desc": Tiled("f32", (m, k) if across else (k, m), x_line, (ROWS, block_k) if across else (block_k, ROWS)),
            "w_desc": Tiled("f16", (n, k) if down else (k, n), w_line, (block_n, block_k) if down else (block_k, block_n)),
        },
        "pointers": {"x_ptr": "f32", "w_ptr": "f16", "y_ptr": "f32"},
        "integers": {
            "M": m, "N": n, "K": k, "x_row": x.rows, "x_column": x.columns, "w_row": w.rows, "w_column": w.columns,
            "y_row": out[0], "y_column": out[1],
        },
        "floats": (),
        "constexprs": {
            "X_ACROSS": across, "W_DOWN": down, "CONSUMERS": consumers, "REGISTERS": _REGISTERS[consumers],
            "BLOCK_M": ROWS * consumers, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages, "GROUP_M": 8,
        },
        "num_warps": 4,
        "num_stages": 1,
        "align": 16,
        "registers": 168 if consumers == 2 else 128,
    }  # fmt: skip


@lru_cache(maxsize=1024)
def _start(
    sizes: tuple[int, int, int], x: Operand, w: Operand, out: tuple[int, int], rank: int, device: torch.device
) -> Start | None:  # fmt: skip
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    shape = configs(*sizes, sm_count)[rank]
    found = described(sizes, x, w, out, shape, sm_count)
    return None if found is None else prepare(mixed_gemm_kernel.gemm_mixed, device=device, **found)


def product(rank: int, a: Tensor, b: Tensor) -> Tensor | None:
    """a [M, K] · b [K, N] in float32, one of them in float32 and the other in float16; None where they lie otherwise than it takes."""
    if {a.dtype, b.dtype} != {torch.float16, torch.float32} or split_planes.aligned(a, b) < 16:
        return None
    y = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    x, w, out = (a, b, y) if a.dtype == torch.float32 else (b.t(), a.t(), y.t())
    sizes = (x.shape[0], w.shape[1], x.shape[1])
    lies = [Operand(name, *t.stride()) for name, t in (("f32", x), ("f16", w))]
    start = _start(sizes, lies[0], lies[1], (out.stride(0), out.stride(1)), rank, a.device)
    return y if start is not None and start(x, w, x, w, y) else None


__all__ = ["RANKS", "configs", "described", "line", "product"]
