"""Attention scores that keep their last exponentials: right on a Hopper GPU; anywhere, what they refuse, and compiled without spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...support.triton import DEVICE, HOPPER, close, poisoned
from ...support.triton import default_device as default_device  # a fixture
from ...support.triton import scores_inputs as inputs

from tensorlogic.kernels.attention_scores import hopper_resident_k  # isort: skip  (after the interpreter is asked for)
from tensorlogic.kernels.triton_runtime import launch  # isort: skip
from ...support.compiled import resources  # isort: skip


CONFIGS = [{"CUBIC": cubic, "HELD": held} for cubic, held in ((1, 1), (2, 1), (2, 0))]


def launcher(
    q: torch.Tensor, k: torch.Tensor, dtype: str, config: dict[str, Any], device: Any = DEVICE
) -> Any:
    (b, h, s, d), t = q.shape, k.shape[2]
    strides = q.stride()[:3], k.stride()[:3]
    return hopper_resident_k.kept_launcher((b, h, s, t, d), dtype, *strides, config, device)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "shape", [(2, 3, 320, 512, 64), (1, 2, 203, 384, 32), (1, 2, 128, 512, 128)]
)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_scores(shape: tuple[int, ...], config: dict[str, Any], dtype: str) -> None:
    b, h, s, t, _ = shape
    q, k = inputs(shape, dtype)
    shared = k[:, :1]  # the memory behind every head's
    run = launcher(q, k, dtype, config)
    for column, late in ((0, 1), (t // 2 + 7, 60), (t - 1, 60)):  # far above the first tile's
        shared[:, :, column] *= late
        y = poisoned(b, h, s, t, dtype=dtype)
        assert run(q, k, y, 0.3)
        close(y, torch.softmax(q.double() @ k.double().mT * 0.3, -1), dtype, 0.1)
    q[-1, -1, 5, 0] = float("nan")
    assert run(q, k, y, 0.3)
    assert torch.equal(y.isnan().all(-1), q.isnan().any(-1))


def test_what_they_refuse_and_offer() -> None:
    fits: dict[str, Any] = {"s": 128, "t": 512, "d": 64, "dtype": "f16", "align": 16, "strides": (64,) * 6}  # fmt: skip
    assert hopper_resident_k.kept_refusal(**fits) is None
    assert "16-bit" in str(hopper_resident_k.kept_refusal(**fits | {"dtype": "f32"}))
    assert [c["HELD"] for c in hopper_resident_k.kept_configs(128, 512, 64)] == [1, 1, 0]
    assert [c["HELD"] for c in hopper_resident_k.kept_configs(128, 768, 64)] == [0, 0]  # no room
    assert [c["HELD"] for c in hopper_resident_k.kept_configs(128, 384, 128)] == [
        1,
        1,
        0,
    ]  # one step is made again
    for wrong in ({"s": 127}, {"t": 256}, {"t": 1024}):
        assert "half of the shared memory" in str(hopper_resident_k.kept_refusal(**fits | wrong))


@pytest.mark.slow
def test_they_compile_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_capability", lambda device: 90)
    cuda, jobs = torch.device("cuda", 0), []
    for t, d, count in ((512, 64, 3), (384, 32, 1), (512, 128, 1)):
        q, k = (torch.empty(4, 16, n, d, device="meta") for n in (512, t))
        for config in hopper_resident_k.kept_configs(512, t, d)[:count]:

            def build(q: Any = q, k: Any = k, config: Any = config) -> object:
                return launcher(q, k, "f16", config, cuda)

            jobs += launch.collect(build, cuda)
    assert len(jobs) == 5
    for job, answer in zip(jobs, resources(jobs), strict=True):
        assert isinstance(answer, launch.Resources), answer
        assert answer.stack == 0, (job, answer)
        assert answer.shared <= launch.SHARED_BYTES[90]
