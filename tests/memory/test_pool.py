"""The pool of CPU outputs: reuse, limits, statistics, threads and processes; and that pooled tensors mean what torch's mean."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.core import weight_cache
from tensorlogic.memory import pool
from tensorlogic.native import cpu_library
from tensorlogic.native import hook_ops as native_hook_ops

pytestmark = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)

MIB = 1 << 20


def test_figures_of_a_device_that_is_not_here_are_refused() -> None:
    for device in (f"cuda:{torch.cuda.device_count()}", "cuda:99", "meta"):
        with pytest.raises(ValueError, match=f"that is here, got {device}"):
            pool.stats(device)


@pytest.fixture(autouse=True)
def fresh_pool() -> Iterator[None]:
    """Nothing held, nothing counted, limits put back afterwards."""
    max_bytes, max_buffers = pool.limits()
    pool.configure(max_bytes=256 * MIB, max_buffers_per_size=32)
    pool.clear()
    yield
    pool.configure(max_bytes=max_bytes, max_buffers_per_size=max_buffers)
    pool.clear()


def empty(size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A pooled tensor of `size` bytes."""
    return torch.ops.tensorlogic_native.empty([size // dtype.itemsize], dtype)


def test_a_freed_block_is_given_out_again() -> None:
    first = empty(MIB)
    address = first.data_ptr()
    del first
    again = empty(MIB - 100)  # the same size class
    assert again.data_ptr() == address
    stats = pool.stats("cpu")
    assert (stats.allocation_count, stats.reuse_count, stats.reuse_rate) == (2, 1, 0.5)
    assert stats.size_classes[MIB] == pool.SizeClass(
        in_use=1, held=0, allocation_count=2, reuse_count=1
    )


def test_kernel_outputs_come_from_the_pool_and_small_ones_do_not() -> None:
    n = torch.ops.tensorlogic_native
    n.add(torch.ones(100), torch.ones(100))
    assert pool.stats().allocation_count == 0
    y = n.add(torch.ones(1 << 20), torch.ones(1 << 20))
    assert pool.stats().bytes_in_use == 4 * MIB
    assert y.data_ptr() % 64 == 0


def test_size_classes_waste_at_most_a_fifth() -> None:
    for size in (65_536, 65_537, 81_920, 100_000, 131_072, 131_073, 3 * MIB + 1, 40_000_001):
        pool.clear()
        held = empty(size)
        stats = pool.stats()
        assert stats.bytes_in_use >= size
        assert 0 <= stats.fragmentation <= 0.2
        assert stats.fragmentation == pytest.approx(1 - size / stats.bytes_in_use)
        del held


def test_figures_add_up() -> None:
    kept = [empty(size) for size in (MIB, MIB, 2 * MIB)]
    freed = [empty(size) for size in (MIB, 4 * MIB)]
    freed.clear()
    stats = pool.stats()
    assert stats.bytes_in_use == 4 * MIB
    assert stats.bytes_held == 5 * MIB
    assert stats.high_water_bytes == 9 * MIB
    for total, part in ((stats.bytes_in_use, "in_use"), (stats.bytes_held, "held")):
        assert total == sum(int(size) * getattr(c, part) for size, c in stats.size_classes.items())
    assert stats.allocation_count == sum(c.allocation_count for c in stats.size_classes.values())
    del kept


def test_limits_hold_and_the_oldest_block_goes_first() -> None:
    pool.configure(max_bytes=4 * MIB)
    blocks = [empty(MIB) for _ in range(8)]
    newest = blocks[-1].data_ptr()
    while blocks:
        blocks.pop(0)
    assert pool.stats().bytes_held == 4 * MIB
    assert empty(MIB).data_ptr() == newest
    assert empty(8 * MIB).numel() == 8 * MIB  # larger than the limit: served, not kept
    assert pool.stats().bytes_held == 4 * MIB
    pool.configure(max_buffers_per_size=1)
    assert pool.stats().bytes_held == MIB
    pool.configure(max_bytes=0)
    assert pool.stats().bytes_held == 0
    with pytest.raises(ValueError, match="max_bytes"):
        pool.configure(max_bytes=-1)


def test_copies_of_weights_are_counted_and_can_be_switched_off() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64).half())
    before = pool.stats().derived_bytes
    limit = weight_cache.CACHE.max_bytes
    try:
        with tensorlogic.policy(force="torch.widened"), torch.no_grad():
            tensorlogic.linear(torch.randn(4, 64).half(), weight)
            assert pool.stats().derived_bytes == before + 4 * 64 * 64
            pool.configure(max_derived_bytes=0)
            assert pool.stats().derived_bytes == 0
            tensorlogic.linear(torch.randn(4, 64).half(), weight)
            assert pool.stats().derived_bytes == 0
    finally:
        pool.configure(max_derived_bytes=limit)


