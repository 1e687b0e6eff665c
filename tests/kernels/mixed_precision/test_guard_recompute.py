"""What a GPU judges of the products of an error budget: what it mends by itself, what it tells, and when that is said."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic import PrecisionWarning
from tensorlogic.kernels.mixed_precision.data_statistics import Statistics
from tensorlogic.mixed_precision import adaptive, error_statistics
from tensorlogic.system import hardware

if hardware.triton_missing() or not (torch.cuda.is_available() or hardware.interpreting()):
    pytest.skip("needs Triton and a GPU or its interpreter", allow_module_level=True)

from tensorlogic.kernels.mixed_precision import guard_recompute, split_planes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((40, 50, 60), (70, 130, 65))


def watch(
    a: Tensor, b: Tensor, c: Tensor, room: float = 2.0, products: int = 1
) -> tuple[guard_recompute.Watch, Tensor]:
    """One that holds so many products to what a · b is, and c after it has looked at it."""
    cancels, crest, low, high, _ = error_statistics.looked(error_statistics.Part(a, b), a @ b)
    then = Statistics(cancels, crest, -low, high)
    seen = [guard_recompute.Seen.of(a, b, c)] * products
    made = guard_recompute.Watch(then, room, seen, DEVICE, 1e-3)
    c = c.clone()
    made.over([(a, b, c)] * products)
    return made, c


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gpu_mends_what_has_left_its_limits(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE).t()
    a, b = a.to(dtype), b.to(dtype)
    near = (a @ b) * (1 + 1e-4)
    good, c = watch(a, b, near)
    assert torch.equal(c, near)  # within its limits: nobody writes
    assert not good.passed()

    cases: list[tuple[Tensor, Tensor]] = []
    half = k // 2
    hard, both = a.clone(), b.clone()
    hard[7, half : 2 * half] = -hard[7, :half]  # one row that cancels
    both[half : 2 * half] = both[:half]
    cases.append((hard, both))
    cases += [(a * 100, b), (a, b * 0.01)]
    none = a @ b
    none[3] = 0  # a result that is 0, of rows that are not
    good.over([(a, b, none)])
    assert (none[3].double() - a[3].double() @ b.double()).abs().max() < 1e-4
    assert good.passed()
    for x, y in cases:
        wrong = (x @ y) * (1 + 1e-2)
        good.over([(x, y, wrong)])
        want = x.double() @ y.double()
        assert (wrong.double() - want).abs().max() <= 1e-6 * want.abs().max()
        assert good.passed()
        assert not good.passed()


@pytest.mark.parametrize("place", [(77, 150), (199, 299)])
def test_a_single_element_beyond_the_range_is_noticed(place: tuple[int, int]) -> None:
    """Where no sketch of its row and its column need meet it: what float64 makes of it is infinite there, too, and that is said."""
    i, j = place
    a, b = torch.randn(200, 64, device=DEVICE).half(), torch.randn(64, 300, device=DEVICE).half()
    a[i], b[:, j] = 12.0, 12.0  # their element is 9,216
    fine = (a.float() @ b.float()).half()
    made, c = watch(a, b, fine)
    assert torch.equal(c, fine)
    assert not made.passed()
    assert not made.beyond()
    wrong = (a.float() * 10 @ b.float()).half()
    assert int((~wrong.isfinite()).sum()) == 1
    made.over([(a * 10, b, wrong)])
    made.wait()
    assert made.passed()
    assert made.beyond()


def test_no_element_is_looked_at_where_none_can_leave_the_range() -> None:
    a, b = torch.randn(40, 60, device=DEVICE), torch.randn(60, 50, device=DEVICE)
    noting = [watch(a.to(t), b.to(t), (a @ b).to(t))[0]._notes for t in (torch.float32, torch.float16)]  # fmt: skip
    assert noting[0] == [None]
    assert noting[1] != [None]


def test_a_value_that_did_not_fit_is_mended_in_every_product_of_the_call() -> None:
    a, b = torch.randn(40, 60, device=DEVICE), torch.randn(60, 50, device=DEVICE)
    made, _ = watch(a, b, a @ b, products=2)
    split_planes.flag(DEVICE).fill_(1)
    one, two = torch.zeros(40, 50, device=DEVICE), torch.zeros(40, 50, device=DEVICE)
    made.over([(a, b, one), (a, b, two)])
    for c in (one, two):
        torch.testing.assert_close(c, a @ b)
    bad = a.clone()
    bad[3, 3] = float("nan")
    c = torch.zeros(40, 50, device=DEVICE)
    made.over([(bad, b, c), (a, b, one)])
    assert torch.isnan(c[3]).all()
    torch.testing.assert_close(c[4:], (a @ b)[4:])


def test_a_device_that_judges_wrongly_is_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guard_recompute.works.cache_clear()
    assert guard_recompute.works(DEVICE)
    with monkeypatch.context() as broken:
        guard_recompute.works.cache_clear()
        broken.setattr(guard_recompute, "_mend", lambda *_: lambda *_: True)
        assert not guard_recompute.works(DEVICE)
        assert "judges products wrongly" in caplog.text
        guard_recompute.works.cache_clear()
        broken.setattr(guard_recompute, "_mend", lambda *_: lambda *_: False)
        assert not guard_recompute.works(DEVICE)
        assert "the host does: mend" in caplog.text
    guard_recompute.works.cache_clear()
    huge = guard_recompute._limits(Statistics(1e300, 1.0, 1020.0, 1023.0), 10.0, 1e-3, 4.0)
    assert huge[0] == huge[3] == math.inf


@pytest.mark.parametrize(
    ("dtype", "factor", "lost"),
    [
        (torch.float32, 2.0**-147, True),
        (torch.bfloat16, 2.0**-135, True),
        (torch.float16, 2.0**-24, True),
        (torch.float16, 2.0**30, True),
        (torch.float32, 2.0**-60, False),
        (torch.bfloat16, 2.0**60, False),
        (torch.float16, 2.0**-6, False),
        (torch.float64, 2.0**-300, False),
    ],
)
def test_what_no_dtype_can_hold_is_told_from_what_was_mended(
    dtype: torch.dtype, factor: float, lost: bool
) -> None:
    a, b = torch.randn(40, 60, device=DEVICE), torch.randn(60, 50, device=DEVICE)
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("the interpreter has no bfloat16 of its own")
    a, b, c = (t.to(torch.float64) for t in (a, b, a @ b))
    rtol = 1e-1 if dtype == torch.bfloat16 else 1e-2
    seen = [guard_recompute.Seen.of(a, b, c.to(dtype))]
    made = guard_recompute.Watch(Statistics(50.0, 4.0, 0.0, 1.0), 1.0, seen, DEVICE, rtol)
    made.over([(a * factor, b, (c * factor).to(dtype))])
    made.wait()
    assert made.passed()
    assert made.beyond() == lost
    assert not made.beyond()


def test_sums_that_float64_cannot_resolve_are_told() -> None:
    a, b = torch.randn(40, 60, device=DEVICE), torch.randn(60, 50, device=DEVICE)
    a, b = a.double(), b.double()
    b[30:] = b[:30]
    a[:, 30:] = -a[:, :30] * (1 + 1e-14)
    made, _ = watch(torch.randn_like(a), torch.randn_like(b), a @ b)
    made.over([(a, b, a @ b)])
    made.wait()
    assert made.passed()
    assert made.beyond()


def test_what_has_become_easy_is_said_and_left() -> None:
    a, b = torch.randn(40, 60, device=DEVICE), torch.randn(60, 50, device=DEVICE)
    b[30:] = b[:30]
    hard = a.clone()
    hard[:, 30:] = -hard[:, :30] * (1 + 1e-4 * torch.randn(40, 30, device=DEVICE))
    made, _ = watch(hard, b, hard @ b)
    wide = error_statistics.looked(error_statistics.Part(hard, b), hard @ b)[0] / 64
    assert error_statistics.looked(error_statistics.Part(a, b), a @ b)[0] < wide
    product = a @ b
    kept = product.clone()
    made.over([(a, b, product)])
    assert torch.equal(product, kept)
    assert made.passed()


def test_adaptive_calls_do_not_wait_where_the_device_judges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole way, on the interpreter's device: changed data come out right in that very call, and are noticed in the next."""
    monkeypatch.setattr(
        adaptive, "watchable", lambda key: dict(key.flags).get("activation", "none") == "none"
    )
    id = "cublaslt.bf16" if DEVICE.type == "cuda" else "torch.bf16"
    monkeypatch.setattr(
        adaptive,
        "order",
        lambda op, *_: [(op.candidates[i], {"rank": 0}) for i in (id, "torch.eager")],
    )
    looked: list[int] = []
    statistics = error_statistics.statistics
    monkeypatch.setattr(
        error_statistics, "statistics", lambda *a: [looked.append(1), statistics(*a)][1]
    )
    a, b = torch.randn(64, 128, device=DEVICE), torch.randn(128, 64, device=DEVICE)
    hard = torch.cat((a[:, :64] * 1e2, -a[:, :64] * 1e2 + torch.randn(64, 64, device=DEVICE)), 1)
    both = torch.cat((b[:64], b[:64]))

    def off(x: Tensor, y: Tensor, **more: Any) -> float:
        with (
            tensorlogic.precision("adaptive", rtol=1e-2),
            tensorlogic.policy(tune="off"),
        ):
            c = tensorlogic.matmul(x, y, **more)
        want = x.double() @ y.double()
        return float(((c - want).norm(dim=1) / want.norm(dim=1)).max())

    assert off(a, b) < 1e-2
    first = len(looked)
    for _ in range(3):
        assert 1e-6 < off(a, b) < 1e-2
    assert len(looked) == first  # nobody waited
    assert off(hard, both) < 1e-5  # mended
    assert len(looked) == first
    assert off(hard, both) < 1e-2  # chosen again
    assert len(looked) > first
    assert off(a, b) < 1e-2
    assert off(a, b) < 1e-2
    with pytest.warns(PrecisionWarning, match="may be beyond rtol=0.01, although float64"):
        off(a * 1e-23, b * 1e-22)  # in the call whose block ends, however soon
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert off(a, b) < 1e-2
    c = tensorlogic.matmul(a, b, "gelu", precision=tensorlogic.precision("adaptive", rtol=1e-2))
    torch.testing.assert_close(c, torch.nn.functional.gelu(a @ b), rtol=0.1, atol=0.1)
