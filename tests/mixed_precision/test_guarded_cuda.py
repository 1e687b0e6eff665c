"""Calls that a GPU judges itself, as one plan: against stand-ins for the driver, cuBLASLt and, by its interpreter, Triton's launches."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorlogic.native import call_extension, cpu_library
from tensorlogic.system import hardware

if hardware.triton_missing() or torch.cuda.is_available() or not hardware.interpreting():
    pytest.skip("needs Triton's interpreter, and no GPU", allow_module_level=True)

from tensorlogic.core.op import OPS
from tensorlogic.kernels.gemm import cublaslt as gemm_cublaslt
from tensorlogic.kernels.mixed_precision import data_statistics, guard_recompute, split_planes
from tensorlogic.kernels.triton_runtime import launch_plan
from tensorlogic.mixed_precision import error_statistics, formats_cuda, guarded_cuda, number_formats
from tensorlogic.mixed_precision.product_sites import Place

from ..support.driver.cublaslt import Library
from ..support.driver.standin import CPU, Device
from ..support.driver.standin import device as device  # a fixture

pytestmark = pytest.mark.skipif(
    cpu_library.calls_available() is not None, reason=str(cpu_library.calls_available())
)
POINTER = ctypes.c_void_p
MATMUL = ctypes.CFUNCTYPE(ctypes.c_int, *[POINTER] * 14, ctypes.c_size_t, POINTER)


@pytest.fixture
def library(device: Device, monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    called = MATMUL(found.cublasLtMatmul)
    address = ctypes.cast(called, POINTER).value

    def series(lib: Any, place: Any, several: bool, handle: int, parts: Any, kept: Any) -> Any:
        about = (device.driver, (0, several), address, handle, tuple(parts), (kept, called))
        return call_extension.module().Series(*about)

    monkeypatch.setattr(launch_plan, "series", series)
    monkeypatch.setattr(gemm_cublaslt, "_library", lambda: found)
    monkeypatch.setattr(gemm_cublaslt, "_handle", lambda lib, index: 1)
    monkeypatch.setattr(gemm_cublaslt, "_workspace", lambda index, queue, size: torch.empty(size, dtype=torch.uint8))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    made = (*formats_cuda._DIRECT.values(), *formats_cuda._ONE.values(), formats_cuda._F16X3)
    for product in made:
        monkeypatch.setattr(product, "runs", {})
    for way in formats_cuda.found():  # as a GPU's first use does
        monkeypatch.setitem(number_formats.WAYS, way.id, way)
    for owner, name in (
        (split_planes, "_split"),
        (split_planes, "_look"),
        (guard_recompute, "_mend"),
    ):
        monkeypatch.setattr(owner, name, _noticed(getattr(owner, name)))
    return found


def _noticed(prepare: Any) -> Any:
    return lambda *about: call_extension.module().Step(prepare(*about))


def served(
    id: str, a: Tensor, b: Tensor, outs: tuple[Tensor | None, ...] | None = None
) -> tuple[Any, guard_recompute.Watch]:
    """The launcher of matmul(a, b) by a way, and its watch."""
    op = OPS["matmul"].precise
    assert op is not None
    c = (a.double() @ b.double()).to(torch.promote_types(a.dtype, b.dtype))
    look = error_statistics.sketched(error_statistics.Part(a, b), c)
    then = data_statistics.Statistics(look[0], look[1], -look[2], look[3])
    watch = guard_recompute.Watch(then, 2.0, [guard_recompute.Seen.of(a, b, c)], CPU, 1e-2)
    key = op.key((a, b, "none", False), "inference", "adaptive")
    given = (c,) if outs is None else outs
    about = ([(a, b, c)], [Place(0, 1, 0)], given, watch)
    return guarded_cuda.launcher(op, key, CPU, (id, {"rank": 0}), *about), watch


@pytest.mark.parametrize("id", ["cublaslt.f16_unscaled", "cublaslt.f16x3", "cublaslt.f32"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)])  # fmt: skip
def test_a_watched_product_is_one_plan(
    id: str, dtypes: tuple[torch.dtype, torch.dtype], library: Library
) -> None:  # fmt: skip
    a, b = torch.randn(40, 72).to(dtypes[0]), torch.randn(56, 72).to(dtypes[1]).t()
    launch, watch = served(id, a, b)
    if id == "cublaslt.f32" and dtypes != (torch.float32, torch.float32):
        assert launch is None  # it would have to convert them
        return
    assert isinstance(launch, call_extension.module().Plan)
    rounding = 2e-3 if id == "cublaslt.f16_unscaled" else 1e-6
    for factor in (1.0, 1.5):
        x = a * factor
        want = x.double() @ b.double()
        (c,) = launch(x, b)
        assert c.dtype == torch.promote_types(*dtypes)
        assert (c.double() - want).norm() <= rounding * want.norm()
        assert (c.double() - want).abs().max() > 0  # nothing was mended
        assert not watch.passed()
    (c,) = launch(a * 100, b)
    want = (a * 100).double() @ b.double()
    assert (c.double() - want).norm() <= 1e-7 * want.norm()  # mended
    assert watch.passed()


def test_a_way_is_quick_from_its_second_call_on(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_cuda, "alone", lambda key: True)
    op = OPS["linear"].precise
    assert op is not None
    x, w = torch.randn(40, 72, dtype=torch.float64), torch.randn(56, 72, dtype=torch.float64)
    key = op.key((x, w, None, None, "none", False), "inference", "adaptive")
    met: list[int] = []

    def launch(x: Tensor, w: Tensor, bias: None, residual: None) -> tuple[Tensor]:
        met.append(1)
        return (x @ w.t(),)

    quick = guarded_cuda.Quick(op, key, {"rank": 0}, CPU, "cublaslt.f16x3", launch)
    for turn in range(3):
        (y,) = quick(x * (turn + 1), w, None, None)
        want = x @ w.t() * (turn + 1)
        assert y.dtype == torch.float64
        assert (y - want).norm() <= 1e-6 * want.norm()
        assert torch.equal(y, want) == (turn == 0)
    assert met == [1]
    monkeypatch.setattr(split_planes, "stream", lambda device: -1)
    captured = guarded_cuda.Quick(op, key, {"rank": 0}, CPU, "cublaslt.f16x3", launch)
    captured(x, w, None, None)
    assert captured.quick is None
    assert not captured.tried


def test_what_does_more_than_start_kernels_is_no_plan(library: Library) -> None:
    a, b = torch.randn(40, 72), torch.randn(72, 56)
    assert served("cublaslt.f16", a, b)[0] is None  # reads exponents
    assert served("torch.eager", a, b)[0] is None
    assert served("cublaslt.f32", a, b, (a @ b, None))[0] is not None
    assert served("cublaslt.f32", a, b, (a @ b, a))[0] is None  # an output that is no product
    assert served("cublaslt.f32", a, b, ((a @ b)[None],))[0] is None
    assert number_formats.WAYS["cublaslt.f16"].run is None


def test_a_series_says_what_it_takes_and_what_the_library_said(
    device: Device, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = MATMUL(lambda *_: 7)
    address = ctypes.cast(refusing, POINTER).value
    make = call_extension.module().Series
    part = (1, 2, 0, 3, 0, 4, 5, 6, 7, 8)
    series = make(device.driver, (0, False), address, 1, (part,), refusing)
    x = torch.zeros(4)
    with pytest.raises(RuntimeError, match="failed with status 7"):
        series(x, x, x)
    with pytest.raises(TypeError, match="not 2 tensors"):
        series(x, x)
    with pytest.raises(TypeError, match="takes tensors, not 3"):
        series(x, x, 3)
    with pytest.raises(ValueError, match="ten numbers"):
        make(device.driver, (0, False), address, 1, ((1, 2),), None)
