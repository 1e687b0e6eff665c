"""The Triton kernels of precision policies, in the interpreter where no GPU is: planes of halves, and what a guard sees."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorlogic.core.op import OPS
from tensorlogic.mixed_precision import error_statistics, product_sites
from tensorlogic.system import capture_state, hardware

if hardware.triton_missing() or not (torch.cuda.is_available() or hardware.interpreting()):
    pytest.skip("needs Triton and a GPU or its interpreter", allow_module_level=True)

from tensorlogic.kernels.mixed_precision import guard_recompute, line_max, scaled_f16, split_planes
from tensorlogic.kernels.triton_runtime import launch
from tensorlogic.mixed_precision import cublaslt_sequence, formats_cuda

from ...support.compiled import resources  # isort: skip

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def split(
    x: Tensor, dtype: torch.dtype, pattern: tuple[int, ...], down: bool, lift: int = 0
) -> Tensor:
    """The planes of x that `pattern` names, side by side or below each other."""
    turned, laid, shape = split_planes._laid(x, pattern, down)
    y = torch.empty(shape, dtype=dtype, device=DEVICE)
    kinds = split_planes.names(x, y)
    start = split_planes._split(kinds, (laid,), lift, split_planes.aligned(x), DEVICE)
    assert start(x, y, split_planes.flag(DEVICE))
    return y.t() if turned else y


def split_both(a: Tensor, b: Tensor, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    """Those of a product's operands, in one launch."""
    made = cublaslt_sequence.Planes(dtype, *formats_cuda.PLANES[count]).made(a, b)
    x, w = made.make(a, b)
    return x.t() if made.turned[0] else x, w.t() if made.turned[1] else w


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_planes_add_up_to_the_product(count: int, turned: bool) -> None:
    a, b = torch.randn(37, 70, device=DEVICE), torch.randn(70, 45, device=DEVICE)
    if turned:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    left, right = formats_cuda.PLANES[count]
    x = split(a, torch.float16, left, False)
    w = split(b, torch.float16, right, True)
    assert x.shape == (37, count * 70)
    assert w.shape == (count * 70, 45)
    want = a.double() @ b.double()
    error = ((x.double() @ w.double() - want).norm() / want.norm()).item()
    assert error < {1: 1e-3, 3: 2e-6}[count]
    assert not split_planes.noted(DEVICE)


def test_small_values_keep_their_lower_half() -> None:
    """1e-3's remainder lies below float16's normal range, where it is lifted out of."""
    x = torch.randn(20, 40, device=DEVICE) * 1e-3
    lifted = split(x, torch.float16, (0, 1), False, 11).double()
    plain = split(x, torch.float16, (0, 1), False).double()
    off = [
        float((p[:, :40] + p[:, 40:] / down - x.double()).norm() / x.double().norm())
        for p, down in ((lifted, 2048), (plain, 1))
    ]
    assert off[0] < 5e-7 < 1e-5 < off[1]


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_both_operands_in_one_launch(turned: tuple[bool, bool], dtype: torch.dtype) -> None:
    a, b = torch.randn(37, 70, device=DEVICE), torch.randn(70, 45, device=DEVICE).half()
    a = a.t().contiguous().t() if turned[0] else a
    b = b.t().contiguous().t() if turned[1] else b
    count = 1 if dtype == torch.float64 else 3
    left, right = formats_cuda.PLANES[count]
    x, y = split_both(a, b, dtype, count)
    assert torch.equal(x, split(a, dtype, left, False))
    assert torch.equal(y, split(b, dtype, right, True))
    if dtype == torch.float64:
        assert torch.equal(formats_cuda.f64(a, b), a.double() @ b.double())
    b[3, 4] = float("inf")
    split_both(a, b, torch.float16, 3)
    assert split_planes.noted(DEVICE)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs are CUDA's")
def test_graphs_note_for_themselves() -> None:
    """They may be replayed side by side: none hears what another's kernels met, nor what an earlier replay did."""
    given = [torch.full((20, 30), value, device=DEVICE) for value in (1.0, float("inf"))]
    split(given[0], torch.float16, (0,), False)  # loads the kernel
    before = len(capture_state._OWN)
    graphs, flags = [torch.cuda.CUDAGraph() for _ in given], []
    for graph, x in zip(graphs, given, strict=True):
        with torch.cuda.graph(graph):
            split(x, torch.float16, (0,), False)
            flags.append(split_planes.flag(DEVICE))
            assert split_planes.flag(DEVICE) is flags[-1]
    assert len({f.data_ptr() for f in (*flags, split_planes.flag(DEVICE))}) == 3
    for first in (0, 1, 0):
        for one in (first, 1 - first):
            graphs[one].replay()
        assert [bool(f.item()) for f in flags] == [False, True]
    given[1].zero_()
    graphs[1].replay()
    assert not flags[1].item()
    assert not split_planes.noted(DEVICE)
    graphs[1].reset()  # and records anew, in memory of its own
    with torch.cuda.graph(graphs[1]):
        split(given[1], torch.float16, (0,), False)
        anew = split_planes.flag(DEVICE)
    assert anew is not flags[1]
    anew.fill_(1)
    graphs[1].replay()
    assert not anew.item()
    del graph, graphs
    gc.collect()
    assert len(capture_state._OWN) == before


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e6])
def test_what_does_not_fit_is_noted_once(bad: float) -> None:
    a = torch.randn(20, 30, device=DEVICE)
    a[7, 3] = bad
    split(a, torch.float16, (0,), False)
    assert split_planes.noted(DEVICE)
    assert not split_planes.noted(DEVICE)


