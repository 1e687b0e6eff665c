"""Softmax of rows that a program holds: right on a Hopper GPU; anywhere, what is refused, and compiled without spills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ...support.triton import (
    TOLERANCE,
    close,
    poisoned,
    rand,
)

from tensorlogic.dispatch import candidate_loading  # isort: skip  (after the interpreter is asked for)
from tensorlogic.core.op import OPS

from tensorlogic.core.key import Key  # isort: skip
from tensorlogic.core.dtypes import DTYPES  # isort: skip
from tensorlogic.kernels.row_access import shared_memory
from tensorlogic.kernels.softmax import smem
from tensorlogic.kernels.triton_runtime import launch
from tensorlogic.system import compile_pool

from tensorlogic.kernels import register  # isort: skip
from tensorlogic.ops.softmax import triton as softmax_triton  # isort: skip
from ...support.compiled import STACK

from ...support.compiled import resources  # isort: skip
from ...support.triton import default_device as default_device  # a fixture

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = [(155640, "f16"), (128256, "f16"), (155648, "bf16"), (40008, "bf16"), (77824, "f32"), (50000, "f32"), (24000, "f32")]  # fmt: skip
ODD = [
    (50257, "f16"),
    (128257, "bf16"),
    (139277, "f16"),
    (36865, "f16"),
    (50257, "f32"),
    (69633, "f32"),
]  # from odd places; tiles cut
PAIRS = [(81912, "f16"), (50304, "bf16"), (36864, "bf16"), (20000, "f16"), (40960, "f32"), (18432, "f32"), (9000, "f32")]  # fmt: skip
ODD_PAIRS = [(50257, "f16"), (20003, "bf16"), (69633, "f16"), (30001, "f32"), (9001, "f32")]
# Rows and programs: some without a row, one each, several each, many (the fewest elements that go round: for slow tools)
SHARED_OUT = [(1, 132), (131, 132), (700, 132), (5, 2)]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "bulk_copies", lambda: True)
    monkeypatch.setattr(register, "cores", lambda: 132)


def within(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor, dtype: str) -> None:
    """What is subtracted may cancel: each element off by its terms' rounding, at most."""
    error = (got.double() - want).abs() / scale.clamp_min(torch.finfo(got.dtype).tiny)
    assert error.max() <= TOLERANCE[dtype], f"error {error.max():.2e} at {error.argmax().item()}"


def offered(columns: int, dtype: str, tensors: int) -> list[dict[str, Any]]:
    found = softmax_triton.held_configs((4096, columns, dtype, (4096, columns), 16), tensors > 1)
    assert found, (columns, dtype)
    return found


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("columns", "dtype"), ROWS + ODD)
@pytest.mark.parametrize(("rows", "programs"), SHARED_OUT)
def test_softmax_of_rows_that_are_held(rows: int, programs: int, columns: int, dtype: str) -> None:
    x = rand(rows, columns, dtype=dtype)
    bad = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    if rows > 3:
        x[0, 7], x[1], x[2, 5] = float("nan"), float("-inf"), float("inf")
        x[3] = torch.finfo(x.dtype).min
        bad[:3] = True
    want = torch.softmax(x[~bad].double(), -1)
    for config in offered(columns, dtype, 1):
        y = poisoned(rows, columns, dtype=dtype)
        run = smem.softmax_held_launcher(rows, columns, dtype, config, DEVICE, programs)
        assert run(x, y)
        assert torch.equal(y.isnan().any(1), bad)
        assert torch.equal(y.isnan().all(1), bad)
        close(y[~bad], want, dtype, max(1 / columns, torch.finfo(x.dtype).tiny))
        assert float((y[~bad].double().sum(1) - 1).abs().max()) < 1e-2


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("columns", "dtype"), PAIRS + ODD_PAIRS)
@pytest.mark.parametrize(("rows", "programs"), SHARED_OUT)
def test_gradients_of_rows_that_are_held(
    rows: int, programs: int, columns: int, dtype: str
) -> None:
    y = (torch.softmax(rand(rows, columns, dtype="f32"), -1) * columns).to(DTYPES[dtype])
    dy = rand(rows, columns, dtype=dtype, seed=1)
    bad = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    if rows > 1:
        dy[0, 7], bad[0] = float("nan"), True
    dy[~bad] *= columns**-0.5
    wide, up = y[~bad].double(), dy[~bad].double()
    dot, spread = (wide * up).sum(1, keepdim=True), (wide * up).norm(dim=1, keepdim=True)
    want, scale = wide * (up - dot), wide * (up.abs() + dot.abs() + spread)
    for config in offered(columns, dtype, 2):
        what = (rows, columns, dtype, config, DEVICE, programs)
        dx = poisoned(rows, columns, dtype=dtype)
        assert smem.softmax_held_launcher(*what, backward=True)(y, dy, dx)
        assert dx[bad].isnan().all()
        within(dx[~bad], want, scale, dtype)


