"""How the report's plots look: SVG whose colours are CSS variables of the page, text is text, nothing is loaded from elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..terminal.size_text import short
from ..terminal.user_error import Problem

INK, FAINT, LOSS = "#010101", "#020202", "#030303"
SERIES = ("#040401", "#040402", "#040403", "#040404", "#040405", "#040406", "#040407")
COLOURS = {INK: "--ink", FAINT: "--faint", LOSS: "--loss"} | {
    c: f"--s{i}" for i, c in enumerate(SERIES, 1)
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.45,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
    "figure.figsize": (4.7, 3.5),
    "savefig.transparent": True,
}
IDS = re.compile(
    r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend|PathCollection|LineCollection|FillBetweenPolyCollection|PolyCollection)_\d+"'
)
SIZE = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>')


@dataclass(frozen=True)
class Plot:
    """A drawing with its heading and what it says in words."""

    title: str
    svg: str
    caption: str = ""


def drawn(
    title: str, draw: Callable[[Any, Any], None], caption: str = "", height: float = 3.5
) -> Plot:
    """A plot that `draw(figure, axes)` fills; Problem without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise Problem(
            "plots need matplotlib: `pip install 'tensorlogic-engine[bench]'`"
        ) from problem
    salt = re.sub(r"\W+", "-", title)
    with rc_context({**STYLE, "svg.hashsalt": salt}):
        figure = Figure(figsize=(4.7, height), layout="constrained")
        draw(figure, figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(title, _inline(out.getvalue(), title), caption)


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


def size_axis(axis: Any, sizes: Sequence[int]) -> None:
    """Sizes along x, as people write them."""
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log", base=2)
    kept = list(sizes) if len(sizes) < 9 else list(sizes)[::2]
    axis.set_xticks(kept, [short(s) for s in kept])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(True)


def plain_numbers(axis: Any, which: str = "y") -> None:
    """Numbers without exponents along a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    side = axis.yaxis if which == "y" else axis.xaxis
    low, high = side.get_view_interval()
    if high < 300 * low:  # few decades: numbers between them, too
        subs = (
            (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
            if high < 4 * low
            else (1.0, 2.0, 5.0)
        )
        side.set_major_locator(LogLocator(subs=subs, numticks=12))
    side.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1000 else f"{v:.4g}"))
    side.set_minor_formatter(FuncFormatter(lambda v, _: ""))


def legend(figure: Any, axis: Any, columns: int = 2) -> None:
    """Under the axes, where it covers nothing."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.2)


def xy(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Points as two lists."""
    points = list(points)
    return [x for x, _ in points], [y for _, y in points]
