"""The warp-specialised product whose tiles leave whole or in parts of so many columns, beside cuBLAS's plain product.

python benchmarks/device/tile_parts.py [--seconds 120]

Of each shape and each of four calls (a product alone; bias, residual and ReLU; tanh GELU; exact GELU that keeps what backward needs) every
tile that the key offers, in every part: over cuBLAS's product of the same run, captured graphs over inputs that exceed the cache, medians of
nine rounds in turn. Kernels compile in worker processes first. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from drawn_timing import Replayed

import tensorlogic
from tensorlogic.bench import measure_case
from tensorlogic.core.key import Key
from tensorlogic.core.op import Op
from tensorlogic.dispatch import candidate_loading
from tensorlogic.system import compile_pool

SHAPES = ((1024, 1024, 1024), (1536, 1536, 1536), (2048, 2048, 2048), (4096, 4096, 4096), (4096, 1024, 4096), (2048, 768, 3072))  # fmt: skip
PARTS = (0, 128, 64, 32)  # columns; 0: whole
ROUNDS = 9
REPLAY_US = 2000.0
Call = tuple[Callable[..., Any], tuple[Any, ...], bool]
DEVICE = torch.device("cuda")


def calls(m: int, k: int, n: int) -> dict[str, Call]:
    """Name -> function, arguments, and whether gradients are recorded."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=DEVICE) * scale).half()

    x, w, b, r = normal(m, k), normal(n, k, scale=k**-0.5), normal(n), normal(m, n)
    return {
        "alone": (tensorlogic.matmul, (x, w.t()), False),
        "residual": (tensorlogic.linear_residual_relu, (x, w, b, r), False),
        "gelu_tanh": (tensorlogic.linear, (x, w, b, None, "gelu_tanh"), False),
        "gelu, kept": (tensorlogic.linear, (x, w, b, None, "gelu"), True),
    }


def met(fn: Callable[..., Any], args: tuple[Any, ...], recorded: bool) -> tuple[Op, Key]:
    """The op and the key of a call."""
    if recorded:
        args = tuple(a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in args)
    with torch.set_grad_enabled(recorded):
        op, key, _ = measure_case.meet(fn, args)[0]
    return op, key


def tiles(op: Op, key: Key) -> dict[tuple[int, int, int, int], Mapping[str, Any]]:
    """(consumers, columns, stages, part) -> configuration."""
    found: dict[tuple[int, int, int, int], Mapping[str, Any]] = {}
    for config in op.candidates["triton.tiled"].configs(key):
        (product,) = config["products"]
        for part in PARTS if "CONSUMERS" in product else ():
            if part < product["BLOCK_N"]:
                whole = {name: value for name, value in product.items() if name != "PART"}
                name = (product["CONSUMERS"], product["BLOCK_N"], product["STAGES"], part)
                found[name] = {**config, "products": [whole | ({"PART": part} if part else {})]}
    return found


def timed(shape: tuple[int, int, int], name: str) -> None:
    """Print every tile and part of one call over cuBLAS's product."""
    m, k, n = shape
    count = max(2, min(8, int(1e8 // (2 * (m * k + n * k + 2 * m * n))) + 1))
    sets = [calls(*shape)[name] for _ in range(count)]
    op, key = met(*sets[0])
    dynamic = sum(p.is_dynamic for p in op.params)
    steps: dict[Any, list[Callable[[], Any]]] = {
        "cublas": [
            lambda a=a: torch.mm(a[0], a[1] if name == "alone" else a[1].t())  # type: ignore[misc]
            for _, a, _ in sets
        ]
    }
    for tile, config in tiles(op, key).items():
        launch = op.candidates["triton.tiled"].bind(key, config, DEVICE)
        steps[tile] = [lambda a=a, f=launch: f(*a[:dynamic]) for _, a, _ in sets]  # type: ignore[misc]
    repeats = count * max(1, int(REPLAY_US / (m * k * n / 3.5e8 + 3)) // count)
    replayed = {tile: Replayed(own, repeats) for tile, own in steps.items()}
    samples: dict[Any, list[float]] = {tile: [] for tile in replayed}
    for _ in range(ROUNDS):
        for tile, loop in replayed.items():
            samples[tile].append(loop.sample())
    took = {tile: statistics.median(s) for tile, s in samples.items()}
    plain = took.pop("cublas")
    print(f"{m} x {k} x {n} {name}: cuBLAS {plain:.2f} us")
    for first in dict.fromkeys(tile[:3] for tile in took):
        over = [f"{t[3] or 'whole'} {us / plain:.3f}" for t, us in took.items() if t[:3] == first]
        print(f"    {64 * first[0]} x {first[1]}, {first[2]} stages: {', '.join(over)}", flush=True)
    for loop in replayed.values():
        loop.close()


@torch.no_grad()
@compile_pool.awaited()  # kernels of what comes next are compiled meanwhile
def main() -> int:
    """All of them, as far as the time goes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    end = time.monotonic() + parser.parse_args().seconds
    candidate_loading.ready("cuda")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    with tensorlogic.policy(tune="off"):
        asked = [(shape, name) for shape in SHAPES for name in calls(8, 8, 8)]
        for shape, name in asked:
            op, key = met(*calls(*shape)[name])
            for config in tiles(op, key).values():
                compile_pool.submit(op.candidates["triton.tiled"].jobs(key, config, DEVICE))
        for shape, name in asked:
            if time.monotonic() < end:
                timed(shape, name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
