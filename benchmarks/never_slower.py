"""Does a choice that nothing was measured for ever lose? Random calls against PyTorch's own, both timed in pairs.

    python benchmarks/never_slower.py [--seed 1] [--count 1000] [--seconds 200] [--json PATH]
    python benchmarks/never_slower.py --grid          products of 64 to 2048 in every layout, batched, by vectors

Lengths from 1 to 2048, float16, bfloat16 and float32, some operands strided, transposed, broadcast or in batches, on a CPU with an empty
store and `tune="off"`, so that cost models choose. A case loses where ours takes 3 % and 2 us more than the plain
PyTorch composition, twice. Prints the losers with what was chosen, and the geometric mean; exit code 1 where over a tenth lose.
In the grid halves are compared with PyTorch's own float32, too, of which they may take 1.15. Variables that limit the CPU
(`ONEDNN_MAX_CPU_ISA=AVX512_CORE TENSORLOGIC_NATIVE_ISA=avx512` for one without halves, `MKL_ENABLE_INSTRUCTIONS=AVX2` for MKL as on AMD) are kept with the result.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tensorlogic
from tensorlogic.bench.machine_info import limits
from tensorlogic.core import policy
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.plans.environment import environment

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LONGEST, ELEMENTS, WORK = 2048, 1 << 22, 1 << 31
LOSES, LEAST_US, ALLOWED = 1.03, 2.0, 0.1
OVER_F32 = 1.15  # that halves may take of PyTorch's float32
SLOW_S = 0.05  # PyTorch's call that is timed once
GRID, LAYOUTS = (64, 128, 256, 512, 1024, 2048), ("nn", "nt", "tn")
SMALL_US, SMALL_OVER = 5, 1.1
SHOWN = 12  # groups of small calls that take longer
Call = Callable[[], Any]
Case = tuple[
    str, torch.dtype, Call, Call, Call | None
]  # name, dtype, ours, PyTorch's, PyTorch's in float32


class Draw:
    """Random lengths and tensors of one case."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.rng, self.dtype = random.Random(seed), dtype

    def length(self, most: int = LONGEST) -> int:
        """Small ones as often as large ones; a third of them powers of two."""
        n = int(2 ** self.rng.uniform(0, math.log2(most)))
        return 1 << (n.bit_length() - 1) if self.rng.random() < 0.33 else n

    def tensor(self, *shape: int, layouts: bool = True) -> Tensor:
        """Contiguous three times in four, else transposed, with padded rows or with steps."""
        kind = self.rng.randrange(12) if layouts and len(shape) > 1 else 3
        if kind == 0:
            wide = torch.randn(*shape[:-2], shape[-1], shape[-2]).mT
        elif kind == 1:
            wide = torch.randn(*shape[:-1], shape[-1] + 8)[..., : shape[-1]]
        elif kind == 2:
            wide = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
        else:
            wide = torch.randn(shape)
        return wide.to(self.dtype)  # keeps the strides where they are dense

    def leading(self) -> tuple[int, ...]:
        """Leading dimensions: a batch in one case of four."""
        rows = self.length()
        return (self.length(8), rows) if self.rng.random() < 0.25 else (rows,)


def pointwise(ours: Any, eager: Any, operands: int) -> Callable[[Draw], tuple[Call, Call]]:
    """An element-wise op; a second operand of the same shape, one row, or one number."""

    def case(draw: Draw) -> tuple[Call, Call]:
        shape = (*draw.leading(), draw.length())
        tensors = [draw.tensor(*shape)]
        for _ in range(operands - 1):
            row = operands == 3 or draw.rng.random() < 0.25
            tensors.append(draw.tensor(*(shape[-1:] if row else shape)))
        return (lambda: ours(*tensors)), (lambda: eager(*tensors))

    return case


def reduction(ours: Any, eager: Any) -> Callable[[Draw], tuple[Call, Call]]:
    def case(draw: Draw) -> tuple[Call, Call]:
        x = draw.tensor(*draw.leading(), draw.length())
        dim: Any = draw.rng.choice((tuple(range(x.dim())), 0, x.dim() - 1))
        return (lambda: ours(x, dim)), (lambda: eager(x, dim))

    return case


