"""Transfers of ordinary memory by pieces of several sizes, numbers of threads and kinds of stores, beside PyTorch's and a pinned copy.

python benchmarks/device/transfers.py [--seconds 50] [--json FILE]

GB/s, median and best of several, each transfer waited for. `pieces` 0: PyTorch's threads, a piece at a time, as without the native
library. What the constants of tensorlogic/memory/staging.py should be is the row that is best at 16 and 256 MiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from tensorlogic.memory import staging

SIZES = (16 << 20, 64 << 20, 256 << 20)
PIECES = (1 << 19, 1 << 20, 2 << 20, 4 << 20)
WORKERS = (4, 8, 12, 16)
DEVICE = torch.device("cuda", 0)


def rate(call: Callable[[], Any], nbytes: int, rounds: int = 5) -> tuple[float, float]:
    """(median, best) GB/s of a call that is waited for."""
    taken = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    taken = taken[1:]
    return round(nbytes / statistics.median(taken) / 1e9, 1), round(nbytes / min(taken) / 1e9, 1)


def both_ways(host: Tensor, there: Tensor) -> tuple[tuple[float, float], tuple[float, float]]:
    """Up and down by `staging.to`; what comes back is what went."""
    n = host.nbytes
    assert torch.equal(staging.to(staging.to(host, DEVICE), "cpu"), host)
    return rate(lambda: staging.to(host, DEVICE), n), rate(lambda: staging.to(there, "cpu"), n)


def plain(host: Tensor, there: Tensor) -> dict[str, Any]:
    """What PyTorch does, what pinned memory allows, and copies of the host alone."""
    n, pinned, other = host.nbytes, host.pin_memory(), torch.empty_like(host)
    return {
        "up PyTorch": rate(lambda: host.to(DEVICE), n, 3),
        "down PyTorch": rate(lambda: there.cpu(), n, 3),
        "up pinned": rate(lambda: there.copy_(pinned, non_blocking=True), n),
        "down pinned": rate(lambda: pinned.copy_(there, non_blocking=True), n),
        "host copy": rate(lambda: other.copy_(host), n),
        "host copy to pinned": rate(lambda: pinned.copy_(host), n),
    }


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    end = time.perf_counter() + given.seconds
    hosts = [torch.randint(0, 256, (n // 4,), dtype=torch.int32).view(torch.float32) for n in SIZES]
    theres = [h.to(DEVICE) for h in hosts]
    about = {
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    found: dict[str, Any] = {**about, "native": staging._runtime() is not None, "rows": []}
    sys.stdout.write(f"{about}\n")
    for host, there in zip(hosts, theres, strict=True):
        line = {"bytes": host.nbytes, **plain(host, there)}
        found["rows"].append(line)
        sys.stdout.write(f"{line}\n")
    usual = (staging.PIECE, staging.WORKERS, staging.PAST_CACHES, staging.SMALLEST)
    least = staging.LEAST_DOWN
    variants = [(usual, "as it stands"), ((0, *usual[1:]), "PyTorch's threads")]
    variants += [
        ((piece, workers, past, piece), "")
        for piece, workers, past in itertools.product(PIECES, WORKERS, (1 << 62, 0))
    ]
    for (piece, workers, past, smallest), name in variants:
        if time.perf_counter() > end:
            break
        staging._STAGERS.clear()
        staging.WORKERS, staging.PAST_CACHES = workers, past
        staging.PIECE, staging.SMALLEST = piece or usual[0], smallest
        staging.LEAST_DOWN = least if name else 0
        for direction in ("up", "down"):
            made = staging.stager(DEVICE, direction)
            made.calls = made.calls if piece else None
        row: dict[str, Any] = {
            "name": name, "piece": piece, "workers": workers, "past caches below": past,
            **{f"{h.nbytes >> 20} MiB": both_ways(h, t) for h, t in zip(hosts, theres, strict=True)},
        }  # fmt: skip
        found["rows"].append(row)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
