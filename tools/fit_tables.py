"""Fit the piecewise polynomials of csrc/simd/tables.h: `python tools/fit_tables.py > csrc/simd/tables.h` (needs scipy)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, expit, ndtr

Values = NDArray[np.float64]
Function = Callable[[Values], Values]
SEGMENTS = 32
UNSEEN = 2.0**-25  # a share that float32 does not tell from 0 in 1 - share
BEND = {
    "GELU": 0.36,
    "GELU_TANH": 0.55,
    "SILU": 0.0,
}  # by which segments narrow: a + bend * a^2 counts them
STEP = {"GELU": 0.25, "GELU_TANH": 0.25, "SILU": 1.0}  # powers of two: an addition makes the index


def minimax(
    f: Function, weight: Function, low: float, high: float, degree: int
) -> tuple[float, Values]:
    """(largest weighted error, coefficients) of a near-minimax polynomial, by Lawson's reweighted least squares."""
    x = np.cos(np.pi * (np.arange(300) + 0.5) / 300) * (high - low) / 2 + (high + low) / 2
    basis = np.polynomial.chebyshev.chebvander((2 * x - low - high) / (high - low), degree)
    y, w, lawson = f(x), weight(x), np.ones(300)
    best = (np.inf, np.zeros(degree + 1))
    for _ in range(60):
        scale = np.sqrt(lawson) * w
        c = np.linalg.lstsq(basis * scale[:, None], y * scale, rcond=None)[0]
        error = np.abs((basis @ c - y) * w)
        if error.max() < best[0]:
            best = (float(error.max()), c)
        lawson = lawson * error / (lawson * error).mean()
    chebyshev = np.polynomial.chebyshev.Chebyshev(best[1], domain=[low, high])
    return best[0], chebyshev.convert(kind=np.polynomial.Polynomial).coef


def tail(a: Values) -> Values:
    """P(X < -a) e^(a^2 / 2) of the normal distribution."""
    return erfcx(a / np.sqrt(2)) / 2


def exact_point(f: Function, low: float, high: float) -> float:
    """A float32 in the middle of [low, high] where f is nearly a float32 itself (Gal's accurate tables)."""
    if low <= 0.0:
        return 0.0
    middle = np.float32((low + high) / 2)
    points = (middle * (1 + np.arange(-400, 401) * 2.0**-20)).astype(np.float32).astype(np.float64)
    value = f(points)
    return float(points[np.argmin(np.abs(value.astype(np.float32) / value - 1))])


