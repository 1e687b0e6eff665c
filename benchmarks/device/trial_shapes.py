"""Problems for kernels on trial: inputs, results in float64, and what is timed: trials by name, beside what is chosen today."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import trial_rows
from torch import Tensor

from tensorlogic.kernels.cross_entropy import rows as cross_entropy_rows
from tensorlogic.kernels.triton_runtime import launch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
CACHE = 100e6  # bytes of inputs that one round walks through
Build = Callable[[], Callable[..., bool]]


def miss(shape: Shape) -> float:
    """Largest relative error of what the last call on the first set wrote; infinite where anything is not finite."""
    pairs = zip(shape.got(shape.sets[0]), shape.want, strict=True)
    errors = [((got.double() - want).norm() / want.norm()).item() for got, want in pairs]
    return max(e if math.isfinite(e) else math.inf for e in errors)


def poison(shape: Shape) -> None:
    """Fill what calls on the first set write with NaN."""
    for i in shape.outputs:
        shape.sets[0][i].fill_(torch.nan)


@dataclass
class Shape:
    """One problem: input sets, float64 results of the first, the fewest bytes; its trials by name, and present ones."""

    name: str
    sets: list[tuple[Any, ...]]
    want: tuple[Tensor, ...]
    got: Callable[[tuple[Any, ...]], tuple[Tensor, ...]]  # what a call wrote
    nbytes: float
    limit: float  # relative error
    outputs: tuple[int, ...]  # which of a set are written
    trials: dict[str, Build] = field(default_factory=dict)


def copies(nbytes: float) -> int:
    """Input sets that together exceed the cache."""
    return max(1, min(16, int(CACHE / nbytes) + 1))


def rand(*shape: int, dtype: str, scale: float = 1.0) -> Tensor:
    """Normal values."""
    return (torch.randn(*shape, device=DEVICE) * scale).to(TORCH[dtype])


def losses(x: Tensor, t: Tensor) -> Tensor:
    """Losses in float64, a few rows at a time."""
    parts = zip(x.split(256), t.split(256), strict=True)
    return torch.cat([torch.nn.functional.cross_entropy(a.double(), b, reduction="none") for a, b in parts])  # fmt: skip


def both(rows: int, columns: int, dtype: str, cores: int = 132) -> Shape:
    """Loss and gradient, as a loss scale of `rows` makes it: shares of one row are subnormal in float16. One pass, beside forward and backward."""
    size = TORCH[dtype].itemsize

    def made() -> tuple[Any, ...]:
        t = torch.randint(columns, (rows,), device=DEVICE)
        f32 = {"device": DEVICE, "dtype": torch.float32}
        x = rand(rows, columns, dtype=dtype)
        return (
            x, t, torch.empty(rows, **f32), torch.full_like(x, float("nan")), torch.empty(rows, **f32),
            torch.empty((), device=DEVICE, dtype=TORCH[dtype]), torch.empty(1, **f32), torch.zeros(1, device=DEVICE, dtype=torch.int64),
        )  # fmt: skip

    sets = [made() for _ in range(copies(2 * rows * columns * size))]
    x, t = sets[0][:2]
    some = min(64, rows)
    want = torch.softmax(x[:some].double(), 1)
    want[torch.arange(some), t[:some]] -= 1
    shape = Shape(
        f"loss and gradient {rows}x{columns} {dtype}", sets, (losses(x, t), want), lambda s: (s[2], s[3][:some]),
        2 * rows * columns * size, 1e-3 if dtype != "bf16" else 6e-3, (2, 3),
    )  # fmt: skip

    def apart() -> Callable[..., bool]:
        ce = cross_entropy_rows
        first = ce.cross_entropy_launcher(
            rows, columns, dtype, dtype, "mean", -100, ce.cross_entropy_configs(columns, dtype)[0], DEVICE, save=True
        )  # fmt: skip
        second = ce.cross_entropy_backward_launcher(
            rows, columns, dtype, "f32", "mean", -100, ce.cross_entropy_backward_configs(columns, dtype)[0], DEVICE
        )  # fmt: skip
        one = torch.full((1,), float(rows), device=DEVICE)
        return lambda x, t, loss, dx, lse, y, share, counter: (
            first(x, t, loss, lse, y, share, counter, 0.0)
            and second(x, t, lse, one, share, dx, 0.0)
        )

    shape.trials["now, two kernels"] = apart
    for lanes, warps in ((512, 8), (1024, 8), (1024, 16), (1024, 32), (2048, 32)):

        def swept(lanes: int = lanes, warps: int = warps) -> Callable[..., bool]:
            start = launch.prepare(
                trial_rows.cross_entropy_swept, grid=(rows, 1, 1),
                pointers={"x_ptr": dtype, "t_ptr": "i64", "loss_ptr": "f32", "dx_ptr": dtype},
                integers={"R": rows, "C": columns, "IGNORE": -100}, floats=("share",),
                constexprs={"LANES": lanes, "WIDTH": 16 // size}, num_warps=warps, num_stages=1, device=DEVICE,
            )  # fmt: skip
            return lambda x, t, loss, dx, *_: start(x, t, loss, dx, 1.0)

        shape.trials[f"swept {lanes} lanes {warps} warps"] = swept
    if columns > 1 << 16:
        return shape
    block = 1 << (columns - 1).bit_length()
    for warps, stages, per, again, most in (
        (16, 3, 1, 1, 0), (16, 3, 1, 0, 0), (32, 3, 1, 0, 0), (16, 3, 2, 0, 64), (8, 3, 2, 0, 128), (16, 1, 0, 0, 64), (8, 1, 0, 0, 128), (16, 1, 0, 0, 128),
    ):  # fmt: skip
        if block * size * (stages - 1) * per > 220e3:
            continue

        def once(warps: int = warps, stages: int = stages, per: int = per, again: int = again, most: int = most) -> Callable[..., bool]:  # fmt: skip
            start = launch.prepare(
                trial_rows.cross_entropy_both, grid=(min(rows, cores * per or rows), 1, 1),
                pointers={"x_ptr": dtype, "t_ptr": "i64", "loss_ptr": "f32", "dx_ptr": dtype},
                integers={"R": rows, "C": columns, "IGNORE": -100}, floats=("share",),
                constexprs={"EVEN": block == columns, "BLOCK": block, "STAGES": stages, "AGAIN": bool(again)},
                num_warps=warps, num_stages=1, device=DEVICE, registers=most,
            )  # fmt: skip
            return lambda x, t, loss, dx, *_: start(x, t, loss, dx, 1.0)

        shape.trials[
            f"one pass {warps} warps {stages} stages {per or 'rows'}{' again' * again}{f' {most}' if most else ''}"
        ] = once
    return shape
