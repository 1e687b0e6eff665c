"""Measures a grid of sizes on this GPU and writes the plans that are shipped for its model.

python benchmarks/device/ship.py tensorlogic/plans/shipped/nvidia-h200.json [--seconds 150] [--fresh] [--part 1/4] [--only OP ...] [--merge FILE ...]

The grid is none of the benchmark's or of a model's: sizes between are served by the nearest plan. Squares, few rows and many,
recorded (training) calls, rows of losses, scores, elements, reductions: in float16, whose plans serve bfloat16 too, and what is
not bound by products in float32; all in turn, so that whatever time there is covers each of them. Stops after `--seconds`, keeping what was measured. Plans that are shipped already and cover
today's candidates are kept as they are, unless `--fresh` is given; those of changed kernels go.
Several GPUs of one model may measure a part each, side by side; `--seconds 0 --merge` puts their files together.
"""

from __future__ import annotations

import argparse
import collections
import inspect
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
from tensorlogic.autotune import config_queue, measure_key, tune
from tensorlogic.core import policy
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading
from tensorlogic.plans import lockfile, open_stores, store
from tensorlogic.plans.environment import environment
from tensorlogic.plans.plan import Plan
from tensorlogic.system import compile_pool

SQUARES = (384, 1536, 96, 768, 3072, 6144)
WIDTHS = (384, 1536, 6144)  # of x and of outputs, all by all
ROWS = (384, 6, 48, 3072, 1)
WORK = 1.5e11  # multiply-adds of a product at most
AHEAD = 24  # calls whose kernels compile while one is measured
CONSTANT = ("running_mean", "running_var", "mask")
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
    if m > 1:
        yield tensorlogic.linear_batch_norm_relu, (x, w, b, mean, var, b, b, 1e-5, True)
    yield tensorlogic.dropout_linear, (x, w, b, 0.1, True)


def odd(dtype: torch.dtype) -> Iterator[Call]:
    """Products whose lines begin at odd places."""
    for m, k, n in (
        (384, 365, 768),
        (384, 768, 1003),
        (3000, 1501, 2999),
        (24, 301, 1536),
        (768, 768, 30001),
        (40, 1003, 997),
    ):
        for fn, args in products(m, k, n, dtype):
            if fn is not tensorlogic.linear or args[3:] in ((None, None), (None, "relu")):
                yield fn, args


def rows(dtype: torch.dtype) -> Iterator[Call]:
    """Losses and softmax, by how far a row's length divides."""
    for columns in (384, 30000, 120000, 1000, 50001, 333, 12, 3003, 12001, 100):
        for count in (3000, 200, 12, 60000):
            if count * columns > 4e8:
                continue
            target = torch.randint(columns, (count,), device="cuda")
            yield tensorlogic.softmax_cross_entropy, (normal(dtype, count, columns), target)
            yield tensorlogic.softmax, (normal(dtype, count, columns), -1)
            if columns in (30000, 120000, 1000, 50001):  # and with smoothed labels
                x = normal(dtype, count, columns)
                yield tensorlogic.softmax_cross_entropy, (x, target, -100, 0.1)
    for shape, dim in (
        ((384, 768), 0),
        ((3000, 333), 0),
        ((12, 200, 768), 1),
        ((48, 30000), 0),
        ((30000, 48), 0),
        ((3, 600000), 1),
    ):
        yield tensorlogic.softmax, (normal(dtype, *shape), dim)


def scores(dtype: torch.dtype) -> Iterator[Call]:
    """Scores alone, causal and masked."""
    for heads, s, t, d in ((6, 800, 480, 96), (16, 72, 240, 96), (4, 700, 4096, 80), (16, 1, 3000, 128), (16, 16, 1536, 96), (8, 1500, 600, 128), (12, 300, 1200, 64)):  # fmt: skip
        q, k = normal(dtype, 2, heads, s, d), normal(dtype, 2, heads, t, d)
        for mask in (None, torch.rand(2, 1, 1, t, device="cuda") > 0.1):
            yield tensorlogic.attention_scores, (q, k, d**-0.5, mask)
    sizes = ((2, 1200, 80), (12, 400, 80), (10, 232, 96), (4, 1600, 96), (8, 192, 64), (12, 768, 64), (12, 768, 128), (8, 3072, 64), (4, 768, 32), (4, 384, 256), (8, 203, 64), (6, 700, 96), (6, 600, 192))  # fmt: skip
    for heads, s, d in sizes:
        q, k = normal(dtype, 2, heads, s, d), normal(dtype, 2, heads, s, d)
        seen = torch.rand(2, 1, 1, s, device="cuda") > 0.1
        for mask, causal in (
            (None, False),
            (None, True),
            (seen, False),
            (normal(dtype, s, s), False),
        ):
            yield tensorlogic.attention_scores, (q, k, d**-0.5, mask, causal)


