"""Softmax of long rows and its gradient: every candidate that reads them once or twice, beside PyTorch and the bytes' own time.

python benchmarks/device/held_rows.py [--seconds 120] [--columns 333 1001 50257] [--rows 8] [--compile]

The outputs of candidates are compared with float64 on some rows first. Captured graphs, medians of nine rounds in turn. Kernels
compile in worker processes first. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from drawn_timing import Replayed

import tensorlogic
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS, Op
from tensorlogic.dispatch import candidate_loading
from tensorlogic.system import compile_pool

ROWS = {
    2: (33000, 50304, 80000, 120000, 155648),
    4: (17000, 30000, 50304, 77824),
}  # bytes an element -> columns
PAIRS = {2: (17000, 30000, 50304, 81920), 4: (8400, 17000, 30000, 40960)}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PEERS = ("PyTorch", "torch.compile")
LINES, ELEMENTS = 3000, 1 << 26  # rows at least, and elements of short ones
OURS = (
    "triton.held",
    "triton.groups",
    "triton.shares",
    "triton.rows",
    "triton.lines",
    "triton.parts",
)
FEW = 1 << 24  # bytes of an input, below which a graph has more calls
ROUNDS = 9
DEVICE = torch.device("cuda")
Met = tuple[Op, Key, tuple[Tensor, ...]]


def lines(columns: int) -> int:
    """How many rows, so that they fill more than the second-level cache."""
    return max(LINES, ELEMENTS // columns)


def problem(rows: int, columns: int, dtype: torch.dtype, backward: bool) -> Met:
    """The op, its key and the tensors of one call."""
    x = torch.randn(rows, columns, device=DEVICE).to(dtype)
    if not backward:
        op = OPS["softmax"]
        return op, op.key([x, 1, False], "inference"), (x,)
    op = OPS["softmax_backward"]
    y = torch.softmax(x, 1)
    return op, op.key([torch.randn_like(x), y, 1], "backward"), (torch.randn_like(x), y)


def error(op: Op, tensors: tuple[Tensor, ...], found: Tensor) -> float:
    """The largest relative distance from float64 on a few rows, elements below their mean taken as the mean; two steps between
    the dtype's smallest numbers, which are all that float16 has for shares of 1e-6, are forgiven."""
    at = torch.tensor([0, 1, 131, 132, -1], device=DEVICE).clamp(max=len(tensors[0]) - 1)
    wide = [t[at].double() for t in tensors]
    if len(wide) == 1:
        want = wide[0].softmax(1)
    else:
        want = wide[1] * (wide[0] - (wide[0] * wide[1]).sum(1, keepdim=True))
    of = torch.finfo(tensors[0].dtype)
    off = (found[at].double() - want).abs() - 2 * of.tiny * of.eps
    return float((off / want.abs().clamp_min(want.abs().mean())).max())


def composed(backward: bool, dtype: torch.dtype) -> Callable[..., Tensor]:
    """PyTorch's."""
    if backward:
        return lambda dy, y: torch.ops.aten._softmax_backward_data(dy, y, 1, dtype)
    return lambda x: torch.softmax(x, 1)


def timed(
    rows: int, columns: int, dtype: torch.dtype, backward: bool, gbs: float, compiled: bool
) -> None:
    """One line of each candidate's best and each configuration of the held."""
    op, key, tensors = problem(rows, columns, dtype, backward)
    plain = composed(backward, dtype)
    steps: dict[str, list[Callable[[], Any]]] = {"PyTorch": [lambda: plain(*tensors)]}
    if compiled:
        torch._dynamo.reset()
        fused = torch.compile(plain, dynamic=False, fullgraph=True)
        steps["torch.compile"] = [lambda: fused(*tensors)]
    wrong = []
    for name in OURS:
        if name not in op.candidates or op.candidates[name].supports(key):
            continue
        for i, config in enumerate(op.candidates[name].configs(key)):
            try:
                launch = op.candidates[name].bind(key, config, DEVICE)
                (out,) = launch(*tensors) or (None,)
            except Exception as failure:  # what cannot be built is said, not timed
                wrong.append(f"{name}.{i} {type(failure).__name__}")
                continue
            off = float("inf") if out is None else error(op, tensors, out)
            if not off < {2: 2e-2, 4: 1e-4}[dtype.itemsize]:
                wrong.append(f"{name}.{i} {config} off by {off:.2g}")
            steps[f"{name}.{i}"] = [lambda f=launch: f(*tensors)]  # type: ignore[misc]
            del out
    calls = 4 if tensors[0].nbytes > FEW else 32
    loops = {name: Replayed(own, calls) for name, own in steps.items()}
    samples: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, loop in loops.items():
            samples[name].append(loop.sample())
    for loop in loops.values():
        loop.close()
    took = {name: statistics.median(s) for name, s in samples.items()}
    least = (2 + backward) * tensors[0].nbytes / gbs / 1e3
    best: dict[str, tuple[float, str]] = {}
    for name, us in took.items():
        kind = name if name in PEERS else name.rpartition(".")[0]
        best[kind] = min(best.get(kind, (us, name)), (us, name))
    each = " ".join(
        f"{us:.0f}"
        for name, us in took.items()
        if name.startswith(("triton.held", "triton.groups", "triton.shares"))
    )
    said = ", ".join(f"{kind} {us:.0f} ({least / us:.2f})" for kind, (us, _) in best.items())
    kind = "gradient" if backward else "forward"
    print(f"{kind} [{rows}, {columns}] {str(dtype)[6:]}: {said}; held, in groups or shared by configuration: {each}", *wrong, flush=True)  # fmt: skip


def reachable() -> float:
    """Gigabytes a second that a copy of half a gigabyte reads and writes."""
    a = torch.empty(1 << 29, dtype=torch.int8, device=DEVICE)
    b = torch.empty_like(a)
    loop = Replayed([lambda: b.copy_(a)], 4)
    us = statistics.median(loop.sample() for _ in range(ROUNDS))
    loop.close()
    return 2 * a.numel() / us / 1e3


@torch.no_grad()
@compile_pool.awaited()  # kernels of what comes next are compiled meanwhile
def main() -> int:
    """All of them, as far as the time goes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--columns", type=int, nargs="+", help="these, of every dtype and tensor")
    parser.add_argument("--rows", type=int, nargs="+", help="so many; else enough for any cache")
    parser.add_argument("--compile", action="store_true", help="beside torch.compile, too")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    candidate_loading.ready("cuda")
    gbs = reachable()
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, a copy {gbs:.0f} GB/s; us, and of it the share of that copy's speed"
    )
    with tensorlogic.policy(tune="off"):
        asked = [
            (rows, columns, dtype, backward)
            for backward, lengths in ((False, ROWS), (True, PAIRS))
            for dtype in DTYPES
            for columns in args.columns or lengths[dtype.itemsize]
            for rows in args.rows or [lines(columns)]
        ]
        for each in asked:
            op, key, _ = problem(*each)
            for name in OURS:
                if name in op.candidates and not op.candidates[name].supports(key):
                    for config in op.candidates[name].configs(key):
                        compile_pool.submit(op.candidates[name].jobs(key, config, DEVICE))
        for each in asked:
            if time.monotonic() < end:
                timed(*each, gbs, args.compile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