def test_limits_that_make_no_sense_are_named() -> None:
    for name in ("max_bytes", "max_buffers_per_size", "max_derived_bytes"):
        with pytest.raises(ValueError, match=rf"{name} must not be negative, got -1"):
            pool.configure(**{name: -1})
        with pytest.raises(ValueError, match=rf"{name} must be below 2\*\*63"):
            pool.configure(**{name: 2**70})
        with pytest.raises(TypeError, match=rf"{name} must be a whole number, got '1'"):
            pool.configure(**{name: "1"})
    with pytest.raises(ValueError, match="max_bytes"):
        pool.shrink_to_fit(-1)


def test_shrink_and_clear_give_free_blocks_back() -> None:
    kept, freed = empty(MIB), [empty(MIB) for _ in range(4)]
    freed.clear()
    assert pool.shrink_to_fit(2 * MIB) == 2 * MIB
    assert pool.stats().bytes_held == 2 * MIB
    assert pool.shrink_to_fit() == 2 * MIB
    pool.clear()
    stats = pool.stats()
    assert (stats.bytes_held, stats.allocation_count, stats.bytes_in_use) == (0, 0, MIB)
    del kept
    assert pool.stats().bytes_in_use == 0


def test_disabled_nests_and_frees_to_the_system() -> None:
    before = empty(MIB)
    with pool.disabled(), pool.disabled():
        inside = empty(MIB)
        del before
        assert pool.stats().bytes_held == 0
    assert pool.stats().allocation_count == 1
    del inside
    assert pool.stats().bytes_held == 0
    empty(MIB)
    assert pool.stats().allocation_count == 2


def test_zeroed_memory_is_zero_fresh_and_reused() -> None:
    zeros = torch.ops.tensorlogic_native.zeros
    for size in (10, MIB, 5 * MIB):
        first = zeros([size], torch.uint8)
        assert first.count_nonzero() == 0
        first.fill_(7)
        del first
        assert zeros([size], torch.uint8).count_nonzero() == 0


def test_memory_of_the_process_follows_the_pool() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    before = resident()
    block = empty(128 * MIB).fill_(1)
    assert resident() - before > 100 * MIB
    del block
    pool.shrink_to_fit()
    assert resident() - before < 40 * MIB


def test_blocks_freed_on_other_threads_come_back() -> None:
    blocks = [empty(MIB) for _ in range(16)]

    def drop() -> None:
        while True:
            try:
                blocks.pop()
            except IndexError:
                return

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = pool.stats()
    assert (stats.bytes_in_use, stats.bytes_held) == (0, 16 * MIB)


def test_threads_never_share_a_block() -> None:
    wrong: list[str] = []

    def hammer(number: int) -> None:
        for step in range(300):
            block = empty(65_536 * (1 + (number + step) % 5)).fill_(number)
            other = empty(65_536).fill_(number + 100)
            if not bool((block == number).all()) or not bool((other == number + 100).all()):
                wrong.append(f"thread {number}, step {step}")

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.stats().bytes_in_use == 0
    assert pool.stats().bytes_held <= 256 * MIB


def test_many_cycles_neither_leak_nor_grow() -> None:
    for i in range(50_000):
        empty(65_536 + 4096 * (i % 7))
    stats = pool.stats()
    assert stats.bytes_in_use == 0
    assert stats.high_water_bytes < 2 * MIB
    assert stats.reuse_rate > 0.999


