"""Host side of the product whose operands are widened to float64 as it multiplies: which it can be, its configurations, its launch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.dtypes import NAMES
from ...core.key import SIZES
from ..gemm.hopper import line
from ..gemm.spec import Operand
from ..triton_runtime.launch import Start, prepare
from ..triton_runtime.tma_descriptors import Tiled
from . import f64_gemm_kernel, split_planes

Shape = tuple[int, int, int, int]  # BLOCK_M, BLOCK_N, warps along either
SHAPES: tuple[Shape, ...] = ((128, 128, 4, 2), (128, 64, 4, 2), (64, 64, 2, 2), (16, 32, 1, 4))
RANKS = 2  # of them that are worth timing
RING = 192 * 1024  # bytes of tiles on their way to a multiprocessor
FEW = 32  # columns, of which there are better more than rows


def configs(m: int, n: int, sm_count: int) -> list[Shape]:
    """Those worth timing, best guess first: rounds of tiles, each as long as its arithmetic, or as bringing it takes where it is small."""

    def clocks(shape: Shape) -> float:
        block_m, block_n, *_ = shape
        resident = _resident(shape)
        rounds = math.ceil(math.ceil(m / block_m) * math.ceil(n / block_n) / (sm_count * resident))
        return rounds * resident * (block_m * block_n + 32 * (block_m + block_n))

    return sorted(SHAPES, key=clocks)[:RANKS]


def _resident(shape: Shape) -> int:
    """Programs that share a multiprocessor."""
    return 8 // (shape[2] * shape[3])


def described(
    sizes: tuple[int, int, int], x: Operand, w: Operand, y: Operand, shape: Shape, sm_count: int
) -> dict[str, Any] | None:  # fmt: skip
    """What `prepare` and `compile_job` want to know of x [M, K], w [K, N] and y [M, N] as they lie; None where it cannot be."""
    (m, n, k), (block_m, block_n, warps_m, warps_n) = sizes, shape
    across, down = x.columns == 1, w.columns != 1
    x_line = line(x, m, k, 16 // SIZES[x.dtype])
    w_line = line(w, k, n, 16 // SIZES[w.dtype])
    if x_line is None or w_line is None:
        return None
    block_k = 64 if max(SIZES[x.dtype], SIZES[w.dtype]) <= 4 else 32
    step = block_k * (block_m * SIZES[x.dtype] + block_n * SIZES[w.dtype])
    tiles = math.ceil(m / block_m) * math.ceil(n / block_n)
    resident = _resident(shape)
    return {
        "grid": (min(tiles, sm_count * resident), 1, 1),
        "tiled": {
            "x_desc": Tiled(x.dtype, (m, k) if across else (k, m), x_line, (block_m, block_k) if across else (block_k, block_m)),
            "w_desc": Tiled(w.dtype, (n, k) if down else (k, n), w_line, (block_n, block_k) if down else (block_k, block_n)),
        },
        "pointers": {"y_ptr": y.dtype},
        "integers": {"M": m, "N": n, "K": k, "y_row": y.rows, "y_column": y.columns},
        "floats": (),
        "constexprs": {
            "X_ACROSS": across, "W_DOWN": down, "WARPS_M": warps_m, "WARPS_N": warps_n, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k,
            "STAGES": max(2, min(4, RING // resident // step)), "GROUP_M": 8,
        },
        "num_warps": warps_m * warps_n,
        "num_stages": 1,
        "align": 16,
        "registers": 168 if resident == 1 else 128,
    }  # fmt: skip


@lru_cache(maxsize=1024)
def _start(
    sizes: tuple[int, int, int], x: Operand, w: Operand, y: Operand, rank: int, device: torch.device
) -> Start | None:
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    shape = configs(*sizes[:2], sm_count)[rank]
    found = described(sizes, x, w, y, shape, sm_count)
    return None if found is None else prepare(f64_gemm_kernel.gemm_widened, device=device, **found)


def product(rank: int, a: Tensor, b: Tensor) -> Tensor | None:
    """a [M, K] · b [K, N] of any floating dtypes, summed in float64, in float32 or, where one of them is float64, in that; None where
    they lie otherwise than it takes. Nothing but the result is allocated."""
    names = split_planes.names(a, b)
    if not set(names) <= set(SIZES) or split_planes.aligned(a, b) < 16:
        return None
    dtype = torch.float64 if "f64" in names else torch.float32
    y = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    x, w, out = (b.t(), a.t(), y.t()) if b.shape[1] < FEW <= a.shape[0] else (a, b, y)
    lies = [Operand(NAMES[t.dtype], t.stride(0), t.stride(1)) for t in (x, w, out)]
    start = _start((x.shape[0], w.shape[1], x.shape[1]), *lies, rank, a.device)
    return y if start is not None and start(x, w, out) else None
