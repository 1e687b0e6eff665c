"""Random products under error budgets: every budget is kept on every row and column, or the call has warned.

    python benchmarks/precision_problems.py --count 1000 --seed 1 [--device cuda] [--seconds 120] [--workers 12] [--json FILE]

Badly scaled rows, columns and inner dimensions, huge, tiny and vanishing ranges, heavy tails, sums that cancel everywhere or in a block,
integers, four dtypes; shapes repeat, so that data of
one kind meet what was chosen for another; ways are tried in a random order, so that every form of numbers is met. On a GPU nearly all of the
time is compilation, a few dozen kernels for every shape and dtype: worker processes have shapes of their own, and so compile at once what
each of them needs. What was found is kept where it is cut short.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from torch import Tensor

import tensorlogic
from tensorlogic import PrecisionWarning
from tensorlogic.core.candidate import EAGER
from tensorlogic.kernels.mixed_precision import data_statistics
from tensorlogic.mixed_precision import adaptive

KINDS = (
    "normal",
    "positive",
    "scaled",
    "huge",
    "tiny",
    "heavy",
    "cancelling",
    "sparse",
    "one bad row",
    "integers",
    "one outlier",
    "faint",
    "one huge row",
    "inner scaled",
    "orthogonal",
    "blocks cancel",
)
DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)


SHAPES = (
    (1, 7, 64),
    (16, 16, 16),
    (33, 65, 129),
    (128, 64, 256),
    (200, 150, 100),
    (64, 300, 512),
)


@dataclass
class Drawn:
    """One problem before its values are drawn, by what is left of `g`."""

    kind: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    rtol: float
    g: torch.Generator


@dataclass
class Outcome:
    """One problem: what was asked, what came."""

    kind: str
    shape: tuple[int, int, int]
    dtype: str
    rtol: float
    error: float
    warned: bool
    way: str

    @property
    def good(self) -> bool:
        """The budget was kept, or the caller was told."""
        return self.warned or self.error <= self.rtol


def operands(
    kind: str, shape: tuple[int, int, int], dtype: torch.dtype, g: torch.Generator
) -> tuple[Tensor, Tensor]:
    """a [M, K] and b [K, N] of one kind, in float64 before they are rounded to the dtype."""
    m, n, k = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    a, b = normal(m, k), normal(k, n)
    span = 2.0 if dtype == torch.float16 else 8.0
    if kind == "positive":
        a, b = a.abs(), b.abs()
    elif kind == "scaled":
        a = a * 10 ** (span * (torch.rand(m, 1, generator=g, dtype=torch.float64) - 0.5))
        b = b * 10 ** (span * (torch.rand(1, n, generator=g, dtype=torch.float64) - 0.5))
    elif kind == "huge":
        a = a * (100.0 if dtype == torch.float16 else 1e12)
    elif kind == "tiny":
        a = a * (1e-3 if dtype == torch.float16 else 1e-15)
    elif kind == "heavy":
        a, b = a**3, b**3
    elif kind == "cancelling" and k > 1:
        half = k // 2
        a[:, half : 2 * half] = -a[:, :half] + 10 ** (
            -4 * float(torch.rand(1, generator=g))
        ) * normal(m, half)
        b[half : 2 * half] = b[:half]
    elif kind == "integers":  # exact in every form, of the norms of "normal"
        a, b = a.round(), b.round()
    elif kind == "sparse":
        a = a * (torch.rand(m, k, generator=g) < 0.05)
    elif kind == "one outlier":  # that the result does not tell of
        i, j = (int(torch.randint(size, (1,), generator=g)) for size in (m, k))
        a[i, j], b[j] = a[i, j] * 1e3, b[j] * 1e-3
    elif kind == "faint":  # below the dtype's normal numbers, operands or result
        a = a * {torch.float16: 1e-6, torch.float64: 1e-305}.get(dtype, 1e-39)
    elif kind == "one huge row":
        a[int(torch.randint(m, (1,), generator=g))] *= 1e3 if dtype == torch.float16 else 1e18
    elif kind == "inner scaled":
        inner = 10 ** (span * (torch.rand(1, k, generator=g, dtype=torch.float64) - 0.5))
        a, b = a * inner, b / inner.t()
    elif kind == "orthogonal":  # but for a ten thousandth
        u = normal(k, 1) / k**0.5
        a, b = a - (a @ u) @ u.t() / (u.t() @ u) + 1e-4 * normal(m, k), u @ normal(1, n)
    elif kind == "blocks cancel" and k > 1:
        half, rows, columns = k // 2, -(-m // 3), -(-n // 2)
        a[:rows, half : 2 * half] = -a[:rows, :half] + 1e-3 * normal(rows, half)
        b[half : 2 * half, :columns] = b[:half, :columns]
    elif kind == "one bad row" and k > 1:
        half, i = k // 2, int(torch.randint(m, (1,), generator=g))
        b[half : 2 * half] = b[:half]
        a[i, half : 2 * half] = -a[i, :half] * (1 + 1e-3 * normal(half))
    return a.to(dtype), b.to(dtype)


def whole_error(y: Tensor, a: Tensor, b: Tensor) -> float:
    """The largest relative 2-norm of the error over every row and column, as the budget is defined."""
    want, y = a.double() @ b.double(), y.double()
    worst = 0.0
    for dim, left, right in ((1, a, b), (0, b.t(), a.t())):
        bound = left.double().norm(dim=1) * right.double().norm()
        size = torch.maximum(want.norm(dim=dim), data_statistics.FLOOR * bound)
        size = size.clamp_min(torch.finfo(torch.float64).tiny)
        worst = max(worst, float(((y - want).norm(dim=dim) / size).max()))
    return worst


def any_order(
    op: Any, key: Any, device: torch.device, rtol: float, seed: list[int]
) -> list[tuple[Any, Any]]:
    """Every candidate that could serve, in a random order instead of the fastest first, so that each form is met."""
    seed[0] += 1
    fit = [c for c in op.candidates.values() if c.id != EAGER and c.unfit(key) is None]
    random.Random(seed[0]).shuffle(fit)
    return [(c, c.configs(key)[0]) for c in fit] + [(op.candidates[EAGER], {})]


def drawn(index: int, seed: int) -> Drawn:
    """What a problem is, but for its values."""
    g = torch.Generator().manual_seed(seed * 1_000_003 + index)

    def pick(count: int) -> int:
        return int(torch.randint(count, (1,), generator=g))

    shape, kind, dtype = (
        SHAPES[pick(len(SHAPES))],
        KINDS[pick(len(KINDS))],
        DTYPES[pick(len(DTYPES))],
    )
    return Drawn(kind, shape, dtype, 10.0 ** -(1 + pick(7)), g)


def solve(index: int, seed: int, device: torch.device) -> Outcome:
    """Draw one problem, compute it within its budget, and see."""
    p = drawn(index, seed)
    a, b = (t.to(device) for t in operands(p.kind, p.shape, p.dtype, p.g))
    with (
        warnings.catch_warnings(record=True) as said,
        tensorlogic.precision("adaptive", rtol=p.rtol),
    ):
        warnings.simplefilter("always")
        y = tensorlogic.matmul(a, b)
    warned = any(issubclass(w.category, PrecisionWarning) for w in said)
    way = adaptive.LAST[-1] if adaptive.LAST else ""
    dtype = str(p.dtype).removeprefix("torch.")
    return Outcome(p.kind, p.shape, dtype, p.rtol, whole_error(y, a, b), warned, way)


def shares(count: int, seed: int, workers: int) -> list[list[int]]:
    """Problems for so many processes: those of one shape and dtype for the same one, in their order."""
    groups: dict[Any, list[int]] = {}
    for i in range(count):
        p = drawn(i, seed)
        groups.setdefault((p.shape, p.dtype), []).append(i)
    found: list[list[int]] = [[] for _ in range(max(1, min(workers, len(groups))))]
    for n, group in enumerate(sorted(groups.values(), key=len, reverse=True)):
        found[n % len(found)] += group
    return found


def serve(
    share: list[int], seed: int, device: str, fastest: bool, put: Callable[[Any], None]
) -> None:
    """Solve these problems, and hand out each."""
    if not fastest:
        adaptive.order = partial(any_order, seed=[seed])
    with tensorlogic.policy(tune="off"):
        for i in share:
            put(solve(i, seed, torch.device(device)))


def work(share: list[int], seed: int, device: str, fastest: bool, queue: Any) -> None:
    """The same in a process of its own; None at the end."""
    torch.set_num_threads(1)
    serve(share, seed, device, fastest, queue.put)
    queue.put(None)


def together(given: argparse.Namespace, keep: Callable[[Outcome], None], end: float) -> bool:
    """Every problem by several processes; False where the time was over before."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    running = [
        context.Process(target=work, args=(share, given.seed, given.device, given.fastest, queue))
        for share in shares(given.count, given.seed, given.workers)
    ]
    for process in running:
        process.start()
    left = len(running)
    try:
        while left and time.monotonic() < end:
            try:
                outcome = queue.get(timeout=1)
            except Empty:
                dead = [p.exitcode for p in running if p.exitcode]
                if dead:
                    raise RuntimeError(f"a worker ended with {dead[0]}") from None
                continue
            if outcome is None:
                left -= 1
            else:
                keep(outcome)
        return left == 0
    finally:
        for process in running:
            process.terminate()
            process.join()


