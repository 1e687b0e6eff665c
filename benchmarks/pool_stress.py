"""The pool under stress: threads that hammer it, forks meanwhile, a million cycles; memory of the process is shown.

    python benchmarks/pool_stress.py [--seconds 60] [--threads 8] [--cycles 1000000] [--everything]

`--everything` does the same to PyTorch's own tensors under `tensorlogic.enable(pool=True)`. Exit code 1 where something
leaked, grew beyond the cap, or was overwritten.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

import tensorlogic
from tensorlogic.memory import pool
from tensorlogic.native import cpu_library
from tensorlogic.native import hook_ops as native_hook_ops

MIB = 1 << 20
CAP = 64 * MIB
Empty = Callable[[int], Tensor]  # bytes -> a tensor of that many from the pool


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def say(what: str) -> None:
    stats = pool.stats()
    print(
        f"{what:<28} RSS {resident() / MIB:7.1f} MiB  in use {stats.bytes_in_use / MIB:6.1f}  held {stats.bytes_held / MIB:6.1f}"
        f"  high water {stats.high_water_bytes / MIB:6.1f}  {stats.allocation_count:,} allocations, {stats.reuse_rate:.1%} reused",
        flush=True,
    )


def marked(block: Tensor, mark: int) -> Tensor:
    """The block, its first and last page written."""
    block[:64] = mark
    block[-64:] = mark
    return block


def intact(block: Tensor, mark: int) -> bool:
    return bool((block[:64] == mark).all()) and bool((block[-64:] == mark).all())


def worker(
    number: int,
    empty: Empty,
    others: queue.SimpleQueue[tuple[Tensor, int]],
    end: float,
    wrong: list[str],
) -> None:
    """Allocate, mark, keep a few, check, hand some to other threads to be freed there."""
    chance, kept = random.Random(number), []
    while time.perf_counter() < end:
        mark = chance.randrange(1, 255)
        block = marked(empty(int(2 ** chance.uniform(16, 22))), mark)
        kept.append((block.view(-1)[:] if chance.random() < 0.3 else block, mark))
        if chance.random() < 0.1:
            kept[-1] = (torch.from_numpy(kept[-1][0].numpy()), mark)
        if chance.random() < 0.3 and others.qsize() < 64:
            others.put(kept.pop(chance.randrange(len(kept))))
        if chance.random() < 0.3 and not others.empty():
            try:
                block, mark = others.get_nowait()
            except queue.Empty:
                continue
            kept.append((block, mark))
        while len(kept) > 6:
            block, mark = kept.pop(chance.randrange(len(kept)))
            if not intact(block, mark):
                wrong.append(f"thread {number}: a block was overwritten")


def child(empty: Empty) -> bool:
    """A forked process works with a pool of its own; True where it ended well."""
    pid = os.fork()
    if pid == 0:
        fine = all(intact(marked(empty(MIB + i), i), i) for i in range(1, 20))
        os._exit(0 if fine else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def hammer(empty: Empty, threads: int, seconds: float, forks: int) -> list[str]:
    """All threads at once, forks and limits meanwhile; what went wrong."""
    wrong: list[str] = []
    others: queue.SimpleQueue[tuple[Tensor, int]] = queue.SimpleQueue()
    end = time.perf_counter() + seconds
    workers = [
        threading.Thread(target=worker, args=(i, empty, others, end, wrong)) for i in range(threads)
    ]
    for w in workers:
        w.start()
    shown = 0.0
    for i in range(forks):
        time.sleep(seconds / (forks + 1))
        if not child(empty):
            wrong.append(f"forked process {i} failed")
        pool.shrink_to_fit(CAP // 2)
        if pool.stats().bytes_held > CAP:
            wrong.append("more is held than the cap")
        if time.perf_counter() - shown > 10:
            say(f"{threads} threads, {i + 1} forks")
            shown = time.perf_counter()
    for w in workers:
        w.join()
    while not others.empty():
        others.get()
    return wrong


def cycles(empty: Empty, count: int) -> float:
    """Allocate and free `count` times; microseconds a cycle."""
    sizes = [(1 << 16) + 4096 * (i % 13) for i in range(13)]
    begin = time.perf_counter()
    for i in range(count):
        empty(sizes[i % 13])
    return (time.perf_counter() - begin) / count * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=1_000_000)
    parser.add_argument("--forks", type=int, default=30)
    parser.add_argument("--everything", action="store_true")
    options = parser.parse_args()
    if reason := cpu_library.available() or (options.everything and native_hook_ops.available()):
        print(reason)
        return 1
    torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
    pool.configure(max_bytes=CAP)
    if options.everything:
        tensorlogic.enable(pool=True)

    def pooled(size: int) -> Tensor:
        return torch.ops.tensorlogic_native.empty([size], torch.uint8)

    def everywhere(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    empty = everywhere if options.everything else pooled
    cycles(empty, 1000)
    pool.clear()
    begin = pool.stats().bytes_in_use
    before = resident()
    say("at the start")
    each = cycles(empty, options.cycles)
    say(f"{options.cycles:,} cycles")
    wrong = [] if resident() - before < 8 * MIB else ["memory grew over the cycles"]
    print(f"{each:.2f} us a cycle")
    wrong += hammer(empty, options.threads, options.seconds, options.forks)
    say("all threads ended")
    stats = pool.stats()
    if stats.bytes_in_use != begin:
        wrong.append(f"{stats.bytes_in_use - begin} bytes leaked")
    if stats.bytes_held > CAP or stats.bytes_held != sum(
        int(size) * c.held for size, c in stats.size_classes.items()
    ):
        wrong.append("what is held is above the cap, or miscounted")
    pool.shrink_to_fit()
    say("shrunk to fit")
    if resident() - before > 48 * MIB:  # the threads' own stacks and arenas stay
        wrong.append("memory was not given back")
    print("\n".join(wrong) or "ok")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
