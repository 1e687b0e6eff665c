"""Float32 products of a few columns: summed by lanes, right at odd sizes, compiled without spills; one behind a ReLU is PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...support.gemm import COLUMNWISE, check
from ...support.triton import DEVICE

from tensorlogic.dispatch import candidate_loading  # isort: skip  (after the interpreter is asked for)
from tensorlogic.core.op import OPS  # isort: skip
from tensorlogic.kernels.gemm import bind

from tensorlogic.kernels.triton_runtime import launch  # isort: skip
from tensorlogic.kernels.gemm.spec import GemmSpec

from tensorlogic.kernels.gemm.spec import Operand  # isort: skip
from ...support.compiled import resources  # isort: skip


def product(n: int, dtype: str = "f32", m: int = 300, k: int = 1000) -> bind.Product:
    spec = GemmSpec(m, n, k, Operand(dtype, k, 1), Operand(dtype, 1, k), Operand(dtype, n, 1))
    return bind.Product(spec, {}, {})


def test_only_float32_of_few_columns_is_summed_by_lanes() -> None:
    for n in (1, 2, 3, 4):
        assert all(c["BLOCK_M"] < 16 and c["BLOCK_N"] >= n for c in product(n).configs())
    assert all(c["BLOCK_M"] >= 16 for c in product(5).configs() + product(1, "f16").configs())
    assert product(1, m=100, k=60000).configs()[0]["SPLIT"] == 8  # or 13 programs read all of x


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_columns(n: int) -> None:
    for i, config in enumerate(product(n, m=19, k=1100).configs()):
        m, k = (19, 1100 + i) if n == 2 else (5, 1024)
        check(config, "f32", m=m, n=n, k=k, bias="f32", activation="gelu", outer="residual", z="f32")  # fmt: skip
    check(config, "f32", "column row row", m=9, n=n, k=70, **dict.fromkeys(COLUMNWISE, "f32"))
    check(
        config | {"SPLIT": 3}, "f32", m=9, n=n, k=300, bias="f32", prologue="rms_norm", gamma="f32"
    )


@pytest.mark.parametrize(
    ("name", "dtype", "columns", "served"),
    [
        ("linear_batch_norm_relu", torch.float32, 1, False),
        ("linear_batch_norm_relu", torch.float32, 2, True),
        ("linear_batch_norm_relu", torch.float16, 1, True),
        ("linear", torch.float32, 1, False),
        ("linear", torch.float32, 3, True),
        ("matmul", torch.float32, 1, False),
    ],
)
def test_one_float32_column_behind_a_relu_is_left_to_pytorch(
    name: str, dtype: torch.dtype, columns: int, served: bool
) -> None:
    candidate_loading.ready(DEVICE.type)
    x, w = torch.ones(6, 8, dtype=dtype), torch.ones(columns, 8, dtype=dtype)
    vectors = [torch.ones(columns, dtype=dtype) for _ in range(4)]
    arguments: dict[str, list[Any]] = {
        "linear": [x, w, None, None, "relu", False],
        "matmul": [x, w.t(), "relu", False],
        "linear_batch_norm_relu": [x, w, None, *vectors, 1e-5, False, 0.1, False],
    }
    op = OPS[name]
    key = op.key([a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arguments[name]], "inference")  # fmt: skip
    reason = op.candidates["triton.tiled"].supports(key)
    assert (reason is None) is served, reason
    assert served or "luck" in str(reason)
    if name == "linear":
        plain = op.key([x.to(DEVICE), w.to(DEVICE), None, None, "none", False], "inference")
        assert op.candidates["triton.tiled"].supports(plain) is None


def test_few_columns_compile_without_spilling() -> None:
    k, row = 1024, Operand("f32", 1024, 1)
    uses: list[dict[str, Any]] = [
        {"bias": "f32", "activation": "relu"},
        {"prologue": "layer_norm", "gamma": "f32", "beta": "f32", "inline": True},
        {"prologue": "gradient", "kind": "silu", "saved": row, "x_out": "f32"},
    ]
    jobs = []
    for n, more in zip((1, 2, 4), uses, strict=True):
        spec = GemmSpec(4096, n, k, row, Operand("f32", 1, k), Operand("f32", n, 1), **more)
        configs = bind.Product(spec, {}, {}).configs()
        jobs += [bind.gemm_jobs(spec, config, 90)[0] for config in configs[:: 2 if n > 1 else 1]]
    for answer in resources(jobs):
        assert isinstance(answer, launch.Resources), answer
        assert answer.stack == 0, answer
