"""Programs spread over multiprocessors by the shared memory they ask for: arithmetic, what is left alone, and what a GPU makes of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402  (after the environment is set)

from tensorlogic.kernels.triton_runtime import launch, occupancy  # noqa: E402
from tensorlogic.kernels.triton_runtime.device_math import follow  # noqa: E402
from tensorlogic.kernels.triton_runtime.kernel_start import Binary  # noqa: E402

HOPPER = 233472  # shared bytes of a multiprocessor
CORES = 132


class Driver:
    """What of NVIDIA's driver is asked: how many programs fit, and that a kernel may have more shared memory."""

    def __init__(self, fit: int, refuses: bool = False, most: int = 49152) -> None:
        self.fit, self.refuses, self.allowed, self.asked = fit, refuses, [most], list[int]()

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, found: Any, function: Any, threads: int, shared: ctypes.c_size_t
    ) -> int:
        self.asked.append(threads)
        found._obj.value = self.fit
        return 0

    def cuFuncGetAttribute(self, found: Any, attribute: int, function: Any) -> int:
        assert attribute == 8
        found._obj.value = self.allowed[-1]
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        assert attribute == 8
        self.allowed.append(value)
        return int(self.refuses)


def given(shared: int, *, warps: int = 4, cluster: int = 1, cooperative: bool = False, dependent: bool = True) -> Binary:  # fmt: skip
    return Binary(
        launch=lambda *args: None, function=1, metadata=(warps, cluster, shared),
        flags=(cooperative, dependent), scratch=0, tiles=(), described=None,
    )  # fmt: skip


def spread(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, binary: Binary, blocks: int) -> int:  # fmt: skip
    """The shared bytes asked for in the end."""
    about = SimpleNamespace(multi_processor_count=CORES, shared_memory_per_multiprocessor=HOPPER)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(occupancy, "_driver", lambda: driver)
    found = occupancy.spread(binary, blocks, torch.device("cuda", 0))
    assert found.metadata[:2] == binary.metadata[:2]
    assert found.function == binary.function
    return found.metadata[2]


def resident(shared: int) -> int:
    return HOPPER // (shared + occupancy.RESERVED)


@pytest.mark.parametrize("total", [HOPPER, 167936, 102400])
def test_so_many_programs_fit_and_not_one_more(total: int) -> None:
    for programs in range(1, 32):
        found = occupancy.asked(programs, total)
        one = found + occupancy.RESERVED
        if found == 0:  # steps are too coarse for so many
            assert programs > 20
            continue
        assert programs * one <= total < (programs + 1) * one
        assert found % occupancy.STEP == 0
        assert (programs + 1) * (one - occupancy.STEP) <= total


@pytest.mark.parametrize(
    ("shared", "fit", "blocks", "programs"),
    [
        (114868, 2, 128, 1),  # tiles: one each
        (73728, 3, 132, 1),
        (73728, 3, 133, 2),
        (73728, 3, 5, 1),
        (512, 16, 512, 4),  # passes over memory
        (0, 16, 528, 4),
        (0, 16, 529, 5),
        (0, 16, 128, 2),  # of which two may share one
        (0, 16, 1, 2),
    ],
)
def test_programs_take_their_part_of_a_multiprocessor(
    monkeypatch: pytest.MonkeyPatch, shared: int, fit: int, blocks: int, programs: int
) -> None:
    driver = Driver(fit)
    found = spread(monkeypatch, driver, given(shared, warps=8), blocks)
    assert found > shared
    assert driver.asked == [256]
    assert driver.allowed[-1] >= found
    assert resident(found) == programs


def test_a_kernel_keeps_the_shared_memory_that_another_grid_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(16)
    most = spread(monkeypatch, driver, given(0), 128)
    assert spread(monkeypatch, driver, given(0), 700) < most
    assert driver.allowed[-1] == most


@pytest.mark.parametrize(
    ("binary", "fit", "blocks"),
    [
        (given(114868, dependent=False), 2, 128),
        (given(114868, cooperative=True), 2, 128),
        (given(114868, cluster=2), 2, 128),
        (given(114868), 2, 0),
        (given(114868), 1, 128),  # no more fit
        (given(114868), 2, 264),  # all of them, once
        (given(114868), 2, 5000),
        (given(0), 2, 128),
        (given(0), 16, 16 * CORES),
    ],
)
def test_what_is_spread_already_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, binary: Binary, fit: int, blocks: int
) -> None:
    driver = Driver(fit)
    assert spread(monkeypatch, driver, binary, blocks) == binary.metadata[2]
    assert driver.allowed == [49152]


def test_without_the_driver_or_its_leave_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spread(monkeypatch, None, given(114868), 128) == 114868
    assert spread(monkeypatch, Driver(2, refuses=True), given(114868), 128) == 114868


@triton.jit
def places(x_ptr, y_ptr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y[program] = the multiprocessor that ran it, after a while."""
    follow(PDL)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    for _ in range(200):
        x = x * 1.0001 + 1.0
    where = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
    tl.store(y_ptr + tl.program_id(0) * BLOCK + at, x * 0.0 + where)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="multiprocessors of a GPU")
def test_programs_behind_others_find_places_everywhere() -> None:
    """Twice as many programs as multiprocessors, behind ones that fill these: none gets more than its part."""
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("kernels wait for those before them on Hopper and later")
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    x = torch.ones(1024, device=device)

    def start(blocks: int, warps: int) -> Any:
        y = torch.zeros(blocks, 1024, device=device)
        run = launch.prepare(
            places, grid=(blocks, 1, 1), pointers={"x_ptr": "f32", "y_ptr": "f32"}, integers={}, floats=(),
            constexprs={"BLOCK": 1024}, num_warps=warps, num_stages=1, device=device,
        )  # fmt: skip
        return y, run

    (before, first), (found, second) = start(16 * cores, 32), start(2 * cores, 4)
    for _ in range(5):
        first(x, before)
        assert second(x, found)
        torch.cuda.synchronize()
        most = int(torch.bincount(found[:, 0].int()).max())
        assert most <= 4  # two at a time; one that ends early leaves its place to another
