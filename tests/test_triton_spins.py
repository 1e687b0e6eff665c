"""Reductions whose last program spins for the others, and products of one row by lanes: right at odd sizes, compiled without spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .test_triton_rows import DEVICE, REDUCE, TORCH, close, default_device, poisoned, rand  # noqa: F401  (a fixture, and the interpreter)

from .test_triton_gemm import check  # isort: skip

import tensorlogic  # isort: skip  (after the interpreter is asked for)
from tensorlogic import registry  # isort: skip
from tensorlogic.op import OPS  # isort: skip
from tensorlogic.ops.common import gemm, gemm_lanes, triton_launch, triton_spins  # isort: skip
from tensorlogic.ops.common.gemm import GemmSpec, Operand  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities


@pytest.mark.parametrize("kind", REDUCE)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_a_reduction_that_spins(kind: str, dtype: str) -> None:
    cells = torch.zeros(64, dtype=torch.int64)
    for launch, (count, block) in enumerate(((1000, 64), (1024, 128), (129, 128), (130, 4), (1000, 64))):  # fmt: skip
        x = rand(count, dtype=dtype, seed=launch)
        if launch == 4:
            x[count // 2] = float("nan")
        y = poisoned(1)
        run = triton_spins.spun_launcher(kind, dtype, "f32", count, {"BLOCK": block, "num_warps": 4}, DEVICE)  # fmt: skip
        assert run(x, y, cells)
        close(y[0], REDUCE[kind](x.double().view(1, -1, 1))[0, 0], "f32", 10.0)
        assert cells[0].item() == launch + 1  # counted, however many parts came before
        parts = triton_spins.spun_parts(count, {"BLOCK": block})
        assert (cells[1:parts] >> 32).eq(launch + 1).all()


@pytest.mark.parametrize("kind", ["sum", "max"])
def test_the_candidate_that_spins(kind: str) -> None:
    fn = getattr(tensorlogic, kind)
    shapes = ((3, 7001), "f16"), ((16384,), "bf16"), ((40000,), "f32")
    for shape, dtype in shapes if kind == "sum" else shapes[:1]:
        x = rand(*shape, dtype=dtype)
        with tensorlogic.policy(force="triton.spins"):
            first, second = fn(x), fn(x)
        assert torch.equal(first, second)
        close(first, x.double().sum() if kind == "sum" else x.double().max(), dtype, 100.0)
    key = OPS[kind].key([rand(64, 300), (1,), False, False], "inference")
    assert "more than one value" in str(OPS[kind].candidates["triton.spins"].supports(key))
    key = OPS[kind].key([rand(300), (0,), False, False], "inference")
    assert "elements to 32 MB" in str(OPS[kind].candidates["triton.spins"].supports(key))


def test_configurations_fit_the_size() -> None:
    assert not triton_spins.spun_configs(2**14 - 1, "f16")
    assert not triton_spins.spun_configs(2**24 + 1, "f16")
    for count in (2**14, 2**14 + 1, 2**20, 2**23):
        for dtype in ("f16", "f32"):
            configs = triton_spins.spun_configs(count, dtype)
            assert configs
            for config in configs:
                parts = triton_spins.spun_parts(count, config)
                assert 2 <= parts <= triton_spins.MOST_PARTS
                assert parts * config["BLOCK"] >= count


@pytest.mark.parametrize("k", [300, 1024])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_one_row(k: int, dtype: str) -> None:
    for n in (37, 5000):
        for config in gemm_lanes.lanes_configs(n, k, TORCH[dtype].itemsize, 132):
            check({**config, "FETCH": 0}, dtype, m=1, n=min(n, 37), k=k, bias=dtype, activation="gelu", outer="residual", z=dtype)  # fmt: skip
    check({**config, "FETCH": 0}, dtype, m=1, n=9, k=k, prologue="activation", kind="gelu_tanh")


def test_which_products_are_of_one_row() -> None:
    registry.ready(DEVICE.type)
    op = OPS["linear"]

    def asked(x: Any, w: Any) -> str | None:
        key = op.key([x, w, None, None, "none", False], "inference")
        return op.candidates["triton.lanes"].supports(key)

    w = rand(64, 512, dtype="f16")
    assert asked(rand(1, 512, dtype="f16"), w) is None
    assert "one row" in str(asked(rand(2, 512, dtype="f16"), w))
    assert "along K" in str(asked(rand(1, 64, dtype="f16"), w.t()))
    assert "along K" in str(asked(rand(1, 100, dtype="f16"), rand(64, 100, dtype="f16")))


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("linear", "triton.lanes"), ("matmul", "triton.lanes"), ("gelu_linear", "triton.lanes"),
    ],
)  # fmt: skip
def test_ops_of_one_row(name: str, id: str) -> None:
    x, w, b = rand(1, 704, dtype="f16"), rand(50, 704, dtype="f16", scale=0.04), rand(50, dtype="f16")  # fmt: skip
    with tensorlogic.policy(force=id):
        if name == "linear":
            y, want = tensorlogic.linear(x, w, b), x.double() @ w.double().t() + b.double()
        elif name == "matmul":
            y, want = tensorlogic.matmul(x, w.t()), x.double() @ w.double().t()
        else:
            y = tensorlogic.gelu_linear(x, w, b)
            want = torch.nn.functional.gelu(x.double(), approximate="tanh") @ w.double().t() + b.double()  # fmt: skip
    close(y, want, "f16", 1.0)


def test_they_compile_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_capability", lambda device: 90)
    cuda, jobs = torch.device("cuda", 0), []
    for count, dtype in ((2**20, "f16"), (2**20 + 1, "bf16"), (2**18, "f32")):
        for config in triton_spins.spun_configs(count, dtype):

            def spun(count: int = count, dtype: str = dtype, config: Any = config) -> object:
                return triton_spins.spun_launcher("sum", dtype, dtype, count, config, cuda)

            jobs += triton_launch.collect(spun, cuda)
    for n, k in ((768, 3072), (5120, 5120)):
        row = Operand("f16", k, 1)
        spec = GemmSpec(1, n, k, row, Operand("f16", 1, k), row, bias="f16", activation="relu", outer="residual", residual=row)  # fmt: skip
        jobs += [j for c in gemm_lanes.lanes_configs(n, k, 2, 132) for j in gemm.gemm_jobs(spec, c, 90)]  # fmt: skip
    assert len(jobs) == 9 + 4
    for job, answer in zip(jobs, triton_launch.resources_apart(jobs), strict=True):
        assert isinstance(answer, triton_launch.Resources), answer
        assert answer.stack == 0, (job, answer)