def elements(dtype: torch.dtype) -> Iterator[Call]:
    """Element-wise ops on one line and beside a row."""
    for count in (1 << 12, 1 << 16, 1 << 19, 1 << 22, 1 << 25):
        a, b = normal(dtype, count), normal(dtype, count)
        for fn in (tensorlogic.add, tensorlogic.mul, tensorlogic.add_relu, tensorlogic.mul_relu, tensorlogic.sub, tensorlogic.div):  # fmt: skip
            yield fn, (a, b)
        for fn in (tensorlogic.relu, tensorlogic.gelu, tensorlogic.silu):
            yield fn, (a,)
        yield tensorlogic.affine, (a, b, a)
        yield from beside(a.view(-1, 256))


def beside(a: torch.Tensor) -> Iterator[Call]:
    """Element-wise ops beside a row, a column and a number."""
    row, column = normal(a.dtype, a.shape[1]), normal(a.dtype, a.shape[0], 1)
    yield tensorlogic.affine, (a, row, row)
    for fn in (tensorlogic.add, tensorlogic.mul, tensorlogic.add_relu, tensorlogic.mul_relu, tensorlogic.sub, tensorlogic.div):  # fmt: skip
        yield fn, (a, row)
    for fn in (tensorlogic.mul, tensorlogic.add_relu, tensorlogic.div):
        yield fn, (a, column)
        yield fn, (a, normal(a.dtype))


def wide(dtype: torch.dtype) -> Iterator[Call]:
    """Likewise beside rows of a few columns, of many, and of odd numbers of them."""
    for rows, columns in ((600, 12000), (24000, 24), (12, 6000), (2500, 3000), (200, 333), (24, 1501), (30000, 19)):  # fmt: skip
        yield from beside(normal(dtype, rows, columns))


def strided(dtype: torch.dtype) -> Iterator[Call]:
    """Element-wise ops on rows with gaps between them and on operands that lie across."""
    for rows, columns in ((6000, 3000), (1536, 384), (48, 333), (50, 200001), (12, 30000), (24, 384)):  # fmt: skip
        a = normal(dtype, rows, columns)
        padded, other = (normal(dtype, rows, columns + 8)[:, :columns] for _ in range(2))
        turned = normal(dtype, columns, rows).t()
        steps = normal(dtype, rows, 2 * columns)[:, ::2]
        for fn in (tensorlogic.add, tensorlogic.mul, tensorlogic.add_relu, tensorlogic.div):
            yield fn, (turned, a)
            yield fn, (padded, a)
            yield fn, (steps, a)
        for fn in (tensorlogic.gelu, tensorlogic.relu):
            yield fn, (padded,)
            yield fn, (steps,)
        yield tensorlogic.mul_relu, (padded, other)
        yield tensorlogic.affine, (turned, a, a)


def reductions(dtype: torch.dtype) -> Iterator[Call]:
    """Sums, means and extremes over everything, rows, columns and what lies between."""
    shapes: tuple[tuple[tuple[int, ...], int | None], ...] = (
        ((30000, 107), 1), ((100000, 384), 1), ((1 << 12,), None), ((1 << 19,), None), ((1 << 24,), None), (((1 << 24) + 1,), None), ((3000, 768), 1), ((24, 3072), 1), ((20000, 48), 1), ((400, 30000), 1),
        ((3000, 333), 1), ((3000, 5001), 1), ((200, 50001), 1), ((12, 50001), 1), ((3000, 768), 0), ((24, 3072), 0), ((24, 200, 768), 1), ((12, 4, 30000), 1), ((200000, 48), 0),
        ((100000, 17), 0), ((300000, 5), 0), ((60000, 777), 0), ((36, 6309), 0), ((32, 2600, 10), 1),
    )  # fmt: skip
    for shape, dim in shapes:
        x = normal(dtype, *shape)
        for fn in (tensorlogic.sum, tensorlogic.mean, tensorlogic.max, tensorlogic.min):
            yield fn, (x, dim)
            if len(shape) == 2 and x.numel() > 1 << 20:
                yield fn, (normal(dtype, *shape[::-1]).t(), dim)


def recorded(calls: Iterator[Call]) -> Iterator[Call]:
    """The calls with gradients of all that is learned or handed on: not of statistics and masks."""
    for fn, args in calls:
        for name, a in zip(inspect.signature(fn).parameters, args, strict=False):
            if isinstance(a, torch.Tensor) and name not in CONSTANT and a.is_floating_point():
                a.requires_grad_()
        yield fn, args


