"""Passes over memory on a CPU beside eager PyTorch, torch.compile and what the bytes alone would take.

    python benchmarks/passes.py [--json FILE] [op ...]

The limit of a row is its least bytes at the rate of PyTorch's own plain pass of as many operands over the same
tensors into memory that is used again: a sum (reads), a copy, an addition. Nothing is timed before it is right.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorlogic.native import cpu_library
from tensorlogic.system.hardware import cpu

ROUNDS, SECONDS = 200, 0.75
N, LOGITS, VECTOR = 2048, (512, 32000), 1 << 20
Call = Callable[[], Any]


def times(ways: dict[str, Call]) -> dict[str, float]:
    """Median microseconds a call, in shuffled turns."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    begin = time.perf_counter()
    while len(samples[next(iter(ways))]) < ROUNDS:
        for name, way in random.sample(list(ways.items()), len(ways)):
            start = time.perf_counter()
            way()
            samples[name].append((time.perf_counter() - start) * 1e6)
        if time.perf_counter() - begin > SECONDS and len(samples[name]) >= 7:
            break
    return {name: statistics.median(values) for name, values in samples.items()}


def rows(dtype: torch.dtype) -> dict[str, tuple[tuple[Tensor, ...], int, Any, Any]]:
    """name -> (inputs, operands of full size, ours, PyTorch's)."""
    x, y = torch.randn(N, N).to(dtype), torch.randn(N, N).to(dtype)
    b, g, v = torch.randn(N).to(dtype), torch.randn(N).to(dtype), torch.randn(VECTOR).to(dtype)
    logits, target = torch.randn(LOGITS).to(dtype), torch.randint(LOGITS[1], (LOGITS[0],))
    op = cpu_library.op
    return {
        "relu(x + y)": ((x, y), 3, op("add_relu"), lambda x, y: torch.relu(x + y)),
        "gelu(x + bias + residual)": (
            (x, b, y),
            3,
            lambda x, b, y: op("epilogue")(x, b, y, 2, dtype),
            lambda x, b, y: F.gelu(x + b + y),
        ),
        "layer norm": (
            (x, g, b),
            2,
            lambda x, g, b: op("layer_norm")(x, g, b, 1e-5, dtype)[0],
            lambda x, g, b: F.layer_norm(x, (N,), g, b),
        ),
        "softmax cross-entropy": (
            (logits, target),
            1,
            lambda x, t: op("softmax_cross_entropy")(x, t, -100, 0.0, 1)[0],
            lambda x, t: F.cross_entropy(x, t),
        ),
        "gelu, 1 Mi": ((v,), 2, lambda v: op("gelu")(v, False), F.gelu),
        "tanh gelu, 1 Mi": (
            (v,),
            2,
            lambda v: op("gelu")(v, True),
            lambda v: F.gelu(v, approximate="tanh"),
        ),
        "silu, 1 Mi": ((v,), 2, op("silu"), F.silu),
    }


def plain(x: Tensor, operands: int) -> Call:
    """PyTorch's own pass of as many operands."""
    other, out = x.clone(), torch.empty_like(x)
    if operands == 1:
        return lambda: torch.sum(x)
    return (lambda: out.copy_(x)) if operands == 2 else (lambda: torch.add(x, other, out=out))


def measure(name: str, dtype: torch.dtype, row: tuple[Any, ...]) -> dict[str, Any]:
    """One row, as it goes into the file."""
    inputs, operands, ours, eager = row
    torch._dynamo.reset()
    both = torch.compile(eager, dynamic=False, fullgraph=True)
    exact = eager(*(t.double() if t.is_floating_point() else t for t in inputs))
    error = (ours(*inputs).double() - exact).norm() / exact.norm()
    assert error < 8 * torch.finfo(dtype).eps, f"{name} {dtype}: error {error:.1e}"
    us = times(
        {
            "ours": lambda: ours(*inputs),
            "eager": lambda: eager(*inputs),
            "compile": lambda: both(*inputs),
            "limit": plain(inputs[0], operands),
        }
    )
    return {"op": name, "dtype": str(dtype).removeprefix("torch."), "us": us}


def main() -> None:
    """Print the rows, and write them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help="names of rows; all by default")
    parser.add_argument("--json", type=Path, help="where to write the result")
    given = parser.parse_args()
    if (why := cpu_library.available()) is not None:
        raise SystemExit(why)
    print(
        f"{'':36}{'ours':>9}{'eager':>9}{'compile':>9}{'limit':>9}   over eager (at most), over compile"
    )
    found = []
    with torch.no_grad():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for name, row in rows(dtype).items():
                if given.ops and name not in given.ops:
                    continue
                found.append(measure(name, dtype, row))
                us = found[-1]["us"]
                print(
                    f"{name:26}{found[-1]['dtype']:10}"
                    + "".join(f"{us[k]:9.0f}" for k in ("ours", "eager", "compile", "limit"))
                    + f"   {us['eager'] / us['ours']:.2f} ({us['eager'] / us['limit']:.2f})"
                    + f"  {us['compile'] / us['ours']:.2f} ({us['compile'] / us['limit']:.2f})",
                    flush=True,
                )
    if given.json:
        about = {"processor": cpu(), "threads": torch.get_num_threads()}
        given.json.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
