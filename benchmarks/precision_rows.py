"""What a CPU gains within error budgets: float32 inputs within 1e-2 beside the best float32 path, float64 ones within 1e-6 beside PyTorch's.

    python benchmarks/precision_rows.py [--sizes 512 1000 2048]

Run it under the limits of another processor to see what that would gain: benchmarks/results/precision-rows-cpu.txt says which.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

import tensorlogic
from tensorlogic.core import dtypes, tolerance
from tensorlogic.core.op import OPS
from tensorlogic.measure import timer
from tensorlogic.mixed_precision import adaptive

BUDGETS = ((torch.float32, 1e-2), (torch.float64, 1e-6))
CPU = torch.device("cpu")


def row(n: int, dtype: torch.dtype, rtol: float) -> str:
    """One product: what served, its error, and milliseconds of a call, guard included, beside what it is compared with."""
    a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
    op = OPS["matmul"].precise
    assert op is not None
    key = op.key((a, b, "none", False), "inference", "adaptive")
    calls: dict[str, Callable[[], Any]] = {"PyTorch": lambda: torch.matmul(a, b)}
    if dtype == torch.float32 and op.candidates["cpu.f32"].unfit(key) is None:
        own = op.candidates["cpu.f32"].bind(key, {}, CPU)
        calls["cpu.f32"] = lambda: own(a, b)
    with tensorlogic.precision("adaptive", rtol=rtol):
        tensorlogic.tune(tensorlogic.matmul, a, b)
        y = tensorlogic.matmul(a, b)
        way = adaptive.LAST[-1]
        calls["served"] = lambda: tensorlogic.matmul(a, b)
        times = timer.wall_samples(calls, CPU, 3.0, rounds=15)
    best = min((name for name in calls if name != "served"), key=times.median)
    error = tolerance.relative_error(y, a.double() @ b.double())
    taken = ", ".join(f"{name} {times.median(name) / 1e3:.2f} ms" for name in calls)
    return (
        f"{dtypes.NAMES[dtype]} {n} within {rtol:g}: {way}, error {error:.1e}; {taken}; "
        f"{times.ratio(best, 'served')[0]:.2f} times {best}"
    )


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1000, 2048])
    given = parser.parse_args()
    for dtype, rtol in BUDGETS:
        for n in given.sizes:
            sys.stdout.write(row(n, dtype, rtol) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
