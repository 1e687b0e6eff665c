"""Transfers in one call of C: what they take, what they leave to others, and that every byte arrives."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tensorlogic
from tensorlogic.memory import pinned_buffers, transfer
from tensorlogic.memory.transfer_tuning import MIB
from tensorlogic.native import call_extension, cpu_library

from ..support.driver.copies import Engine
from ..support.driver.replaying import Driver

pytestmark = pytest.mark.skipif(
    cpu_library.calls_available() is not None, reason="needs the compiled calls"
)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALLEST = 4096
RULES = (1, 0, 2, 1, 3, 2)


class Fake:
    """A mover whose device is the CPU under another name, with an engine that puts everything off."""

    def __init__(self, up: bool, refuse: int = 0) -> None:
        self.engine, self.driver = Engine(refuse), Driver()
        self.ring = torch.empty(8 * 4096, dtype=torch.uint8)
        events = [1, 2, 3, 4, 5]
        self.number = cpu_library.op("staging_open")(self.ring, events, self.engine.calls, 0)
        shape, below = (1024, 4096, 1024, 0), (20_000, 40_000)
        self.move = call_extension.module().Mover(
            self.driver.driver, (0, up), self.number, SMALLEST, shape, below, RULES
        )


@pytest.fixture(params=[True, False], ids=["up", "down"])
def fake(request: pytest.FixtureRequest) -> Fake:
    return Fake(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("n", [4096, 33 * 1000, 50_001])
def test_every_byte_arrives(fake: Fake, n: int, dtype: torch.dtype) -> None:
    given = torch.randint(0, 2, (n,)).to(dtype).view(-1, 1 if n % 2 else 4)
    for _ in range(3):
        moved = fake.move(given)
        fake.engine.finish()
        assert torch.equal(moved, given)
        assert moved.data_ptr() != given.data_ptr()
        assert (moved.dtype, moved.shape, moved.is_contiguous()) == (dtype, given.shape, True)


@pytest.mark.parametrize("up", [True, False])
def test_memory_is_kept_while_it_is_moved(monkeypatch: pytest.MonkeyPatch, up: bool) -> None:
    """The tensor gets other memory in the midst, as another thread may give it."""
    given = torch.full((40 * MIB,), 7, dtype=torch.uint8)

    class Taking(Engine):
        def use(self, device: int) -> int:
            given.set_()
            return super().use(device)

    monkeypatch.setitem(globals(), "Engine", Taking)
    fake = Fake(up)
    moved = fake.move(given)
    fake.engine.finish()
    assert given.numel() == 0
    assert moved.nbytes == 40 * MIB
    assert moved.eq(7).all()


def test_what_is_left_to_others(fake: Fake) -> None:
    class Own(torch.Tensor):
        pass

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    x = torch.randn(128, 64)
    leaf, whole = x.clone().requires_grad_(), torch.randn(64, 64, dtype=torch.complex64)
    for other in (
        x[:8],
        x.t(),
        x[:, ::2],
        leaf,
        whole.conj(),
        x.as_subclass(Own),
        torch.nn.Parameter(x),
        x.to("meta"),
        torch._neg_view(x),
        x.to_sparse(),
        x.numpy(),
        None,
        7,
    ):
        assert fake.move(other) is None
    with Watching():
        assert fake.move(x) is None
    fake.driver.capturing = 1
    assert fake.move(x) is None
    fake.driver.capturing = 0
    fake.driver.refuse["stream"] = 3
    assert fake.move(x) is None
    fake.driver.refuse.clear()
    assert fake.engine.moves == 0
    with torch.no_grad():
        moved = fake.move(leaf)
    fake.engine.finish()
    assert torch.equal(moved, leaf)
    assert not moved.requires_grad
    with pytest.raises(TypeError, match="one tensor"):
        fake.move(x, x)
    with pytest.raises(TypeError, match="one tensor"):
        fake.move(tensor=x)


@pytest.mark.parametrize("up", [True, False])
def test_what_cuda_refuses_is_said_and_forgotten(up: bool) -> None:
    broken = Fake(up, refuse=2)
    given = torch.randint(0, 256, (60_000,), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="CUDA reports error 700 for a transfer of 60000 bytes"):
        broken.move(given)
    # The memory that these went to is gone; a device's would be given to none but what follows on the stream.
    broken.engine.queue = [done for done in broken.engine.queue if len(done) == 1]
    moved = broken.move(given)
    broken.engine.finish()
    assert torch.equal(moved, given)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs limits of memory")
def test_where_there_is_no_memory_nothing_is_moved(fake: Fake) -> None:
    import resource

    given = torch.full((64 * MIB,), 3, dtype=torch.uint8)
    small = given[:SMALLEST].clone()
    whole = resource.getrlimit(resource.RLIMIT_AS)
    tensorlogic.pool.clear()  # what it held is none of what is used
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 16 * MIB, whole[1]))
    try:
        for _ in range(400):  # some find threads that have copied by then
            with pytest.raises(RuntimeError, match="memory"):
                fake.move(given)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, whole)
    assert all(to for to, *_ in fake.engine.queue)  # nothing to where there is no memory
    for t in (small, given):
        moved = fake.move(t)
        fake.engine.finish()
        assert torch.equal(moved, t)


def test_what_makes_no_mover_is_refused(fake: Fake) -> None:
    shape, below = (1024, 4096, 1024, 0), (20_000, 40_000)
    for wrong in (
        ((1024, 4096, 1024), below, RULES),
        (shape, (1, 2, 3), RULES),
        (shape, below, RULES[:4]),
    ):
        with pytest.raises(ValueError, match="four numbers of a transfer"):
            call_extension.module().Mover(
                fake.driver.driver, (0, True), fake.number, SMALLEST, *wrong
            )
    nobody = call_extension.module().Mover(
        fake.driver.driver, (0, True), fake.number + 1000, SMALLEST, shape, below, RULES
    )
    with pytest.raises(RuntimeError, match="error -1"):
        nobody(torch.empty(SMALLEST, dtype=torch.uint8))


class Shared(Engine):
    """One that several threads may ask at a time."""

    def __init__(self, refuse: int = 0) -> None:
        self.alone = threading.RLock()
        super().__init__(refuse)

    def move(self, *args: int) -> int:
        with self.alone:
            return super().move(*args)

    def record(self, *args: int) -> int:
        with self.alone:
            return super().record(*args)

    def query(self, event: int) -> int:
        with self.alone:
            return super().query(event)

    def finish(self) -> None:
        with self.alone:
            super().finish()


@pytest.mark.parametrize("up", [True, False])
def test_callers_of_one_mover_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, up: bool
) -> None:
    monkeypatch.setitem(globals(), "Engine", Shared)
    fake, wrong = Fake(up), []

    def work(i: int) -> None:
        given = torch.full((40_000 + i,), i, dtype=torch.uint8)
        for _ in range(10):
            moved = fake.move(given)
            fake.engine.finish()
            if not torch.equal(moved, given):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers whose rules are known, as after the first few."""
    monkeypatch.setattr(transfer, "_QUICK", {})
    for up in (True, False):
        monkeypatch.setattr(pinned_buffers.stager(0, up), "left", 0)


