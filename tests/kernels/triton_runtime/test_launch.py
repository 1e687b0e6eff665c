"""Prepared launches: numerics, the generated closures, compiling elsewhere, refusals."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402  (after the environment is set)

from tensorlogic.kernels.triton_runtime import kernel_start, toolchain  # noqa: E402
from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch  # noqa: E402
from tensorlogic.system import settings  # noqa: E402
from tensorlogic.system.compile_pool import CompileFailure  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def scale_add(x_ptr, b_ptr, y_ptr, N, stride, scale, extra, BLOCK: tl.constexpr):
    """y = x * scale + b + extra / 2**32, with b and extra optional."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + at * stride, mask=at < N).to(tl.float32) * scale
    if b_ptr is not None:
        y += tl.load(b_ptr + at, mask=at < N).to(tl.float32)
    if extra is not None:
        y += (extra.to(tl.int64) >> 32).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < N)


@triton.jit
def too_many_registers(x_ptr, y_ptr, N, SIZE: tl.constexpr):
    """A product whose sums alone need more registers than one warp has."""
    row = tl.arange(0, SIZE)
    at = row[:, None] * SIZE + row[None, :]
    acc = tl.zeros([SIZE, SIZE], tl.float32)
    for step in range(N):
        x = tl.load(x_ptr + step * SIZE * SIZE + at)
        acc = tl.dot(x, x, acc)
    tl.store(y_ptr + at, acc)


def options(**changes: Any) -> dict[str, Any]:
    return {
        "grid": (4, 1, 1),
        "pointers": {"x_ptr": "f16", "b_ptr": "f32", "y_ptr": "f16"},
        "integers": {"N": 100, "stride": 1},
        "floats": ("scale",),
        "constexprs": {"BLOCK": 32},
        "num_warps": 2,
        "num_stages": 1,
        **changes,
    }


@pytest.mark.parametrize("with_bias", [True, False])
def test_prepared_kernel_computes(with_bias: bool) -> None:
    pointers = {"x_ptr": "f16", "b_ptr": "f32", "y_ptr": "f16"}
    if not with_bias:
        del pointers["b_ptr"]
    start = triton_runtime_launch.prepare(scale_add, device=DEVICE, **options(pointers=pointers))
    x, b = torch.randn(100, device=DEVICE).half(), torch.randn(100, device=DEVICE)
    y = torch.full((128,), torch.nan, device=DEVICE, dtype=torch.float16)
    assert start(*([x, b] if with_bias else [x]), y, 0.5)
    torch.testing.assert_close(
        y[:100], (x.float() * 0.5 + (b if with_bias else 0)).half(), rtol=1e-3, atol=1e-3
    )
    assert y[100:].isnan().all()


def test_64_bit_numbers_are_given_with_every_start() -> None:
    start = triton_runtime_launch.prepare(scale_add, device=DEVICE, longs=("extra",), **options())
    x, b = torch.zeros(100, device=DEVICE).half(), torch.zeros(100, device=DEVICE)
    for extra in (0, 5, 2**33 + 1, 7 * 2**32):
        y = torch.full((100,), torch.nan, device=DEVICE, dtype=torch.float16)
        assert start(x, b, y, 0.5, extra)
        assert (y == extra // 2**32).all()


def test_declines_pointers_less_aligned_than_promised() -> None:
    x, b = torch.randn(101, device=DEVICE).half(), torch.randn(100, device=DEVICE)
    y = torch.full((100,), torch.nan, device=DEVICE, dtype=torch.float16)
    assert not triton_runtime_launch.prepare(scale_add, device=DEVICE, align=16, **options())(
        x[1:], b, y, 0.5
    )
    assert y.isnan().all()
    assert triton_runtime_launch.prepare(scale_add, device=DEVICE, align=2, **options())(
        x[1:], b, y, 0.5
    )
    assert not y.isnan().any()


def test_an_empty_grid_does_nothing() -> None:
    start = triton_runtime_launch.prepare(scale_add, device=DEVICE, **options(grid=(0, 1, 1)))
    y = torch.full((100,), torch.nan, device=DEVICE, dtype=torch.float16)
    assert start(y, torch.zeros(100, device=DEVICE), y, 1.0)
    assert y.isnan().all()


@pytest.mark.parametrize("grid", [(1, 70000, 1), (2**16, 2**15, 1)])
def test_a_grid_that_would_silently_not_run_is_refused(grid: tuple[int, int, int]) -> None:
    with pytest.raises(CompileFailure, match="grid"):
        triton_runtime_launch.prepare(scale_add, device=DEVICE, **options(grid=grid))


def test_misnamed_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="has parameters"):
        triton_runtime_launch.compile_job(
            scale_add, sm=90, **options(integers={"stride": 1, "N": 100})
        )


