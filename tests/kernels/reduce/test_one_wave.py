"""Reductions whose last program spins for the others: right at odd sizes, compiled without spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...support.triton import (
    DEVICE,
    REDUCE,
    close,
    poisoned,
    rand,
)

import tensorlogic  # isort: skip  (after the interpreter is asked for)
from tensorlogic.core.op import OPS  # isort: skip
from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch

from tensorlogic.kernels.reduce import one_wave  # isort: skip
from ...support.compiled import resources  # isort: skip
from ...support.triton import default_device as default_device  # a fixture

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
        run = one_wave.spun_launcher(kind, dtype, "f32", count, {"BLOCK": block, "num_warps": 4}, DEVICE)  # fmt: skip
        assert run(x, y, cells)
        close(y[0], REDUCE[kind](x.double().view(1, -1, 1))[0, 0], "f32", 10.0)
        assert cells[0].item() == launch + 1  # counted, however many parts came before
        parts = one_wave.spun_parts(count, {"BLOCK": block})
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
    assert not one_wave.spun_configs(2**14 - 1, "f16")
    assert not one_wave.spun_configs(2**24 + 1, "f16")
    for count in (2**14, 2**14 + 1, 2**20, 2**23):
        for dtype in ("f16", "f32"):
            configs = one_wave.spun_configs(count, dtype)
            assert configs
            for config in configs:
                parts = one_wave.spun_parts(count, config)
                assert 2 <= parts <= one_wave.MOST_PARTS
                assert parts * config["BLOCK"] >= count


def test_they_compile_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime_launch, "_capability", lambda device: 90)
    cuda, jobs = torch.device("cuda", 0), []
    for count, dtype in ((2**20, "f16"), (2**20 + 1, "bf16"), (2**18, "f32")):
        for config in one_wave.spun_configs(count, dtype):

            def spun(count: int = count, dtype: str = dtype, config: Any = config) -> object:
                return one_wave.spun_launcher("sum", dtype, dtype, count, config, cuda)

            jobs += triton_runtime_launch.collect(spun, cuda)
    assert len(jobs) == 9
    for job, answer in zip(jobs, resources(jobs), strict=True):
        assert isinstance(answer, triton_runtime_launch.Resources), answer
        assert answer.stack == 0, (job, answer)
