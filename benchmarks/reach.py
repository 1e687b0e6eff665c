"""What a CPU reaches of the goals that no other script measures: products of 512 to 2048 in every layout, a vector by a matrix, fresh outputs, small calls.

    python benchmarks/reach.py [--json FILE] [--only products vector fresh small]

Public functions as a program calls them, beside PyTorch's own, in shuffled turns; each row says what is compared and its
goal. A vector by a matrix is compared with the rate of a copy measured in the same run. Products of up to 1024 in more layouts:
`never_slower.py --grid`; fused passes: `passes.py`; a Transformer: `enable.py`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tensorlogic
from tensorlogic.bench.machine_info import limits
from tensorlogic.plans.environment import environment

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SECONDS, ROUNDS, LEAST = 0.5, 400, 7
SIZES, LAYOUTS = (512, 1024, 2048), ("nn", "nt", "tn")
MATRIX, COPIED_MIB, FRESH_MIB = 4096, 128, (64, 128, 256, 512)
SMALL, CALLS = (64, 1024, 4096), 200
Call = Callable[[], Any]


class Row(NamedTuple):
    """One measured goal: `value` of `unit`, at most or at least `goal`."""

    what: str
    value: float
    unit: str
    goal: float
    least: bool
    us: dict[str, float]

    @property
    def missed(self) -> bool:
        return self.value < self.goal if self.least else self.value > self.goal

    def __str__(self) -> str:
        times = ", ".join(f"{name} {us:.4g}" for name, us in self.us.items())
        sign = "at least" if self.least else "at most"
        return f"{'MISS' if self.missed else 'ok':5}{self.what:52}{self.value:8.3f} {self.unit:10}{sign} {self.goal:<6g} us: {times}"


def timed(ways: dict[str, Call], calls: int = 1) -> dict[str, float]:
    """Median microseconds of each, `calls` in a row at a time, in shuffled turns."""
    for way in ways.values():
        way()
        way()
    samples: dict[str, list[float]] = {name: [] for name in ways}
    begin = time.perf_counter()
    for taken in range(ROUNDS):
        if taken >= LEAST and time.perf_counter() - begin > SECONDS * len(ways):
            break
        for name, way in random.sample(list(ways.items()), len(ways)):
            start = time.perf_counter()
            for _ in range(calls):
                way()
            samples[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def once(call: Call) -> float:
    """Microseconds of one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def right(ours: Tensor, exact: Tensor) -> None:
    """Nothing is timed before it is right."""
    error = ((ours.double() - exact).norm() / exact.norm()).item()
    if not error < 4 * torch.finfo(ours.dtype).eps:
        raise SystemExit(f"reach: relative error {error:.1e} of {tuple(ours.shape)} {ours.dtype}")


def products() -> Iterator[Row]:
    """Halves beside PyTorch's float32, float32 `linear` beside PyTorch's, and PyTorch's own product of halves once."""
    for n in SIZES:
        for layout in LAYOUTS:
            a, b = torch.randn(n, n), torch.randn(n, n) * n**-0.5
            a = a.mT.contiguous().mT if layout == "tn" else a
            b = b.mT.contiguous().mT if layout == "nt" else b
            for dtype in (F16, F32):
                x, y = a.to(dtype), b.to(dtype)
                exact = x.double() @ y.double()
                w = y.mT
                right(tensorlogic.matmul(x, y), exact)
                right(tensorlogic.linear(x, w), exact)
                us = timed(
                    {
                        "matmul": partial(tensorlogic.matmul, x, y),
                        "linear": partial(tensorlogic.linear, x, w),
                        "torch f32": partial(torch.matmul, a, b),
                        "torch f32 linear": partial(F.linear, a, b.mT),
                    }
                )
                name = str(dtype).removeprefix("torch.")
                if dtype is F16:
                    for op, peer in (("matmul", "torch f32"), ("linear", "torch f32 linear")):
                        yield Row(f"{op} {name} {n} {layout}, over PyTorch's float32", us[op] / us[peer], "x its time", 1.15, False, us)  # fmt: skip
                else:
                    yield Row(f"matmul {name} {n} {layout}, over PyTorch's", us["matmul"] / us["torch f32"], "x its time", 1.0, False, us)  # fmt: skip
                    goal = 2.0 if layout == "nt" else 1.0
                    yield Row(f"linear {name} {n} {layout}, faster than PyTorch", us["torch f32 linear"] / us["linear"], "times", goal, True, us)  # fmt: skip
    x, y = torch.randn(1024, 1024).half(), torch.randn(1024, 1024).half()
    us = {"ours": timed({"ours": lambda: tensorlogic.matmul(x, y)})["ours"], "torch": once(lambda: x @ y)}  # fmt: skip
    yield Row("matmul f16 1024 nn, faster than PyTorch's f16", us["torch"] / us["ours"], "times", 100, True, us)  # fmt: skip


