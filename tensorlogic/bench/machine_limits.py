"""The limits of this machine, measured in the run: copy bandwidth by footprint, product rate by dtype, launch cost.

A limit is the best that was seen; times of rows are medians.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from ..core import dtypes as core_dtypes
from ..kernels.cpu import onednn
from ..measure import timer
from ..ops.pointwise import add
from .cases import Maker
from .result_file import Ceilings, Results, Row

MIB = 1 << 20
PRODUCTS = ("matmul", "fusion", "batch")  # categories whose rows may be bound by arithmetic
FOOTPRINTS = {
    "cpu": (1 << 12, 1 << 15, 1 << 18, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    "cuda": (1 << 12, 1 << 16, MIB, 16 * MIB, 128 * MIB, 512 * MIB),
}
SIDES = {"cpu": (1024,), "cuda": (4096, 8192), "mps": (2048, 4096)}


def find(device: torch.device, dtypes: Sequence[str], budget_s: float) -> Ceilings:
    """Measure all three; `budget_s` is the time of each single measurement."""
    with torch.no_grad():
        return Ceilings(
            _copies(device, budget_s),
            _products(device, dtypes, budget_s),
            _launches(device, budget_s),
        )


def _copies(device: torch.device, budget_s: float) -> list[tuple[int, float]]:
    """The faster of a copy and an addition into memory that is there already: on GPUs a copy may go by a slower engine."""
    found = []
    for size in FOOTPRINTS.get(device.type, FOOTPRINTS["cpu"]):
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        third = torch.ones(2 * size // 12, dtype=torch.float32, device=device)
        total = torch.empty_like(third)
        target.copy_(source)
        calls: dict[str, list[timer.Call]] = {
            "copy": [partial(target.copy_, source)],
            "add": [partial(torch.add, third, third.flip(0), out=total)],
        }
        samples = timer.device_samples(calls, device, budget_s)
        us = min(min(samples.values[name]) for name in calls)
        found.append((2 * size, float(f"{us:.5g}")))
    return found


def _products(device: torch.device, dtypes: Sequence[str], budget_s: float) -> dict[str, float]:
    """Rates of PyTorch's own products; a CPU without f16 arithmetic can multiply f16 in float32."""
    names = list(dict.fromkeys([*dtypes, "f32", "bf16"] if device.type == "cpu" else dtypes))
    sides = SIDES[device.type]
    rates = {name: max(_rate(device, name, n, budget_s) for n in sides) for name in names}
    if device.type == "cpu" and "f16" in rates:
        rates["f16"] = max(rates["f16"], rates["f32"])
    return rates


def _rate(device: torch.device, name: str, n: int, budget_s: float) -> float:
    maker = Maker(core_dtypes.DTYPES[name], device, n)
    a, w = maker.normal(n, n), maker.weight(n, n)
    calls: dict[str, list[timer.Call]] = {"linear": [lambda: F.linear(a, w)]}
    if name == "f32" and onednn.onednn_available(device.type) is None:
        calls["onednn"] = [lambda: onednn.onednn(a, w, None, "none")]
    samples = timer.device_samples(calls, device, budget_s)
    return float(f"{2e-3 * n**3 / min(min(samples.values[c]) for c in calls):.5g}")


def _launches(device: torch.device, budget_s: float) -> dict[str, float]:
    """The smallest addition: what a caller pays PyTorch and us, and on a GPU what the device does."""
    a, b = torch.ones(1, device=device), torch.ones(1, device=device)
    calls: dict[str, list[timer.Call]] = {
        "torch": [lambda: torch.add(a, b)],
        "tensorlogic": [lambda: add(a, b)],
    }
    host = timer.host_samples(calls, device, budget_s)
    found = {name: host.median(name) for name in calls}
    if device.type == "cuda":
        alone = timer.device_samples({"torch": calls["torch"]}, device, budget_s)
        found["device"] = alone.median("torch")
    return {name: float(f"{us:.4g}") for name, us in found.items()}


def reached(ceilings: Ceilings, rows: Iterable[Row]) -> list[tuple[int, float]]:
    """Bytes and the least microseconds in which the run has seen them moved: by a copy, or by a row that was faster.

    What moves fewer bytes is allowed no longer, so the points rise in both.
    """
    points = list(ceilings.copy)
    if not points:
        return []
    for row in rows:
        if row.category != "transfer" and row.bytes:
            us = row.median_us()
            if us < copy_us(ceilings.copy, row.bytes):
                points.append((int(row.bytes), us))
    found: list[tuple[int, float]] = []
    least = dict(sorted(points, reverse=True))  # the smallest us comes last
    for moved, us in least.items():
        found.append((moved, min(us, found[-1][1]) if found else us))
    return found[::-1]


def copy_us(points: Sequence[tuple[int, float]], moved: float) -> float:
    """Time to move as many bytes, between the points by their logarithms."""
    if moved >= points[-1][0]:
        return points[-1][1] * moved / points[-1][0]
    if moved <= points[0][0]:
        return points[0][1]
    for (low, low_us), (high, high_us) in itertools.pairwise(points):
        if moved <= high:
            part = math.log(moved / low) / math.log(high / low)
            return math.exp((1 - part) * math.log(low_us) + part * math.log(high_us))
    raise AssertionError("points are in rising order")


def peak_gflops(ceilings: Ceilings, rows: Sequence[Row], dtype: str) -> float:
    """The largest rate that the run has seen for a dtype, rows included."""
    seen = [r.gflops for r in rows if r.dtype == dtype and r.category in PRODUCTS]
    return max([ceilings.gflops.get(dtype, 0.0), *seen])


class Floors:
    """The least time of any row of a run, by what that run has seen: bytes to move, operations to do."""

    def __init__(self, results: Results) -> None:
        self.rows, self.ceilings = results.timed, results.ceilings
        self.copy = reached(results.ceilings, self.rows)
        self.peak = {r.dtype: peak_gflops(self.ceilings, self.rows, r.dtype) for r in self.rows}

    def us(self, row: Row, dtype: str | None = None) -> float | None:
        """The longer of moving the row's bytes and multiplying at the peak (of another dtype, if given)."""
        if not self.copy or row.category == "transfer":
            return None
        peak = self.peak.get(dtype or row.dtype) or self.ceilings.gflops.get(dtype or "", 0.0)
        moving = copy_us(self.copy, row.bytes)
        return max(moving, row.flops / peak / 1e3) if row.category in PRODUCTS and peak else moving

    def share(self, row: Row) -> float | None:
        """Of the limit: the floor over the row's time."""
        floor = self.us(row)
        return None if floor is None else floor / row.median_us()