def mills(bits: int, degree: int) -> tuple[float, Values, Values]:
    """(error, points, table): the tail on segments of a + 1 given by exponent and so many bits of mantissa, index as those bits."""
    each = 2**bits
    segments = 4 * each  # a + 1 up to 16
    points, table, worst = np.zeros((1, segments)), np.zeros((degree + 1, segments)), 0.0
    for k in range(segments):
        low, width = 2.0 ** (k // each) * (1 + k % each / each) - 1, 2.0 ** (k // each) / each
        place = (k + 127 * each) % segments
        error, points[0, place], table[:, place] = around_point(tail, low, low + width, degree)
        worst = max(worst, error)
    return worst, points, table


def around_point(
    f: Function, low: float, high: float, degree: int = 5
) -> tuple[float, float, Values]:
    """(relative error, point, coefficients) of f on [low, high] by powers of the distance from a point."""
    point = exact_point(f, low, high)
    first = float(np.float32(f(np.array(point))))

    def slope(d: Values) -> Values:
        safe = np.where(np.abs(d) < 1e-9, 1e-9, d)
        return (f(point + safe) - first) / safe

    error, c = minimax(
        slope, lambda d: np.abs(d) / f(point + d) + 1e-9, low - point, high - point, degree - 1
    )
    return error, point, np.array([first, *c])


def precise_gates(gate: Function, limit: float, bend: float) -> tuple[float, float, Values, Values]:  # fmt: skip
    """(scale, error, points, table): the share of x that passes at x = -a < limit, to float32's relative accuracy.

    Segment k lies about the a of which scale * (a + bend * a^2) is k.
    """
    scale = (SEGMENTS - 0.5) / (limit + bend * limit**2)
    points, table, worst = np.zeros((1, SEGMENTS)), np.zeros((6, SEGMENTS)), 0.0
    edges = np.maximum(0.0, np.arange(-0.5, SEGMENTS)) / scale
    if bend:
        edges = (np.sqrt(1 + 4 * bend * edges) - 1) / (2 * bend)
    for k in range(SEGMENTS):
        error, points[0, k], table[:, k] = around_point(gate, edges[k], edges[k + 1])
        worst = max(worst, error)
    return scale, worst, points, table


def spacing(values: Values, bits: int, smallest: int) -> Values:
    """Of floating-point numbers with so many bits near these values."""
    exponent = np.floor(np.log2(np.maximum(values, 1e-30)))
    return np.asarray(np.exp2(np.maximum(exponent, smallest) - (bits - 1)))


def gates(
    gate: Function, degree: int, scale: float, count: int, bits: int, smallest: int
) -> tuple[float, Values]:
    """(error in ulps of a * gate, table): the share of x that passes at x = -a, by powers of a itself.

    Segment k, of so many, lies about k / scale. Halves have so few digits that float32 stands what powers of a cancel.
    """
    table, worst = np.zeros((degree + 1, SEGMENTS)), 0.0

    def weight(a: Values) -> Values:
        return np.asarray(np.maximum(a, 0) / spacing(a * gate(a), bits, smallest) + 1e-9)

    for k in range(count):
        error, c = minimax(gate, weight, max(0.0, (k - 0.5) / scale), (k + 0.5) / scale, degree)
        worst = max(worst, error)
        table[:, k] = c
    return worst, table


def powers() -> Values:
    """2^(j / 32) as float32, its bits lessened by j where an exponent's fraction would add j."""
    j = np.arange(SEGMENTS)
    bits = np.exp2(j / SEGMENTS).astype(np.float32).view(np.int32) - (j << 18)
    return bits.astype(np.int32).view(np.float32).astype(np.float64)[None]


def text(name: str, table: Values) -> str:
    """The table as C++."""
    rows = []
    for row in table:
        numbers = [f"{np.float32(v):.9g}" for v in row]
        numbers = [n if "." in n or "e" in n else n + ".0" for n in numbers]
        rows.append("    {" + ", ".join(n + "f" for n in numbers) + "}")
    return (
        f"static constexpr float {name}[{len(table)}][{table.shape[1]}] = {{\n"
        + ",\n".join(rows)
        + "};\n"
    )


def main() -> None:
    print(
        "// Piecewise polynomials, one row a power, one column a segment. Made by tools/fit_tables.py; not edited by hand."
    )
    print("#pragma once\n\nnamespace tensorlogic {\n")
    for name, bits, degree in (("MILLS", 3, 5), ("MILLS_FEW", 1, 8)):
        error, points, table = mills(bits, degree)
        print(
            f"// The normal tail over its exponential, relative error 2^{np.log2(error):.1f}; powers of the distance from a point."
        )
        print(text(f"{name}_POINT", points))
        print(text(name, table))
    kinds: dict[str, Function] = {
        "GELU": lambda a: ndtr(-a),
        "GELU_TANH": lambda a: expit(-2 * np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)),
        "SILU": lambda a: expit(-a),
    }
    for name, gate in kinds.items():
        a = np.linspace(2, 40, 400_001)
        end = float(a[a * gate(a) < 2.0**-25][0])  # beyond, all float16 products round to zero
        step = STEP[name]
        count = math.ceil(end / step + 0.5)
        error, table = gates(gate, 3, 1 / step, count, 11, -14)
        print(
            f"// The share of x that {name.lower()} passes at x = -a, segments of width {name}_STEP, none left at {name}_END;"
            f" {error:.2f} ulp of float16."
        )
        print(f"static constexpr float {name}_STEP = {step}f, {name}_END = {count * step}f;")
        print(text(f"{name}_GATE", table))
        limit = float(a[a * gate(a) < 2.0**-17][0])
        scale = (SEGMENTS - 0.6) / limit
        error, table = gates(gate, 2, scale, SEGMENTS, 8, -126)
        print(f"// The same below {name}_LIMIT; {error:.2f} ulp of bfloat16.")
        print(
            f"static constexpr float {name}_COARSE_SCALE = {scale:.9g}f, {name}_LIMIT = {limit:.9g}f;"
        )
        print(text(f"{name}_COARSE_GATE", table))
        limit = float(a[gate(a) < UNSEEN][0])
        scale, error, points, table = precise_gates(gate, limit, BEND[name])
        below = np.float32(limit * (1 - 2.0**-20))  # the end itself rounds to no segment
        print(
            f"// The same below {name}_NEAR, relative error 2^{np.log2(error):.1f}; powers of the distance from a point."
        )
        print(
            f"static constexpr float {name}_NEAR_SCALE = {scale:.9g}f, {name}_NEAR_BEND = {BEND[name] * scale:#.9g}f,"
            f" {name}_NEAR = {below:.9g}f;"
        )
        print(text(f"{name}_NEAR_POINT", points))
        print(text(f"{name}_NEAR_GATE", table))
    print(
        "// Powers of two by 32nds, the bits of each lessened by its index where an exponent's fraction would add it."
    )
    print(text("EXP2_LESS_INDEX", powers()))
    print("}  // namespace tensorlogic")


if __name__ == "__main__":
    main()
