"""Measures a grid of sizes on this GPU and writes the plans that are shipped for its model.

python benchmarks/device/ship.py tensorlogic/shipped/nvidia-h200.json [--seconds 150] [--fresh] [--part 1/4] [--only OP ...] [--merge FILE ...]

The grid is none of the benchmark's or of a model's: sizes between are served by the nearest plan. Squares, few rows and many,
recorded (training) calls, rows of scores and losses, elements: in float16 and bfloat16, all in turn, so that whatever
time there is covers each of them. Stops after `--seconds`, keeping what was measured. Plans that are shipped already and cover
today's candidates are kept as they are, unless `--fresh` is given; those of changed kernels go.
Several GPUs of one model may measure a part each, side by side; `--seconds 0 --merge` puts their files together.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["TENSORLOGIC_CACHE_DIR"] = tempfile.mkdtemp(prefix="tensorlogic-ship-")

import torch

import tensorlogic
from tensorlogic import compiling, plans, policies, registry, stores, tuning, turns
from tensorlogic.op import EAGER, OPS
from tensorlogic.plans import Plan, environment

SQUARES = (384, 1536, 96, 768, 3072, 6144)
ROWS = (
    (4, 1024),
    (128, 5120),
    (32, 1024),
    (512, 1024),
    (4, 5120),
    (128, 1024),
    (2048, 1024),
    (32, 5120),
    (512, 5120),
)
AHEAD = 24  # calls whose kernels compile while one is measured
RECORDED = (
    tensorlogic.softmax_cross_entropy,
    tensorlogic.softmax,
    tensorlogic.gelu,
    tensorlogic.mul_relu,
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
    for rows, columns in ((256, 384), (3000, 1000), (3000, 30000), (1500, 50000), (6000, 100000)):
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


def groups(dtype: torch.dtype) -> Iterator[Iterator[Call]]:
    """What is shipped in one dtype, by kind, the likeliest first in each."""
    yield (call for n in SQUARES for call in products(n, n, n, dtype))
    yield (call for m, k in ROWS for n in (3 * k, k // 4) for call in products(m, k, n, dtype))
    yield (
        (fn, (args[0].requires_grad_(), *args[1:]))
        for n in SQUARES[:-1]
        for fn, args in products(n, n, n, dtype)
    )
    yield others(dtype)
    yield (
        (fn, (args[0].requires_grad_(), *args[1:])) for fn, args in others(dtype) if fn in RECORDED
    )


def calls() -> Iterator[Call]:
    """Everything that is shipped, one of each kind in turn; float16 twice as often as bfloat16."""
    f16, bf16 = (list(groups(dtype)) for dtype in (torch.float16, torch.bfloat16))
    waiting = [group for pair in zip(f16, f16, bf16, strict=True) for group in pair]
    while waiting:
        for group in list(waiting):
            call = next(group, None)
            if call is None:
                waiting.remove(group)
            else:
                yield call


def ahead(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Start to compile what measuring this call and its backward pass will need."""
    met: list[tuple[Any, ...]] = []
    watching = replace(
        policies.current(), tune="off", force=EAGER, observer=lambda *seen: met.append(seen), entries={}
    )  # fmt: skip
    with policies.use(watching):
        out = fn(*args)
        if out.requires_grad:
            torch.autograd.grad(out, args[0], torch.ones_like(out))
    for op, key, device in met:
        if not stores.complete(op, stores.current(device).get(key), key):
            compiling.submit(turns.kernels(op, key, device))


def current(plan: Plan) -> bool:
    """True when both winners are today's."""
    return plan.valid({c.id: c.source for c in OPS[plan.key.op].candidates.values()})


def main() -> int:
    """Measure until the time is over and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--fresh", action="store_true", help="keep nothing of what is shipped")
    parser.add_argument(
        "--part", default="1/1", help="K/N: every N-th call of the grid, from the K-th"
    )
    parser.add_argument("--only", nargs="*", default=[], help="calls of these public functions")
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="*",
        default=[],
        help="plans of these files, too: of one key the latest",
    )
    given = parser.parse_args()
    if given.fresh:
        plans.SHIPPED = Path(os.environ["TENSORLOGIC_CACHE_DIR"])  # where nothing is
    begin, done, device = time.perf_counter(), 0, torch.device("cuda", torch.cuda.current_device())
    waiting: collections.deque[Call] = collections.deque()
    part, parts = map(int, given.part.split("/"))
    asked = (c for c in calls() if not given.only or c[0].__name__ in given.only)
    coming = itertools.islice(asked, part - 1, None, parts)
    while time.perf_counter() - begin < given.seconds:
        for fn, args in itertools.islice(coming, AHEAD - len(waiting)):
            ahead(fn, args)
            waiting.append((fn, args))
        if not waiting:
            break
        fn, args = waiting.popleft()
        tuning.whole(fn, *args)
        done += 1
    registry.ready(device.type)  # who was chosen is known where nothing was called, too
    found = [p for p in stores.current(device).plans(shipped=True) if current(p)]
    for path in given.merge:
        found += [p for p in plans.load_lockfile(path).plans() if current(p)]
    found = list({p.key.text: p for p in sorted(found, key=lambda p: p.measured)}.values())
    given.path.parent.mkdir(parents=True, exist_ok=True)
    plans.export_lockfile(given.path, found, [environment(device)])
    kinds = collections.Counter((p.key.direction, p.key.tensors[0].dtype) for p in found if p.key.tensors[0])  # fmt: skip
    for (direction, dtype), count in sorted(kinds.items()):
        print(f"{count:5d} {direction} {dtype}")
    print(
        f"{done} calls, {len(found)} plans in {time.perf_counter() - begin:.0f} s -> {given.path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