def vector() -> Iterator[Row]:
    """One row of halves by a matrix of 32 MiB, beside a copy's rate (bytes read and written)."""
    source = torch.ones(COPIED_MIB << 18)
    target = torch.empty_like(source)
    x, w = torch.randn(MATRIX).half(), (torch.randn(MATRIX, MATRIX) * MATRIX**-0.5).half()
    turned = w.mT.contiguous()
    exact = w.double() @ x.double()
    ways: dict[str, Call] = {
        "linear [N, K]": lambda: tensorlogic.linear(x[None], w),
        "matmul [N, K]": lambda: tensorlogic.matmul(x[None], w.mT),
        "matmul [K, N]": lambda: tensorlogic.matmul(x[None], turned),
        "matmul by a column": lambda: tensorlogic.matmul(w, x[:, None]),
    }
    for way in ways.values():
        right(way().reshape(-1), exact)
    us = timed({**ways, "copy": lambda: target.copy_(source)})
    copied = 2 * source.nbytes / us["copy"]
    for name in ways:
        rate = w.nbytes / us[name]
        yield Row(f"f16 {MATRIX} x {MATRIX}, {name}", rate / copied, "of a copy", 0.8, True, {name: us[name], "GB/s": rate / 1e3, "copy GB/s": copied / 1e3})  # fmt: skip


def _add_relu(x: Tensor) -> Tensor:
    return torch.relu(x + x)


def fresh() -> Iterator[Row]:
    """Outputs that are made anew at every call, beside writing into one that is there."""
    for mib in FRESH_MIB:
        x = torch.ones(mib << 18)
        out = torch.empty_like(x)
        us = timed(
            {
                "ours": partial(tensorlogic.add_relu, x, x),
                "reused": partial(torch.add, x, x, out=out),
                "torch": partial(_add_relu, x),
                "torch.add": partial(torch.add, x, x),
            }
        )
        yield Row(f"add_relu, fresh {mib} MiB, over torch.add(out=)", us["ours"] / us["reused"], "x its time", 1.15, False, us)  # fmt: skip
        yield Row(f"add_relu, fresh {mib} MiB, faster than PyTorch", us["torch"] / us["ours"], "times", 4.0, True, us)  # fmt: skip
        tensorlogic.pool.shrink_to_fit()


def small() -> Iterator[Row]:
    """Calls of at most 4,096 elements: microseconds over PyTorch's own."""
    for n, dtype in itertools.product(SMALL, (F32, F16, BF16, torch.float64)):
        for name, (ours, eager) in short(n, dtype).items():
            us = timed({"ours": ours, "torch": eager}, CALLS if n < SMALL[-1] else CALLS // 4)
            yield Row(f"{name} {str(dtype).removeprefix('torch.')} {n}, over PyTorch's call", us["ours"] - us["torch"], "us", 2.0, False, us)  # fmt: skip


def short(n: int, dtype: torch.dtype) -> dict[str, tuple[Call, Call]]:
    """Name -> ours and PyTorch's, of n elements."""
    side = math.isqrt(n)
    x, y = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    m, w = torch.randn(side, side).to(dtype), torch.randn(side, side).to(dtype)
    t = tensorlogic
    return {
        "relu": (lambda: t.relu(x), lambda: torch.relu(x)),
        "add": (lambda: t.add(x, y), lambda: torch.add(x, y)),
        "add_relu": (lambda: t.add_relu(x, y), lambda: torch.relu(x + y)),
        "gelu": (lambda: t.gelu(x), lambda: F.gelu(x)),
        "silu": (lambda: t.silu(x), lambda: F.silu(x)),
        "sum": (lambda: t.sum(x), lambda: torch.sum(x)),
        "max": (lambda: t.max(x), lambda: torch.amax(x, ())),
        "softmax": (lambda: t.softmax(m, -1), lambda: torch.softmax(m, -1)),
        "matmul": (lambda: t.matmul(m, w), lambda: m @ w),
        "linear": (lambda: t.linear(m, w), lambda: F.linear(m, w)),
    }


PARTS = {"products": products, "vector": vector, "fresh": fresh, "small": small}


def main() -> None:
    """Print the rows, and write them where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    given = parser.parse_args()
    rows: list[Row] = []
    torch.manual_seed(0)
    with torch.no_grad():
        for part in given.only:
            for row in PARTS[part]():
                rows.append(row)
                if part != "small" or row.value > 0.1:
                    print(row, flush=True)
    missed = [row for row in rows if row.missed]
    print(f"{len(rows)} rows, {len(missed)} missed")
    if given.json:
        about = environment(torch.device("cpu"))
        given.json.write_text(
            json.dumps(
                {
                    "machine": about.device,
                    "threads": about.threads,
                    "torch": about.torch,
                    "date": datetime.date.today().isoformat(),
                    "limited to": limits(),
                    "missed": len(missed),
                    "rows": [{**row._asdict(), "missed": row.missed} for row in rows],
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
