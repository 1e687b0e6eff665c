"""A product and its guard in one native call: within limits exactly where the guard in Python says so, and used wherever it can be."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic import PrecisionWarning
from tensorlogic.core.op import OPS
from tensorlogic.mixed_precision import adaptive as mixed_precision_adaptive
from tensorlogic.mixed_precision import candidate_order, error_statistics
from tensorlogic.mixed_precision import candidate_order as mixed_precision_candidate_order
from tensorlogic.mixed_precision.adaptive import Adaptive
from tensorlogic.native import cpu_library

from ..support.helpers import off
from ..support.native import LEVELS, forced

pytestmark = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)

CPU = torch.device("cpu")


@pytest.fixture(params=LEVELS)
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each instruction set in turn."""
    yield from forced(request.param)


def held(
    a: Tensor, b: Tensor, error: float = 2e-3, rtol: float = 1e-2
) -> mixed_precision_adaptive.Held:
    """What an error measured on a · b holds for."""
    now = error_statistics.statistics([error_statistics.Part(a, b)], [a @ b])
    candidate: Any = OPS["matmul"].precise.candidates["cpu.f32"]  # type: ignore[union-attr]
    return mixed_precision_adaptive.Held(candidate, {}, lambda *_: None, error, now, rtol, 1.2)


def cancelling(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """One row of the result far smaller than its operands."""
    half = a.shape[1] // 2
    x, y = a.clone(), b.clone()
    y[half : 2 * half] = y[:half]
    x[3, half : 2 * half] = -x[3, :half] * (1 + 1e-3)
    return x, y


def changed(t: Tensor, at: Any, value: float) -> Tensor:
    t = t.clone()
    t[at] = value
    return t


CHANGES: tuple[tuple[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], bool], ...] = (
    ("the same", lambda a, b: (a, b), True),
    ("a little larger", lambda a, b: (a * 12, b), True),
    ("much larger", lambda a, b: (a * 60, b), False),
    ("much smaller", lambda a, b: (a, b / 300), False),
    ("one small row", lambda a, b: (changed(a, 5, 1e-4), b), False),
    ("rows cancel", cancelling, False),
    ("a row of zeros", lambda a, b: (changed(a, 5, 0.0), b), True),
    ("zeros", lambda a, b: (a * 0, b), False),
    ("not finite", lambda a, b: (changed(a, (5, 0), float("inf")), b), False),
    ("not a number", lambda a, b: (a, changed(b, (0, 5), float("nan"))), False),
)


@pytest.mark.parametrize("shape", [(64, 48, 40), (130, 97, 600), (300, 530, 70), (3, 200, 100)])
@pytest.mark.parametrize(("name", "change", "good"), CHANGES, ids=[c[0] for c in CHANGES])
def test_it_tells_what_the_guard_in_python_does(
    ops: Any, shape: tuple[int, int, int], name: str, change: Any, good: bool
) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k), torch.randn(k, n)
    if m < 6 and name not in ("the same", "much larger", "much smaller"):
        pytest.skip("has no such row")
    then = held(a, b)
    limits = torch.tensor(then.limits, dtype=torch.float64)
    for x, y in (change(a, b), change(a.t().contiguous().t(), b.t().contiguous().t())):
        c, told = ops.matmul_watched(x, y, 3, limits)
        torch.testing.assert_close(c, ops.matmul_f32(x, y), rtol=0, atol=0, equal_nan=True)
        covered = then.covers(error_statistics.statistics([error_statistics.Part(x, y)], [c]))
        assert bool(told.item()) == covered == good


def test_what_may_have_left_the_range_is_not_vouched_for(ops: Any) -> None:
    a, b = torch.randn(40, 64) * 1e18, torch.randn(64, 40) * 1e18
    limits = torch.tensor(held(a, b).limits, dtype=torch.float64)
    assert ops.matmul_watched(a, b, 3, limits)[1].item() == 0  # all elements are to be looked at
    assert ops.matmul_watched(a * 0.1, b * 0.1, 3, limits)[1].item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1.0, 1e17, 1e30])
def test_squares_that_float32_does_not_hold_are_seen(
    ops: Any, scale: float, dtype: torch.dtype
) -> None:
    a, b = torch.randn(70, 80, dtype=dtype), torch.randn(80, 45, dtype=dtype)
    c = a @ b
    a[::5] *= scale  # rows of either kind are looked at together
    b[:, 3::7] *= scale
    a[7] = 0
    for left, right in (
        (a, b),
        (a.t().contiguous().t(), b.t().contiguous().t()),
        (a[1:35], b[:, 2:9]),
    ):
        part, out = error_statistics.Part(left, right), c[: left.shape[0], : right.shape[1]]
        assert error_statistics.natively(part, out) == pytest.approx(
            error_statistics.sketched(part, out), rel=1e-6
        )


