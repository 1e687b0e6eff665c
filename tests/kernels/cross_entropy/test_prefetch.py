"""Cross-entropy with rows on their way before their targets are known: against float64, its special rows, what the compiler makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ...support.triton import (
    DEVICE,
    close,
    poisoned,
    rand,
)

import tensorlogic  # isort: skip  (after the interpreter is asked for)
from tensorlogic.core.op import OPS  # isort: skip
from tensorlogic.kernels.cross_entropy import prefetch as cross_entropy_prefetch  # isort: skip
from tensorlogic.kernels.triton_runtime import launch  # isort: skip
from ...support.compiled import resources  # isort: skip
from ...support.triton import default_device as default_device  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities


def run(
    x: torch.Tensor, t: torch.Tensor, dtype: str, reduction: str, ignore: int, **config: int
) -> tuple[torch.Tensor, ...]:
    """What is left in (loss of a row, log-sum-exp, result, share)."""
    rows, columns = x.shape
    config = {"LANES": 32, "num_warps": 1, "DEPTH": 2, "SKIP": True, **config}
    left = poisoned(rows), poisoned(rows), poisoned(1, dtype=dtype), poisoned(1)
    start = cross_entropy_prefetch.ahead_launcher(
        rows, columns, dtype, reduction, ignore, config, DEVICE, save=True
    )
    for _ in range(2):
        assert start(x, t, *left)
    return left


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("columns", "dtype", "config"), [
    (1000, "f16", {"DEPTH": 4}), (1000, "f16", {"DEPTH": 2, "SKIP": False}), (1280, "bf16", {"DEPTH": 2}), (504, "f32", {"DEPTH": 9}), (200, "f16", {}),
    (2600, "f16", {"LANES": 256, "num_warps": 8, "DEPTH": 1}),
])  # fmt: skip
def test_against_float64(columns: int, dtype: str, config: dict[str, int], reduction: str) -> None:
    rows, ignore = 19, 3
    x = rand(rows, columns, dtype=dtype, scale=3.0)
    t = torch.arange(rows) * 137 % columns
    t[4] = t[0] = t[18] = ignore
    x[4] = float("nan")
    loss, lse, y, share = run(x, t, dtype, reduction, ignore, **config)
    wide, keep = x.double(), t != ignore
    close(y[0], F.cross_entropy(wide, t, reduction=reduction, ignore_index=ignore), dtype)
    close(loss, F.cross_entropy(wide, t, reduction="none", ignore_index=ignore), "f32", 1.0)
    close(lse[keep], torch.logsumexp(wide, 1)[keep], "f32")
    assert lse[~keep].eq(0).all()
    close(share[0], 1 / keep.sum() if reduction == "mean" else torch.tensor(1.0), "f32", 0.1)


@pytest.mark.parametrize(("dtype", "tile"), [("f16", 256), ("f32", 128)])
def test_rows_unlike_their_first_tile(dtype: str, tile: int) -> None:
    """Rows that rise late, by more than exponentials hold, that fall, and whose first tile holds nothing finite."""
    columns = 4 * tile - 24
    x, t = rand(10, columns, dtype=dtype), torch.arange(10) * 7 + tile
    x[1, -1] += 60
    x[2, tile:] += 300
    x[3, tile] = 30000
    x[4, :tile] += 500
    x[5, :tile] = float("-inf")
    x[6] -= 2000
    x[7, 3] = float("inf")
    x[8, -1] = float("nan")
    x[9] = float("-inf")
    loss, lse, y, _ = run(x, t, dtype, "sum", -100)
    wide = x.double()
    close(loss, F.cross_entropy(wide, t, reduction="none"), "f32", 1.0)
    close(lse[:7], torch.logsumexp(wide, 1)[:7], "f32")
    assert y.isnan().all()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_values_at_the_ends_of_the_range(dtype: str) -> None:
    """As a mask makes them: the most negative number alone; with others; and a row of the largest."""
    x, t = rand(4, 504, dtype=dtype), torch.arange(4) * 7
    x[1], x[2, :300], x[3] = (
        torch.finfo(x.dtype).min, torch.finfo(x.dtype).min, torch.finfo(x.dtype).max,
    )  # fmt: skip
    t[2] = 400
    loss, *_ = run(x, t, dtype, "sum", -100)
    close(loss, F.cross_entropy(x.double(), t, reduction="none"), "f32", 1.0)


def test_targets_beyond_the_classes_and_rows_that_do_not_count() -> None:
    x = rand(4, 512, dtype="f16")
    t = torch.tensor([0, 512, -1, 511])
    loss, *_ = run(x, t, "f16", "sum", -100)
    assert loss.isnan().tolist() == [False, True, True, False]
    none = torch.full((4,), -100)
    assert run(x, none, "f16", "sum", -100)[2].item() == 0.0
    assert run(x, none, "f16", "mean", -100)[2].isnan().all()


def test_large_logits_cost_no_accuracy() -> None:
    x, t = rand(9, 1000, scale=3.0) + 1e4, torch.arange(9) * 5
    loss = run(x, t, "f32", "sum", -100)[0]
    assert (loss.double() - F.cross_entropy(x.double(), t, reduction="none")).abs().max() < 3e-6


def test_the_candidate_and_its_gradient() -> None:
    x, t = rand(8, 4096, dtype="f16"), torch.arange(8) * 500
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    with tensorlogic.policy(force="triton.ahead"):
        got = tensorlogic.softmax_cross_entropy(leaf, t)
    (want := F.cross_entropy(wide, t)).backward()
    got.backward()
    close(got.detach(), want.detach(), "f16")
    assert leaf.grad is not None
    assert wide.grad is not None
    close(leaf.grad, wide.grad, "f16", 0.1)
    op = OPS["softmax_cross_entropy"]

    def asked(x: Any, *flags: Any) -> str | None:
        key = op.key([x, torch.zeros(4, dtype=torch.int64), *flags, False], "inference")
        return op.candidates["triton.ahead"].supports(key)

    assert asked(rand(4, 4096, dtype="f16"), -100, 0.0, "mean") is None
    assert asked(rand(4, 2048), -100, 0.0, "sum") is None
    assert "smoothing" in str(asked(rand(4, 4096, dtype="f16"), -100, 0.1, "mean"))
    assert "reduced" in str(asked(rand(4, 4096, dtype="f16"), -100, 0.0, "none"))
    assert "whole groups" in str(asked(rand(4, 4097, dtype="f16"), -100, 0.0, "mean"))
    for columns in (4088, 262152):
        assert "8192 to 524288 bytes" in str(
            asked(rand(4, columns, dtype="f16"), -100, 0.0, "mean")
        )


@pytest.mark.slow
def test_it_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, jobs = torch.device("cuda", 0), []
    for sm, columns, dtype, save in ((90, 32000, "f16", True), (90, 128256, "bf16", False), (80, 32000, "f32", True), (100, 4096, "f16", True)):  # fmt: skip
        monkeypatch.setattr(launch, "_capability", lambda device, sm=sm: sm)
        for config in cross_entropy_prefetch.ahead_configs(columns, dtype)[: 4 if sm == 90 else 1]:

            def build(c: int = columns, d: str = dtype, s: bool = save, config: Any = config) -> object:  # fmt: skip
                return cross_entropy_prefetch.ahead_launcher(
                    4096, c, d, "mean", -100, config, cuda, save=s
                )

            jobs += launch.collect(build, cuda)
    jobs = list(dict.fromkeys(jobs))
    for job, answer in zip(jobs, resources(jobs), strict=True):
        assert isinstance(answer, launch.Resources), answer
        assert answer.stack == 0, (job, answer)
        assert answer.registers <= 80, (job, answer)  # three programs of 8 warps a multiprocessor


def test_a_neighbour_s_tiles_grow_with_the_row() -> None:
    config = {"LANES": 256, "num_warps": 8, "DEPTH": 4}
    assert cross_entropy_prefetch.tiles(32000, "f16", config) == (256, 16)
    assert cross_entropy_prefetch.tiles(4096, "f16", config) == (256, 2)
    assert cross_entropy_prefetch.tiles(128256, "f16", config) == (512, 32)
    assert cross_entropy_prefetch.tiles(128256, "f32", config) == (1024, 32)
    for columns in (4096, 16384, 262144):
        assert cross_entropy_prefetch.ahead_configs(columns, "f16")
