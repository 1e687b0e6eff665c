"""Attention-score kernels against float64: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from ...support.triton import (
    DEVICE,
    Config,
    close,
    poisoned,
    rand,
)
from ...support.triton import default_device as default_device  # a fixture

from tensorlogic.kernels.attention_scores import recompute as attention_scores_recompute  # isort: skip  (after the interpreter is asked for)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities

SCORES = (
    {"strategy": "held", "BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 1},
    {"strategy": "sweeps", "BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2},
    {"strategy": "sweeps", "BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2},
    {"strategy": "sweeps", "BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
)


@pytest.mark.parametrize(
    "config", SCORES, ids=lambda c: f"{c['strategy']}-{c['BLOCK_M']}x{c['BLOCK_N']}"
)
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_attention_scores(config: Config, mask: str, causal: bool, scale: float) -> None:
    for b, h, s, t, d in ((2, 3, 37, 45, 20),) if scale > 0 else ((1, 2, 48, 33, 16),):
        q, k = rand(b, s, h, d, dtype="f16").transpose(1, 2), rand(b, h, t, d, dtype="f16", seed=1)
        logits = q.double() @ k.double().mT * scale
        extra = {"none": q, "bool": rand(1, h, s, t) > 0, "float": rand(b, 1, 1, t) * 2}[mask]
        if mask == "bool":
            extra[:, :, 5] = False  # a row that sees nothing
            logits = logits.masked_fill(~extra, float("-inf"))
        elif mask == "float":
            extra[0, 0, 0, 3] = float("-inf")
            logits = logits + extra.double()
        if causal:
            logits = logits.masked_fill(~torch.ones(s, t, dtype=torch.bool).tril(), float("-inf"))
        strides = extra.expand(b, h, s, t).stride() if mask != "none" else (0,) * 4
        dtype = {"none": "f16", "bool": "bool", "float": "f32"}[mask]
        y = poisoned(b, h, s, t, dtype="f16")
        run = attention_scores_recompute.attention_scores_launcher(
            (b, h, s, t, d), "f16", "f16", q.stride()[:3], k.stride()[:3], mask, dtype, strides, causal, config, DEVICE
        )  # fmt: skip
        assert run(q, k, extra, y, scale)
        close(y, torch.softmax(logits, -1), "f16", 0.1)


@pytest.mark.parametrize("config", SCORES[:2], ids=lambda c: c["strategy"])
def test_attention_scores_keep_nan_and_large_masks(config: Config) -> None:
    q, k = rand(1, 1, 20, 16), rand(1, 1, 40, 16, seed=1)
    q[0, 0, 3, 0] = float("nan")
    lowest = torch.full((1, 1, 1, 40), torch.finfo(torch.float32).min)
    run = attention_scores_recompute.attention_scores_launcher(
        (1, 1, 20, 40, 16), "f32", "f32", (0, 0, 16), (0, 0, 16), "float", "f32", (0, 0, 0, 1), False, config, DEVICE
    )  # fmt: skip
    y = poisoned(1, 1, 20, 40)
    assert run(q, k, lowest, y, 1.0)
    close(y, torch.softmax(q @ k.mT + lowest, -1), "f32")


@pytest.mark.parametrize(
    "config", SCORES, ids=lambda c: f"{c['strategy']}-{c['BLOCK_M']}x{c['BLOCK_N']}"
)
@pytest.mark.parametrize("offset", [-3000.0, 3000.0, 0.0])
def test_attention_scores_beyond_the_range_of_exponentials(config: Config, offset: float) -> None:
    s, t, d = 37, 50, 16
    q, k = rand(1, 1, s, d), rand(1, 1, t, d, seed=1)
    q[..., 0], k[..., 0] = 1.0, 1.0
    k[..., 0] += offset  # shifts every score of a row alike; without it rows differ by hundreds
    q[:, :, ::2] *= 40.0 if not offset else 1.0
    run = attention_scores_recompute.attention_scores_launcher(
        (1, 1, s, t, d), "f32", "f32", (0, 0, d), (0, 0, d), "none", "f32", (0,) * 4, False, config, DEVICE
    )  # fmt: skip
    y = poisoned(1, 1, s, t)
    assert run(q, k, q, y, 1.0)
    want = torch.softmax(q.double() @ k.double().mT, -1)
    assert (y.double() - want).norm() <= 1e-3 * want.norm()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter sums in another order")
@pytest.mark.parametrize("size", [64, 248])
def test_a_mask_costs_float32_no_accuracy(size: int) -> None:
    q, k, mask = (rand(1, 1, size, size, dtype="f32", seed=i) for i in range(3))
    scale = size**-0.5
    want = torch.softmax(q.double() @ k.double().mT * scale + mask.double(), -1)
    for config in attention_scores_recompute.attention_scores_configs(
        size, size, size, "f32", "float", False
    ):
        y, strides = poisoned(1, 1, size, size, dtype="f32"), mask.stride()
        run = attention_scores_recompute.attention_scores_launcher(
            (1, 1, size, size, size), "f32", "f32", q.stride()[:3], k.stride()[:3], "float", "f32", strides, False, config, DEVICE
        )  # fmt: skip
        assert run(q, k, mask, y, scale)
        error = float((y.double() - want).norm() / want.norm())
        assert error < 8 * torch.finfo(torch.float32).eps, (config, error)
