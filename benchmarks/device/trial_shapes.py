"""Problems for kernels on trial: inputs, results in float64, and what is timed: trials by name, beside what is chosen today."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import trial_rows
import trial_scores
from torch import Tensor

from tensorlogic.ops.common import (
    gemm,
    scores_specialised,
    triton_cross_entropy,
    triton_cross_entropy_stays,
    triton_launch,
    triton_reduce,
    triton_spins,
)
from tensorlogic.ops.common.triton_descriptors import Tiled

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


def short(config: dict[str, Any]) -> str:
    """A configuration in few characters."""
    return " ".join(str(v) for v in config.values())


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


def cross_entropy(
    rows: int, columns: int, dtype: str, cores: int = 132, ignored: int = 17
) -> Shape:
    """Mean loss: programs that stay, beside a program a row."""
    size = TORCH[dtype].itemsize

    def made() -> tuple[Any, ...]:
        t = torch.randint(columns, (rows,), device=DEVICE)
        t[: rows if ignored else 0 : max(ignored, 1)] = -100
        f32 = {"device": DEVICE, "dtype": torch.float32}
        return (
            rand(rows, columns, dtype=dtype), t, torch.empty(rows, **f32), torch.empty(rows, **f32),
            torch.full((), float("nan"), device=DEVICE, dtype=TORCH[dtype]), torch.empty(1, **f32),
            torch.zeros(1, device=DEVICE, dtype=torch.int64),
        )  # fmt: skip

    sets = [made() for _ in range(copies(rows * columns * size))]
    want = losses(*sets[0][:2]).sum() / (sets[0][1] != -100).sum()
    shape = Shape(
        f"cross-entropy {rows}x{columns} {dtype}", sets, (want,), lambda s: (s[4],),
        rows * columns * size * (1 - (1 / ignored if ignored else 0)), {"f32": 1e-5, "f16": 1e-3, "bf16": 4e-3}[dtype], (4,),
    )  # fmt: skip
    for i, config in enumerate(triton_cross_entropy.cross_entropy_configs(columns, dtype)[:4]):

        def now(config: dict[str, Any] = config) -> Callable[..., bool]:
            start = triton_cross_entropy.cross_entropy_launcher(
                rows, columns, dtype, dtype, "mean", -100, config, DEVICE
            )
            return lambda *a: start(*a, 0.0)

        shape.trials[f"now {i} {short(config)}"] = now
    width = 4 if dtype == "f32" else 8
    for lanes, warps, per in (
        (256, 4, 4), (256, 4, 16), (512, 8, 8), (1024, 8, 4), (512, 8, 0), (1024, 8, 0), (512, 4, 0), (1024, 4, 0), (1024, 16, 0), (2048, 16, 0), (512, 4, 8), (256, 2, 16),
    ):  # fmt: skip
        if columns < lanes * width:
            continue

        def stays(lanes: int = lanes, warps: int = warps, per: int = per) -> Callable[..., bool]:
            config = {"LANES": lanes, "WIDTH": width, "per": per or rows, "num_warps": warps}
            return triton_cross_entropy_stays.stays_launcher(rows, columns, dtype, "mean", -100, config, DEVICE, cores)  # fmt: skip

        shape.trials[f"stays {lanes} lanes {warps} warps {per or 'rows'}"] = stays
    return shape


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
        ce = triton_cross_entropy
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
            start = triton_launch.prepare(
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
        (16, 3, 1, 1, 0), (16, 3, 1, 0, 0), (32, 3, 1, 0, 0), (32, 4, 1, 0, 0), (16, 3, 2, 0, 64), (16, 3, 2, 1, 64), (8, 3, 2, 1, 128), (8, 3, 2, 0, 128),
        (16, 1, 0, 0, 64), (16, 1, 0, 1, 64), (32, 1, 0, 0, 0), (32, 1, 0, 1, 0), (8, 1, 0, 0, 128), (16, 1, 0, 0, 128),
    ):  # fmt: skip
        if block * size * (stages - 1) * per > 220e3:
            continue

        def once(warps: int = warps, stages: int = stages, per: int = per, again: int = again, most: int = most) -> Callable[..., bool]:  # fmt: skip
            start = triton_launch.prepare(
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


def sums(count: int) -> Shape:
    """Sum of few elements, in the cache as the acceptance script has them."""
    x = rand(count, dtype="f16")
    sets = [(x, torch.empty((), device=DEVICE, dtype=torch.float16), torch.zeros(2048, device=DEVICE, dtype=torch.int64))]  # fmt: skip
    want = x.double().sum()
    shape = Shape(f"sum {count}", sets, (want,), lambda s: (s[1],), 2 * count, 1e-2, (1,))
    for config in triton_reduce.reduce_configs(1, count, 1, "f16")[:4]:

        def now(config: dict[str, Any] = config) -> Callable[..., bool]:
            start = triton_reduce.reduce_launcher("sum", "f16", "f16", 1, count, 1, config, DEVICE)
            return lambda x, y, cells: start(x, y, cells, cells)

        shape.trials[f"now {short(config)}"] = now
    for block, warps in ((8192, 8), (8192, 4), (4096, 8), (4096, 4), (16384, 16), (16384, 8)):
        config = {"BLOCK": block, "num_warps": warps}
        if not 2 <= triton_spins.spun_parts(count, config) <= triton_spins.MOST_PARTS:
            continue

        def spun(config: dict[str, Any] = config) -> Callable[..., bool]:
            return triton_spins.spun_launcher("sum", "f16", "f16", count, config, DEVICE)

        shape.trials[f"spins {short(config)}"] = spun
    return shape


def few(m: int, k: int, n: int, dtype: str) -> Shape:
    """A few rows: shapes of ordinary products that today's table lacks, beside it."""
    size = TORCH[dtype].itemsize

    def made() -> tuple[Any, ...]:
        return (
            rand(m, k, dtype=dtype), rand(n, k, dtype=dtype, scale=k**-0.5), rand(n, dtype=dtype), torch.empty(m, n, device=DEVICE, dtype=TORCH[dtype]),
            torch.empty(2**20, device=DEVICE), torch.zeros(4096, device=DEVICE, dtype=torch.int32),
        )  # fmt: skip

    sets = [made() for _ in range(copies(n * k * size))]
    x, w, b = sets[0][:3]
    want = torch.relu(x.double() @ w.double().t() + b.double())
    shape = Shape(f"{m}x{k}x{n} {dtype}", sets, (want,), lambda s: (s[3],), n * k * size, 2e-3 if dtype == "f16" else 1e-2, (3,))  # fmt: skip
    spec = gemm.GemmSpec(
        m, n, k, gemm.Operand(dtype, k, 1), gemm.Operand(dtype, 1, k), gemm.Operand(dtype, n, 1), bias=dtype, activation="relu"
    )  # fmt: skip
    found = {f"now {i}": c for i, c in enumerate(gemm.gemm_configs(m, n, k, size))}
    for bn, bk, warps, split, ahead in (
        (4, 4096, 4, 1, 0), (2, 4096, 4, 1, 0), (4, 4096, 8, 1, 0), (8, 4096, 8, 1, 0), (1, 4096, 2, 1, 0), (4, 2048, 4, 1, 0), (8, 2048, 4, 1, 0),
        (4, 2048, 4, 2, 0), (8, 2048, 8, 2, 0), (8, 1024, 4, 4, 0), (8, 1024, 4, 2, 0), (16, 1024, 8, 4, 0), (4, 4096, 4, 1, 1), (8, 2048, 4, 1, 1), (2, 4096, 4, 1, 1),
    ):  # fmt: skip
        bk //= 1 if m == 1 else 2
        config = {"BLOCK_M": 1 << (m - 1).bit_length(), "BLOCK_N": bn, "BLOCK_K": bk, "GROUP_M": 8, "SPLIT": split, "num_warps": warps, "num_stages": 1}  # fmt: skip
        if ahead:
            config |= {"FETCH": 1, "STREAM": False}
        found[f"{bn}x{bk} {warps} warps, {split} parts{', ahead' * ahead}"] = config
    for name, config in found.items():

        def build(config: dict[str, Any] = config) -> Callable[..., bool]:
            start = gemm.gemm_launcher(spec, config, DEVICE)
            if config["SPLIT"] > 1:
                return lambda x, w, b, y, space, counter: start(x, w, b, y, space, counter)
            return lambda x, w, b, y, space, counter: start(x, w, b, y)

        shape.trials[f"{name} {short(config)}" if name.startswith("now") else name] = build
    return shape