def product(
    ours: Any, eager: Any, *wanted: str, batched: bool = True
) -> Callable[[Draw], tuple[Call, Call]]:
    """A product of x [.., K] with a weight [N, K], and what else the op takes."""

    def case(draw: Draw) -> tuple[Call, Call]:
        lead, n, k = draw.leading(), draw.length(), draw.length()
        lead = lead if batched else lead[-1:]
        made = {
            "x": lambda: draw.tensor(*lead, k),
            "weight": lambda: draw.tensor(n, k),
            "bias": lambda: draw.tensor(n),
            "residual": lambda: draw.tensor(*lead, n, layouts=False),
            "gamma": lambda: draw.tensor(k),
            "beta": lambda: draw.tensor(k),
            "mean": lambda: draw.tensor(n),
            "var": lambda: draw.tensor(n).abs() + 0.5,
        }
        tensors = [made[name]() for name in wanted]
        return (lambda: ours(*tensors)), (lambda: eager(*tensors))

    return case


def matmul(draw: Draw) -> tuple[Call, Call]:
    lead, n, k = draw.leading(), draw.length(), draw.length()
    b = draw.tensor(*lead[:-1], k, n) if draw.rng.random() < 0.5 else draw.tensor(k, n)
    a = draw.tensor(*lead, k)
    return (lambda: tensorlogic.matmul(a, b)), (lambda: torch.matmul(a, b))


def softmax(draw: Draw) -> tuple[Call, Call]:
    x = draw.tensor(*draw.leading(), draw.length())
    return (lambda: tensorlogic.softmax(x, -1)), (lambda: torch.softmax(x, -1))


def cross_entropy(draw: Draw) -> tuple[Call, Call]:
    rows, classes = draw.length(), draw.length()
    x, target = draw.tensor(rows, classes), torch.randint(classes, (rows,))
    return (
        lambda: tensorlogic.softmax_cross_entropy(x, target),
        lambda: F.cross_entropy(x, target),
    )


def scores(draw: Draw) -> tuple[Call, Call]:
    batch, length, depth = draw.length(8), draw.length(512), draw.length(128)
    q, k = draw.tensor(batch, length, depth), draw.tensor(batch, length, depth)
    return (
        lambda: tensorlogic.attention_scores(q, k, 0.125),
        lambda: torch.softmax(0.125 * (q @ k.mT), -1),
    )


def _batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> Tensor:
    return F.relu(F.batch_norm(F.linear(x, w, b), mean, var, gamma, beta))


tl = tensorlogic
CASES: dict[str, Callable[[Draw], tuple[Call, Call]]] = {
    "relu": pointwise(tl.relu, torch.relu, 1),
    "gelu": pointwise(tl.gelu, F.gelu, 1),
    "gelu_tanh": pointwise(
        lambda x: tl.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh"), 1
    ),
    "silu": pointwise(tl.silu, F.silu, 1),
    "add": pointwise(tl.add, torch.add, 2),
    "mul": pointwise(tl.mul, torch.mul, 2),
    "div": pointwise(tl.div, torch.div, 2),
    "add_relu": pointwise(tl.add_relu, lambda a, b: torch.relu(a + b), 2),
    "mul_relu": pointwise(tl.mul_relu, lambda a, b: torch.relu(a * b), 2),
    "affine": pointwise(tl.affine, lambda x, s, b: x * s + b, 3),
    "softmax": softmax,
    "sum": reduction(tl.sum, torch.sum),
    "mean": reduction(tl.mean, torch.mean),
    "max": reduction(tl.max, torch.amax),
    "matmul": matmul,
    "linear": product(tl.linear, F.linear, "x", "weight", "bias"),
    "linear_residual_relu": product(
        tl.linear_residual_relu,
        lambda x, w, b, r: torch.relu(F.linear(x, w, b) + r),
        *("x", "weight", "bias", "residual"),
    ),
    "gelu_linear": product(
        tl.gelu_linear,
        lambda x, w, b: F.linear(F.gelu(x, approximate="tanh"), w, b),
        *("x", "weight", "bias"),
    ),
    "layer_norm_linear": product(
        tl.layer_norm_linear,
        lambda x, g, b, w, c: F.linear(F.layer_norm(x, x.shape[-1:], g, b), w, c),
        *("x", "gamma", "beta", "weight", "bias"),
    ),
    "linear_batch_norm_relu": product(
        tl.linear_batch_norm_relu,
        _batch_norm,
        *("x", "weight", "bias", "mean", "var", "bias", "bias"),
        batched=False,
    ),
    "softmax_cross_entropy": cross_entropy,
    "attention_scores": scores,
}


