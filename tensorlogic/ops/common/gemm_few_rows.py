"""Products of a few rows: the tiled kernel with deeper pipelines than its own table has, and little asked ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .gemm import GemmSpec, gemm_refusal
from .gemm_wiring import Product

MOST_ROWS = 64
LEAST = 2**23  # weights below which programs end before a pipeline is full
# BLOCK_M, BLOCK_N, BLOCK_K, num_stages, SPLIT, columns of K asked ahead: the best of 200 on an H200 at 4096 × 4096 and 4096 × 14336
_DEEP = (
    (16, 32, 256, 6, 1, 512), (16, 64, 256, 5, 1, 0), (16, 32, 512, 4, 1, 512),
    (64, 64, 128, 5, 2, 0), (64, 32, 128, 8, 1, 0),
)  # fmt: skip


def few_rows_refusal(spec: GemmSpec) -> str | None:
    """None, or why the product is not a few rows by many 16-bit weights."""
    if spec.m > MOST_ROWS or spec.batch != 1:
        return f"more than {MOST_ROWS} rows, or a batch"
    if spec.m == 1 and spec.w.rows == 1:
        return "one row by weights that lie together along K"
    if spec.x.dtype == "f32" or spec.n * spec.k < LEAST:
        return f"16-bit weights, {LEAST} or more, are required"
    return gemm_refusal(spec)


def few_rows_configs(m: int) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return [
        {
            "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": step, "GROUP_M": 8, "SPLIT": split, "num_warps": 4, "num_stages": stages,
            **({"FETCH": ahead // step, "STREAM": False} if ahead else {}),
        }
        for rows, columns, step, stages, split, ahead in _DEEP
        if (rows == 16) == (m <= 16)
    ]  # fmt: skip


@dataclass(frozen=True)
class FewRows(Product):
    """A product of a few rows."""

    def refusal(self) -> str | None:
        """None, or why it is none."""
        return few_rows_refusal(self.spec)

    def configs(self) -> list[dict[str, Any]]:
        """Configurations, best guess first."""
        return few_rows_configs(self.spec.m)
