"""What reused memory for outputs is worth: the same calls with it and without, in turns.

python benchmarks/pooling.py [--out FILE.json]   on the GPU if there is one

On a CPU that is `tensorlogic.pool` against `pool.disabled()`, on a GPU PyTorch's caching allocator against none
(`torch.cuda.caching_allocator_enable(False)`). Each call makes a fresh output, is waited for, and drops it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tensorlogic
from tensorlogic.bench import machine_info
from tensorlogic.measure import timer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIB = (1, 16, 64, 256)
ROUNDS = 9


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Outputs come from the driver, or the C library, and go back to it."""
    if DEVICE.type == "cpu":
        with tensorlogic.pool.disabled():
            yield
        return
    torch.cuda.caching_allocator_enable(False)
    try:
        yield
    finally:
        torch.cuda.caching_allocator_enable(True)


def turn(call: Callable[[], Any], count: int) -> float:
    """Microseconds of a call, the middle of a few behind one that is not counted."""
    timer.once(call, DEVICE)
    return statistics.median(timer.once(call, DEVICE) for _ in range(count))


def row(mib: int) -> dict[str, Any]:
    """One size, as many turns with as without."""
    a = torch.ones(mib << 19, dtype=torch.float16, device=DEVICE)
    call = lambda: tensorlogic.add_relu(a, a)  # noqa: E731
    found: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(ROUNDS):
        found["with"].append(turn(call, max(3, 64 // mib)))
        with without():
            found["without"].append(turn(call, max(3, 64 // mib)))
    us = {name: statistics.median(times) for name, times in found.items()}
    lower = 1 - statistics.median(w / o for w, o in zip(*found.values(), strict=True))
    print(f"add_relu into {mib} MiB: {us['with']:.1f} us with, {us['without']:.1f} without, {lower:.0%} lower", flush=True)  # fmt: skip
    return {"mib": mib, "us": us, "lower": lower}


@torch.no_grad()
def main() -> None:
    """Measure and print one line a size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tensorlogic.policy(tune="off"):
        rows = [row(mib) for mib in MIB]
    stats = tensorlogic.pool.stats(DEVICE)
    print(stats)
    if asked.out:
        whole = {
            "machine": machine_info.describe(DEVICE),
            "date": datetime.date.today().isoformat(),
            "rows": rows,
            "reuse_rate": stats.reuse_rate,
            "high_water_bytes": stats.high_water_bytes,
        }
        asked.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
