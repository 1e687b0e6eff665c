"""Host side of products of one row: which products they can be, configurations, launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ...core.dtypes import DTYPES
from ...core.key import Key
from . import tiled
from .bind import Plan, Product
from .spec import Config, GemmSpec

LEAST = 256  # of K: below it a step is mostly padding
MOST_LOADS = 32  # of 16 bytes, that a thread has under way
NORMS = ("layer_norm", "rms_norm")
#: Rows of w a program, warps: each within 2 % of the best somewhere on an H200.
SHAPES = ((4, 4), (8, 8), (2, 4), (1, 4), (2, 2), (4, 2))
# columns of K that are asked for before the kernels before have ended
AHEAD = 1024


def one_row_refusal(spec: GemmSpec) -> str | None:
    """None, or why the product is not one row by weights whose K lies together."""
    if spec.m * spec.batch != 1:
        return "more than one row"
    if spec.w.rows != 1 or spec.x.columns != 1 or spec.k < LEAST:
        return f"x and weights that lie together along K of {LEAST} or more are required"
    if spec.prologue not in ("none", "activation", *NORMS) or spec.outer == "dropout":
        return f"prologue {spec.prologue!r}, outer {spec.outer!r}"
    if spec.prologue in NORMS and not spec.inline:
        return "statistics that are given"
    if spec.x_out or spec.row_sum:
        return "an output of the prologue"
    return tiled.gemm_refusal(spec)


def one_row_configs(k: int, size: int) -> list[dict[str, Any]]:
    """Configurations for elements of `size` bytes, best guess first."""
    fitting = [(rows, warps) for rows, warps in SHAPES if 512 * warps // size < 2 * k]
    return [one_row_config(rows, warps, k, size) for rows, warps in fitting]


def one_row_config(rows: int, warps: int, k: int, size: int) -> dict[str, Any]:
    """Programs of `rows` rows of w and `warps` warps: 16 bytes of each row a thread and step, as many steps at once as loads may be."""
    step = 512 * warps // size
    return {
        "BLOCK_M": 1, "BLOCK_N": rows, "BLOCK_K": step, "GROUP_M": 1, "SPLIT": 1,
        "UNROLL": max(1, min(math.ceil(k / step), MOST_LOADS // rows)),
        "FETCH": min(AHEAD, 1 << (k - 1).bit_length()), "num_warps": warps, "num_stages": 1,
    }  # fmt: skip


def described(spec: GemmSpec, config: Config) -> dict[str, Any]:
    """What `prepare` and `compile_job` want to know: of what the tiled product takes, what this kernel does."""
    from .gemv_kernel import gemm_one_row

    found, names = tiled.described(spec, config, upcast=False), set(gemm_one_row.arg_names)
    for part in ("integers", "constexprs"):
        found[part] = {name: value for name, value in found[part].items() if name in names}
    constants = found["constexprs"]
    constants["EVEN_K"] = spec.k % (config["BLOCK_K"] * config["UNROLL"]) == 0
    # 32 of x a thread for its statistics: more would leave none to the loop
    constants["STATISTICS"] = min(1024 * int(config["num_warps"]), constants["STATISTICS"])
    return found


def one_row_launcher(spec: GemmSpec, config: Config, device: torch.device) -> Callable[..., bool]:
    """A callable that writes y (and z), taking what `gemm.gemm_arguments` names."""
    from ..triton_runtime.launch import prepare
    from .gemv_kernel import gemm_one_row

    return prepare(gemm_one_row, device=device, **described(spec, config))


def one_row_jobs(spec: GemmSpec, config: Config, sm: int) -> tuple[Any, ...]:
    """The compile work behind `one_row_launcher`, for compute capability `sm` (90: Hopper)."""
    from ..triton_runtime.launch import compile_job
    from .gemv_kernel import gemm_one_row

    return (compile_job(gemm_one_row, sm=sm, **described(spec, config)),)


@dataclass(frozen=True)
class OneRow(Product):
    """A product of one row."""

    def refusal(self) -> str | None:
        """None, or why it is none."""
        return one_row_refusal(self.spec)

    def configs(self) -> list[dict[str, Any]]:
        """Configurations, best guess first."""
        return one_row_configs(self.spec.k, DTYPES[self.spec.x.dtype].itemsize)

    def start(self, config: Config, device: torch.device) -> Callable[..., bool]:
        """The launcher over `arguments`."""
        return one_row_launcher(self.spec, config, device)


def instead(describe: Callable[[Key], Plan | str]) -> Callable[[Key], Plan | str]:
    """What `describe` says of a key, with its product as one of one row."""

    def found(key: Key) -> Plan | str:
        plan = describe(key)
        if isinstance(plan, str):
            return plan
        if len(plan.products) != 1 or not isinstance(plan.products[0], Product):
            return "more than one launch"
        about = {f.name: getattr(plan.products[0], f.name) for f in fields(Product)}
        return replace(plan, products=(OneRow(**about),))

    return found