def test_job_specialises_and_travels() -> None:
    integers = {"N": 2**31, "stride": 1}
    job = triton_runtime_launch.compile_job(scale_add, sm=90, **options(integers=integers))
    assert dict(job.signature) == {
        "x_ptr": "*fp16", "b_ptr": "*fp32", "y_ptr": "*fp16", "N": "i64", "stride": "constexpr",
        "scale": "fp32", "extra": "constexpr", "BLOCK": "constexpr",
    }  # fmt: skip
    assert dict(job.constexprs) == {"stride": 1, "extra": None, "BLOCK": 32}
    assert job.hinted == (("x_ptr", 16), ("b_ptr", 16), ("y_ptr", 16), ("N", 16))
    travelled = pickle.loads(pickle.dumps(job))
    assert travelled == job
    assert hash(travelled) == hash(job)
    less = triton_runtime_launch.compile_job(
        scale_add, sm=90, align=8, **options(integers={"N": 1000, "stride": 3})
    )
    assert less.hinted == (("x_ptr", 8), ("b_ptr", 8), ("y_ptr", 8), ("N", 8))


class Recorder:
    """Stands for Triton's C launcher."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


def noted_launch(flat: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Any]:
    """What notes how Triton's launcher is called, and a kernel that is started by it."""
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False
    )
    kernel_start.closure.cache_clear()
    launch = Recorder()
    binary = kernel_start.Binary(
        launch=launch, function=99, metadata=(4, 1, 1024), flags=(False, False), scratch=0, tiles=(),
        described=None if flat else ("annotations", b"types"),
    )  # fmt: skip
    return launch, binary


