"""Attention scores whose k stays in shared memory: right on a Hopper GPU; anywhere, what they refuse, and compiled without spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .test_triton_rows import DEVICE, close, default_device, poisoned, rand  # noqa: F401  (a fixture)
from .test_triton_specialised import HOPPER

from tensorlogic.ops.common import scores_resident, triton_launch  # isort: skip  (after the interpreter is asked for)
from tensorlogic.ops.common import scores_specialised as scores  # isort: skip


def launcher(q: torch.Tensor, k: torch.Tensor, dtype: str, config: dict[str, Any], device: Any = DEVICE) -> Any:  # fmt: skip
    (b, h, s, d), t = q.shape, k.shape[2]
    lies = [scores.heads(b, h, rows, d, x.stride()[:3]) for rows, x in ((s, q), (t, k))]
    return scores_resident.resident_launcher((b, h, s, t, d), dtype, *lies, config, device)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("config", [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_scores(config: tuple[int, int], dtype: str) -> None:
    named = dict(zip(("CONSUMERS", "BUFFERS"), config, strict=True))
    for b, h, s, t, d in ((2, 3, 320, 512, 64), (1, 2, 64, 128, 128), (1, 1, 192, 256, 32)):
        q = rand(b, s, h, d, dtype=dtype).transpose(1, 2)
        k = rand(b, h, t, d, dtype=dtype, seed=1)
        for _ in range(2):
            y = poisoned(b, h, s, t, dtype=dtype)
            assert launcher(q, k, dtype, named)(q, k, y, 0.3)
            close(y, torch.softmax(q.double() @ k.double().mT * 0.3, -1), dtype, 0.1)
            k[:, :, t // 2] *= 60  # a late maximum, far above the first tile's
        q[-1, -1, 5, 0] = float("nan")
        assert launcher(q, k, dtype, named)(q, k, y, 0.3)
        assert torch.equal(y.isnan().any(-1), q.isnan().any(-1))
        assert torch.equal(y.isnan().all(-1), q.isnan().any(-1))


def test_what_they_refuse_and_offer() -> None:
    fits: dict[str, Any] = {"s": 64, "t": 512, "d": 64, "dtype": "f16", "align": 16}
    assert scores_resident.resident_refusal(**fits) is None
    assert "16-bit" in str(scores_resident.resident_refusal(**fits | {"dtype": "f32"}))
    for t in (64, 192, 2048):
        assert "pairs of tiles" in str(scores_resident.resident_refusal(**fits | {"t": t}))
    assert scores_resident.resident_configs(1024, 64) == [
        {"CONSUMERS": 2, "BUFFERS": 2},
        {"CONSUMERS": 4, "BUFFERS": 2},
    ]


def test_what_is_offered_fits_and_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(triton_launch, "_capability", lambda device: 90)
    cuda, jobs = torch.device("cuda", 0), []
    for config in scores_resident.resident_configs(512, 64):
        q = torch.empty(4, 16, 512, 64, device="meta")
        jobs += triton_launch.collect(lambda q=q, c=config: launcher(q, q, "f16", c, cuda), cuda)
    for answer in triton_launch.resources_apart(jobs):
        assert isinstance(answer, triton_launch.Resources), answer
        assert answer.stack == 0, answer
        assert answer.shared <= triton_launch.SHARED_BYTES[90]
