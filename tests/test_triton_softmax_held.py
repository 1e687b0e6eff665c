"""Softmax of rows that a program holds: right on a Hopper GPU; anywhere, what is refused, and compiled without spills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from .test_triton_rows import close, poisoned, rand

from tensorlogic import registry  # isort: skip  (after the interpreter is asked for)
from tensorlogic.op import OPS, Key  # isort: skip
from tensorlogic.ops.common import cross_entropy_held, softmax_held, triton_launch, wiring  # isort: skip

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LONG = [(128256, "f16"), (50304, "bf16"), (40008, "f16"), (50000, "f32"), (20000, "f16"), (24000, "f32")]  # fmt: skip


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("columns", "dtype"), LONG)
@pytest.mark.parametrize("rows", [1, 131, 700])
def test_softmax_of_rows_that_are_held(rows: int, columns: int, dtype: str) -> None:
    for config in cross_entropy_held.held_configs(columns, dtype):
        x = rand(rows, columns, dtype=dtype, scale=4.0)
        x[0, 7] = float("nan")
        if rows > 2:
            x[1], x[2, 5] = float("-inf"), float("inf")
        y = poisoned(rows, columns, dtype=dtype)
        run = softmax_held.softmax_held_launcher(rows, columns, dtype, config, DEVICE, 132)
        assert run(x, y)
        bad = min(rows, 3)
        assert y[:bad].isnan().all()
        close(y[bad:], torch.softmax(x[bad:].double(), -1), dtype, 0.1)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("columns", "dtype"), LONG)
@pytest.mark.parametrize("rows", [1, 131, 700])
def test_gradients_of_rows_that_are_held(rows: int, columns: int, dtype: str) -> None:
    y = torch.softmax(rand(rows, columns, dtype="f32", scale=2.0), -1)
    y, dy = y.to(rand(1, 1, dtype=dtype).dtype), rand(rows, columns, dtype=dtype, seed=1) * 100
    dy[0, 7] = float("nan")
    wide = y.double()
    want = wide * (dy.double() - (wide * dy.double()).sum(1, keepdim=True))
    for config in cross_entropy_held.held_configs(columns, dtype, 2):
        what = (rows, columns, dtype, config, DEVICE, 132)
        dx = poisoned(rows, columns, dtype=dtype)
        assert softmax_held.softmax_held_launcher(*what, backward=True)(y, dy, dx)
        assert dx[0].isnan().all()
        close(dx[1:], want[1:], dtype, 0.1)


def compiled(
    columns: int, dtype: str, config: dict[str, Any], cuda: torch.device, backward: bool
) -> list[Any]:
    what = (4096, columns, dtype, config, cuda, 132)
    return triton_launch.collect(
        lambda: softmax_held.softmax_held_launcher(*what, backward=backward), cuda
    )


def test_softmax_held_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_capability", lambda device: 90)
    cuda, jobs = torch.device("cuda", 0), []
    for columns, dtype in LONG:
        for backward in (False, True):
            for config in cross_entropy_held.held_configs(columns, dtype, 1 + backward):
                jobs += compiled(columns, dtype, config, cuda, backward)
    jobs = list(dict.fromkeys(jobs))
    assert len(jobs) >= len(LONG)
    for job, answer in zip(jobs, triton_launch.resources_apart(jobs), strict=True):
        assert isinstance(answer, triton_launch.Resources), answer
        assert answer.stack == 0, (job, answer)
        assert answer.registers <= 128, (job, answer)


def test_what_softmax_held_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.ready("cuda")
    op = OPS["softmax"]
    candidate = op.candidates["triton.held"]
    monkeypatch.setattr(wiring, "cores", lambda: 132)

    def unfit(rows: int, columns: int, dtype: torch.dtype = torch.float16, hopper: bool = True) -> str | None:  # fmt: skip
        monkeypatch.setattr(wiring, "bulk_copies", lambda: hopper)
        x = torch.empty(rows, columns, dtype=dtype, device="meta")
        key: Key = op.key([x, 1, False], "inference")
        return candidate.supports(replace(key, device="cuda"))

    assert unfit(4096, 128256) is None
    assert unfit(132, 40000, torch.float32) is None
    assert "fewer rows" in str(unfit(131, 128256))
    assert "whole groups" in str(unfit(4096, 128257))
    assert "no program holds" in str(unfit(4096, 4096))
    assert "no program holds" in str(unfit(4096, 400000))
    assert "no program holds" in str(unfit(4096, 128256, hopper=False))
    x = torch.empty(4096, 20000, dtype=torch.float16, device="meta")
    key = replace(OPS["softmax_backward"].key([x, x, 1], "backward"), device="cuda")
    monkeypatch.setattr(wiring, "bulk_copies", lambda: True)
    assert OPS["softmax_backward"].candidates["triton.held"].supports(key) is None
    assert "or two do" in str(unfit(4096, 20000))  # two programs' registers hold these
    short = {"LANES": 256, "num_warps": 8, "per": 1, "KEPT": 8, "AHEAD": 2}
    with pytest.raises(triton_launch.CompileFailure, match="does not hold"):
        softmax_held.softmax_held_launcher(4, 300000, "f16", short, DEVICE, 1)