@pytest.mark.parametrize("shape", [(40, 50, 60), (129, 300, 65)])
def test_a_guard_sees_on_a_gpu_what_it_sees_on_a_cpu(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE).t()
    a[::3] *= 1e-3
    part = error_statistics.Part(a, b)
    c = a @ b
    mine = error_statistics.looked(part, c)
    assert mine == pytest.approx(error_statistics.sketched(part, c), rel=1e-6)
    split_planes.flag(DEVICE).fill_(1)
    assert all(map(math.isinf, error_statistics.looked(part, c)))
    assert all(map(math.isfinite, error_statistics.looked(part, c)))
    c[3, 5] = float("nan")
    assert all(map(math.isinf, error_statistics.looked(part, c)))


SHAPES = ((40, 50, 60), (70, 130, 65))


#: Bytes of lines that a program holds, and programs from which on each takes whole lines: parts of lines, strips, held lines.
WAYS = [(0, 64), (0, 1), (8192, 64)]


@pytest.fixture(params=WAYS, ids=["parts", "strips", "held"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way that lines are rounded by."""
    monkeypatch.setattr(scaled_f16, "WHOLE", request.param[0])
    monkeypatch.setattr(scaled_f16, "STRIPS", request.param[1])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("way")
def test_halves_of_any_range_and_back(shape: tuple[int, int, int], turned: bool) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k, device=DEVICE), torch.randn(k, n, device=DEVICE)
    a[::3] *= 1e-18
    a[1::3] *= 1e14
    b[:, ::2] *= 1e-15
    b[:, -1] *= 1e-15
    a[:, -1] *= 1e6  # the largest of a line is its last
    b[:, 5], a[4] = 0, 0
    if turned:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    x, rows = scaled_f16.halves(a)
    y, columns = scaled_f16.halves(b.t())
    assert x.stride() == a.stride()
    assert rows[::3].max() < -20
    assert columns[1:-1:2].abs().max() == 0
    c = scaled_f16.scaled_back(x.float() @ y.t().float(), rows, columns)
    want = a.double() @ b.double()
    for dim in (0, 1):
        size = want.norm(dim=dim).clamp_min(1e-300)
        assert ((c.double() - want).norm(dim=dim) / size).max() < 1e-3


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.usefixtures("way")
def test_halves_of_all_of_float64_and_back(turned: bool) -> None:
    a = torch.randn(40, 60, dtype=torch.float64, device=DEVICE)
    b = torch.randn(60, 50, dtype=torch.float64, device=DEVICE)
    a[::3] *= 1e250
    a[1::3] *= 1e-240
    b[:, ::2] *= 1e-60
    a[7], b[:, 3] = 3e-300, 0
    if turned:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    x, rows = scaled_f16.halves(a)
    y, columns = scaled_f16.halves(b.t())
    assert (x.float().abs() <= 4).all()
    c = scaled_f16.scaled_back(x.float() @ y.t().float(), rows, columns, True)
    want = a @ b
    assert c.dtype == torch.float64
    peak = want.abs().amax(1, keepdim=True).clamp_min(1e-300)
    assert (
        ((c - want) / peak).norm(dim=1) / (want / peak).norm(dim=1).clamp_min(1e-3)
    ).max() < 1e-3
    if DEVICE.type == "cuda":
        off = (formats_cuda.scaled(a, b) / peak - want / peak).norm() / (want / peak).norm()
        assert off < 1e-3


@pytest.mark.usefixtures("way")
def test_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([[1.0, float("inf"), 1e30], [float("nan"), 2.0, 3.0]], device=DEVICE)
    y, exponents = scaled_f16.halves(x)
    assert y.tolist()[0] == [1.0, float("inf"), 65504.0]
    assert math.isnan(y.tolist()[1][0])
    assert exponents.tolist() == [0, 0]


def test_they_compile_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[launch.CompileJob] = []

    def record(kernel: Any, *, device: torch.device, **options: Any) -> Any:
        jobs.extend(launch.compile_job(kernel, sm=sm, **options) for sm in (90,))
        return lambda *args: True

    for module in (scaled_f16, line_max, guard_recompute, split_planes):
        monkeypatch.setattr(module, "prepare", record)
    n, strides, place = 4096, (4096, 1) * 3, torch.device("cuda", 0)
    guard_recompute._mend.__wrapped__(("f32",) * 3, (n, n, n), strides, (128, 256, 0), 4, place)
    guard_recompute._mend.__wrapped__(
        ("f64", "f64", "f64"), (n, n, n), strides, (128, 256, 0), 4, place
    )
    guard_recompute._note.__wrapped__("f16", n * n, 768, 2, place)
    split_planes._look.__wrapped__(("f32",) * 3, (n, n, n), strides, 4, place)
    for kind, laid in (
        ("f32", (n, 1, n, 1)),
        ("bf16", (1, n, 1, n)),
        ("f64", (n, 1, n, 1)),
        ("f64", (1, n, 1, n)),
    ):
        real = "f64" if kind == "f64" else "f32"
        line_max._peaks.__wrapped__(kind, real, (n, n), laid, 16, place)
        scaled_f16._halve.__wrapped__(kind, (n, n), laid, 2, 16, place)
        scaled_f16._whole.__wrapped__(kind, (n, 1024), laid, 16, place)
        scaled_f16._strips.__wrapped__(kind, (n, n), laid, 16, place)
    both = (((n, n), (n, 1), (1, 0, 0), False), ((n, n), (1, n), (0, 1, 0), True))
    split_planes._split.__wrapped__(("f32", "f32", "f16"), both, 0, 4, place)
    single = tuple((*laid[:2], (0,), laid[3]) for laid in both)
    split_planes._split.__wrapped__(("f16", "f32", "f64"), single, 0, 4, place)
    for wide in (False, True):
        scaled_f16._back.__wrapped__((n, n), ("left_ptr", "right_ptr"), wide, place)
    answers = resources(jobs)
    bad = {
        f"{job.kernel} sm_{job.sm}": answer
        for job, answer in zip(jobs, answers, strict=True)
        if isinstance(answer, str) or answer.stack
    }
    assert not bad


def test_float64_is_left_as_it_is_where_that_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS["matmul"].precise
    assert op is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, refused in (((9, 0), True), ((8, 9), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        for mode, dtype in (
            ("f32", torch.float64),
            ("f32", torch.float32),
            ("adaptive", torch.float64),
        ):
            key = op.key((torch.ones(4, 4, dtype=dtype),) * 2 + ("none", False), "inference", mode)
            served = formats_cuda._narrowing(key) is None
            assert served == (not refused or (mode, dtype) != ("f32", torch.float64))


def test_where_a_call_has_its_operands_does_not_depend_on_the_tensors_of_one_call() -> None:
    Place, made = product_sites.Place, torch.ones(1)
    x, w = torch.randn(2, 3, 8), torch.randn(5, 8)
    a, b = x[0], x[0].t()  # one memory: the next call may bring two

    def found(name: str, *args: Any, outs: tuple[Any, ...] = (made,)) -> list[product_sites.Place]:
        op = OPS[name].precise
        assert op is not None
        return product_sites.places(op, op.key(args, "inference", "adaptive"), outs)

    assert found("matmul", a, b, "none", False) == [Place(0, 1, 0)]
    assert found("linear", x, w, None, None, "none", False) == [Place(0, 1, 0)]
    dy = torch.randn(2, 3, 5)
    both = found("linear_backward", dy, x, w, None, "none", "1100", outs=(made, made, None, None))
    assert both == [Place(0, 2, 0), Place(0, 1, 1)]
    relu = found("linear_backward", dy, x, w, dy, "relu", "1100", outs=(made, made, None, None))
    assert relu == []  # of a gradient that is made on the way


@pytest.mark.parametrize("turned", [False, True])
def test_programs_that_stay_see_every_part_and_every_tile(
    monkeypatch: pytest.MonkeyPatch, turned: bool
) -> None:
    monkeypatch.setattr(scaled_f16, "LOOKING", 2)
    lines, along = (5, 9001) if not turned else (133, 715)  # more parts than are read at a time
    x = torch.randn(lines, along, device=DEVICE)
    x = x.t().contiguous().t() if turned else x
    x[-2, -1], x[-1] = 1e9, 1e-9
    y, exponents = scaled_f16.halves(x)
    assert exponents.tolist() == [0] * (lines - 2) + [29, int(x[-1].abs().max().log2().floor())]
    back = y.double() * 2.0 ** exponents.double()[:, None]
    assert float(((back - x).norm(dim=1) / x.double().norm(dim=1)).max()) < 1e-3
    c, moved = (
        torch.ones(4099, 3, device=DEVICE),
        torch.zeros(4099, dtype=torch.int32, device=DEVICE),
    )
    moved[-1] = 3
    assert scaled_f16.scaled_back(c, moved, None)[-2:].tolist() == [[1.0] * 3, [8.0] * 3]
