"""What configurations must hold of the problem they are launched for: one that a neighbour brought may be too small for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorlogic.system.compile_pool import CompileFailure

# kernels whose programs hold whole lines: the block, and the length it has to cover
WHOLE = {
    "softmax_fwd_registers": ("BLOCK_C", "C"),
    "softmax_bwd_registers": ("BLOCK_C", "C"),
    "layer_norm_fwd_registers": ("BLOCK_C", "N"),
    "layer_norm_bwd_registers": ("BLOCK_C", "N"),
    "cross_entropy_fwd_registers": ("BLOCK_C", "C"),
    "halve_whole_lines": ("BLOCK_C", "C"),
}
# kernels that count elements in 32 bits: the length, and what they step by
COUNTED = {"reduce_polled": ("N", "BLOCK"), "reduce_spun": ("N", "BLOCK")}
# of fewer lanes that sum a row each adds at most so many: a chain of thousands loses digits
LANES, CHAIN = (512, 256)


def fitting(fits: bool, what: str, config: Mapping[str, Any], problem: str) -> None:
    """Raise CompileFailure, so that another configuration is taken, unless `config` of `what` fits the problem."""
    if not fits:
        said = ", ".join(f"{name}={value}" for name, value in config.items())
        raise CompileFailure(f"{what}: a configuration of {said} does not fit {problem}")


def check(kernel: str, integers: Mapping[str, int], constants: Mapping[str, Any]) -> None:
    """Raise CompileFailure where a kernel of these constants would leave out a part of its problem, count beyond 32 bits or sum by
    too few lanes."""
    block, length = WHOLE.get(kernel, ("", ""))
    if kernel == "attention_scores_fwd" and constants["HELD"]:
        block, length = "BLOCK_N", "T"
    if block:
        size = constants[block]
        fitting(integers[length] <= size, kernel, {block: size}, f"{length} of {integers[length]}")
    if kernel == "reduce_rows":
        lanes, row = constants["BLOCK_C"], integers["N"]
        fitting(lanes >= min(LANES, row / CHAIN), kernel, {"BLOCK_C": lanes}, f"N of {row}")
    if kernel in COUNTED:
        length, block = COUNTED[kernel]
        end = integers[length] + constants[block] * integers.get("PARTS", 1)
        fitting(end < 2**31, kernel, {block: constants[block]}, f"{length} of {integers[length]}")