@gpu
@pytest.mark.usefixtures("ready")
def test_transfers_go_the_short_way_once_their_rules_are_known() -> None:
    host = torch.randint(0, 256, (5 * MIB + 3,), dtype=torch.uint8)
    for _ in range(3):
        before = pinned_buffers.STATS.transfers
        there = tensorlogic.to(host, "cuda")
        assert torch.equal(there.cpu(), host)
        assert torch.equal(tensorlogic.to(there, "cpu"), host)
        assert pinned_buffers.STATS.transfers == before + 2
    assert set(transfer._QUICK) == {"cuda", "cpu"}
    assert transfer._QUICK["cuda"](host.pin_memory()) is None
    assert transfer._QUICK["cuda"](there) is None
    assert transfer._QUICK["cpu"](host) is None
    assert tensorlogic.to(host, "cpu") is host
    half = torch.randn(2 * MIB)
    assert torch.equal(tensorlogic.to(half, "cuda", torch.float16).cpu(), half.half())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # in the order of the current stream
        late = torch.zeros(8 * MIB, device="cuda")
        torch.cuda._sleep(20_000_000)
        late += 1
        assert tensorlogic.to(late, "cpu").eq(1).all()


@gpu
@pytest.mark.usefixtures("ready")
def test_a_full_device_is_said_and_the_next_transfer_arrives() -> None:
    host = torch.randint(0, 256, (64 * MIB,), dtype=torch.uint8)
    small = host[: 2 * MIB].clone()
    tensorlogic.to(small, "cuda")
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(max(1e-6, 16 * MIB / total))
    try:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                tensorlogic.to(host, "cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(tensorlogic.to(small, "cuda").cpu(), small)
    assert torch.equal(tensorlogic.to(host, "cuda").cpu(), host)


@gpu
@pytest.mark.parametrize("up", [True, False])
def test_without_the_library_buffers_wait_for_the_stream_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, up: bool
) -> None:
    monkeypatch.setattr(cpu_library, "available", lambda: "not for this test")
    mover = pinned_buffers.Stager(torch.device("cuda", torch.cuda.current_device()), up)
    assert mover.copy is None
    host = torch.randint(0, 256, (70 * MIB + 5,), dtype=torch.uint8)
    there = torch.zeros_like(host, device="cuda")
    other = torch.zeros_like(host)
    device = host.cuda()
    torch.cuda.synchronize()
    for _ in range(2):
        torch.cuda._sleep(100_000_000)
        if up:
            mover.here(host, there, True)
            assert torch.equal(there.cpu(), host)
        else:
            there.copy_(device)
            mover.here(there, other, False)
            assert torch.equal(other, host)
        there.zero_()
        other.zero_()


@gpu
@pytest.mark.parametrize("nbytes", [1024, 5 * MIB])
def test_every_stream_that_waits_is_ordered_behind_the_transfer(nbytes: int) -> None:
    host = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    busy, later = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(busy):
            torch.cuda._sleep(100_000_000)
            moved = tensorlogic.to(host, "cuda", torch.int32, asynchronous=True)
            moved.wait()
        with torch.cuda.stream(later):
            assert torch.equal(moved.wait().cpu(), host.int())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_goes_the_way_on_which_pytorch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transfer._QUICK, "cpu", lambda t: t)
    pid = os.fork()
    if pid == 0:
        os._exit(len(transfer._QUICK))
    assert os.waitpid(pid, 0)[1] == 0
    assert len(transfer._QUICK) >= 1
