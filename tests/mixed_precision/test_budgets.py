"""Budgets are kept or their breach is said, whatever data meet what was chosen for others; what the guard sees."""

from __future__ import annotations

import itertools
import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic import PrecisionWarning
from tensorlogic.autotune.ranking import nearest, pick
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS
from tensorlogic.mixed_precision import adaptive, candidate_order, error_statistics, formats_cpu
from tensorlogic.mixed_precision import candidate_order as mixed_precision_candidate_order

from ..support.helpers import ALL_FLOATS, off


@pytest.mark.parametrize("rtol", [1e-2, 1e-3, 1e-4, 1e-6])
def test_adaptive_keeps_its_budget(rtol: float) -> None:
    a, b = torch.randn(128, 200), torch.randn(200, 96)
    with tensorlogic.precision("adaptive", rtol=rtol), warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        assert off(tensorlogic.matmul(a, b), a.double() @ b.double()) <= rtol


def test_a_budget_nothing_keeps_is_said_with_what_is_reached() -> None:
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    with (
        tensorlogic.precision("adaptive", rtol=1e-12),
        pytest.warns(
            PrecisionWarning, match="torch.eager, has a relative error of .*times the budget"
        ),
    ):
        y = tensorlogic.matmul(a, b)
    assert off(y, a.double() @ b.double()) < 1e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_call_beyond_its_budget_says_so(dtype: torch.dtype) -> None:
    """A half result cannot be as exact as asked, however it was computed: the first call says so, and every other."""
    a, b = torch.randn(40, 64).to(dtype), torch.randn(64, 40).to(dtype)
    rtol = 1e-16 if dtype is torch.float64 else 1e-4
    for _ in range(3):
        with (
            tensorlogic.precision("adaptive", rtol=rtol),
            pytest.warns(PrecisionWarning),
        ):
            tensorlogic.matmul(a, b)


def test_data_that_change_are_looked_at_again() -> None:
    """The same key, warm; then rows whose sums cancel, which only float64 can add."""
    a, b = torch.randn(64, 128), torch.randn(128, 64)
    hard = torch.cat((a[:, :64] * 1e4, -a[:, :64] * 1e4 + torch.randn(64, 64)), 1)
    both = torch.cat((b[:64], b[:64]))
    with tensorlogic.precision("adaptive", rtol=1e-2):
        for _ in range(3):
            assert off(tensorlogic.matmul(a, b), a.double() @ b.double()) <= 1e-2
        for _ in range(2):
            assert off(tensorlogic.matmul(hard, both), hard.double() @ both.double()) <= 1e-2
        assert off(tensorlogic.matmul(a, b), a.double() @ b.double()) <= 1e-2


