"""The report's plots, one function for each kind, made from result files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compare import Comparison
from ..machine_limits import Floors
from ..result_file import Results, Row
from ..terminal.size_text import short
from .svg_style import FAINT, INK, LOSS, SERIES, Plot, drawn, legend, plain_numbers, size_axis, xy

WORDS = {
    "matmul": "products",
    "elementwise": "elements",
    "reduction": "reductions",
    "activation": "activations",
    "fusion": "fused",
    "batch": "batches",
}


def categories(results: Results) -> list[Plot]:
    """One plot for each plain operation: rate over size, ours, PyTorch's and the limit."""
    floors = Floors(results)
    plain = [r for r in results.timed if r.category not in ("fusion", "transfer", "batch")]
    found = [
        _rates(op, [r for r in plain if r.op == op], floors)
        for op in dict.fromkeys(r.op for r in plain)
    ]
    moves = [r for r in results.timed if r.category == "transfer"]
    return [*found, *([_transfers(moves, results.kind)] if moves else [])]


def _rates(op: str, rows: list[Row], floors: Floors) -> Plot:
    product = rows[0].category == "matmul"

    def rate(row: Row, us: float) -> float:
        return (row.flops if product else row.bytes) / us / 1e3

    def draw(figure: Any, axis: Any) -> None:
        for i, dtype in enumerate(dict.fromkeys(r.dtype for r in rows)):
            some = sorted((r for r in rows if r.dtype == dtype), key=lambda r: r.size)
            sizes, colour = [r.size for r in some], SERIES[i]
            axis.plot(
                sizes,
                [rate(r, r.median_us()) for r in some],
                "o-",
                color=colour,
                ms=4,
                label=f"{dtype}, ours",
            )
            axis.fill_between(sizes, *_band(some, rate), color=colour, alpha=0.15, linewidth=0)
            best = [
                (r.size, rate(r, r.median_us(b))) for r in some if (b := r.best_eager()) is not None
            ]
            axis.plot(*xy(best), "s--", color=colour, ms=3.5, mfc="none", label=f"{dtype}, PyTorch")
            limit = [(r.size, rate(r, us)) for r in some if (us := floors.us(r))]
            axis.plot(*xy(limit), ":", color=colour, lw=1, label=f"{dtype}, limit")
        axis.set_yscale("log")
        plain_numbers(axis)
        size_axis(axis, sorted({r.size for r in rows}))
        axis.set_xlabel("side of the matrices" if product else "elements")
        axis.set_ylabel("GFLOPS" if product else "GB/s of the least traffic")
        legend(figure, axis, 2)

    return drawn(f"{op} ({WORDS[rows[0].category]})", draw)


