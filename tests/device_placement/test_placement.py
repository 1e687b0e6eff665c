"""Where tensors are and move: transfers, and the choice of a device."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.device_placement import link_speed
from tensorlogic.memory import pinned_buffers, transfer
from tensorlogic.native import cpu_library

from ..support.driver.copies import Engine

CUDA = torch.cuda.is_available()
gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")


def test_what_offers_a_tensor_is_taken_without_a_copy() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    class Arrayed:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return array

    for value in (array, Arrayed(), torch.from_numpy(array)):
        moved = tensorlogic.to(value, "cpu")
        assert moved.data_ptr() == array.ctypes.data
    assert tensorlogic.to(array, "cpu", torch.float16).dtype is torch.float16
    frozen = array.copy()
    frozen.flags.writeable = False
    assert tensorlogic.to(frozen, "cpu").data_ptr() != frozen.ctypes.data
    with pytest.raises(TypeError, match=r"to: tensor is list; .*torch.as_tensor"):
        tensorlogic.to([1.0], "cpu")
    assert tensorlogic.to(torch.ones(2), "cpu", asynchronous=True).wait().tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"to: device is 'quantum'; a device such as 'cpu'"):
        tensorlogic.to(torch.ones(2), "quantum")


@pytest.mark.skipif(cpu_library.available() is not None, reason="needs the native library")
@pytest.mark.parametrize("stores", [0, 1, 2, 3])
@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4096, 4096 * 41 + 5])
@pytest.mark.parametrize(("unit", "workers"), [(700, 1), (700, 3), (4096, 3)])
def test_chunks_wait_for_each_other(
    up: bool, stores: int, nbytes: int, unit: int, workers: int
) -> None:
    """Every byte arrives, whatever it means as a float, and no buffer is written to before it was emptied."""
    engine = Engine()
    pinned = torch.empty(6 * 5000, dtype=torch.uint8)  # units need not fill it
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    host, there = (source, target) if up else (target, source)
    opened, stage = cpu_library.op("staging_open"), cpu_library.op("staged_copy")
    number = opened(pinned, [1, 2, 3, 4, 5, 6, 7], engine.calls, 5)
    addresses = (host.data_ptr(), there.data_ptr(), nbytes)
    rest = (unit, workers, 50, up, stores, 11)
    for _ in range(3):
        target.zero_()
        stage(number, *addresses, 1024, 4096, *rest)
        engine.finish()
        assert torch.equal(source, target)
        stage(number, *addresses, 1024, 4096, *rest)  # behind one that nobody waited for
    assert engine.used == 5
    with pytest.raises(RuntimeError, match="units of which its memory holds four"):
        stage(number, *addresses, 1024, 4096, 7501, *rest[1:])
    assert (
        pinned_buffers._copy()(number, *addresses, 4096, 1024, *rest) == -1
    )  # the same without PyTorch
    assert pinned_buffers._copy()(number, *addresses, 1024, 4096, *rest) == 0
    engine.finish()
    with pytest.raises(RuntimeError, match="an open stager"):
        stage(number + 1, *addresses, 1024, 4096, *rest)
    with pytest.raises(RuntimeError, match="pinned memory, four events or more"):
        opened(pinned, [1], engine.calls, 5)
    broken = Engine(refuse=1)
    number = opened(pinned, [1, 2, 3, 4, 5, 6, 7], broken.calls, 5)
    with pytest.raises(RuntimeError, match="error 700"):
        stage(number, *addresses, 1024, 4096, *rest)
    broken.finish()
    target.zero_()
    stage(number, *addresses, 1024, 4096, *rest)  # finds the ring empty
    broken.finish()
    assert torch.equal(source, target)


@pytest.mark.skipif(cpu_library.available() is not None, reason="needs the native library")
def test_units_of_another_size_wait_until_the_ring_is_empty() -> None:
    engine, pinned = Engine(), torch.empty(4 * 4096, dtype=torch.uint8)
    number = cpu_library.op("staging_open")(pinned, [1, 2, 3, 4, 5], engine.calls, 0)
    drawn = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (9000, 16000, 12000, 30000)]
    for _ in range(3):
        targets = [torch.zeros_like(source) for source in drawn]
        for i, (source, target) in enumerate(zip(drawn, targets, strict=True)):
            addresses = (source.data_ptr(), target.data_ptr(), len(source))
            unit = (700, 1024, 4096)[i % 3]
            cpu_library.op("staged_copy")(
                number, *addresses, 1024, 4096, unit, 1 + i % 3, 0, True, 0, 8
            )
        engine.finish()
        assert all(map(torch.equal, drawn, targets))


@pytest.mark.skipif(cpu_library.available() is not None, reason="needs the native library")
def test_transfers_at_the_same_time_have_threads_of_their_own() -> None:
    opened, stage = cpu_library.op("staging_open"), cpu_library.op("staged_copy")

    def many(seed: int) -> bool:
        engine, good = Engine(), True
        drawn = torch.Generator().manual_seed(seed)
        source = torch.randint(0, 256, (50_000,), dtype=torch.uint8, generator=drawn)
        pinned = torch.empty(4 * 4096, dtype=torch.uint8)
        number = opened(pinned, [1, 2, 3, 4, 5], engine.calls, 0)
        for i in range(20):
            target = torch.zeros_like(source)
            time.sleep(0.0005 * (i % 3))  # some threads are parked by then
            addresses = (source.data_ptr(), target.data_ptr(), len(source))
            stage(number, *addresses, 1024, 4096, 1024, 1 + i % 4, 0, True, 0, 8)
            engine.finish()
            good &= torch.equal(source, target)
        return good

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(many, range(3)))


@pytest.mark.skipif(cpu_library.available() is not None, reason="needs the native library")
@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.bool, torch.complex64])
def test_what_comes_back_has_pooled_memory(dtype: torch.dtype) -> None:
    before = tensorlogic.pool.stats("cpu").bytes_in_use
    kept = transfer._fresh(torch.empty(300, 1000, dtype=dtype), torch.device("cpu"))
    assert (kept.dtype, kept.shape, kept.is_contiguous()) == (dtype, (300, 1000), True)
    assert tensorlogic.pool.stats("cpu").bytes_in_use >= before + kept.nbytes


@gpu
@pytest.mark.parametrize("nbytes", [1 << 20, (3 << 20) + 7, 40 << 20])
def test_large_transfers_arrive(nbytes: int) -> None:
    host = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    for _ in range(3):
        there = tensorlogic.to(host, "cuda")
        assert torch.equal(there, host.cuda())
        assert torch.equal(tensorlogic.to(there, "cpu"), host)
    both = [tensorlogic.to(host, "cuda", asynchronous=True) for _ in range(3)]
    assert all(torch.equal(t.wait().cpu(), host) for t in both)


def test_what_lies_together() -> None:
    t = torch.empty(4, 5, 6)
    assert transfer._dense(t)
    assert transfer._dense(t.permute(2, 0, 1))
    assert not transfer._dense(t[:, ::2])
    assert not transfer._dense(torch.empty(1, 3).expand(4, 3))


def test_links_are_timed_once_and_speeds_are_the_best_of_all_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A link by memory that was written to, each time another part of it: the page of zeros that fresh memory reads as lies in a cache."""
    cpu = torch.device("cpu")
    moved: list[tuple[int, int]] = []
    clock = [0.0]

    def to(t: torch.Tensor, device: Any) -> torch.Tensor:
        moved.append((t.nbytes, t.data_ptr()))
        assert t.view(torch.uint8)[:: pinned_buffers.PAGE].eq(1).all()
        clock[0] += 0.001 if t.nbytes < 9999 else 0.003
        return t

    monkeypatch.setattr(transfer, "to", to)
    monkeypatch.setattr(link_speed, "PROBED", (1 << 12, 1 << 20))
    monkeypatch.setitem(link_speed.SIDES, "cpu", 32)
    link_speed.forget()
    try:
        with monkeypatch.context() as timed:
            timed.setattr(link_speed, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
            link = link_speed.link(cpu)
            assert link.timed
            assert link_speed.link(cpu) is link
        assert link.latency == pytest.approx(0.001)
        assert link.bandwidth == pytest.approx(((1 << 20) - (1 << 12)) / 0.002)
        assert len({at for _, at in moved}) == 5
        assert sum(nbytes == 1 << 20 for nbytes, _ in moved) == 10
        fast = link_speed.speed(cpu)
        assert link_speed.speed(cpu) >= fast > 0
        link_speed._NEXT.clear()
        with torch.autocast("cpu"):
            assert link_speed.speed(cpu) >= fast
        link_speed.forget()
        assert not link_speed._SPEED
        assert not link_speed._LINKS
    finally:
        link_speed.forget()


def test_placement_without_a_gpu_or_with_one_gives_the_same() -> None:
    a = torch.randn(64, 64)
    for place in ("auto", "cpu", None):
        with tensorlogic.placement(place):
            y = tensorlogic.matmul(a, a, activation="relu")
        torch.testing.assert_close(y, torch.relu(a @ a))
        assert y.device.type == "cpu"
    assert policy.current().placement is None
    with (
        pytest.raises(ValueError, match=r"placement: device is 'nowhere'"),
        tensorlogic.placement("nowhere"),
    ):
        pass
    if not CUDA:
        with (
            pytest.raises(ValueError, match=r"'cuda', which is not there"),
            tensorlogic.placement("cuda"),
        ):
            pass


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64])
def test_staged_transfers_keep_every_bit(dtype: torch.dtype) -> None:
    x = (torch.randn(1031, 4099) * 100).to(dtype)
    for source in (x, x.t(), x[:, ::2], x[5:]):
        there = tensorlogic.to(source, "cuda")
        assert torch.equal(there.cpu(), source)
        assert torch.equal(tensorlogic.to(there, "cpu"), source)
    half = tensorlogic.to(x, "cuda", torch.float16)
    assert torch.equal(half.cpu(), x.to(torch.float16))
    handles = [tensorlogic.to(x, "cuda", asynchronous=True) for _ in range(4)]
    assert all(torch.equal(h.wait().cpu(), x) for h in handles)


@gpu
def test_placed_calls_and_gradients() -> None:
    a, b = torch.randn(512, 512), torch.randn(512, 512, requires_grad=True)
    with tensorlogic.placement("cuda"):
        y = tensorlogic.matmul(a, b)
        y.sum().backward()
    assert y.device.type == "cpu"
    assert b.grad is not None
    torch.testing.assert_close(b.grad, a.t() @ torch.ones(512, 512), rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(y, a @ b, rtol=1e-3, atol=1e-2)
    x = tensorlogic.unified(a)
    with tensorlogic.placement("cuda"):
        z = tensorlogic.matmul(tensorlogic.matmul(x, x), x)
    assert z.devices == (torch.device("cuda", 0),)
    a.mul_(2)
    with tensorlogic.placement("cuda"):
        z = tensorlogic.matmul(x, x)
    torch.testing.assert_close(z.on("cpu"), a @ a, rtol=1e-3, atol=1e-1)
