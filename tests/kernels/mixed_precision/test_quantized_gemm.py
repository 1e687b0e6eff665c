"""Products of bytes: lines scaled into int8 and float8, what does not fit, and the product of the bytes itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading
from tensorlogic.mixed_precision import adaptive, error_statistics
from tensorlogic.system import hardware

if hardware.triton_missing() or not (torch.cuda.is_available() or hardware.interpreting()):
    pytest.skip("needs Triton and a GPU or its interpreter", allow_module_level=True)

from tensorlogic.kernels.mixed_precision import line_max, quantized_gemm, split_planes
from tensorlogic.kernels.triton_runtime import launch
from tensorlogic.mixed_precision import formats_quantized

from ...support.compiled import resources  # isort: skip

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMS = ("int8", "fp8")


def off(got: Tensor, want: Tensor) -> float:
    """The largest relative error of a row or column."""
    size = [want.norm(dim=d).clamp_min(1e-300) for d in (0, 1)]
    return max(float(((got.double() - want).norm(dim=d) / size[d]).max()) for d in (0, 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_line_has_a_scale_of_its_own(form: str, turned: bool, dtype: torch.dtype) -> None:
    x = torch.randn(37, 300, device=DEVICE)
    x[::3] *= 1e-9
    x[1::3] *= 1e9
    x[4] = 0
    x = x.to(dtype)
    given = x.t().contiguous().t() if turned else x
    y, scale = quantized_gemm.quantise(given, form)
    assert y.shape == (37, 384)
    assert y.dtype == quantized_gemm.TYPES[form]
    wide = y.float()
    assert not wide[:, 300:].any()
    torch.testing.assert_close(scale, x.float().abs().amax(1) / quantized_gemm.TOP[form])
    near = x.float() / scale.clamp_min(1e-30)[:, None]
    if form == "int8":
        assert ((wide[:, :300] - near).abs() <= 0.51).all()
    else:
        want = near.to(torch.float8_e4m3fn).float()
        carried = (want.frexp().mantissa.abs() == 0.5) & (DEVICE.type == "cpu")
        good = (wide[:, :300] - want).abs() <= 2.0**-9 + want.abs() / 8
        assert (good | carried).all()  # the interpreter's rounding forgets the carry
    assert not split_planes.noted(DEVICE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "value", [30.0, 0.0, float("nan"), float("inf"), -float("inf"), 1e20, 1e-20]
)
def test_what_does_not_fit_is_noted(form: str, value: float) -> None:
    """One element is enough, wherever it is; an outlier of a row leaves int8 no steps for the others."""
    x = torch.randn(9, 700, device=DEVICE).clamp(-4, 4)
    x[3, 77] = 5.5
    quantized_gemm.quantise(x, form)
    assert not split_planes.noted(DEVICE)
    x[3, 77] = value
    if value == 1e-20:
        x[3] = value
    quantized_gemm.quantise(x, form)
    fits = value == 0 or (value == 30 and form == "fp8")
    assert split_planes.noted(DEVICE) != fits
    assert not split_planes.noted(DEVICE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(40, 50, 128), (70, 130, 256)])
def test_the_product_of_bytes_is_exact(form: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, w = (torch.randint(-16, 17, (rows, k), device=DEVICE) for rows in (m, n))
    left, right = (t.to(torch.float32).to(quantized_gemm.TYPES[form]) for t in (x, w))
    rows, columns = torch.rand(m, device=DEVICE), torch.rand(n, device=DEVICE)
    want = (x.double() @ w.double().t()) * rows.double()[:, None] * columns.double()
    for rank in range(len(quantized_gemm.TILES)) if m == 40 else (3,):
        got = quantized_gemm.multiply((left, rows), (right, columns), form, rank)
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rows", [16, 40])
def test_sums_of_the_library_are_scaled_back(rows: int) -> None:
    a, b = torch.randn(rows, 200, device=DEVICE), torch.randn(200, 64, device=DEVICE)
    b[:, 5] = 0
    got = formats_quantized.library("int8", a, b)
    torch.testing.assert_close(got, formats_quantized.tiled("int8", 3, a, b), rtol=1e-6, atol=1e-6)
    assert off(got, a.double() @ b.double()) < 3e-2


@pytest.mark.skipif(DEVICE.type != "cuda", reason="float8 of a library needs its GPU")
def test_float8_of_the_library() -> None:
    a, b = torch.randn(300, 520, device=DEVICE), torch.randn(520, 256, device=DEVICE)
    want = a.double() @ b.double()
    assert off(formats_quantized.library("fp8", a, b), want) < 5e-2
    assert off(formats_quantized.tiled("fp8", 0, a, b), want) < 5e-2


def test_hardware_without_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA" in str(formats_quantized.available("fp8", "cpu"))
    monkeypatch.setattr(formats_quantized, "lt_available", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for found, refused in (((7, 5), FORMS), ((8, 0), ("fp8",)), ((8, 9), ()), ((9, 0), ())):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=found: found)
        for form in FORMS:
            reason = formats_quantized.available(form, "cuda")
            assert (reason is not None) == (form in refused)
            assert reason is None or f"this is {found[0]}.{found[1]}" in reason
    op = OPS["matmul"].precise
    assert op is not None
    deep = torch.empty(2, 1, device="meta").expand(2, 1 << 17)
    key = op.key((deep, deep.t(), "none", False), "inference", "adaptive")
    assert "32 bits" in str(formats_quantized._serves("int8", key))
    assert formats_quantized._serves("fp8", key) is None


def test_a_hidden_outlier_does_not_break_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element in a row that no sketch meets takes all steps of int8 for itself: the way sees it, the guard is told."""
    candidate_loading.ready(DEVICE.type)
    op = OPS["matmul"].precise
    assert op is not None
    monkeypatch.setattr(
        error_statistics, "natively", error_statistics.looked
    )  # which asks the kernels
    a, b = torch.randn(48, 512, device=DEVICE), torch.randn(512, 40, device=DEVICE)
    spiky = a.clone()
    spiky[5, 100] = 2e3
    small = torch.cat((b[:100], b[100:101] * 1e-6, b[101:]))  # so that the others tell
    # the interpreter rounds float8 badly
    for id, rtol in (
        ("triton.int8", 0.1),
        ("torch.int8" if DEVICE.type == "cpu" else "triton.fp8", 0.11),
    ):
        adaptive.forget()
        chosen = [(op.candidates[id], {"rank": 3}), (op.candidates[EAGER], {})]
        monkeypatch.setattr(adaptive, "order", lambda *_, chosen=chosen: chosen)
        with (
            tensorlogic.precision("adaptive", rtol=rtol),
            tensorlogic.policy(tune="off"),
        ):
            for x, y in ((a, b), (a, b), (spiky, b), (spiky, small), (spiky, small)):
                assert off(tensorlogic.matmul(x, y), x.double() @ y.double()) <= rtol, id
                assert [id] == adaptive.LAST or x is spiky


def test_they_compile_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[launch.CompileJob] = []

    def record(kernel: Any, *, device: torch.device, **options: Any) -> Any:
        jobs.append(launch.compile_job(kernel, sm=90, **options))
        return lambda *args: True

    for module in (quantized_gemm, line_max):
        monkeypatch.setattr(module, "prepare", record)
    n, place = 4096, torch.device("cuda", 0)
    for form in FORMS:
        for strides in ((n, 1), (1, n)):
            line_max._peaks.__wrapped__("f32", "f32", True, (n, n), strides, 16, place)
            quantized_gemm._to_bytes.__wrapped__("f32", form, (n, n), strides, 4, n, 16, place)
        for tile in quantized_gemm.TILES:
            quantized_gemm._multiply.__wrapped__(form, (n, n, n), tile, place)
    quantized_gemm._scale.__wrapped__(n, n, place)
    answers = resources(jobs)
    bad = {
        f"{job.kernel} {dict(job.constexprs)}": answer
        for job, answer in zip(jobs, answers, strict=True)
        if isinstance(answer, str) or answer.stack
    }
    assert not bad