def _band(rows: list[Row], rate: Callable[[Row, float], float]) -> tuple[list[float], list[float]]:
    """The quarter and three-quarter samples, as rates."""
    low, high = [], []
    for row in rows:
        values = sorted(row.device_us[row.subject])
        low.append(rate(row, values[3 * len(values) // 4]))
        high.append(rate(row, values[len(values) // 4]))
    return low, high


def _transfers(rows: list[Row], kind: str) -> Plot:
    def draw(figure: Any, axis: Any) -> None:
        for colour, detail in zip(SERIES, dict.fromkeys(r.detail for r in rows), strict=False):
            some = sorted((r for r in rows if r.detail == detail), key=lambda r: r.size)
            axis.plot(*xy((r.size, r.gbs) for r in some), "o-", color=colour, ms=4, label=detail)
        axis.set_yscale("log")
        plain_numbers(axis)
        size_axis(axis, sorted({r.size for r in rows}))
        axis.set_xlabel(f"elements of {rows[0].dtype}")
        axis.set_ylabel("GB/s read and written" if kind == "cpu" else "GB/s over the bus")
        legend(figure, axis, 2)

    return drawn("transfer", draw)


def roofline(results: Results) -> list[Plot]:
    """One for each dtype: rate over intensity, under what this machine has shown."""
    floors, found = Floors(results), []
    timed = [r for r in results.timed if r.flops and r.bytes and r.category != "transfer"]
    for dtype in dict.fromkeys(r.dtype for r in timed):
        rows = [r for r in timed if r.dtype == dtype]
        if floors.copy and floors.peak.get(dtype):
            found.append(_roof(dtype, rows, floors))
    return found


def _roof(dtype: str, rows: list[Row], floors: Floors) -> Plot:
    peak = floors.peak[dtype]
    far = floors.copy[-1][0] / floors.copy[-1][1] / 1e3
    near = max(moved / us / 1e3 for moved, us in floors.copy)

    def draw(figure: Any, axis: Any) -> None:
        xs = [r.flops / r.bytes for r in rows]
        ends = (min(xs) / 2, max(max(xs), peak / far) * 2)
        for bandwidth, style, name in ((far, "-", "memory"), (near, "--", "cache")):
            knee = peak / bandwidth
            axis.plot(
                [ends[0], knee, ends[1]],
                [ends[0] * bandwidth, peak, peak],
                style,
                color=INK,
                lw=1.1,
                label=f"{name}: {bandwidth:,.0f} GB/s, {peak:,.0f} GFLOPS",
            )
        marks = dict(zip(WORDS, ("s", "o", "v", "D", "^", "P"), strict=True))
        for colour, category in zip(SERIES, WORDS, strict=False):
            some = [r for r in rows if r.category == category]
            if some:
                axis.plot(
                    *xy((r.flops / r.bytes, r.gflops) for r in some),
                    marks[category],
                    color=colour,
                    ms=4.5,
                    alpha=0.8,
                    label=WORDS[category],
                )
        axis.set_xscale("log")
        axis.set_yscale("log")
        plain_numbers(axis)
        plain_numbers(axis, "x")
        axis.grid(True)
        axis.set_xlabel("operations per byte of the least traffic")
        axis.set_ylabel("GFLOPS")
        legend(figure, axis, 2)

    return drawn(f"roofline {dtype}", draw, height=4.1)


def fusion(results: Results, clock: str = "device") -> list[Plot]:
    """One for each dtype: speed over the separate operations, and over PyTorch's best, for every size."""
    fused = [r for r in results.timed if r.category == "fusion"]
    if clock == "host":
        fused = [r for r in fused if r.host_us]
    return [
        _fused(dtype, [r for r in fused if r.dtype == dtype], clock)
        for dtype in dict.fromkeys(r.dtype for r in fused)
    ]


def _fused(dtype: str, rows: list[Row], clock: str) -> Plot:
    ops = list(dict.fromkeys(r.op for r in rows))[::-1]
    sizes = sorted({r.size for r in rows})

    def draw(figure: Any, axis: Any) -> None:
        shown: set[str] = set()
        for row in rows:
            at = ops.index(row.op) + 0.3 - 0.6 * sizes.index(row.size) / max(len(sizes) - 1, 1)
            for over, mark, name in (
                ("separate", "o", "over separate operations"),
                (None, "D", "over PyTorch's best"),
            ):
                speed = row.speed(over, clock)
                if speed is None:
                    continue
                lost = speed[2] < 1
                name = "slower than PyTorch's" if lost else name
                axis.plot(
                    [speed[0]],
                    [at],
                    mark,
                    color=LOSS if lost else SERIES[0 if over else 1],
                    ms=4,
                    mfc="none" if over and not lost else None,
                    ls="",
                    label=None if name in shown else name,
                )
                shown.add(name)
        axis.axvline(1, color=INK, lw=1)
        axis.set_xscale("log")
        plain_numbers(axis, "x")
        axis.set_yticks(range(len(ops)), ops, fontsize=9.5)
        axis.grid(True, axis="x")
        axis.set_xlabel(f"times as fast ({clock} time)" if clock == "host" else "times as fast")
        legend(figure, axis, 1)

    about = f"In each operation from top to bottom: {', '.join(map(short, sizes))}."
    return drawn(f"fused {dtype}, {clock} time", draw, about, height=1.8 + 0.33 * len(ops))


def errors(results: Results) -> list[Plot]:
    """Error over PyTorch's beside the speed over PyTorch's best."""
    rows = [
        r
        for r in results.timed
        if r.error and r.eager_error and r.speed() and r.category != "batch"
    ]
    if not rows:
        return []

    def draw(figure: Any, axis: Any) -> None:
        for i, dtype in enumerate(dict.fromkeys(r.dtype for r in rows)):
            points = [
                (speed[0], (r.error or 0) / (r.eager_error or 1))
                for r in rows
                if r.dtype == dtype and (speed := r.speed()) is not None
            ]
            axis.plot(*xy(points), "osD^"[i], color=SERIES[i], ms=4, alpha=0.75, label=dtype)
        axis.axhline(1, color=INK, lw=0.8)
        axis.axvline(1, color=INK, lw=0.8)
        axis.axhline(2, color=LOSS, lw=1, ls="--", label="refused above, unless it is rounding")
        axis.set_xscale("log")
        axis.set_yscale("log")
        plain_numbers(axis)
        plain_numbers(axis, "x")
        axis.grid(True)
        axis.set_xlabel("times as fast as PyTorch's best")
        axis.set_ylabel("error over PyTorch's error")
        legend(figure, axis, 2)

    return [
        drawn(
            "errors beside speeds",
            draw,
            "Errors are relative to float64; below 1 ours is more exact.",
        )
    ]


def batches(results: Results) -> list[Plot]:
    """What a request waits, and how many are served in a second, over the batch size."""
    rows = sorted((r for r in results.timed if r.category == "batch"), key=lambda r: r.size)
    if not rows:
        return []
    clock = "host" if results.kind == "cuda" else "device"

    def us(row: Row) -> float:
        return max(row.median_us(), row.median_us(clock=clock) if clock == "host" else 0.0)

    def plot(title: str, label: str, value: Callable[[Row], float]) -> Plot:
        def draw(figure: Any, axis: Any) -> None:
            for colour, dtype in zip(SERIES, dict.fromkeys(r.dtype for r in rows), strict=False):
                some = [(r.size, value(r)) for r in rows if r.dtype == dtype]
                axis.plot(*xy(some), "o-", color=colour, ms=4, label=f"{rows[0].op} {dtype}")
            axis.set_yscale("log")
            plain_numbers(axis)
            size_axis(axis, sorted({r.size for r in rows}))
            axis.set_xlabel("requests in a batch")
            axis.set_ylabel(label)
            legend(figure, axis, 2)

        return drawn(title, draw, height=3.0)

    return [
        plot("latency by batch", "microseconds a batch", us),
        plot("throughput by batch", "requests a second", lambda r: r.size / us(r) * 1e6),
    ]


def changes(found: Comparison) -> list[Plot]:
    """After over before, every row, sorted, with intervals."""
    timed = sorted((c for c in found.changes if c.ratio is not None), key=lambda c: c.ratio or 0.0)
    if not timed:
        return []

    def draw(figure: Any, axis: Any) -> None:
        for verdict, colour, name in (
            ("better", SERIES[0], "faster"),
            ("unchanged", FAINT, "within the margin or the noise"),
            ("worse", LOSS, "slower"),
        ):
            some = [(i, c) for i, c in enumerate(timed) if c.verdict == verdict]
            if some:
                ratio = [c.ratio or 0.0 for _, c in some]
                spread = [
                    [r - (c.low or 0.0) for r, (_, c) in zip(ratio, some, strict=True)],
                    [(c.high or 0.0) - r for r, (_, c) in zip(ratio, some, strict=True)],
                ]
                axis.errorbar(
                    [i for i, _ in some],
                    ratio,
                    yerr=[[max(v, 0.0) for v in side] for side in spread],
                    fmt="o",
                    ms=3,
                    lw=0.8,
                    color=colour,
                    label=f"{name} ({len(some)})",
                )
        axis.axhline(1, color=INK, lw=0.8)
        axis.set_yscale("log")
        plain_numbers(axis)
        axis.grid(True, axis="y")
        axis.set_xlabel("rows, sorted")
        axis.set_ylabel("time after over time before")
        legend(figure, axis, 1)

    return [drawn("before and after", draw)]
