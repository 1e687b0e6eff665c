"""Short names of PyTorch's dtypes, as they stand in keys."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
    "c32": torch.complex32, "c64": torch.complex64, "c128": torch.complex128, "bool": torch.bool,
    "i8": torch.int8, "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
