"""Warp-specialised attention scores: right on a Hopper GPU; anywhere, which they refuse, and compiled without spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .support.triton import DEVICE, HOPPER, close, default_device, poisoned, rand  # noqa: F401  (a fixture)

from tensorlogic.op import OPS  # isort: skip  (after the interpreter is asked for)
from tensorlogic import registry  # isort: skip
from tensorlogic.ops.common import scores_held, scores_launch  # isort: skip
from tensorlogic.ops.common import scores_specialised as scores  # isort: skip
from tensorlogic.ops.common import triton_launch  # isort: skip
from .compiled import resources  # isort: skip

CONFIGS = [
    {"CONSUMERS": 2, "BLOCK_N": 64, "STAGES": 8, "BUFFERS": 2, "ROUNDS": 1, "APART": 0},
    {"CONSUMERS": 2, "BLOCK_N": 64, "STAGES": 2, "BUFFERS": 1, "ROUNDS": 2, "APART": 1},
    {"CONSUMERS": 4, "BLOCK_N": 128, "STAGES": 2, "BUFFERS": 1, "ROUNDS": 1, "APART": 1},
    {"CONSUMERS": 4, "BLOCK_N": 64, "STAGES": 4, "BUFFERS": 2, "ROUNDS": 3, "APART": 1},
    {"BLOCK_N": 64, "STAGES": 4, "KEPT": 2},
    {"BLOCK_N": 128, "STAGES": 4, "KEPT": 1},
]


def start(
    q: torch.Tensor, k: torch.Tensor, dtype: str, config: dict[str, Any], cores: int = 3
) -> Any:
    b, h, s, d = q.shape
    t = k.shape[2]
    lies = [scores_launch.heads(b, h, rows, d, x.stride()[:3]) for rows, x in ((s, q), (t, k))]
    if "KEPT" in config:
        return scores_held.held_launcher((b, h, s, t, d), dtype, *lies, config, DEVICE, cores)
    return scores.specialised_scores_launcher((b, h, s, t, d), dtype, *lies, config, DEVICE, cores)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_scores(config: dict[str, Any], dtype: str) -> None:
    for b, h, s, t, d in ((2, 3, 320, 256, 64), (1, 2, 64, 384, 128), (1, 1, 192, 128, 32)):
        if d == 128 and config["BLOCK_N"] == 128:
            continue  # more than shared memory holds
        q = rand(b, s, h, d, dtype=dtype).transpose(1, 2)
        k = rand(b, h, t, d, dtype=dtype, seed=1)
        k[:, :, t // 2] *= 60  # a late maximum, far above the first tile's
        y = poisoned(b, h, s, t, dtype=dtype)
        assert start(q, k, dtype, config)(q, k, y, 0.3)
        close(y, torch.softmax(q.double() @ k.double().mT * 0.3, -1), dtype, 0.1)
        q[-1, -1, 5, 0] = float("nan")
        assert start(q, k, dtype, config)(q, k, y, 0.3)
        assert torch.equal(y.isnan().any(-1), q.isnan().any(-1))
        assert torch.equal(y.isnan().all(-1), q.isnan().any(-1))


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_a_scale_that_is_not_positive_is_declined() -> None:
    registry.ready("cuda")
    q, k = rand(1, 2, 64, 64, dtype="f16"), rand(1, 2, 128, 64, dtype="f16")
    candidate = OPS["attention_scores"].candidates["triton.specialised"]
    key = OPS["attention_scores"].key([q, k, 1.0, None, False, False], "inference")
    launch = candidate.bind(key, candidate.configs(key)[0], DEVICE)
    assert launch(q, k, 1.0, None) is not None
    assert launch(q, k, -1.0, None) is None
    assert launch(q, k, 0.0, None) is None


def test_heads_of_one_matrix() -> None:
    contiguous, between = torch.empty(2, 3, 64, 32), torch.empty(2, 64, 3, 32).transpose(1, 2)
    assert scores_launch.heads(2, 3, 64, 32, contiguous.stride()[:3]) == scores_launch.Heads(
        (384, 32), 32, (192, 0), (64, 0)
    )
    assert scores_launch.heads(2, 3, 64, 32, between.stride()[:3]) == scores_launch.Heads(
        (128, 96), 96, (64, 0), (0, 32)
    )
    assert isinstance(
        scores_launch.heads(2, 3, 64, 32, (6145, 2048, 32)), str
    )  # not a multiple of rows
    assert isinstance(
        scores_launch.heads(1, 3, 64, 32, (0, 40, 64)), str
    )  # heads overlap the next row
    assert isinstance(
        scores_launch.heads(1, 1, 64, 32, (0, 0, 36)), str
    )  # rows begin at odd places
    assert scores_launch.heads(2, 3, 64, 32, (0, 0, 32)) == scores_launch.Heads(
        (64, 32), 32, (0, 0), (0, 0)
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"s": 65}, "multiples"), ({"t": 100}, "multiples"), ({"d": 48}, "D in"),
        ({"dtype": "f32"}, "16-bit"), ({"align": 8}, "16-bit"),
    ],
)  # fmt: skip
def test_what_they_refuse(change: dict[str, Any], reason: str) -> None:
    fits: dict[str, Any] = {"s": 64, "t": 128, "d": 64, "dtype": "f16", "align": 16}
    assert scores.scores_refusal(**fits) is None
    assert reason in str(scores.scores_refusal(**fits | change))


def test_held_scores_refuse_long_rows_and_offer_what_fits() -> None:
    assert scores_held.held_refusal(512, 256, 64, "f16", 16) is None
    assert "T of 128" in str(scores_held.held_refusal(512, 512, 64, "f16", 16))
    assert "T of 192" in str(scores_held.held_refusal(512, 128, 128, "f16", 16))
    assert "multiples" in str(scores_held.held_refusal(512, 200, 64, "f16", 16))
    for d in (32, 64, 128):
        for t in (
            t for t in range(64, 448, 64) if not scores_held.held_refusal(64, t, d, "f16", 16)
        ):
            for config in scores_held.held_configs(t, d):
                assert t % config["BLOCK_N"] == 0
                assert 1 <= config["KEPT"] <= t // config["BLOCK_N"]
            assert scores_held.held_configs(t, d)


def test_what_is_offered_fits_and_compiles_without_spilling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_launch, "_capability", lambda device: 90)
    jobs = []
    for s, t, d in ((512, 512, 64), (2048, 2048, 64)):
        lies = scores_launch.heads(4, 16, t, d, (16 * t * d, t * d, d))
        for config in scores.specialised_scores_configs(64, s, t, d, 132)[:3]:
            jobs += triton_launch.collect(
                lambda s=s, t=t, d=d, lies=lies, config=config: scores.specialised_scores_launcher(
                    (4, 16, s, t, d), "f16", lies, lies, config, torch.device("cuda", 0), 132
                ),
                torch.device("cuda", 0),
            )
    for t, d in ((256, 64), (192, 128)):
        lies = scores_launch.heads(4, 16, t, d, (16 * t * d, t * d, d))
        for config in scores_held.held_configs(t, d):
            jobs += triton_launch.collect(
                lambda t=t, d=d, lies=lies, config=config: scores_held.held_launcher(
                    (4, 16, t, t, d), "f16", lies, lies, config, torch.device("cuda", 0), 132
                ),
                torch.device("cuda", 0),
            )
    jobs = list(dict.fromkeys(jobs))
    assert len(jobs) > 6
    for answer in resources(jobs):
        assert isinstance(answer, triton_launch.Resources), answer
        assert answer.stack == 0, answer
        assert answer.shared <= triton_launch.SHARED_BYTES[90]
