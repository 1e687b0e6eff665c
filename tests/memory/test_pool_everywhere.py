"""enable(pool=True): every large CPU tensor comes from the pool and means what it did; and faults, stress and limits of both."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorlogic
from tensorlogic.memory import pool
from tensorlogic.native import hook_ops as native_hook_ops

pytestmark = pytest.mark.skipif(
    native_hook_ops.available() is not None, reason=str(native_hook_ops.available())
)

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture
def pooled() -> Iterator[None]:
    """PyTorch's allocator replaced, nothing held, nothing counted; put back afterwards."""
    limits = pool.limits()
    tensorlogic.enable(pool=True)
    pool.configure(max_bytes=256 * MIB, max_buffers_per_size=32)
    pool.clear()
    yield
    tensorlogic.disable()
    pool.configure(max_bytes=limits[0], max_buffers_per_size=limits[1])
    pool.clear()


def run(program: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout,
        check=False,
    )


def test_large_tensors_of_torch_itself_are_reused(pooled: None) -> None:
    in_use = pool.stats().bytes_in_use
    x = torch.empty(MIB, dtype=torch.uint8)
    assert pool.stats().bytes_in_use == in_use + MIB
    address = x.data_ptr()
    assert address % 64 == 0
    del x
    assert (torch.empty(1024, 256) + 1).data_ptr() == address or pool.stats().reuse_count >= 1
    before = pool.stats().allocation_count
    torch.empty(1000, dtype=torch.uint8)  # small: PyTorch's own
    assert pool.stats().allocation_count == before


def test_tensors_outlive_the_switch(pooled: None) -> None:
    x = torch.full((512, 512), 3.0)
    in_use = pool.stats().bytes_in_use
    tensorlogic.disable()
    before = pool.stats().allocation_count
    fresh = torch.ones(512, 512)
    assert pool.stats().allocation_count == before
    assert (x * fresh).sum().item() == 3.0 * 512 * 512
    del x
    assert pool.stats().bytes_in_use == in_use - MIB
    tensorlogic.enable()
    torch.ones(512, 512)
    assert pool.stats().allocation_count == before  # enable() alone does not replace the allocator


def test_tensors_keep_their_meaning(pooled: None) -> None:
    x = torch.zeros(512, 512)
    array = x.numpy()
    array[0, 0] = 5.0
    assert x[0, 0].item() == 5.0
    assert torch.equal(torch.from_dlpack(x), x)
    assert torch.equal(pickle.loads(pickle.dumps(x)), x)
    grown = torch.ones(512, 512)
    view = grown[1:]
    grown.resize_(1024, 1024)
    grown[1, 0] = 2.0
    assert grown.view(-1)[: 512 * 512].sum().item() == 512 * 512 + 1
    assert view.sum().item() == 511 * 512 + 1
    shared = torch.ones(512, 512).share_memory_()
    assert shared.is_shared()
    assert shared.sum().item() == 512 * 512
    grown.untyped_storage().resize_(0)
    assert grown.untyped_storage().nbytes() == 0
    made = torch.frombuffer(bytearray(4 * MIB), dtype=torch.float32)
    assert made.sum().item() == 0.0
    del x, grown, view, shared
    spoil = [torch.full((512, 512), 7.0) for _ in range(3)]
    assert array[0, 0] == 5.0  # NumPy's view keeps the block
    del spoil


def test_training_and_threads(pooled: None) -> None:
    problems: list[str] = []

    def work(seed: int) -> None:
        torch.manual_seed(seed)
        layer = torch.nn.Linear(256, 256)
        for _ in range(20):
            x = torch.randn(256, 256)
            layer(x).square().mean().backward()
            y = layer(x)
            if not torch.equal(y, layer(x)):
                problems.append("changed")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert problems == []


def test_the_profiler_sees_the_memory(pooled: None) -> None:
    with torch.profiler.profile(profile_memory=True) as seen:
        x = torch.empty(MIB, dtype=torch.uint8)
        del x
    sizes = [e.cpu_memory_usage for e in seen.events()]
    assert MIB in sizes