def test_softmax_held_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest rows of each configuration among them."""
    monkeypatch.setattr(launch, "_capability", lambda device: 90)
    cuda, jobs = torch.device("cuda", 0), []
    for asked, backward in ((ROWS + ODD, False), (PAIRS + ODD_PAIRS, True)):
        for columns, dtype in asked:
            for config in offered(columns, dtype, 1 + backward):

                def build(c: int = columns, d: str = dtype, g: Any = config, b: bool = backward) -> Any:  # fmt: skip
                    return smem.softmax_held_launcher(4096, c, d, g, cuda, 132, b)

                jobs += [(job, config) for job in launch.collect(build, cuda)]
    assert {job.kernel for job, _ in jobs} == {"softmax_held", "softmax_backward_held"}
    answers = resources([job for job, _ in jobs])
    for (job, config), answer in zip(jobs, answers, strict=True):
        assert isinstance(answer, launch.Resources), answer
        assert answer.stack <= STACK, (job, answer)
        assert answer.registers <= shared_memory.registers(config), (job, answer)
        assert config["per"] * (answer.shared + 1024) <= 228 * 1024, (job, answer)


def test_what_softmax_held_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate_loading.ready("cuda")

    def unfit(
        rows: int, columns: int, dtype: torch.dtype = torch.float16, op: str = "softmax"
    ) -> str | None:
        x = torch.empty(rows, columns, dtype=dtype, device="meta")
        args, way = ([x, 1, False], "inference") if op == "softmax" else ([x, x, 1], "backward")
        key: Key = OPS[op].key(args, way)
        return OPS[op].candidates["triton.held"].supports(replace(key, device="cuda"))

    assert unfit(4096, 128256) is None
    assert unfit(132, 40000, torch.float32) is None
    assert unfit(4096, 128256, torch.bfloat16) is None
    assert "fewer rows" in str(unfit(131, 128256))
    assert unfit(4096, 128257) is None  # from odd places
    assert "no program holds" in str(unfit(4096, 4096))
    assert "no program holds" in str(unfit(4096, 160000))
    assert "or two do" in str(unfit(4096, 20000))  # two programs' registers hold these
    assert unfit(4096, 20000, torch.bfloat16, "softmax_backward") is None
    monkeypatch.setattr(register, "bulk_copies", lambda: False)
    assert "no program holds" in str(unfit(4096, 128256))
    few = {
        "LANES": 32,
        "num_warps": 1,
        "per": 1,
        "KEPT": 1,
        "AHEAD": 1,
    }  # all but one in shared memory
    assert shared_memory.tiles(1000, "f16", few) == (4, 3)
    assert shared_memory.tiles(1001, "f16", few) == (4, 0)  # the last two may be ragged
    short = {"LANES": 256, "num_warps": 8, "per": 1, "KEPT": 8, "AHEAD": 2}
    with pytest.raises(compile_pool.CompileFailure, match="does not hold"):
        smem.softmax_held_launcher(4, 300000, "f16", short, DEVICE, 1)