def scores(s: int, d: int, dtype: str, heads: int = 16) -> Shape:
    """Attention scores of short rows: held, beside two sweeps."""
    b, h = 4, heads

    def made() -> tuple[Any, ...]:
        y = torch.full((b, h, s, s), float("nan"), device=DEVICE, dtype=TORCH[dtype])
        return rand(b, h, s, d, dtype=dtype), rand(b, h, s, d, dtype=dtype), y

    nbytes = 2 * b * h * s * s + 4 * b * h * s * d
    sets = [made() for _ in range(1 + copies(nbytes))]
    sets[0][1][0, 0, s - 5] *= 60  # a late maximum, far above the first tile's
    q, k = sets[0][:2]
    want = torch.softmax(q.double() @ k.double().mT * 0.125, -1)
    shape = Shape(f"scores {s} d {d} {dtype}", sets, (want,), lambda x: (x[2],), nbytes, 1.2e-3 if dtype == "f16" else 1e-2, (2,))  # fmt: skip
    lies = scores_specialised.heads(b, h, s, d, (h * s * d, s * d, d))
    assert not isinstance(lies, str)
    for config in scores_specialised.specialised_scores_configs(b * h, s, s, d, 132)[:3]:

        def now(config: dict[str, Any] = config) -> Callable[..., bool]:
            start = scores_specialised.specialised_scores_launcher(
                (b, h, s, s, d), dtype, lies, lies, config, DEVICE, 132
            )
            return lambda q, k, y: start(q, k, y, 0.125)

        shape.trials[f"now {short(config)}"] = now
    steps = {"qb_row": h * s, "qb_column": 0, "qh_row": s, "qh_column": 0, "kb_row": h * s, "kb_column": 0, "kh_row": s, "kh_column": 0}  # fmt: skip

    def prepared(kernel: Any, bn: int, units: int, groups: int, per: int, entry: int, **constants: int) -> Callable[..., bool]:  # fmt: skip
        start = triton_launch.prepare(
            kernel, grid=(min(units, 132 * per), 1, 1),
            tiled={
                "q_desc": Tiled(dtype, (b * h * s, d), d, (64, d)), "k_desc": Tiled(dtype, (b * h * s, d), d, (bn, d)),
                "y_desc": Tiled(dtype, (b * h * s, s), s, (64, bn)),
            },
            pointers={}, integers={**steps, "H": h, "S": s, "T": s, "groups": groups, "units": units}, floats=("scale",),
            constexprs={**constants, "BLOCK_N": bn, "STAGES": constants["STAGES"]}, num_warps=4, num_stages=1, device=DEVICE, registers=entry,
        )  # fmt: skip
        return lambda q, k, y: start(q, k, y, 0.125)

    if s > 768:
        for config in scores_specialised.specialised_scores_configs(b * h, s, s, d, 132)[:2]:
            for poly in (2, 3, 4):
                rounds = config["ROUNDS"]
                groups = -(-s // (64 * 4 * rounds))
                shape.trials[f"mixed {short(config)} every {poly}"] = partial(
                    prepared, trial_scores.attention_scores_mixed, config["BLOCK_N"], b * h * groups, groups, 1, 96,
                    CONSUMERS=4, ROUNDS=rounds, APART=1, POLY=poly, REGISTERS=120, BUFFERS=config["BUFFERS"], STAGES=config["STAGES"],
                )  # fmt: skip
        return shape
    for bn, kept, stages in (
        (64, 1, 8),
        (64, 4, 8),
        (64, 5, 4),
        (64, 8, 8),
        (128, 1, 4),
        (128, 2, 4),
        (128, 4, 4),
    ):
        tiles = s // bn
        for entry, later, per in ((168, 240, 1), (80, 112, 2)):
            shared = 2 * (2 * 64 * d + stages * bn * d + 2 * 64 * s) + 512
            if s % bn or kept > tiles or shared * per > 227 * 1024 or (per > 1 and kept * bn > 128):
                continue
            shape.trials[f"held {kept} of {tiles}, {stages} stages, {per}"] = partial(
                prepared, trial_scores.attention_scores_held, bn, b * h * s // 128, s // 128, per, entry,
                CONSUMERS=2, REGISTERS=later, TILES=tiles, KEPT=kept, STAGES=stages,
            )  # fmt: skip
    return shape
