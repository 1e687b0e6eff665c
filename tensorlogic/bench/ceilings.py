"""The limits of this machine, measured in the run: copy bandwidth by footprint, product rate by dtype, launch cost.

A limit is the best that was seen; times of rows are medians.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

import tensorlogic

from .. import measure, numerics
from ..ops.common import products
from .cases import Maker
from .results import Ceilings, Row

MIB = 1 << 20
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
    found = []
    for size in FOOTPRINTS.get(device.type, FOOTPRINTS["cpu"]):
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        target.copy_(source)
        copy = partial(target.copy_, source)
        us = min(measure.device_samples({"copy": [copy]}, device, budget_s).values["copy"])
        found.append((2 * size, float(f"{us:.5g}")))
    return found


def _products(device: torch.device, dtypes: Sequence[str], budget_s: float) -> dict[str, float]:
    """Rates of PyTorch's own products; a CPU without f16 arithmetic can multiply f16 in float32."""
    names = list(dict.fromkeys([*dtypes, "f32"] if device.type == "cpu" else dtypes))
    rates = {
        name: max(_rate(device, name, n, budget_s) for n in SIDES[device.type]) for name in names
    }
    if device.type == "cpu" and "f16" in rates:
        rates["f16"] = max(rates["f16"], rates["f32"])
    return rates


def _rate(device: torch.device, name: str, n: int, budget_s: float) -> float:
    maker = Maker(numerics.DTYPES[name], device, n)
    a, w = maker.normal(n, n), maker.weight(n, n)
    calls: dict[str, list[measure.Call]] = {"linear": [lambda: F.linear(a, w)]}
    if name == "f32" and products.onednn_available(device.type) is None:
        calls["onednn"] = [lambda: products.onednn(a, w, None, "none")]
    samples = measure.device_samples(calls, device, budget_s)
    return float(f"{2e-3 * n**3 / min(min(samples.values[c]) for c in calls):.5g}")


def _launches(device: torch.device, budget_s: float) -> dict[str, float]:
    """The smallest addition: what a caller pays PyTorch and us, and on a GPU what the device does."""
    a, b = torch.ones(1, device=device), torch.ones(1, device=device)
    calls: dict[str, list[measure.Call]] = {
        "torch": [lambda: torch.add(a, b)],
        "tensorlogic": [lambda: tensorlogic.add(a, b)],
    }
    host = measure.host_samples(calls, device, budget_s)
    found = {name: host.median(name) for name in calls}
    if device.type == "cuda":
        found["device"] = measure.device_samples(
            {"torch": calls["torch"]}, device, budget_s
        ).median("torch")
    return {name: float(f"{us:.4g}") for name, us in found.items()}


def copy_us(ceilings: Ceilings, moved: float) -> float:
    """Time of a copy that moves as many bytes, between the measured footprints by their logarithms."""
    points = ceilings.copy
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
    seen = [r.gflops for r in rows if r.dtype == dtype and r.category in ("matmul", "fusion")]
    return max([ceilings.gflops.get(dtype, 0.0), *seen])


def share(ceilings: Ceilings, rows: Sequence[Row], row: Row) -> float | None:
    """Share of the limit: the longer of copying the row's bytes and multiplying at the peak, over the row's time."""
    if not ceilings.copy or row.category == "transfer":
        return None
    limit = copy_us(ceilings, row.bytes)
    peak = peak_gflops(ceilings, rows, row.dtype)
    if row.category in ("matmul", "fusion") and peak:
        limit = max(limit, row.flops / peak / 1e3)
    return limit / row.median_us()