def test_its_arguments_are_checked() -> None:
    run, a = cpu_library.op("matmul_watched"), torch.randn(4, 4)
    five = torch.zeros(5, dtype=torch.float64)
    for given, words in (
        ((a[0], a, 3, five), "a must be a matrix"),
        ((a, a[0], 3, five), "b must be a matrix"),
        ((a, torch.randn(3, 4), 3, five), "does not fit"),
        ((a, a, 4, five), "parts must be"),
        ((a, a, 3, five[:4]), "5 numbers"),
        ((a, a, 3, five.float()), "element type"),
    ):
        with pytest.raises(RuntimeError, match=words):
            run(*given)


CALLS: tuple[tuple[str, Callable[[Tensor, Tensor], Tensor]], ...] = (
    ("matmul", lambda a, b: tensorlogic.matmul(a, b)),
    ("linear", lambda a, b: tensorlogic.linear(a, b.t().contiguous())),
    ("float64", lambda a, b: tensorlogic.matmul(a.double(), b.double())),
)


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[c[0] for c in CALLS])
def test_it_serves_and_is_asked_again_when_data_change(
    name: str, call: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    natively = error_statistics.natively
    monkeypatch.setattr(error_statistics, "natively", lambda *g: looked.append(1) or natively(*g))
    usual = mixed_precision_candidate_order.order
    monkeypatch.setattr(
        mixed_precision_adaptive,
        "order",
        lambda op, *g: [(op.candidates["cpu.f32"], {}), *usual(op, *g)],
    )
    a, b = torch.randn(70, 96), torch.randn(96, 50)
    with tensorlogic.policy(tune="off"), tensorlogic.precision("adaptive", rtol=1e-5):
        call(a, b)
        before = len(looked)
        for scale in (1.0, 3.0, 0.5):
            assert off(call(a * scale, b), (a * scale).double() @ b.double()) < 1e-5
        assert len(looked) == before  # nothing but the one call
        x, y = cancelling(a, b)
        assert off(call(x, y), x.double() @ y.double()) < 1e-5
        assert len(looked) > before


def test_other_results_are_looked_at_in_python() -> None:
    """Elements of float16 leave the range, and an activation makes zeros by itself."""
    a, b = torch.randn(70, 96), torch.randn(96, 50)
    op = OPS["matmul"].precise
    assert op is not None
    for x, y, activation in ((a.half(), b.half(), "none"), (a, b, "relu")):
        key = op.key((x, y, activation, False), "inference", "adaptive")
        adaptive = mixed_precision_adaptive.Adaptive(op, key, CPU, 1e-2)
        adaptive.order = [(op.candidates["cpu.f32"], {}), *adaptive.order]
        adaptive(x, y)
        assert adaptive.held is not None
        assert adaptive.held.fused is None


def test_float64_that_left_float32_on_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element, where no sketch of rows and columns need be."""
    monkeypatch.setattr(
        mixed_precision_adaptive, "order",
        lambda op, *_: [(op.candidates["cpu.f32"], {}), (op.candidates["torch.eager"], {})],
    )  # fmt: skip
    a, b = torch.randn(200, 64).double() * 1e17, torch.randn(64, 300).double() * 1e17
    for scale in (1.0, 1.3):
        x, y = a.clone(), b.clone()
        x[77], y[:, 150] = 2e18 * scale, 2e18 * scale  # their element is 2.6e38
        with (
            tensorlogic.precision("adaptive", rtol=1e-5),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            c = tensorlogic.matmul(x, y)
        told = any(w.category is PrecisionWarning for w in said)
        assert told or off(c, x @ y) < 1e-5
        assert bool(c.isfinite().all())


def test_a_call_beside_a_choice_meets_all_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It met the new candidate's limits with the old one's product: 2.4 off where 1e-2 was asked for, and no warning."""
    op = OPS["matmul"].precise
    assert op is not None
    crude, exact = op.candidates["cpu.i16"], op.candidates["cpu.f32"]
    if reason := crude.available("cpu"):
        pytest.skip(reason)
    a, b = torch.randn(96, 256), torch.randn(256, 80)
    key = op.key((a, b, "none", False), "inference", "adaptive")
    adaptive = mixed_precision_adaptive.Adaptive(op, key, CPU, 1e-2)
    adaptive.order = [(crude, {}), (exact, {})]
    adaptive(a, b)
    assert adaptive.held is not None
    assert (adaptive.held.candidate, adaptive.held.fused is None) == (crude, False)
    x, y = cancelling(a, b)
    meanwhile: list[Tensor] = []
    fuse = mixed_precision_adaptive.Adaptive._fuse

    def beside(self: mixed_precision_adaptive.Adaptive, *about: Any) -> Any:
        if not meanwhile:
            meanwhile.append(x)
            outs = adaptive(x, y)  # as another thread would
            assert outs is not None
            assert outs[0] is not None
            meanwhile[0] = outs[0]
        return fuse(self, *about)

    monkeypatch.setattr(mixed_precision_adaptive.Adaptive, "_fuse", beside)
    adaptive(x, y)
    assert adaptive.held.candidate is exact
    assert off(meanwhile[0], x.double() @ y.double()) < 1e-2


@pytest.mark.skipif(
    cpu_library.calls_available() is not None, reason=str(cpu_library.calls_available())
)
@pytest.mark.parametrize(("name", "call"), CALLS[:2], ids=[c[0] for c in CALLS[:2]])
def test_a_warm_call_stays_in_c_while_the_guard_is_certain(
    name: str, call: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Adaptive] = []
    choose, python = Adaptive._choose, Adaptive.__call__
    monkeypatch.setattr(Adaptive, "_choose", lambda s, *d: asked.append(s) or choose(s, *d))
    monkeypatch.setattr(Adaptive, "__call__", lambda s, *d: asked.append(s) or python(s, *d))
    a, b = torch.randn(97, 520), torch.randn(520, 83)
    with torch.inference_mode(), tensorlogic.precision("adaptive", rtol=1e-2):
        for _ in range(3):
            call(a, b)
        before, mixed_precision_adaptive.LAST[:] = len(asked), ["another", "and one more"]
        for _ in range(5):
            y = call(a, b)
        assert len(asked) == before > 0
        assert len(mixed_precision_adaptive.LAST) == 1
        assert off(y, a.double() @ b.double()) < 1e-2
        x, z = cancelling(a, b)
        for _ in range(2):  # chosen anew, and served by what was chosen
            assert off(call(x, z), x.double() @ z.double()) < 1e-2
        assert len(asked) > before
        assert off(call(a, b), a.double() @ b.double()) < 1e-2


@pytest.mark.skipif(
    cpu_library.calls_available() is not None, reason=str(cpu_library.calls_available())
)
def test_what_c_computed_is_judged_by_what_was_held_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread has chosen again meanwhile, or nothing was held."""
    order = (
        candidate_order.order
    )  # products of ours first, whichever is fastest here: C guards no others
    monkeypatch.setattr(
        mixed_precision_adaptive,
        "order",
        lambda *about: sorted(order(*about), key=lambda c: c[0].id != "cpu.f32"),
    )
    op = OPS["matmul"].precise
    assert op is not None
    a, b = torch.randn(96, 256), torch.randn(256, 80)
    adaptive = Adaptive(op, op.key((a, b, "none", False), "inference", "adaptive"), CPU, 1e-2)
    guarded = adaptive.direct()
    assert guarded is adaptive.direct()
    assert guarded.way is None
    wanted = guarded(a, b)  # asks, and is told how from then on
    held, *_ = guarded.way
    assert held is adaptive.held
    assert torch.equal(guarded(a, b), wanted)
    x, y = cancelling(a, b)
    wrong = torch.zeros_like(wanted)
    assert off(adaptive._asked(held, wrong, x, y), x.double() @ y.double()) < 1e-2
    assert adaptive.held is not held  # which did not cover these data
    for bad in ((a,), (a, b, *[None] * 20)):
        with pytest.raises(TypeError, match="argument"):
            guarded(*bad)
    with pytest.raises(TypeError, match="way must be"):
        guarded.way = 3
    guarded.way = (held,)
    with pytest.raises(TypeError):
        guarded(a, b)
    guarded.way = None
    assert off(guarded(a, b), a.double() @ b.double()) < 1e-2


@pytest.mark.skipif(
    cpu_library.calls_available() is not None, reason=str(cpu_library.calls_available())
)
def test_a_guarded_product_is_freed_with_its_adaptive() -> None:
    op = OPS["matmul"].precise
    assert op is not None
    a, b = torch.randn(96, 256), torch.randn(256, 80)
    adaptive = Adaptive(op, op.key((a, b, "none", False), "inference", "adaptive"), CPU, 1e-2)
    adaptive.direct()(a, b)
    gone = weakref.ref(adaptive)
    del adaptive
    gc.collect()
    assert gone() is None
