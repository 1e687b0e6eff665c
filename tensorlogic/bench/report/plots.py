"""The report's plot: rate over size, ours beside PyTorch's and the limit, as SVG in the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..cases import SQUARE
from ..machine_limits import Floors
from ..result_file import Results, Row
from ..terminal.size_text import short
from ..terminal.user_error import Problem

# operations per byte from which a rate is one of arithmetic
INTENSE = 16
# stand-ins that become the page's CSS variables, so that a plot follows its colour scheme
INK, FAINT = "#010101", "#020202"
SERIES = ("#040401", "#040402", "#040403", "#040404")
COLOURS = {INK: "--ink", FAINT: "--faint"} | {c: f"--s{i}" for i, c in enumerate(SERIES, 1)}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "tensorlogic", "font.family": "sans-serif", "font.size": 10.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "text.color": INK, "grid.color": FAINT, "grid.linewidth": 0.4,
    "grid.alpha": 0.45, "legend.frameon": False, "legend.fontsize": 9.5, "legend.labelcolor": INK,
    "lines.linewidth": 1.6, "figure.figsize": (4.7, 3.5), "savefig.transparent": True,
}  # fmt: skip
# the svg element's attributes, and names that a page with several plots would hold twice
SIZE = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>')
IDS = re.compile(r' id="(?:[a-zA-Z]+|line2d|matplotlib\.axis)_\d+"')


@dataclass(frozen=True)
class Plot:
    """A drawing with its heading."""

    title: str
    svg: str


def over_size(results: Results) -> list[Plot]:
    """One plot for each operation; Problem without matplotlib."""
    try:
        from matplotlib import rc_context
    except ImportError as problem:
        raise Problem(
            "plots need matplotlib: `pip install 'tensorlogic-engine[bench]'`"
        ) from problem
    floors, rows = Floors(results), results.timed
    with rc_context(STYLE):
        return [_plot(op, [r for r in rows if r.op == op], floors) for op in dict.fromkeys(r.op for r in rows)]  # fmt: skip


def _plot(op: str, rows: list[Row], floors: Floors) -> Plot:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axis = figure.add_subplot()
    _rates(axis, sorted(rows, key=lambda r: r.size), floors)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, handlelength=2.2)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(f"{op} ({rows[0].category})", _inline(out.getvalue(), op))


def _rates(axis: Any, rows: list[Row], floors: Floors) -> None:
    category = rows[0].category
    product = rows[-1].flops > INTENSE * rows[-1].bytes

    def line(points: Iterable[tuple[Row, float | None]], mark: str, **style: Any) -> None:
        known = [(r.size, (r.flops if product else r.bytes) / us / 1e3) for r, us in points if us]
        if known:
            axis.plot(*zip(*known, strict=True), mark, ms=4, **style)

    for colour, name in zip(SERIES, dict.fromkeys(r.detail or r.dtype for r in rows), strict=False):
        some = [r for r in rows if name == (r.detail or r.dtype)]
        line(((r, r.median_us()) for r in some), "o-", color=colour, label=f"{name}, ours" if some[0].key else name)  # fmt: skip
        best = [(r, r.median_us(b)) for r in some if (b := r.best_eager())]
        line(best, "s--", color=colour, mfc="none", label=f"{name}, PyTorch")
        line(((r, floors.us(r)) for r in some), ":", color=colour, lw=1, label=f"{name}, limit")
    axis.set_yscale("log")
    _plain_numbers(axis.yaxis)
    _sizes(axis, sorted({r.size for r in rows}))
    axis.set_xlabel("side of the matrices" if category in SQUARE else "requests in a batch" if category == "batch" else "elements")  # fmt: skip
    axis.set_ylabel("GFLOPS" if product else "GB/s of the least traffic")


def _sizes(axis: Any, sizes: list[int]) -> None:
    """Sizes along x, as people write them."""
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log", base=2)
    shown = sizes if len(sizes) < 9 else sizes[::2]
    axis.set_xticks(shown, [short(s) for s in shown])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(True)


def _plain_numbers(side: Any) -> None:
    """Numbers without exponents along a logarithmic axis; some between the decades where these are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = side.get_view_interval()
    if high < 300 * low:
        subs = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0) if high < 4 * low else (1.0, 2.0, 5.0)  # fmt: skip
        side.set_major_locator(LogLocator(subs=subs, numticks=12))
    side.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1000 else f"{v:.4g}"))
    side.set_minor_formatter(NullFormatter())


def _inline(text: str, title: str) -> str:
    """The svg element alone, with the page's colours, as wide as its place allows."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = SIZE.sub(
        lambda m: f'<svg viewBox="{m[1]}" role="img" aria-label="{title}">', text, count=1
    )
    for colour, variable in COLOURS.items():
        text = text.replace(colour, f"var({variable})")
    text = IDS.sub("", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", text)
    return re.sub(r"\n\s*", "\n", text)