def alone(given: argparse.Namespace, keep: Callable[[Outcome], None], end: float) -> bool:
    """Every problem in this process; False where the time was over before."""

    class Over(Exception):
        pass

    def put(outcome: Outcome) -> None:
        keep(outcome)
        if time.monotonic() > end:
            raise Over

    try:
        serve(list(range(given.count)), given.seed, given.device, given.fastest, put)
    except Over:
        return False
    return True


def summary(found: list[Outcome], given: argparse.Namespace, complete: bool) -> dict[str, Any]:
    """What is written down."""
    bad = [o for o in found if not o.good]
    ways = collections.Counter(o.way for o in found)
    return {
        "count": len(found), "asked": given.count, "complete": complete, "kept": sum(o.error <= o.rtol for o in found),
        "warned": sum(o.warned for o in found), "broken": len(bad), "ways": dict(ways.most_common()),
        "seed": given.seed, "device": given.device, "torch": torch.__version__,
        "broken_problems": [asdict(o) for o in bad],
    }  # fmt: skip


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fastest", action="store_true", help="try the fastest first, as calls do")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop then")
    parser.add_argument("--workers", type=int, help="processes: one on a CPU, 12 for a GPU")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.workers is None:
        given.workers = 1 if given.device == "cpu" else min(12, os.cpu_count() or 1)
    begin = time.monotonic()
    found: list[Outcome] = []

    def keep(outcome: Outcome) -> None:
        found.append(outcome)
        if not outcome.good:
            sys.stdout.write(f"{asdict(outcome)}\n")
        if len(found) % 50 == 0 or not outcome.good:
            sys.stdout.write(
                f"{len(found)} of {given.count} after {time.monotonic() - begin:.0f} s\n"
            )
            sys.stdout.flush()
            if given.json:
                given.json.write_text(json.dumps(summary(found, given, False), indent=1) + "\n")

    run = alone if given.workers == 1 else together
    complete = run(given, keep, begin + given.seconds)
    said = summary(found, given, complete) | {"seconds": round(time.monotonic() - begin, 1)}
    sys.stdout.write(json.dumps({k: v for k, v in said.items() if k != "broken_problems"}) + "\n")
    if given.json:
        given.json.write_text(json.dumps(said, indent=1) + "\n")
    return 1 if said["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
