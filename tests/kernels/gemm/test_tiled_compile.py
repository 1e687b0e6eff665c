"""What the compiler makes of the matrix products: no spills, on any architecture."""

from __future__ import annotations

from typing import Any

import pytest

from ...support.gemm import COLUMNWISE

from tensorlogic.kernels.gemm import bind, tiled  # isort: skip  (after the interpreter is asked for)
from tensorlogic.kernels.gemm.spec import GemmSpec

from tensorlogic.kernels.gemm.spec import Operand  # isort: skip
from ...support.compiled import resources  # isort: skip


def compiled_specs() -> dict[str, tuple[GemmSpec, dict[str, Any]]]:
    """One product per use of the family, at a usual size, with a usual configuration."""

    def spec(m: int, n: int, k: int, dtype: str = "f16", **more: Any) -> GemmSpec:
        return GemmSpec(
            m, n, k, Operand(dtype, k, 1), Operand(dtype, 1, k), Operand(dtype, n, 1), **more
        )

    row = Operand("f16", 1024, 1)
    large = {
        "BLOCK_M": 128,
        "BLOCK_N": 256,
        "BLOCK_K": 64,
        "GROUP_M": 8,
        "SPLIT": 1,
        "num_warps": 8,
        "num_stages": 3,
    }
    square = large | {"BLOCK_N": 128}
    small = large | {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}
    norm = {"prologue": "layer_norm", "gamma": "f16", "beta": "f16"}
    residual = {"outer": "residual", "residual": Operand("f16", 4096, 1)}
    dz = {"prologue": "gradient", "saved": row}
    side = (1024, 1024, 1024)
    thin = small | {"BLOCK_K": 32}
    first = {m: tiled.gemm_configs(m, 4096, 4096, 2)[0] for m in (1, 16)}
    return {
        "relu": (spec(4096, 4096, 4096, bias="f16", activation="relu", **residual), large),
        "odd": (spec(1001, 999, 777, bias="f16", activation="gelu_tanh", z="f16", align=2), thin),
        "batch_norm": (spec(*side, activation="relu", **dict.fromkeys(COLUMNWISE, "f32")), square),
        "gelu": (spec(*side, bias="f16", prologue="activation", kind="gelu"), small),
        "dropout": (spec(*side, bias="f16", prologue="dropout", seeded=True), small),
        "layer_norm": (spec(*side, **norm), square),
        "inline": (spec(*side, inline=True, **norm), small),
        "dx": (spec(*side, kind="silu", x_out="f16", **dz), thin),
        "dw": (spec(*side, kind="relu", row_sum="f16", **dz), small | {"SPLIT": 4}),
        "skinny": (spec(16, 4096, 4096, bias="f16"), first[16]),
        "row": (spec(1, 4096, 4096, bias="f16"), first[1]),
        "single": (spec(512, 512, 512, "f32", bias="f32"), tiled.gemm_configs(512, 512, 512, 4)[0]),
    }


@pytest.mark.slow
def test_deep_pipelines_compile_without_spilling() -> None:
    from tensorlogic.kernels.triton_runtime import launch

    jobs = []
    for m in (16, 64):
        row = Operand("f16", 4096, 1)
        spec = GemmSpec(m, 4096, 4096, row, Operand("f16", 1, 4096), row, bias="f16", activation="gelu", outer="residual", residual=row)  # fmt: skip
        jobs += [j for c in tiled._deep(m, 4096, 4096, 2) for j in bind.gemm_jobs(spec, c, 90)]
    assert len(jobs) == 5
    for job, answer in zip(jobs, resources(jobs), strict=True):
        assert isinstance(answer, launch.Resources), answer
        assert answer.stack == 0, (job, answer)


@pytest.mark.slow
def test_compiles_for_every_architecture_without_spilling() -> None:
    from tensorlogic.kernels.triton_runtime import launch

    jobs = {
        (name, sm): bind.gemm_jobs(spec, config, sm)[0]
        for name, (spec, config) in compiled_specs().items()
        for sm in (80, 90, 100)
    }
    answers = dict(zip(jobs, resources(list(jobs.values())), strict=True))
    bad = {at: a for at, a in answers.items() if not isinstance(a, launch.Resources) or a.stack}
    assert not bad