@pytest.mark.parametrize("flat", [True, False], ids=["3.6", "3.7"])
def test_closure_passes_what_the_launcher_takes(
    flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, binary = noted_launch(flat, monkeypatch)
    make = kernel_start.closure(0, 2, 1, 1, True, False, False, flat)
    start = make(binary, (3, 2, 1), 5, 15, 0, (1000,), ())
    x, y = torch.zeros(64), torch.zeros(64)
    assert start(x, y, 0.5) is True
    assert start(x[1:], y, 0.5) is False
    (call,) = launch.calls
    head, kernel_args = (3, 2, 1, 75, 99, False, False), (x.data_ptr(), y.data_ptr(), 1000, 0.5)
    if flat:
        assert call == (*head, None, None, (4, 1, 1024), None, None, None, *kernel_args)
    else:
        assert call == (
            *head,
            (4, 1, 1024),
            None,
            None,
            None,
            None,
            None,
            "annotations",
            b"types",
            kernel_args,
        )
    kernel_start.closure.cache_clear()


@pytest.mark.parametrize("flat", [True, False], ids=["3.6", "3.7"])
def test_closure_passes_descriptors_before_pointers(
    flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, binary = noted_launch(flat, monkeypatch)
    x, w, b = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    made = {x.data_ptr(): "x's", w.data_ptr(): "w's"}
    make = kernel_start.closure(2, 1, 1, 0, True, False, False, flat)
    start = make(binary, (3, 2, 1), 5, 15, 0, (1000,), (made, 4, 16, 16, made, 2, 32, 40))
    assert start(x, w, b) is True
    assert start(x[1:], w, b) is False
    (call,) = launch.calls
    kernel_args = ("x's", 4, 16, 16, 1, "w's", 2, 32, 40, 1, b.data_ptr(), 1000)
    assert call[-len(kernel_args) :] == kernel_args if flat else call[-1] == kernel_args
    kernel_start.closure.cache_clear()


@pytest.mark.parametrize("shared", [1000, 1001])
def test_a_launcher_that_c_starts_make_needless_is_built_when_it_is_called(
    shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.6 has a C compiler build one for every signature."""
    built: list[Any] = []

    def launcher_cls(src: Any, metadata: Any) -> Any:
        built.append(src)
        return SimpleNamespace(launch=lambda *args: built.append(args))

    utils = SimpleNamespace(
        get_device_properties=lambda index: {"max_shared_mem": 1000},
        load_binary=lambda name, image, shared, index: ("module", 99, 32, 0, 1024),
    )
    active = SimpleNamespace(utils=utils, launcher_cls=launcher_cls)
    monkeypatch.setattr(kernel_start.triton.runtime.driver, "_active", active, raising=False)
    monkeypatch.setattr(kernel_start.cuda_driver, "driver", lambda device: "ours")
    compiled = SimpleNamespace(
        name="k", kernel=b"", src="source", metadata=SimpleNamespace(shared=shared, num_warps=4)
    )
    if shared > 1000:
        with pytest.raises(kernel_start.OutOfResources, match="shared memory"):
            kernel_start.launcher(compiled, 0)
        return
    found = kernel_start.launcher(compiled, 0)
    assert (found.function, found.described, built) == (99, None, [])
    found.launch(1, 2)
    found.launch(3)
    assert built == ["source", (1, 2), (3,)]


@pytest.mark.slow
def test_compiling_apart_reports_resources_and_reasons() -> None:
    huge = {
        "pointers": {"x_ptr": "f16", "y_ptr": "f32"},
        "integers": {"N": 8},
        "floats": (),
        "num_stages": 1,
    }
    spilling = triton_runtime_launch.compile_job(
        too_many_registers, constexprs={"SIZE": 128}, num_warps=1, sm=80, **huge
    )
    fine = triton_runtime_launch.compile_job(scale_add, sm=90, **options())
    no_fit = triton_runtime_launch.compile_job(
        too_many_registers,
        constexprs={"SIZE": 256},
        num_warps=8,
        sm=86,
        **(huge | {"num_stages": 4}),
    )
    spilled, kept, refused = triton_runtime_launch.resources_apart([spilling, fine, no_fit])
    assert isinstance(spilled, triton_runtime_launch.Resources)
    assert isinstance(kept, triton_runtime_launch.Resources)
    assert spilled.stack > 0 == kept.stack
    assert 0 < kept.registers < 64
    assert "shared memory" in str(refused)


@pytest.mark.slow
def test_kernels_stay_in_one_cache_whatever_the_variables_become(tmp_path: Path) -> None:
    """torch.compile sets a folder and an assembler for its own kernels; ours, and those of the workers, keep what the process
    began with, and know each other again: the version of the assembler that Triton remembers is part of their names."""
    ours, other, assembler = tmp_path / "ours", tmp_path / "other", tmp_path / "ptxas"
    assembler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.9, V99.9.1'\n")
    assembler.chmod(0o755)
    job = triton_runtime_launch.compile_job(scale_add, sm=90, **options())
    code = f"""
import os, pickle, sys
from triton.backends.nvidia import compiler
from tensorlogic.system import compile_workers as workers
from tensorlogic.kernels.triton_runtime import launch as triton_launch
torchs = {{"TRITON_CACHE_DIR": {str(other)!r}, "TRITON_PTXAS_PATH": {str(assembler)!r}}}
if sys.argv[1] == "torch":
    os.environ |= torchs
    assert "99.9" in compiler.get_ptxas_version(90)
    given = workers.environment()
    assert given["TRITON_CACHE_DIR"] == {str(ours)!r} and "TRITON_PTXAS_PATH" not in given
job = pickle.load(sys.stdin.buffer)
triton_launch.run_compile_job(job)
if sys.argv[1] == "torch":
    assert torchs.items() <= os.environ.items()
    assert "99.9" in compiler.get_ptxas_version(90)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_PTXAS_PATH"} | {
        "TRITON_CACHE_DIR": str(ours),
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    for process in ("torch", "worker"):
        subprocess.run(
            [sys.executable, "-c", code, process],
            input=pickle.dumps(job),
            env=environment,
            check=True,
        )
    assert len(list(ours.rglob("*.cubin"))) == 1
    assert not other.exists()


def test_threads_share_what_is_their_own_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that torch.compile has set comes back once the last thread has left."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "torch's")
    monkeypatch.setitem(settings.TRITON, "TRITON_CACHE_DIR", "ours")
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with toolchain.own:
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with toolchain.own:
        thread.start()
        assert entered.wait(10)
    assert os.environ["TRITON_CACHE_DIR"] == "ours"
    leave.set()
    thread.join()
    assert os.environ["TRITON_CACHE_DIR"] == "torch's"
