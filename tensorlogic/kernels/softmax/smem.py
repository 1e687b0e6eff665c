"""Host side of softmax and its gradient over rows held in shared memory and registers: their launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.row_access.shared_memory import odd, registers, tiles
from tensorlogic.kernels.triton_runtime import launch
from tensorlogic.system.compile_pool import CompileFailure


def softmax_held_launcher(
    rows: int,
    columns: int,
    dtype: str,
    config: Mapping[str, Any],
    device: torch.device,
    cores: int,
    backward: bool = False,
) -> Callable[..., bool]:
    """A callable (x, y) -> bool: softmax of contiguous rows [rows, columns], of tensors at 16-byte addresses; or
    (y, dy, dx) -> bool, its gradient; on a Hopper GPU of `cores` multiprocessors. Configurations: `fused_backward_smem.held_configs`."""
    from .smem_kernel import softmax_backward_held, softmax_held

    lanes, width = config["LANES"], 16 // SIZES[dtype]
    names = ("y_ptr", "dy_ptr", "dx_ptr") if backward else ("x_ptr", "y_ptr")
    count, shared = tiles(columns, dtype, config, len(names) - 1)
    if not shared:
        raise CompileFailure(
            f"a program of {dict(config)} does not hold a row of {columns} {dtype}"
        )
    return launch.prepare(
        softmax_backward_held if backward else softmax_held,
        grid=(min(rows, cores * config["per"]), 1, 1),
        pointers=dict.fromkeys(names, dtype),
        integers={"R": rows, "C": columns},
        constexprs={
            "TILES": count, "SHARED": shared, "AHEAD": config["AHEAD"], "EVEN": columns % (lanes * width) == 0,
            "ODD": odd(columns, dtype), "LANES": lanes, "WIDTH": width,
        },
        num_warps=config["num_warps"],
        registers=registers(config),
        device=device,
    )  # fmt: skip
