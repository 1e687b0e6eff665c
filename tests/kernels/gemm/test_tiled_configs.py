"""Configurations of the matrix product family: measured winners are among them, contradictions are named."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tensorlogic.kernels.gemm import tiled
from tensorlogic.kernels.gemm.spec import GemmSpec, Operand

from ...support.gemm import K, M, N
from ...support.triton import DEVICE


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
    assert "f64" in str(tiled.gemm_refusal(replace(plain, x=Operand("f64", K, 1))))
    assert "equal" in str(tiled.gemm_refusal(replace(plain, x=Operand("bf16", K, 1))))
    assert "batch" in str(tiled.gemm_refusal(replace(plain, batch=2, prologue="dropout")))


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
    offered = tiled.gemm_configs(*shape, 2)
    assert winner in [
        (c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"], c["num_warps"], c["num_stages"])
        for c in offered
        if c["SPLIT"] == 1
    ]


def test_few_rows_by_many_weights_get_deeper_pipelines() -> None:
    for m, deep in ((2, 3), (16, 3), (17, 2), (64, 2)):
        offered = tiled.gemm_configs(m, 4096, 4096, 2)
        best, more = offered[: tiled.MOST_CONFIGS], offered[tiled.MOST_CONFIGS :]
        assert len(more) == deep
        assert all(c["SPLIT"] * c["BLOCK_M"] <= 128 for c in more)
        assert tiled.gemm_configs(m, 4096, 4096, 2, most=4) == [*best[:4], *more]
    for m, n, size in ((1, 4096, 2), (65, 4096, 2), (16, 1024, 2), (16, 4096, 4)):
        assert len(tiled.gemm_configs(m, n, 4096, size)) <= tiled.MOST_CONFIGS
    known = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 256, "GROUP_M": 8, "SPLIT": 1, "num_warps": 4, "num_stages": 5}  # fmt: skip
    assert [tiled.gemm_configs(16, 14336, 4096, 2, most=most).count(known) for most in (0, 6)] == [1, 1]  # fmt: skip


def test_deeper_pipelines_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorlogic.core.op import OPS
    from tensorlogic.dispatch import candidate_loading

    candidate_loading.ready(DEVICE.type)
    monkeypatch.setattr(tiled, "LEAST_WEIGHTS", 1)
    op, half = OPS["linear"], {"dtype": torch.float16, "device": DEVICE}
    for m, deep in ((5, 3), (33, 2)):
        x, w, b = (torch.randn(*shape, **half) for shape in ((m, 520), (72, 520), (72,)))
        key = op.key((x, w, b, None, "relu", False), "inference")
        candidate = op.candidates["triton.tiled"]
        want = torch.relu(torch.nn.functional.linear(x.double(), w.double(), b.double()))
        offered = candidate.configs(key)[-deep:]
        assert [c["products"] for c in offered] == [[c] for c in tiled._deep(m, 72, 520, 2)]
        for config in offered:
            (y,) = candidate.bind(key, config, DEVICE)(x, w, b, None)
            assert ((y.double() - want).norm() / want.norm()).item() < 1e-3


@pytest.mark.parametrize("size", [2, 4])
def test_some_configurations_for_every_shape(size: int) -> None:
    for m, n, k in itertools.product((1, 3, 16, 100, 2048, 100000), (1, 64, 5000), (1, 77, 4096)):
        offered = tiled.gemm_configs(m, n, k, size)
        assert 0 < len(offered) <= tiled.MOST_CONFIGS + 3  # of _DEEP
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
    from tensorlogic.core.op import OPS
    from tensorlogic.dispatch import candidate_loading

    candidate_loading.ready(DEVICE.type)
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
