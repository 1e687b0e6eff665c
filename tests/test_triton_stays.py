"""Cross-entropy by programs that stay: against float64, its special rows, its gradients, and what the compiler makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .support.triton import DEVICE, TORCH, close, default_device, poisoned, rand  # noqa: F401  (a fixture, and the interpreter)

import tensorlogic  # isort: skip  (after the interpreter is asked for)
from tensorlogic.op import OPS  # isort: skip
from tensorlogic.ops.common import triton_cross_entropy_stays as stays  # isort: skip
from tensorlogic.ops.common import triton_cross_entropy as cross_entropy  # isort: skip
from tensorlogic.ops.common import triton_launch  # isort: skip
from .compiled import resources  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities


@pytest.mark.parametrize(("columns", "dtype"), [(2048, "f16"), (2600, "bf16"), (2052, "f32")])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_against_float64(columns: int, dtype: str, reduction: str) -> None:
    rows, ignore = 19, 3
    x = rand(rows, columns, dtype=dtype, scale=3.0)
    t = torch.arange(rows) * 137 % columns
    t[4] = t[0] = t[18] = ignore
    want = F.cross_entropy(x.double(), t, reduction=reduction, ignore_index=ignore)
    for config in ({"per": 4}, {"per": 30}, {"per": 1, "LANES": 512, "num_warps": 8}):
        part, lse, y, share = poisoned(rows), poisoned(rows), poisoned(1, dtype=dtype), poisoned(1)
        counter = torch.zeros(1, dtype=torch.int64)
        config = {"LANES": 256, "WIDTH": 16 // x.element_size(), "num_warps": 4, **config}
        run = stays.stays_launcher(rows, columns, dtype, reduction, ignore, config, DEVICE, 1, save=True)  # fmt: skip
        for _ in range(2):
            assert run(x, t, part, lse, y, share, counter)
            assert counter.item() == 0
            close(y[0], want, dtype)
        keep = t != ignore
        close(share[0], 1 / keep.sum() if reduction == "mean" else torch.tensor(1.0), "f32", 0.1)
        close(lse, torch.logsumexp(x.double(), 1) * keep, "f32")


def test_special_rows() -> None:
    columns, config = 2056, {"LANES": 256, "WIDTH": 8, "per": 2, "num_warps": 4}
    x, targets = rand(7, columns, dtype="f16"), torch.arange(7)
    x[1, 3], x[2, :], x[3, 2050] = float("nan"), float("-inf"), float("inf")
    targets[4], targets[5] = columns, -1
    part, y, other = poisoned(7), poisoned(1, dtype="f16"), torch.zeros(1, dtype=torch.int64)
    run = stays.stays_launcher(7, columns, "f16", "sum", -100, config, DEVICE, 1)
    for row in range(7):
        t = torch.where(torch.arange(7) == row, targets, -100)
        assert run(x, t, part, part, y, part, other)
        if row in (0, 6):
            close(y[0], F.cross_entropy(x.double(), t, reduction="sum"), "f16")
        else:
            assert y.isnan().all(), row
    assert run(x, torch.full((7,), -100), part, part, y, part, other)
    assert y.item() == 0.0
    mean = stays.stays_launcher(7, columns, "f16", "mean", -100, config, DEVICE, 1)
    assert mean(x, torch.full((7,), -100), part, part, y, part, other)
    assert y.isnan().all()


def test_the_candidate_and_its_gradient() -> None:
    x, t = rand(2, 4, 2600, dtype="f32"), torch.arange(8).view(2, 4) * 300
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    with tensorlogic.policy(force="triton.stays"):
        flat = tensorlogic.softmax_cross_entropy(leaf.view(8, 2600), t.view(8))
    (want := F.cross_entropy(wide.view(8, 2600), t.view(8))).backward()
    flat.backward()
    close(flat.detach(), want.detach(), "f32")
    assert leaf.grad is not None
    assert wide.grad is not None
    close(leaf.grad, wide.grad, "f32", 0.1)
    op = OPS["softmax_cross_entropy"]

    def asked(x: Any, *flags: Any) -> str | None:
        key = op.key([x, torch.zeros(4, dtype=torch.int64), *flags, False], "inference")
        return op.candidates["triton.stays"].supports(key)

    assert asked(rand(4, 4096, dtype="f16"), -100, 0.0, "mean") is None
    assert "smoothing" in str(asked(rand(4, 4096, dtype="f16"), -100, 0.1, "mean"))
    assert "reduced" in str(asked(rand(4, 4096, dtype="f16"), -100, 0.0, "none"))
    assert "whole groups" in str(asked(rand(4, 4097, dtype="f16"), -100, 0.0, "mean"))
    assert "whole groups" in str(asked(rand(4, 256, dtype="f16"), -100, 0.0, "mean"))


def test_it_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_capability", lambda device: 90)
    cuda, jobs = torch.device("cuda", 0), []
    for columns, dtype, save in ((32000, "f16", True), (8192, "bf16", False), (50264, "f32", True)):
        for config in stays.stays_configs(columns, dtype):

            def build(c: int = columns, d: str = dtype, s: bool = save, config: Any = config) -> object:  # fmt: skip
                return stays.stays_launcher(4096, c, d, "mean", -100, config, cuda, 132, save=s)

            jobs += triton_launch.collect(build, cuda)
    for job, answer in zip(jobs, resources(jobs), strict=True):
        assert isinstance(answer, triton_launch.Resources), answer
        assert answer.stack == 0, (job, answer)
    assert set(TORCH) == set(stays.SIZE)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("columns", [50, 64])
@pytest.mark.parametrize("config", [{"BLOCK_R": 1, "BLOCK_C": 32}, {"BLOCK_R": 2, "BLOCK_C": 64}])
def test_large_logits_cost_no_accuracy(
    smoothing: float, columns: int, config: dict[str, int]
) -> None:
    """Only their differences matter, and those are exact; PyTorch's gradients are off by 1e-7, those of a rounded lse by 5e-4."""
    rows, s = 9, smoothing
    x = rand(rows, columns, scale=3.0) + 1e4
    t = torch.arange(rows) * 5 % columns
    leaf = x.double().requires_grad_()
    F.cross_entropy(leaf, t, reduction="sum", label_smoothing=s).backward()
    assert leaf.grad is not None
    for forward in cross_entropy.cross_entropy_configs(columns, "f32")[:1], cross_entropy.cross_entropy_configs(9000, "f32")[:1]:  # fmt: skip
        loss, lse, other = poisoned(rows), poisoned(rows), torch.ones(1)
        run = cross_entropy.cross_entropy_launcher(
            rows, columns, "f32", "f32", "none", -100, forward[0], DEVICE, smooth=s > 0, save=True
        )
        assert run(x, t, loss, lse, loss, other, other, s)
        want = F.cross_entropy(x.double(), t, reduction="none", label_smoothing=s)
        assert (loss.double() - want).abs().max() < 3e-6 + 2e-3 * s
        dx = poisoned(rows, columns)
        back = cross_entropy.cross_entropy_backward_launcher(
            rows, columns, "f32", "f32", "sum", -100, {**config, "num_warps": 4}, DEVICE, smooth=s > 0
        )  # fmt: skip
        assert back(x, t, lse, other, other, dx, s)
        assert (dx.double() - leaf.grad).abs().max() < 3e-6


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_what_rows_keep_is_float32_whatever_the_default(reduction: str) -> None:
    logits, target = rand(7, 13, dtype="f16"), torch.arange(7)
    try:
        torch.set_default_dtype(torch.float64)
        with tensorlogic.policy(force="triton.rows"):
            outs = torch.ops.tensorlogic.softmax_cross_entropy(logits, target, -100, 0.0, reduction, True)  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    assert [o.dtype for o in outs] == [torch.float16, torch.float32, torch.float32]
