"""Measures a grid of sizes on this GPU and writes the plans that are shipped for its model.

python benchmarks/device/ship.py tensorlogic/shipped/nvidia-h200.json [--seconds 240]

The grid is none of the benchmark's or of a model's: sizes between are served by the nearest plan. Squares first, then rows
of few and of many tokens, in float16 and bfloat16; recorded (training) calls of the squares last. Stops after `--seconds`,
keeping what was measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["TENSORLOGIC_CACHE_DIR"] = tempfile.mkdtemp(prefix="tensorlogic-ship-")

import torch

import tensorlogic
from tensorlogic import compiling, stores, study
from tensorlogic.bench.rows import meet
from tensorlogic.plans import environment, export_lockfile

SQUARES = (
    (96, 96, 96),
    (384, 384, 384),
    (768, 768, 768),
    (1536, 1536, 1536),
    (3072, 3072, 3072),
    (6144, 6144, 6144),
)
ROWS = (
    (4, 1024),
    (32, 1024),
    (128, 1024),
    (512, 1024),
    (2048, 1024),
    (4, 5120),
    (32, 5120),
    (128, 5120),
    (512, 5120),
)
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal values on the GPU."""
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def products(m: int, k: int, n: int, dtype: torch.dtype) -> Iterator[Call]:
    """The linear family on x [m, k] and weight [n, k]."""
    x, w, b = normal(dtype, m, k), normal(dtype, n, k, scale=k**-0.5), normal(dtype, n)
    r, gamma, beta = normal(dtype, m, n), normal(dtype, k), normal(dtype, k)
    mean, var = normal(dtype, n), normal(dtype, n).abs() + 1
    yield tensorlogic.matmul, (x, w.t())
    yield tensorlogic.matmul, (x, w.t().contiguous())
    for activation in (None, "relu", "gelu_tanh", "silu"):
        yield tensorlogic.linear, (x, w, b, None, activation)
    yield tensorlogic.linear_residual_relu, (x, w, b, r)
    yield tensorlogic.linear, (x, w, b, r)
    yield tensorlogic.gelu_linear, (x, w, b)
    yield tensorlogic.layer_norm_linear, (x, gamma, beta, w, b, 1e-5)
    yield tensorlogic.linear_batch_norm_relu, (x, w, b, mean, var, b, b, 1e-5)
    yield tensorlogic.dropout_linear, (x, w, b, 0.1, True)


def others(dtype: torch.dtype) -> Iterator[Call]:
    """Rows, scores, element-wise ops and reductions."""
    for rows, columns in ((256, 384), (3000, 1000), (1500, 50000), (6000, 100000)):
        target = torch.randint(columns, (rows,), device="cuda")
        yield tensorlogic.softmax_cross_entropy, (normal(dtype, rows, columns), target)
        yield tensorlogic.softmax, (normal(dtype, rows, columns), -1)
    for heads, s, d in ((8, 192, 64), (12, 768, 64), (12, 768, 128), (8, 3072, 64)):
        q, k = normal(dtype, 2, heads, s, d), normal(dtype, 2, heads, s, d)
        for causal in (False, True):
            yield tensorlogic.attention_scores, (q, k, d**-0.5, None, causal)
    for count in (1 << 12, 1 << 16, 1 << 19, 1 << 22, 1 << 25):
        a, b = normal(dtype, count), normal(dtype, count)
        for fn in (tensorlogic.add, tensorlogic.mul, tensorlogic.add_relu, tensorlogic.mul_relu):
            yield fn, (a, b)
        for fn in (tensorlogic.relu, tensorlogic.gelu, tensorlogic.silu, tensorlogic.sum):
            yield fn, (a,)


def calls() -> Iterator[Call]:
    """Everything that is shipped, the likeliest first."""
    dtypes = (torch.float16, torch.bfloat16)
    for dtype in dtypes:
        for shape in SQUARES:
            yield from products(*shape, dtype)
    for dtype in dtypes:
        for m, width in ROWS:
            yield from products(m, width, 3 * width, dtype)
            yield from products(m, 3 * width, width, dtype)
        yield from others(dtype)
    for shape in SQUARES[:-1]:
        for fn, args in products(*shape, torch.float16):
            yield fn, (args[0].requires_grad_(), *args[1:])


def main() -> int:
    """Measure until the time is over and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    given = parser.parse_args()
    begin, done, device = time.perf_counter(), 0, torch.device("cuda", torch.cuda.current_device())
    ahead: list[Call] = []
    for fn, args in calls():  # kernels of the next few compile while one is measured
        ahead.append((fn, args))
        if not args[0].requires_grad:
            with torch.no_grad():
                for op, key, where in meet(fn, args):
                    compiling.submit(study.kernels(op, key, where))
        if len(ahead) < 8:
            continue
        fn, args = ahead.pop(0)
        tensorlogic.tune(fn, *args)
        done += 1
        if time.perf_counter() - begin > given.seconds:
            break
    else:
        for fn, args in ahead:
            tensorlogic.tune(fn, *args)
            done += 1
    plans = list(stores.current(device).plans())
    given.path.parent.mkdir(parents=True, exist_ok=True)
    export_lockfile(given.path, plans, [environment(device)])
    print(
        f"{done} calls, {len(plans)} plans in {time.perf_counter() - begin:.0f} s -> {given.path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