def drawn(seed: int, count: int, only: list[str]) -> Iterator[Case]:
    """Random calls of each op in turn."""
    for i in range(count):
        name, dtype = only[i % len(only)], DTYPES[i // len(only) % 3]
        draw = Draw(seed * 1_000_003 + i, dtype)
        torch.manual_seed(i)
        ours, eager = CASES[name](draw)
        if small(eager):
            yield name, dtype, ours, eager, None


def grid() -> Iterator[Case]:
    """Square products of every layout, as a matmul and as a linear, four in a batch, 16 rows, a row and a column of one."""
    for n in GRID:
        shapes = [(layout, (n, n), (n, n)) for layout in LAYOUTS]
        shapes += [("batch nn", (4, n, n), (4, n, n)), ("batch nt", (4, n, n), (4, n, n))]
        shapes += [
            ("row nn", (1, n), (n, n)),
            ("row nt", (1, n), (n, n)),
            ("column nn", (n, n), (n, 1)),
        ]
        shapes += [("few nn", (16, n), (n, n)), ("few nt", (16, n), (n, n))]
        for (layout, left, right), dtype in itertools.product(shapes, DTYPES):
            if math.prod(left) * right[-1] > WORK or (n == GRID[-1] and layout.startswith("batch")):
                continue
            a, b = torch.randn(left), torch.randn(right) * n**-0.5
            a = a.mT.contiguous().mT if layout.endswith("tn") else a
            b = b.mT.contiguous().mT if layout.endswith("nt") else b
            yield _one("matmul", layout, a, b, dtype)
            if layout in ("nt", "row nt", "few nt"):
                yield _one("linear", layout, a, b.mT, dtype)


def _one(op: str, layout: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Case:
    ours, eager = {"matmul": (tensorlogic.matmul, torch.matmul), "linear": (tl.linear, F.linear)}[
        op
    ]
    x, y = a.to(dtype), b.to(dtype)
    wide = None if dtype == torch.float32 else (lambda: eager(a, b))
    return f"{op} {layout}", dtype, (lambda: ours(x, y)), (lambda: eager(x, y)), wide


def pair(ours: Call, eager: Call, rounds: int) -> tuple[float, float]:
    """Microseconds of both: calls in a row of about 200 us, in turns; the lower quartile of the rounds."""

    def timed(call: Call, calls: int) -> float:
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return (time.perf_counter_ns() - begin) / calls / 1e3

    for call in (ours, eager, ours, eager):
        call()
    counts = {c: max(1, min(200, int(200 / max(timed(c, 1), 0.1)))) for c in (ours, eager)}
    times: dict[Call, list[float]] = {ours: [], eager: []}
    for r in range(rounds):
        for call in (ours, eager) if r % 2 else (eager, ours):
            times[call].append(timed(call, counts[call]))
    first, second = (sorted(times[c])[rounds // 4] for c in (ours, eager))
    return first, second


def chosen(call: Call) -> str:
    """What the first choice of a call was."""
    names: list[str] = []
    usual = dispatch_selector.choose

    def noted(*args: Any, **kwargs: Any) -> Any:
        choice = usual(*args, **kwargs)
        names.append(f"{choice.candidate.id} {dict(choice.config) or ''}".strip())
        return choice

    dispatch_selector.choose = noted
    policy.forget_entries()
    try:
        call()
    finally:
        dispatch_selector.choose = usual
    return ", ".join(names)


def small(tensors: Call) -> bool:
    """Whether the case fits: its largest tensor, and its multiply-adds."""
    held = [c.cell_contents for c in tensors.__closure__ or ()]
    flat = [t for h in held for t in (h if isinstance(h, list) else [h]) if isinstance(t, Tensor)]
    sizes = [t.numel() for t in flat]
    work = sizes[0] * (flat[1].shape[0] if len(flat) > 1 and flat[1].dim() > 1 else 1)
    return max(sizes) <= ELEMENTS and work <= WORK


def row(
    name: str, dtype: torch.dtype, ours: Call, eager: Call, wide: Call | None
) -> dict[str, Any]:
    """One case timed, again where it lost, and what was chosen where it did or took long for a small call."""
    if once(eager) > SLOW_S:  # halves without hardware
        a, b = pair(ours, ours, 8)[0], once(eager) * 1e6
    else:
        a, b = pair(ours, eager, 8)
        if a > b * LOSES and a - b > LEAST_US:
            a, b = pair(ours, eager, 24)
    over = 0.0
    for rounds in (8, 24):
        if wide is not None and (over == 0.0 or over > OVER_F32):
            half, single = pair(ours, wide, rounds)
            over = half / single
    held = [c.cell_contents for c in eager.__closure__ or ()]
    flat = [t for h in held for t in (h if isinstance(h, list) else [h])]
    shapes = " ".join(
        f"{tuple(t.shape)}{'' if t.is_contiguous() else '*'}" for t in flat if isinstance(t, Tensor)
    )
    lost = (a > b * LOSES and a - b > LEAST_US) or over > OVER_F32
    return {
        "op": name,
        "dtype": str(dtype).removeprefix("torch."),
        "shapes": shapes,
        "ours_us": round(a, 2),
        "torch_us": round(b, 2),
        "over_f32": round(over, 3),
        "lost": lost,
        "chosen": chosen(ours) if lost or (b < SMALL_US and a > SMALL_OVER * b) else None,
    }


def once(call: Call) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> int:
    """Draw, time, show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ["TENSORLOGIC_CACHE_DIR"] = tempfile.mkdtemp()
    end, rows = time.monotonic() + given.seconds, []
    torch.set_grad_enabled(False)
    cases = grid() if given.grid else drawn(given.seed, given.count, given.only)
    with tensorlogic.policy(tune="off"):
        for case in cases:
            rows.append(row(*case))
            if time.monotonic() > end:
                break
    lost_rows = [r for r in rows if r["lost"]]
    for r in sorted(lost_rows, key=lambda r: r["torch_us"] / r["ours_us"]):
        print(
            f"{r['ours_us'] / r['torch_us']:6.2f} {r['over_f32'] or '':5}  {r['op']:<24}{r['dtype']:<9} {r['ours_us']:9.1f} us, PyTorch {r['torch_us']:9.1f}"
            f"  {r['chosen']}  {r['shapes']}"
        )
    mean = statistics.geometric_mean(r["ours_us"] / r["torch_us"] for r in rows)
    ours_by = [r for r in lost_rows if r["chosen"] != "torch.eager"]
    little = [r for r in rows if r["torch_us"] < SMALL_US]
    slow = [r for r in little if r["ours_us"] > SMALL_OVER * r["torch_us"]]
    over = len(slow)
    groups: dict[str, list[float]] = {}
    for r in slow:
        name = f"{r['op']} {r['dtype']} by {r['chosen']}"
        groups.setdefault(name, []).append(r["ours_us"] - r["torch_us"])
    for name, by in sorted(groups.items(), key=lambda g: -len(g[1]))[:SHOWN]:
        print(f"{len(by):4d} small calls of {name}: {statistics.median(by):.1f} us over PyTorch's")
    print(
        f"{len(rows)} cases: {len(lost_rows)} lose ({len(ours_by)} by a choice of ours), geometric mean {mean:.3f}; of "
        f"{len(little)} that take PyTorch less than {SMALL_US} us, {over} take ours over 1.1 times as long"
    )
    if given.json:
        given.json.write_text(
            json.dumps(
                {
                    "environment": environment(torch.device("cpu")).to_json(),
                    "date": datetime.date.today().isoformat(),
                    "limited to": limits(),
                    "seed": None if given.grid else given.seed,
                    "cases": len(rows),
                    "lost": len(lost_rows),
                    "lost_by_choice": len(ours_by),
                    "geometric_mean": mean,
                    "small": len(little),
                    "small_over_1.1": over,
                    "losers": lost_rows,
                },
                indent=1,
            )
            + "\n"
        )
    return 1 if len(lost_rows) > ALLOWED * len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
