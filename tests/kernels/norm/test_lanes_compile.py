"""Statistics are the same numbers in all lanes of a warp.

The compiler makes one fused multiply-add of a product and what it is added to. Where that is another lane's share of a sum, each lane
adds its own product, unrounded, to the other's, rounded: sums differ in the last bit between lanes. Then it is chance which of them is
stored, and lanes that decide by their sums decide differently. A choice by a mask between the two keeps them apart.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton")

from tensorlogic.kernels.elementwise import column_passes
from tensorlogic.kernels.mixed_precision import guard_recompute
from tensorlogic.kernels.norm import batch_norm as norm_batch_norm
from tensorlogic.kernels.norm import group_norm as norm_group_norm
from tensorlogic.kernels.norm import layer_norm as norm_layer_norm
from tensorlogic.kernels.triton_runtime import launch

from ...support.compiled import ptx  # isort: skip

ANY = torch.device("cuda", 0)
STATISTICS = dict.fromkeys(("mean", "var", "rstd"), "f32")


def layer_norms(dtype: str, align: int) -> None:
    for columns in (21, 100):
        for config in norm_layer_norm.layer_norm_configs(columns, dtype)[:2]:
            norm_layer_norm.layer_norm_launcher(9, columns, (dtype,) * 3, config, ANY, align=align)


def batch_norms_held(dtype: str, align: int) -> None:
    names: dict[str, str | None] = dict.fromkeys(
        ("z", "running_mean", "running_var", "gamma", "beta", "y"), dtype
    )
    takes = names | {"mean": "f32", "rstd": "f32"}
    for rows, columns in ((64, 64), (16, 99)):
        for config in norm_batch_norm.held_configs(rows, columns, "fwd")[:2]:
            column_passes.launcher(norm_batch_norm.batch_norm_relu_fwd_held, rows, columns, takes, config, ANY, align, ("eps", "momentum"))  # fmt: skip


def batch_statistics(dtype: str, align: int) -> None:
    for rows, columns in ((300, 64), (32, 1000)):
        for config in column_passes.backward_configs(rows, columns, 132)[:2]:
            column_passes.launcher(norm_batch_norm.batch_statistics_columns, rows, columns, {"z": dtype, **STATISTICS}, config, ANY, align, ("eps",))  # fmt: skip


def group_norms(dtype: str, align: int) -> None:
    for pixels, last in ((49, False), (3136, True)):
        norm_group_norm.group_norm_launcher(2, 64, pixels, 8, dtype, (True, True), last, ANY, align)


def mended_products(dtype: str, align: int) -> None:
    for strides in ((96, 1, 64, 1, 64, 1), (1, 80, 1, 96, 64, 1)):
        guard_recompute._mend((dtype,) * 3, (80, 64, 96), strides, (3, 6, 36), align, ANY)


def from_other_lanes(text: str) -> set[str]:
    """Registers of a kernel that hold another lane's number; one of 64 bits travels in two halves."""
    found = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%r\d+)", text))
    low = re.findall(r"cvt\.u64\.u32\s+(%rd\d+), (%r\d+);", text)
    halves = {to for to, of in low if of in found}
    high = re.findall(r"shl\.b64\s+(%rd\d+), (%rd\d+), 32;", text)
    halves |= {to for to, of in high if of in halves}
    both = re.findall(r"or\.b64\s+(%rd\d+), (%rd\d+), (%rd\d+);", text)
    return found | {to for to, *of in both if halves.issuperset(of)}


def fused(text: str, lanes: set[str]) -> list[str]:
    """Products that are added to another lane's number in one instruction, or may be by the assembler."""
    done = re.findall(r"(fma\.rn\.f(?:32|64)\s+%\w+, %\w+, %\w+, (%\w+);)", text)
    # What is written more than once may be a sum.
    written = Counter(re.findall(r"^\s*[\w.]+\s+(%\w+),", text, re.M))
    products = {to for to in re.findall(r"mul\.f(?:32|64)\s+(%\w+),", text) if written[to] == 1}
    sums = re.findall(r"(add\.f(?:32|64)\s+%\w+, (%\w+), (%\w+);)", text)
    free = [line for line, *of in sums if lanes & set(of) and products & set(of)]
    return free + [line for line, added in done if added in lanes]


@pytest.mark.parametrize(("dtype", "align"), [("f16", 16), ("f32", 4)])
@pytest.mark.parametrize(
    "build", [layer_norms, batch_norms_held, batch_statistics, group_norms, mended_products]
)
def test_no_product_is_fused_with_what_another_lane_holds(
    build: Callable[[str, int], None], dtype: str, align: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_capability", lambda device: 90)
    jobs = list(dict.fromkeys(launch.collect(lambda: build(dtype, align), ANY)))
    sums = 0
    for job, text in zip(jobs, ptx(jobs), strict=True):
        lanes = from_other_lanes(text)
        assert not fused(text, lanes), (job.kernel, job.num_warps, dict(job.constexprs))
        sums += len(lanes)
    assert sums
