"""Write the tables and plots of docs/choosing-precision.md from the committed results: `python -m tools.docs.precision_page`."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from .facts import without_gone

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "choosing-precision.md"
RESULTS = {"h200": "precision-h200.json", "cpu": "precision-cpu.json"}
MARK = "<!-- {} -->"
ASKED = 1000  # side of the float64 product that the question began with


def _there(found: dict[str, Any]) -> dict[str, Any]:
    """What was found on the machine's GPU, or on its processor where it has none."""
    device = "cuda" if found["machine"]["gpu"] else "cpu"
    parts = ("strategies", "adaptive", "mixed")
    return found | {p: [r for r in found[p] if r["device"] == device] for p in parts}


def tables(found: dict[str, Any]) -> str:
    """The strategies at the usual size, what budgets take, transfers and placement, as Markdown."""
    # its "f16" was timed by the product of float16 and float32 that is gone
    half = not found["machine"]["gpu"] or without_gone(found)["strategies"] == found["strategies"]
    found = without_gone(found)
    asked = _asked(found)
    found = _there(found)
    machine = found["machine"]
    name = (machine["gpu"] or {}).get("name") or machine["processor"]
    torch = machine["environment"]["torch"]
    blocks = [f"{name}, PyTorch {torch}, {found['before']['time'][:10]}."]
    if asked:
        head = ["device", "way", "conversion alone, µs", "run, µs", "transfers, µs", "total, µs", "peak MiB", "error"]  # fmt: skip
        said = f"**f64 inputs, {ASKED}×{ASKED}, from ordinary memory and back, on each device**"
        blocks.append(f"{said}\n\n{_markdown(head, asked)}")
    sizes = sorted({r["size"] for r in found["strategies"]})
    largest = max((n for n in sizes if n <= 4096), default=sizes[-1])
    for dtype in ("f32", "f64"):
        rows = [
            [r["way"], r["conversion_us"], r["us"], r["transfer_us"], _peak(found, r), r["error"]]
            for r in found["strategies"]
            if r["size"] == largest and r["dtype"] == dtype and "us" in r
        ]  # fmt: skip
        head = ["way", "conversion alone, µs", "run, µs", "transfers, µs", "peak MiB", "error"]
        blocks.append(f"**{dtype} inputs, {largest}×{largest}**\n\n" + _markdown(head, rows))
    rows = [
        [r["size"], r["dtype"], f"{r['rtol']:.0e}", r["way"], r["error"], r["us"], r["speed"][0], r.get("watched_speed", ("",))[0], r["wall_speed"][0]]
        for r in sorted(found["adaptive"], key=lambda r: (r["size"], r["dtype"]))
    ]  # fmt: skip
    head = [
        "size",
        "inputs",
        "rtol",
        "way",
        "error",
        "µs",
        "× PyTorch",
        "guard on the device included",
        "× PyTorch, waiting for each call",
    ]
    blocks.append("**Within a budget**\n\n" + _markdown(head, rows))
    modes = ("f32", "f16") if half else ("f32",)
    rows = [[r["size"], *(r[m][0] for m in modes)] for r in found["mixed"]]
    blocks.append(
        "**float16 × float32, time over that of operands converted before**\n\n"
        + _markdown(["size", *(f'`"{m}"`' for m in modes)], rows)
    )
    if found["transfers"]:
        names = [k for k in found["transfers"][0] if k != "bytes"]
        rows = [[f"{r['bytes'] >> 20} MiB", *(r[k] for k in names)] for r in found["transfers"]]
        blocks.append("**Transfers, GB/s**\n\n" + _markdown(["", *names], rows))
    if found["placement"]:
        rows = [
            [r["size"], r["auto"], r["cpu"], r["cuda"], r["over_best"]] for r in found["placement"]
        ]
        head = ["size", "auto, ms", "CPU", "GPU", "auto over the better"]
        blocks.append("**Placement, f32 operands on the CPU**\n\n" + _markdown(head, rows))
    return "\n\n".join(blocks)


def _peak(found: dict[str, Any], row: dict[str, Any]) -> float | str:
    """MiB; nothing of a CPU in files that did not count what its heap had kept."""
    return row["peak_bytes"] / 2**20 if row["device"] != "cpu" or "peaks" in found else ""


def _asked(found: dict[str, Any]) -> list[list[Any]]:
    """The problem that the question of precision and place began with, the fastest way of all devices first."""
    mine = [
        r for r in found["strategies"] if r["size"] == ASKED and r["dtype"] == "f64" and "us" in r
    ]
    return [
        [{"cuda": "GPU", "cpu": "CPU"}[r["device"]], r["way"], r["conversion_us"], r["us"], r["transfer_us"], r["total_us"], _peak(found, r), r["error"]]
        for r in sorted(mine, key=lambda r: r["total_us"])
    ]  # fmt: skip


def _markdown(head: list[str], rows: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return (
        f"{value:.1e}"
        if 0 < abs(value) < 1e-3
        else f"{value:.3g}"
        if value < 1000
        else f"{value:.0f}"
    )


def plot(found: dict[str, Any], path: Path) -> None:
    """Time of every way over the size, f32 inputs: where the lines cross, the choice changes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    rows = [
        r for r in _there(without_gone(found))["strategies"] if r["dtype"] == "f32" and "us" in r
    ]
    for way in dict.fromkeys(r["way"] for r in rows):
        points = sorted((r["size"], r["us"]) for r in rows if r["way"] == way)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=way)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="side of the square product",
        ylabel="microseconds, conversions included",
    )
    axes.legend(fontsize=7)
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "tensorlogic"
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _between(begin: str, body: str, end: str, _: re.Match[str]) -> str:
    return f"{begin}\n\n{body}\n\n{end}"


def filled(text: str) -> str:
    """The page with what the result files say between its marks."""
    for name, file in RESULTS.items():
        path = ROOT / "benchmarks" / "results" / file
        if path.is_file():
            begin, end = MARK.format(name), MARK.format(f"end {name}")
            text = re.sub(
                re.escape(begin) + ".*?" + re.escape(end),
                partial(_between, begin, tables(json.loads(path.read_text())), end),
                text,
                flags=re.DOTALL,
            )
    return text


def main(check: bool) -> int:
    """Write the page and its plots, or with `check` say whether the page is as the results make it."""
    text = PAGE.read_text()
    if check:
        return int(filled(text) != text)
    PAGE.write_text(filled(text))
    for name, file in RESULTS.items():
        path = ROOT / "benchmarks" / "results" / file
        if path.is_file():
            plot(json.loads(path.read_text()), PAGE.parent / f"precision-{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