def groups() -> Iterator[Iterator[Call]]:
    """What is shipped, by kind, the likeliest first in each; bfloat16 is kin of float16, and measured where float32 is not."""
    f16, f32 = torch.float16, torch.float32
    yield (call for n in SQUARES for call in products(n, n, n, f16))
    grid = [(m, k, n) for m in ROWS for k in WIDTHS for n in WIDTHS if m * k * n <= WORK and (m, n) != (k, k)]  # fmt: skip
    yield (call for m, k, n in grid for call in products(m, k, n, f16))
    yield recorded(call for n in SQUARES[:-1] for call in products(n, n, n, f16))
    yield recorded(
        call
        for m, k, n in ((3072, 384, 1536), (48, 1536, 384), (3072, 1536, 384), (48, 384, 1536))
        for call in products(m, k, n, f16)
    )
    yield (call for n in SQUARES[:4] for call in products(n, n, n, torch.bfloat16))
    yield (
        call
        for m, k, n in (
            (384, 384, 384),
            (48, 1536, 384),
            (3072, 384, 1536),
            (1, 1536, 1536),
            (6, 1536, 30000),
            (80, 360, 6144),
        )
        for call in products(m, k, n, f32)
    )
    yield (call for m, n in ((1500, 4000), (6144, 384)) for call in products(m, 96, n, f16))
    yield recorded(products(1500, 96, 4000, f16))
    yield recorded(
        call for m, k, n in ((384, 384, 384), (48, 1536, 1003)) for call in products(m, k, n, f32)
    )
    yield odd(f16)
    yield recorded(odd(f16))
    yield scores(f16)
    for dtype in (f16, f32):
        for some in (rows, elements, wide, strided, reductions):
            yield some(dtype)
            yield recorded(some(dtype))
    yield scores(f32)
    yield recorded(scores(f16))


def calls() -> Iterator[Call]:
    """Everything that is shipped, one of each kind in turn, of the products' grid three."""
    waiting = list(groups())
    grid = waiting[1]
    while waiting:
        for group in list(waiting):
            for _ in range(3 if group is grid else 1):
                call = next(group, None)
                if call is not None:
                    yield call
                elif group in waiting:
                    waiting.remove(group)


def ahead(fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Start to compile what measuring this call and its backward pass will need; whether there is anything to measure."""
    met: list[tuple[Any, ...]] = []
    watching = replace(
        policy.current(), tune="off", force=EAGER, observer=lambda *seen: met.append(seen), entries={}
    )  # fmt: skip
    with policy.use(watching):
        out = fn(*args)
        if out.requires_grad:
            leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
            torch.autograd.grad(out, leaves, torch.ones_like(out))
    left = [
        (its, k, device)
        for op, key, device in met
        for its, k in ((op, key), *op.twins(key))
        if not measure_key.complete(its, open_stores.current(device).get(k), k)
    ]
    for op, key, device in left:
        compile_pool.submit(config_queue.kernels(op, key, device))
    return bool(left)


def current(plan: Plan) -> bool:
    """True when both winners are today's."""
    return plan.valid({c.id: c.source for c in OPS[plan.key.op].candidates.values()})


@compile_pool.awaited()  # kernels of what comes next are compiled meanwhile
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
        store.SHIPPED = Path(os.environ["TENSORLOGIC_CACHE_DIR"])  # where nothing is
    begin, done, device = time.perf_counter(), 0, torch.device("cuda", torch.cuda.current_device())
    known, unmeasured = 0, list[str]()
    waiting: collections.deque[Call] = collections.deque()
    part, parts = map(int, given.part.split("/"))
    asked = (c for c in calls() if not given.only or c[0].__name__ in given.only)
    coming = itertools.islice(asked, part - 1, None, parts)
    while time.perf_counter() - begin < given.seconds:
        for fn, args in coming:
            if ahead(fn, args):
                waiting.append((fn, args))
            else:
                known += 1
            if len(waiting) >= AHEAD or time.perf_counter() - begin > given.seconds:
                break
        if not waiting:
            break
        fn, args = waiting.popleft()
        learned = tune.whole(fn, *args)
        done += 1
        unmeasured += learned.unmeasured
    candidate_loading.ready(device.type)  # who was chosen is known where nothing was called, too
    found = [p for p in open_stores.current(device).plans(shipped=True) if current(p)]
    for path in given.merge:
        found += [p for p in lockfile.load_lockfile(path).plans() if current(p)]
    found = list({p.key.text: p for p in sorted(found, key=lambda p: p.measured)}.values())
    given.path.parent.mkdir(parents=True, exist_ok=True)
    lockfile.export_lockfile(given.path, found, [environment(device)])
    kinds = collections.Counter((p.key.direction, p.key.tensors[0].dtype) for p in found if p.key.tensors[0])  # fmt: skip
    for (direction, dtype), count in sorted(kinds.items()):
        print(f"{count:5d} {direction} {dtype}")
    print(
        f"{done} calls measured, {known} known before, {len(found)} plans in {time.perf_counter() - begin:.0f} s -> {given.path}"
    )
    for text in dict.fromkeys(unmeasured):
        print(f"not measured: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
