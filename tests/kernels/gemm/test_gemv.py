"""Products of one row: right at odd sizes and with everything that an op asks of them, compiled without spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...support.gemm import (
    COLUMNWISE,
    check,  # first: it asks for the interpreter
)
from ...support.triton import DEVICE

import tensorlogic  # isort: skip
from tensorlogic.dispatch import candidate_loading  # isort: skip
from tensorlogic.core.op import OPS  # isort: skip
from tensorlogic.kernels.gemm import bind, gemv

from tensorlogic.kernels.triton_runtime import launch  # isort: skip
from tensorlogic.kernels.gemm.spec import GemmSpec

from tensorlogic.kernels.gemm.spec import Operand  # isort: skip
from ...support.compiled import resources  # isort: skip

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
LAYOUT = "row column row"  # weights as torch keeps them


@pytest.fixture
def one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind, "gemm_launcher", gemv.one_row_launcher)


def configs(k: int, dtype: str = "f16") -> list[dict[str, Any]]:
    """Those that the candidate offers, and a small one; nothing is asked ahead where there is no GPU."""
    found = gemv.one_row_configs(k, DTYPES[dtype].itemsize)
    small = {**found[0], "BLOCK_N": 4, "BLOCK_K": 128, "UNROLL": 2, "num_warps": 2}
    return [{**c, "FETCH": c["FETCH"] * DEVICE.type.startswith("cuda")} for c in (*found, small)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("one_row")
def test_any_size(dtype: str) -> None:
    for n, k in ((37, 300), (48, 1024), (1, 257), (5, 2056)):
        for config in configs(k, dtype):
            check(config, dtype, LAYOUT, m=1, n=n, k=k, bias=dtype, activation="gelu", outer="residual", z=dtype)  # fmt: skip


@pytest.mark.usefixtures("one_row")
def test_prologues_and_epilogues() -> None:
    config = configs(300)[-1]
    for prologue in ("layer_norm", "rms_norm"):
        check(config, layouts=LAYOUT, m=1, n=37, k=300, prologue=prologue, inline=True, gamma="f32", beta="f32")  # fmt: skip
    check(config, layouts=LAYOUT, m=1, n=37, k=300, prologue="layer_norm", inline=True)
    for kind in ("relu", "gelu_tanh", "gelu", "silu"):
        check(config, layouts=LAYOUT, m=1, n=37, k=300, prologue="activation", kind=kind)
    columns = {name: "f16" if name in ("bias", "shift") else "f32" for name in COLUMNWISE}
    check(config, layouts=LAYOUT, m=1, n=37, k=300, **columns, activation="relu", z="f16")  # fmt: skip
    check(config, layouts=LAYOUT, m=1, n=37, k=300, outer="gradient", kind="gelu")
    check(config, layouts="padded column padded", m=1, n=37, k=300)  # fmt: skip


@pytest.mark.usefixtures("one_row")
def test_a_residual_that_is_one_number() -> None:
    x, w = torch.randn(1, 300, device=DEVICE), torch.randn(9, 300, device=DEVICE)
    other, y = torch.full((1,), 3.0, device=DEVICE), torch.full((1, 9), torch.nan, device=DEVICE)
    still = Operand("f32", 0, 0)
    spec = GemmSpec(1, 9, 300, Operand("f32", 300, 1), Operand("f32", 1, 300), Operand("f32", 9, 1), outer="residual", residual=still, align=4)  # fmt: skip
    for config in configs(300, "f32"):
        assert gemv.one_row_launcher(spec, config, DEVICE)(x, w, other, y.fill_(torch.nan))
        torch.testing.assert_close(y.double(), x.double() @ w.double().t() + 3.0, rtol=1e-5, atol=1e-4)  # fmt: skip


def test_which_products_are_of_one_row() -> None:
    candidate_loading.ready(DEVICE.type)
    op = OPS["linear"]

    def asked(x: Any, w: Any) -> str | None:
        key = op.key([x, w, None, None, "none", False], "inference")
        return op.candidates["triton.one_row"].supports(key)

    half: dict[str, Any] = {"dtype": torch.float16, "device": DEVICE}
    w = torch.randn(64, 512, **half)
    assert asked(torch.randn(1, 512, **half), w) is None
    assert "one row" in str(asked(torch.randn(2, 512, **half), w))
    assert "along K" in str(asked(torch.randn(1, 64, **half), w.t()))
    assert "along K" in str(asked(torch.randn(1, 100, **half), torch.randn(64, 100, **half)))
    plain = GemmSpec(1, 64, 512, Operand("f16", 512, 1), Operand("f16", 1, 512), Operand("f16", 64, 1))  # fmt: skip
    assert gemv.one_row_refusal(plain) is None
    for more, why in (
        ({"prologue": "dropout"}, "prologue 'dropout'"), ({"outer": "dropout"}, "outer 'dropout'"),
        ({"prologue": "layer_norm"}, "given"), ({"prologue": "activation", "kind": "relu", "x_out": "f16"}, "an output"),
    ):  # fmt: skip
        assert why in str(gemv.one_row_refusal(GemmSpec(**(vars(plain) | more))))


@pytest.mark.parametrize("name", ["linear", "matmul", "gelu_linear", "layer_norm_linear", "linear_batch_norm_relu"])  # fmt: skip
def test_ops_of_one_row(name: str) -> None:
    half: dict[str, Any] = {"dtype": torch.float16, "device": DEVICE}
    x, w, b = torch.randn(1, 704, **half), torch.randn(50, 704, **half) * 0.04, torch.randn(50, **half)  # fmt: skip
    g, h, shift = torch.rand(704, **half) + 0.5, torch.randn(704, **half), torch.rand(50, **half)
    F = torch.nn.functional
    wide = [t.double() for t in (x, w, b, g, h, shift)]
    X, W, B, G, H, S = wide
    with tensorlogic.policy(force="triton.one_row"):
        if name == "linear":
            y, want = tensorlogic.linear(x, w, b, activation="silu"), F.silu(F.linear(X, W, B))
        elif name == "matmul":
            y, want = tensorlogic.matmul(x, w.t()), X @ W.t()
        elif name == "gelu_linear":
            y, want = tensorlogic.gelu_linear(x, w, b), F.linear(F.gelu(X, approximate="tanh"), W, B)  # fmt: skip
        elif name == "layer_norm_linear":
            y, want = tensorlogic.layer_norm_linear(x, g, h, w, b), F.linear(F.layer_norm(X, (704,), G, H), W, B)  # fmt: skip
        else:
            y = tensorlogic.linear_batch_norm_relu(x, w, b, shift, shift + 0.5, shift, b)
            want = F.relu(F.batch_norm(F.linear(X, W, B), S, S + 0.5, S, B))
    assert ((y.double() - want).norm() / want.norm()).item() < 1e-3


def test_they_compile_without_spilling() -> None:
    jobs = []
    for n, k in ((768, 3072), (5120, 5120)):
        row = Operand("f16", k, 1)
        for prologue in ({}, {"prologue": "layer_norm", "inline": True, "gamma": "f16", "beta": "f16"}):  # fmt: skip
            spec = GemmSpec(1, n, k, row, Operand("f16", 1, k), row, bias="f16", activation="gelu", outer="residual", residual=row, **prologue)  # fmt: skip
            jobs += [j for c in gemv.one_row_configs(k, 2) for j in gemv.one_row_jobs(spec, c, 90)]
    assert len(jobs) >= 8
    for job, answer in zip(jobs, resources(jobs), strict=True):
        assert isinstance(answer, launch.Resources), answer
        assert answer.stack == 0, (job, answer)