@pytest.mark.parametrize("id", ["torch.bf16", "cpu.bf16", "torch.f16"])
def test_digits_that_happen_to_fit_are_no_measure(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small integers are exact in a half; data of the same norms that are not must not meet what was chosen for them."""
    op = OPS["matmul"].precise
    assert op is not None
    monkeypatch.setattr(adaptive, "order", lambda *_: [(op.candidates[i], {}) for i in (id, EAGER)])
    size = math.sqrt(2 / 3)
    a, b = (torch.randint(-1, 2, (96, 96)).float() for _ in range(2))
    x, y = (torch.randn(96, 96) * size for _ in range(2))
    rtol = 1e-3 if id != "torch.f16" else 2e-4
    with tensorlogic.precision("adaptive", rtol=rtol):
        for left, right in ((a, b), (a, b), (x, y), (x, y)):
            got = tensorlogic.matmul(left, right)
            assert off(got, left.double() @ right.double()) <= rtol


def test_a_row_that_vanishes_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves that differ by less than a form resolves: their difference comes out as 0, and no norm is there to compare."""
    op = OPS["matmul"].precise
    assert op is not None
    monkeypatch.setattr(
        adaptive, "order", lambda *_: [(op.candidates[i], {}) for i in ("torch.bf16", EAGER)]
    )
    # whose sums are exact, however they are added
    a, b = (torch.randint(-64, 65, (16, 16)) / 64 for _ in range(2))
    b[8:] = b[:8]
    with tensorlogic.precision("adaptive", rtol=0.1):
        tensorlogic.matmul(a, b)
        a[5, 8:] = -a[5, :8]  # whose row is 0 indeed
        tensorlogic.matmul(a, b)
        a[5, 8:] = 0
        a[3, 8:] = -a[3, :8] * (1 + 1e-4)
        for _ in range(2):
            assert off(tensorlogic.matmul(a, b), a.double() @ b.double()) < 0.1


def test_errors_of_data_are_kept_in_the_plan() -> None:
    a, b = torch.randn(96, 96), torch.randn(96, 96)
    with tensorlogic.policy(tune="full"), tensorlogic.precision("adaptive", rtol=1e-3):
        tensorlogic.matmul(a, b)
    op = OPS["matmul"].precise
    assert op is not None
    key = op.key((a, b, "none", False), "inference", "adaptive")
    adaptive.forget()
    known = adaptive.recall(key, torch.device("cpu"))
    assert known
    assert all(0 < k.error < 1 and k.statistics.cancels > 0 for k in known)
    with tensorlogic.precision("adaptive", rtol=1e-3):
        shown = str(tensorlogic.explain(tensorlogic.matmul, a, b))
    assert "precision=adaptive" in shown
    assert "errors on data met before" in shown


@pytest.mark.skipif(
    formats_cpu.cpu_library.available() is not None, reason="needs the native library"
)
@pytest.mark.parametrize("shape", [(40, 50, 60), (129, 300, 265), (1, 1, 1), (600, 530, 777)])
@pytest.mark.parametrize("dtype", ALL_FLOATS, ids=str)
def test_the_native_guard_sees_what_pytorch_sees(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype).t()
    a[::3] *= 1e-3
    for left, right in ((a, b), (a.t().contiguous().t(), b.contiguous())):
        part, c = error_statistics.Part(left, right), left @ right
        assert error_statistics.natively(part, c) == pytest.approx(
            error_statistics.sketched(part, c), rel=1e-6
        )
    if m > 1:
        c[5], c[:, 7] = 0, 0
        part.left[9] = 0
        assert error_statistics.natively(part, c)[4] == error_statistics.sketched(part, c)[4] == 2
    c[0, 0] = float("nan")
    assert not all(map(math.isfinite, error_statistics.natively(part, c)))


def test_what_sparse_rows_seem_to_cancel_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sketch of a few elements that are not 0 overstates it, and few sums have small errors: dense rows must not inherit that."""
    op = OPS["matmul"].precise
    assert op is not None
    chosen = [(op.candidates[i], {}) for i in ("torch.f32", EAGER)]
    monkeypatch.setattr(adaptive, "order", lambda *_: chosen)
    drawn = torch.Generator().manual_seed(0)
    for share in (0.3, 0.4, 0.5, 0.6, 0.7):
        adaptive.forget()
        a, b = (torch.randn(s, generator=drawn) for s in ((64, 512), (512, 300)))
        sparse = a * (torch.rand(64, 512, generator=drawn) < 0.05)
        hard = torch.cat((a[:, :256], -a[:, :256] + share * a[:, 256:]), 1)
        both = torch.cat((b[:256], b[:256]))
        with tensorlogic.precision("adaptive", rtol=1e-6 * (1 + share / 1e3)):
            for x, y in ((sparse, b), (hard, both)):
                assert off(tensorlogic.matmul(x, y), x.double() @ y.double()) <= 1e-6


@pytest.mark.parametrize("scales", [(1.0, 1e-43), (1e-39, 1e-43), (1e-30, 1e-43)])
def test_results_below_a_dtype_s_range_are_told(
    scales: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 keeps few digits of what is smaller than 1e-38, whatever was served well before."""
    monkeypatch.setattr(adaptive, "order", lambda op, *_: [(op.candidates[EAGER], {})])
    a, b = torch.randn(40, 30), torch.randn(30, 50)
    rtol, told = 1e-4, []
    for scale in scales:
        with (
            tensorlogic.precision("adaptive", rtol=rtol),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            y = tensorlogic.matmul(a * scale, b)
        told.append(any(w.category is PrecisionWarning for w in said))
        assert told[-1] or off(y, (a * scale).double() @ b.double()) <= rtol
    assert told == [False, True]


@pytest.mark.parametrize("before", [False, True])
def test_results_beyond_a_dtype_s_range_are_told(before: bool) -> None:
    """A single element of float16, where no sample of rows and columns need be, whatever was served well before."""
    a, b = torch.randn(200, 64).half(), torch.randn(64, 300).half()
    a[77], b[:, 150] = 12.0, 12.0  # their element is 9,216
    told = []
    for scale in (1.0, 10.0, 10.0)[not before :]:
        with (
            tensorlogic.precision("adaptive", rtol=1e-2),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            y = tensorlogic.matmul(a * scale, b)
        assert int((~y.isfinite()).sum()) == (scale > 1)
        told.append(any(w.category is PrecisionWarning for w in said))
    assert told == [False, True, True][not before :]


@pytest.mark.parametrize("before", [False, True])
def test_a_faint_column_of_halves_is_told(before: bool) -> None:
    """It cancels no more than the others and has few digits all the same, and no sample of columns need meet it."""
    a, b = torch.randn(64, 512).half() * 1e-3, torch.randn(512, 300).half()
    small = b.clone()
    small[:, 195] = torch.randn(512).half() * 5e-5
    for right in (b, small)[not before :]:
        with (
            tensorlogic.precision("adaptive", rtol=1e-2),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            y = tensorlogic.matmul(a, right)
        told = any(w.category is PrecisionWarning for w in said)
        assert told or off(y, a.double() @ right.double()) <= 1e-2
        assert told == (right is small)


@pytest.mark.parametrize("order", [1, -1])
def test_halves_that_become_smaller_lose_digits_only_with_a_word(order: int) -> None:
    """Float16 results pass into its subnormal numbers without a change of their error before."""
    a, b = torch.randn(64, 96), torch.randn(96, 80).half()
    for power in range(0, 24, 2)[::order]:
        x = (a * 2.0**-power).half()
        with (
            tensorlogic.precision("adaptive", rtol=2e-3),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            y = tensorlogic.matmul(x, b)
        kept = off(y, x.double() @ b.double()) <= 2e-3
        assert kept or any(w.category is PrecisionWarning for w in said)


def test_every_accuracy_is_measured_whole() -> None:
    """Which budgets will be asked for nobody knows: the fastest few alone are not enough."""
    rows = (("f64", 0.0, 60.0), ("f32", 1e-7, 100.0), ("near", 2e-7, 30.0), ("x3", 1e-6, 31.0), ("tf32", 1e-3, 12.0), ("f16", 1e-3, 9.0), ("bf16", 1e-2, 10.0), ("coarse", 1e-1, 20.0))  # fmt: skip
    entrants: list[Any] = [
        SimpleNamespace(candidate=SimpleNamespace(id=id, coarse=lambda _, e=e: e), rough_us=us)
        for id, e, us in rows
    ]
    for precision, wanted in (
        ("adaptive", ["f64", "near", "x3", "f16", "bf16"]),
        ("f16", ["f64", "f32", "near", "x3"]),
    ):
        asked: Any = SimpleNamespace(precision=precision)
        assert [e.candidate.id for e in nearest(entrants, asked)] == wanted


def test_float32_keeps_no_copies_where_anything_else_serves() -> None:
    final: list[Any] = [
        SimpleNamespace(candidate=SimpleNamespace(id=id, trusted=True)) for id in (EAGER, "a", "b")
    ]
    times = {EAGER: 10.0, "a": 13.0, "b": 12.0}
    op = OPS["matmul"].precise
    assert op is not None

    def won(mode: str, *dtypes: torch.dtype, among: int = 3) -> str:
        operands = [torch.ones(4, 4, dtype=d) for d in dtypes]
        key = op.key((*operands, "none", False), "inference", mode)
        chosen: str = pick(final[:among], times, key, "cuda").candidate.id
        return chosen

    half, single, double = torch.float16, torch.float32, torch.float64
    assert won("f32", half, single) == won("f32", double, half) == "b"
    assert won("f32", double, double) == won("adaptive", half, single) == EAGER
    assert won("f32", half, single, among=1) == EAGER


def test_where_hosts_take_as_long_the_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS["matmul"].precise
    assert op is not None
    a = torch.randn(64, 64)
    key = op.key((a, a, "none", False), "inference", "adaptive")
    taken = {"torch.f32": 9.0, "cpu.f32": 8.0, "torch.bf16": 7.0, EAGER: 9.5}
    monkeypatch.setattr(
        candidate_order, "_expected", lambda _, c, *__: (10.0, taken.get(c.id, math.inf), {})
    )
    found = [c.id for c, _ in candidate_order.order(op, key, a.device, 1e-1)]
    assert [id for id in found if id in taken] == ["torch.bf16", "cpu.f32", "torch.f32", EAGER]


def test_who_is_looked_at_seldom_pays_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS["matmul"].precise
    assert op is not None
    taken = {"cpu.f32": 34.0, EAGER: 40.0}
    monkeypatch.setattr(
        candidate_order, "_expected", lambda _, c, *__: (taken.get(c.id, math.inf),) * 2 + ({},)
    )
    monkeypatch.setitem(candidate_order.GUARD_US, "cpu", 8.0)
    for dtype, first in ((torch.float64, EAGER), (torch.float32, "cpu.f32")):
        a = torch.randn(64, 64, dtype=dtype)
        key = op.key((a, a, "none", False), "inference", "adaptive")
        assert candidate_order.order(op, key, a.device, 1e-6)[0][0].id == first
    taken["cpu.f32"] = 31.0  # ahead with what looking takes
    key = op.key((a.double(), a.double(), "none", False), "inference", "adaptive")
    assert candidate_order.order(op, key, a.device, 1e-6)[0][0].id == "cpu.f32"


def test_float64_with_room_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "order", lambda op, *_: [(op.candidates[EAGER], {})])
    looked: list[int] = []
    statistics = error_statistics.statistics
    monkeypatch.setattr(
        error_statistics, "statistics", lambda *a: [looked.append(1), statistics(*a)][1]
    )

    def looks(a: torch.Tensor, b: torch.Tensor, rtol: float) -> list[int]:
        """In which of the calls that follow the first two rounds of rest the data were looked at."""
        found = []
        with (
            tensorlogic.precision("adaptive", rtol=rtol),
            tensorlogic.policy(tune="off"),
        ):
            for call in range(2 * (mixed_precision_candidate_order.REST + 1) + 1):
                before = len(looked)
                c = tensorlogic.matmul(a, b)
                found += [call] * (len(looked) > before)
        assert torch.equal(c, (a.double() @ b.double()).to(c.dtype))
        return found

    a, b = torch.randn(70, 66), torch.randn(66, 80)
    every = mixed_precision_candidate_order.REST + 1
    assert looks(a.double(), b.double(), 1e-6) == [0, every, 2 * every]
    assert len(looks(a.double(), b.double(), 1e-14)) == 2 * every + 1  # little room
    assert len(looks(a, b, 1e-6)) == 2 * every + 1  # results that float32 may not hold
    half = a.double()[:, :33] * 1e11
    hard, both = (
        torch.cat((half, -half + a.double()[:, 33:]), 1),
        torch.cat((b[:33], b[:33])).double(),
    )
    with pytest.warns(PrecisionWarning, match="rtol=1e-06"):
        looks(hard, both, 1e-6)


def test_one_interruption_of_looking_teaches_little(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(3, 64, 64), torch.randn(3, 64, 64)  # looked at by themselves, not by kernels
    seconds = itertools.count()  # between two looks at the clock, one
    monkeypatch.setattr(adaptive, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    before = candidate_order.GUARD_US["cpu"]
    with tensorlogic.precision("adaptive", rtol=1e-4):
        for _ in range(3):
            tensorlogic.matmul(a, b)
    looks = next(seconds) // 2
    assert looks > 0
    assert candidate_order.GUARD_US["cpu"] == pytest.approx(before * 1.15**looks)
