"""Configurations of the matrix product family: measured winners are among them, contradictions are named."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tensorlogic.ops.common import gemm
from tensorlogic.ops.common.gemm import GemmSpec, Operand

from .support.gemm import K, M, N
from .support.triton import DEVICE


def test_contradictions_and_limits_are_named() -> None:
    plain = GemmSpec(M, N, K, Operand("f16", K, 1), Operand("f16", N, 1), Operand("f16", N, 1))
    for change, message in (
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"outer": "residual"}, "residual"),
        ({"prologue": "gradient"}, "saved"),
        ({"inline": True}, "inline"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(plain, **change)
    assert "f64" in str(gemm.gemm_refusal(replace(plain, x=Operand("f64", K, 1))))
    assert "equal" in str(gemm.gemm_refusal(replace(plain, x=Operand("bf16", K, 1))))
    assert "batch" in str(gemm.gemm_refusal(replace(plain, batch=2, prologue="dropout")))


MEASURED = [  # m, n, k on an H200, f16: the fastest of 50 to 250 configurations
    ((384, 384, 384), (64, 64, 128, 4, 4)),
    ((512, 512, 512), (64, 64, 128, 4, 4)),
    ((1024, 1024, 1024), (64, 128, 128, 4, 4)),
    ((2048, 2048, 2048), (128, 256, 64, 8, 3)),
    ((16, 4096, 4096), (16, 32, 256, 4, 6)),
    ((16, 14336, 4096), (16, 64, 256, 4, 5)),
    ((64, 4096, 4096), (64, 32, 128, 4, 5)),
]


@pytest.mark.parametrize(("shape", "winner"), MEASURED)
def test_measured_winners_are_offered(shape: tuple[int, int, int], winner: tuple[int, ...]) -> None:
    offered = gemm.gemm_configs(*shape, 2)
    assert winner in [
        (c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"], c["num_warps"], c["num_stages"])
        for c in offered
        if c["SPLIT"] == 1
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_some_configurations_for_every_shape(size: int) -> None:
    for m, n, k in itertools.product((1, 3, 16, 100, 2048, 100000), (1, 64, 5000), (1, 77, 4096)):
        offered = gemm.gemm_configs(m, n, k, size)
        assert 0 < len(offered) <= gemm.MOST_CONFIGS
        assert len({tuple(c.items()) for c in offered}) == len(offered)


@pytest.mark.parametrize(
    ("name", "vectors"),
    [
        ("linear", (2,)),
        ("gelu_linear", (2,)),
        ("layer_norm_linear", (1, 2, 4)),
        ("linear_batch_norm_relu", (2, 3, 4, 5, 6)),
    ],
)
def test_strided_vectors_are_refused(name: str, vectors: tuple[int, ...]) -> None:
    from tensorlogic import registry
    from tensorlogic.op import OPS

    registry.ready(DEVICE.type)
    op = OPS[name]
    case = next(iter(op.cases()))
    args = [a.to(DEVICE) if isinstance(a, Tensor) else a for a in case]
    served = {
        id
        for id in op.candidates
        if op.candidates[id].supports(op.key([*args, False], "inference")) is None
    }
    assert any(id.startswith("triton.") for id in served)
    for i in vectors:
        strided = [*args]
        strided[i] = torch.stack([args[i], args[i]], 1)[:, 0]
        key = op.key([*strided, False], "inference")
        for id in served:
            if id.startswith(("triton.", "cublaslt.")) and id != "triton.rows":
                assert "strided" in str(op.candidates[id].supports(key)), (id, i)
