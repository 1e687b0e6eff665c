"""Matrices as Hopper's bulk copies see them: tensor descriptors, made on the host and kept by address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

_TYPES = {"f16": ("fp16", tl.float16), "bf16": ("bf16", tl.bfloat16), "f32": ("fp32", tl.float32), "f64": ("fp64", tl.float64)}  # fmt: skip


@dataclass(frozen=True)
class Tiled:
    """A matrix [rows, columns] as Hopper's bulk copies read and write it: by tiles, its columns together in memory."""

    dtype: str
    shape: tuple[int, int]
    stride: int  # from row to row, in elements
    tile: tuple[int, int]

    @property
    def type(self) -> str:
        """What Triton calls it in a kernel's signature; a tile lies in shared memory as wgmma reads it."""
        from triton.experimental.gluon.language import NVMMASharedLayout

        inner, dtype = _TYPES[self.dtype]
        layout = NVMMASharedLayout.get_default_for(list(self.tile), dtype)
        return f"tensordesc<{inner}{list(self.tile)},{layout!r}>"


class Descriptors(dict[int, Any]):
    """A matrix's tensor descriptors by address, made as they are asked for."""

    MOST = 512  # kept at a time; graphs and launches hold copies

    def __init__(self, matrix: Tiled, laid: Mapping[str, Any]) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        utils = triton.runtime.driver.active.utils
        self.fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
        self.laid = (
            laid["swizzle"], laid["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[laid["elem_type"]],
            laid["block_size"], list(matrix.shape), [matrix.stride, 1], 0,
        )  # fmt: skip

    def __missing__(self, address: int) -> Any:
        if len(self) >= self.MOST:
            self.clear()
        made = self[address] = self.fill(address, *self.laid)
        return made
