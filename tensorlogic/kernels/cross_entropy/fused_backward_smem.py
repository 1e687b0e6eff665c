"""Host side of cross-entropy with its gradient over rows held in shared memory and registers: configurations and launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.cross_entropy.fused_backward import share_launcher
from tensorlogic.kernels.cross_entropy.rows import total_launcher
from tensorlogic.kernels.triton_runtime import launch
from tensorlogic.system.compile_pool import CompileFailure

from ..row_access.shared_memory import odd, registers, tiles

# of rows: shorter ones are held by two programs' registers, which takes 3 % less
LEAST_BYTES = 64 * 1024


def held_configs(columns: int, dtype: str, tensors: int = 1) -> list[dict[str, Any]]:
    """Configurations, best guess first: lanes of a tile, warps, programs of a multiprocessor, tiles in registers, and how many
    tiles later one that has been asked for is summed."""
    if columns * SIZES[dtype] * tensors <= LEAST_BYTES:
        return []
    shapes = {
        1: ((512, 2, 5, 4), (1024, 1, 8, 4), (1024, 1, 8, 3)),
        2: ((512, 2, 2, 3), (512, 1, 6, 4), (1024, 1, 3, 2)),
    }[tensors]
    found = [
        {"LANES": lanes, "num_warps": 16, "per": per, "KEPT": kept, "AHEAD": ahead}
        for lanes, per, kept, ahead in shapes
    ]
    return [c for c in found if tiles(columns, dtype, c, tensors)[1]]


def held_launcher(
    rows: int,
    columns: int,
    dtype: str,
    reduction: str,
    ignore_index: int,
    config: Mapping[str, Any],
    device: torch.device,
    cores: int,
) -> Callable[..., bool]:
    """As `fused_backward.together_launcher`, on a Hopper GPU of `cores` multiprocessors."""
    from .fused_backward_smem_kernel import cross_entropy_held

    lanes, warps, per = config["LANES"], config["num_warps"], config["per"]
    count, shared = tiles(columns, dtype, config)
    if not shared:
        raise CompileFailure(
            f"a program of {dict(config)} does not hold a row of {columns} {dtype}"
        )
    width = 16 // SIZES[dtype]
    first = share_launcher(rows, reduction, ignore_index, device)
    start = launch.prepare(
        cross_entropy_held,
        grid=(min(rows, cores * per), 1, 1),
        pointers={
            "x_ptr": dtype, "t_ptr": "i64", "loss_ptr": "f32", "lse_ptr": "f32", "share_ptr": "f32", "cell_ptr": "i32", "used_ptr": "i32",
            "dx_ptr": dtype,
        },
        integers={"R": rows, "C": columns, "IGNORE": ignore_index},
        constexprs={
            "TILES": count, "SHARED": shared, "AHEAD": config["AHEAD"], "EVEN": columns % (lanes * width) == 0,
            "ODD": odd(columns, dtype), "LANES": lanes, "WIDTH": width,
        },
        num_warps=warps,
        registers=registers(config),
        device=device,
    )  # fmt: skip
    last = total_launcher(rows, dtype, reduction, ignore_index, device, save=False)

    def all_three(
        x: Any, t: Any, part: Any, lse: Any, y: Any, share: Any, counter: Any, cell: Any, used: Any, dx: Any
    ) -> bool:  # fmt: skip
        return (
            first(t, share)
            and start(x, t, part, lse, share, cell, used, dx)
            and last(part, t, y, share)
        )

    return all_three