def test_views_keep_the_block_alive_and_writes_are_seen() -> None:
    base = torch.ops.tensorlogic_native.zeros([1024, 1024], torch.float32)
    view = base[10:20, ::2]
    base[10, 0] = 3.0
    del base
    others = [empty(4 * MIB).fill_(255) for _ in range(3)]
    assert view[0, 0].item() == 3.0
    assert view[1:].count_nonzero() == 0
    del others


def test_numpy_dlpack_pickle_and_shared_memory_keep_their_meaning() -> None:
    x = torch.ops.tensorlogic_native.zeros([512, 512], torch.float32)
    array = x.numpy()
    array[0, 0] = 5.0
    assert x[0, 0].item() == 5.0
    assert torch.equal(torch.from_dlpack(x), x)
    assert torch.equal(pickle.loads(pickle.dumps(x)), x)
    del x
    spoil = empty(MIB).fill_(255)
    assert array[0, 0] == np.float32(5.0)
    assert not array[1:].any()
    shared = torch.ops.tensorlogic_native.zeros([512, 512], torch.float32).share_memory_()
    assert shared.is_shared()
    shared.fill_(2.0)
    assert shared.sum().item() == 2.0 * 512 * 512
    del spoil


def test_resize_shrinks_and_grows_within_and_beyond_the_block() -> None:
    x = torch.ops.tensorlogic_native.zeros([1024, 64], torch.float32).fill_(1.0)
    x.resize_(10, 10)
    assert x.sum().item() == 100.0
    if native_hook_ops.available() is not None:
        pytest.skip("without the hooks growing is refused, as on NumPy's memory")
    view = x.view(-1)
    x.resize_(4096, 512)
    assert x.view(-1)[: 1024 * 64].sum().item() == 1024 * 64
    x[0, 0] = 7.0
    assert view[0].item() == 7.0  # a view follows, as PyTorch's do
    assert pool.stats().bytes_in_use >= 4096 * 512 * 4
    x.set_(torch.zeros(3))
    assert pool.stats().bytes_in_use >= 4096 * 512 * 4
    del view
    assert pool.stats().bytes_in_use == 0  # the block goes back


def _child(queue: multiprocessing.Queue[int]) -> None:
    block = empty(MIB).fill_(9)
    queue.put(int(block.sum().item()) + pool.stats().reuse_count)


def test_a_forked_process_has_a_working_pool_of_its_own() -> None:
    kept = empty(MIB).fill_(1)
    empty(MIB)  # one free block in both processes
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[int] = context.Queue()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
    process = context.Process(target=_child, args=(queue,))
    process.start()
    answer = queue.get(timeout=30)
    process.join(30)
    torch.set_num_threads(threads)
    assert process.exitcode == 0
    assert answer == 9 * MIB + 1
    assert kept.sum().item() == MIB


@pytest.mark.slow
def test_exit_with_living_tensors_is_clean() -> None:
    program = (
        "import torch, sys; from tensorlogic.native import cpu_library as native; native.available();"
        "sys.kept = [torch.ops.tensorlogic_native.empty([1 << 20], torch.float32) for _ in range(4)];"
        "torch.ops.tensorlogic_native.empty([1 << 20], torch.float32)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_absurd_size_raises_torchs_error_and_leaves_the_pool_whole() -> None:
    empty(MIB)
    before = pool.stats().bytes_in_use  # of whatever another test has left to be collected
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        empty(1 << 46)
    assert pool.stats().bytes_in_use <= before
    assert empty(MIB).numel() == MIB


def test_without_the_library_figures_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "_state", ["absent"])
    assert pool.stats("cpu").allocation_count == 0
    assert pool.shrink_to_fit() == 0
    pool.configure(max_bytes=1)
    pool.clear()
    with pool.disabled():
        pass
    with pytest.raises(ValueError, match="meta"):
        pool.stats("meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_figures_come_from_torchs_allocator() -> None:
    x = torch.empty(1 << 20, device="cuda")
    stats = pool.stats("cuda")
    assert stats.bytes_in_use >= x.numel() * 4
    assert 0 <= stats.reuse_rate <= 1