def test_zeroed_tensors_are_zero_when_the_block_was_used_before(pooled: None) -> None:
    torch.full((512, 512), 7.0)
    assert torch.zeros(512, 512).count_nonzero() == 0
    assert torch.empty(512, 512).zero_().count_nonzero() == 0


PROGRAMS = {
    "exit with living tensors": (
        "import sys, torch, tensorlogic; tensorlogic.enable(pool=True)\n"
        "sys.kept = [torch.ones(1 << 20) for _ in range(4)]; torch.ones(1 << 20); print('ok')"
    ),
    "exit with tensors of threads": (
        "import threading, torch, tensorlogic; tensorlogic.enable(pool=True)\n"
        "def work():\n    kept = torch.ones(1 << 18); threading.Event().wait()\n"
        "[threading.Thread(target=work, daemon=True).start() for _ in range(3)]\n"
        "import time; time.sleep(0.2); print('ok')"
    ),
    "fork": (
        "import os, torch, tensorlogic; tensorlogic.enable(pool=True); torch.set_num_threads(1)\n"
        "kept = torch.ones(1 << 20)\npid = os.fork()\n"
        "if pid == 0: os._exit(0 if (torch.ones(1 << 20) + kept).sum().item() == 2 << 20 else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0; print('ok')"
    ),
    "no memory": (
        "import resource, torch, tensorlogic; from tensorlogic.native import cpu_library as native; from tensorlogic import pool\nfrom tensorlogic.memory.pool import stats\n"
        "torch.set_num_threads(1); torch.ones(1 << 20).sum(); MIB = 1 << 20\n"
        "def used():\n"
        "    return int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "for everything in (False, True):\n"
        "    if everything: tensorlogic.enable(pool=True)\n"
        "    pool.configure(max_bytes=1 << 40); pool.clear()\n"
        "    make = (lambda n: torch.empty(n, dtype=torch.uint8)) if everything else (\n"
        "        lambda n: torch.ops.tensorlogic_native.empty([n], torch.uint8))\n"
        "    assert native.available() is None\n"
        "    soft, hard = resource.getrlimit(resource.RLIMIT_AS)\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used() + 600 * MIB, hard))\n"
        "    in_use = stats().bytes_in_use\n"
        "    freed = [make(100 * MIB) for _ in range(4)]; del freed\n"
        "    held = stats().bytes_held; assert held >= 400 * MIB, held\n"
        "    big = make(450 * MIB)  # fits once the free blocks are gone\n"
        "    assert stats().bytes_held < held; del big\n"
        "    try: make(900 * MIB); raise SystemExit('allocated')\n"
        '    except RuntimeError as e: assert "can\'t allocate memory" in str(e), e\n'
        "    assert stats().bytes_in_use == in_use, stats()\n"
        "    assert make(MIB).numel() == MIB; assert stats().bytes_in_use == in_use\n"
        "    pool.shrink_to_fit(); resource.setrlimit(resource.RLIMIT_AS, (soft, hard))\n"
        "print('ok')"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_processes_end_well(name: str) -> None:
    done = run(PROGRAMS[name])
    errors = [line for line in done.stderr.splitlines() if "Exception in aoti_torch" not in line]
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), errors


@pytest.mark.slow
@pytest.mark.parametrize("which", [[], ["--everything"]])
def test_stress_in_short(which: list[str]) -> None:
    small = ["--seconds", "2", "--cycles", "20000", "--forks", "4"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "pool_stress.py"), *small, *which],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "ok"), done.stdout + done.stderr


@pytest.mark.slow
def test_the_variable_asks_for_the_pool() -> None:
    program = (
        "import tensorlogic; from tensorlogic.native import hook_ops; print(hook_ops.op('pools_all')());"
        "tensorlogic.disable(); print(hook_ops.op('pools_all')())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TENSORLOGIC_ENABLE": "pool"},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True", "False"], "")
