"""How often float32 products of few columns fail the check by the order of their sums alone, modelled in NumPy, no GPU needed.

python benchmarks/few_columns.py [--draws 250] [--seed 0]

Eager is modelled as 128 lanes of fused multiply-adds whose sums are added as a tree. "chain": tiles of 64, one added after the
other. "lanes": 512 lanes, then a tree. "exact": the product rounded once.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tensorlogic.core import tolerance

Array = Any  # numpy's arrays have no useful types without their dtypes
Finish = Callable[[Array], Array]


def fused(a: Array, b: Array, c: Array) -> Array:
    """a b + c in float32, rounded once."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def chain(x: Array, w: Array, tile: int = 64) -> Array:
    """Sums of tiles, each one chain, added one after the other."""
    total = np.zeros(len(x), np.float32)
    for start in range(0, x.shape[1], tile):
        part = np.zeros(len(x), np.float32)
        for j in range(start, min(start + tile, x.shape[1])):
            part = fused(x[:, j], w[j], part)
        total += part
    return total


def lanes(x: Array, w: Array, width: int = 512) -> Array:
    """Sums of `width` lanes, added as a tree."""
    sums = np.zeros((len(x), width), np.float32)
    for start in range(0, x.shape[1], width):
        stop = min(x.shape[1], start + width)
        sums[:, : stop - start] = fused(x[:, start:stop], w[None, start:stop], sums[:, : stop - start])  # fmt: skip
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def layer(kind: str, rng: Any) -> tuple[Finish, Finish]:
    """What a layer makes of one column of products, in float32 and in float64."""
    bias, mean, beta = rng.standard_normal(3).astype(np.float32)
    var, gamma = np.float32(0.5 + rng.random()), np.float32(1 + 0.1 * rng.standard_normal())
    if kind == "linear":
        return lambda v: v + bias, lambda v: v + np.float64(bias)
    if kind == "linear, ReLU":
        return lambda v: np.maximum(v + bias, np.float32(0)), lambda v: np.maximum(v + np.float64(bias), 0)  # fmt: skip
    factor = np.float32(1 / np.sqrt(np.float64(var) + 1e-5))
    wide = np.float64(gamma) / np.sqrt(np.float64(var) + 1e-5)
    return (
        lambda v: np.maximum((v + bias - mean) * (gamma * factor) + beta, np.float32(0)),
        lambda v: np.maximum((v + np.float64(bias) - mean) * wide + beta, 0),
    )


def main() -> None:
    """Print, for each layer and number of columns, the share of draws that fail, by order of summation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = np.random.default_rng(asked.seed)
    orders: dict[str, Callable[[Array, Array], Array]] = {
        "chain": chain,
        "lanes": lanes,
        "exact": lambda x, w: (x.astype(np.float64) @ w.astype(np.float64)).astype(np.float32),
    }
    for columns in (1, 2, 4):
        for kind in ("linear", "linear, ReLU", "linear, batch norm, ReLU"):
            failed = Counter[str]()
            for _ in range(asked.draws):
                m, k = int(rng.integers(8, 700)), int(rng.integers(16, 1025))
                x = rng.standard_normal((m, k)).astype(np.float32)
                found: dict[str, list[Array]] = {name: [] for name in (*orders, "eager", "wide")}
                for _ in range(columns):
                    w = (rng.standard_normal(k) * k**-0.5).astype(np.float32)
                    single, double = layer(kind, rng)
                    found["eager"].append(single(lanes(x, w, 128)))
                    found["wide"].append(double(x.astype(np.float64) @ w.astype(np.float64)))
                    for name, order in orders.items():
                        found[name].append(single(order(x, w)))
                made = {name: torch.from_numpy(np.stack(v, 1)) for name, v in found.items()}
                for name in orders:
                    verdict = tolerance.judge([made[name]], [made["eager"]], [made["wide"]])
                    failed[name] += not verdict
            shares = ", ".join(
                f"{name} {100 * failed[name] / asked.draws:.1f} %" for name in orders
            )
            print(f"{columns} columns, {kind}: {shares}", flush=True)


if __name__ == "__main__":
    main()
