"""The figures of the notes this work began from, beside those of result files: the tables of `docs/figures.md`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tensorlogic.bench.machine_limits import Floors
from tensorlogic.bench.result_file import Results, Row
from tensorlogic.bench.terminal.size_text import short
from tensorlogic.bench.terminal.user_error import Problem

# the notes' speed over separate operations, by side of the matrices
FUSED = {
    "linear_residual_relu": {128: 3.63, 256: 3.39, 512: 1.74, 1024: 0.63},
    "gelu_linear": {128: 2.82, 256: 1.80, 512: 0.42, 1024: 0.43},
}
# what, the notes' figure, operation, detail, size, whether in operations
RATES = (
    ("element-wise, 1M", "22 GB/s", "add", "", 1 << 20, False),
    ("sum, 1M", "6.5 to 7.7 GB/s", "sum", "", 1 << 20, False),
    ("GELU, 1M", "30 GFLOPS", "gelu", "", 1 << 20, True),
)
NOTED_PRODUCT = "1129 GFLOPS; 75 to 93 % of the vendor's library"
PEER = re.compile(r"^\w+\s+(add_relu with a fresh (\d+) MiB output, speed over torch)\s+([\d.]+) x", re.M)  # fmt: skip


def tables(runs: Sequence[Results], folder: Path, part: str) -> str:
    """One of the tables, "fused" or "others", or the sentence "product", as Markdown."""
    if part == "product":
        return _sentence(runs[0])
    if part not in ("fused", "others"):
        raise Problem(f"figures are {part!r}; fused, others or product is required")
    return _fused(runs) if part == "fused" else _others(runs, folder)


def _sentence(results: Results) -> str:
    """What the plain product of 1024 reaches, in words."""
    row = _row(results, "matmul", 1024)
    products = [r for r in results.timed if r.category == "matmul" and r.dtype == "f16"]
    if row is None or (speed := row.speed()) is None:
        return ""
    low, high = speed[1:]
    beside = "faster than" if low > 1 else "slower than" if high < 1 else "as fast as"
    limit = max(products, key=lambda r: r.gflops)
    return (
        f"On the {_name(results)} our plain product of 1024 is {beside} the vendor's library ({speed[0]:.2f} times, "
        f"{low:.2f} to {high:.2f}). Its share of the limit is {Floors(results).share(row) or 0.0:.0%}: "
        f"the limit is the rate of a product of {short(limit.size)} or more."
    )


def _row(results: Results, op: str, size: int, dtype: str = "f16", detail: str = "") -> Row | None:
    for row in results.timed:
        if (row.op, row.size, row.dtype, row.detail) == (op, size, dtype, detail):
            return row
    return None


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|" + "|".join([":---", *["---:"] * (len(head) - 1)]) + "|"
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(c) + " |" for c in lines)])  # fmt: skip


def _name(results: Results) -> str:
    return str(results.machine["environment"]["device"]).removeprefix("NVIDIA ")


def _columns(runs: Sequence[Results]) -> list[tuple[str, Callable[[str, int], Row | None], str]]:
    """Heading, row of an operation and size, and clock of every column."""
    found: list[tuple[str, Callable[[str, int], Row | None], str]] = []
    for results in runs:

        def f16(op: str, size: int, results: Results = results) -> Row | None:
            return _row(results, op, size)

        def f32(op: str, size: int, results: Results = results) -> Row | None:
            return _row(results, op, size, "f32")

        name = _name(results)
        if results.kind == "cuda":
            found += [(f"{name}, f16", f16, "device"), (f"{name}, f16, host time", f16, "host")]
        else:
            found += [(f"{name}, f16", f16, "device"), (f"{name}, f32", f32, "device")]
    return found


def _fused(runs: Sequence[Results]) -> str:
    """Speed over separate operations, the notes' first; and in words where fusion loses."""
    columns, lines, lost, count = _columns(runs), [], [], 0
    for op, sizes in FUSED.items():
        for size, noted in sizes.items():
            cells = [f"{op} {size}", f"{noted:.2f}"]
            for name, find, clock in columns:
                row = find(op, size)
                speed = None if row is None else row.speed("separate", clock)
                if speed is None:
                    cells.append("")
                    continue
                count += 1
                cells.append(f"{speed[0]:.2f} [{speed[1]:.2f}, {speed[2]:.2f}]")
                if speed[2] < 1:
                    lost.append(f"{op} {size} ({name}: {speed[0]:.2f})")
                elif speed[0] < noted and "f16" in name:  # the notes are of f16
                    cells[-1] += " (below the notes)"
            lines.append(cells)
    head = ["times as fast as separate operations", "notes", *(h for h, _, _ in columns)]
    word = f"Fusion loses in {len(lost)} of these {count} figures" + (f": {'; '.join(lost)}." if lost else ".")  # fmt: skip
    return f"{_markdown(head, lines)}\n\n{word}"


def _others(runs: Sequence[Results], folder: Path) -> str:
    head = ["", "notes", *(f"{_name(r)}" for r in runs)]
    lines = [["product f16 1024", NOTED_PRODUCT, *(_product(r) for r in runs)]]
    for what, noted, op, detail, size, operations in RATES:
        cells = [_rate(r, _row(r, op, size, "f16", detail), operations) for r in runs]
        lines.append([f"{what}, f16", noted, *cells])
    lines.append(["transfer, largest", "93 GB/s (copied within the CPU's memory)", *map(_transfer, runs)])  # fmt: skip
    lines.append(["launch", "0.15 to 0.20 ms", *map(_launch, runs)])
    lines.append(["conversion", "10 to 30 % of the time", *map(_conversion, runs)])
    lines.append(["pooled outputs", "latency 20 to 30 % lower", *(_pool(r, folder) for r in runs)])
    return _markdown(head, lines)


def _product(results: Results) -> str:
    row, f32 = _row(results, "matmul", 1024), _row(results, "matmul", 1024, "f32")
    if row is None or f32 is None:
        return ""
    share = Floors(results).share(row) or 0.0
    vendor, name = row.best_eager(), "of the vendor's library"
    us = row.median_us(vendor) if vendor else 0.0
    single = f32.best_eager()
    if single and us > f32.median_us(single):  # no library multiplies f16 well there
        name, us = "of the vendor's float32", f32.median_us(single)
    return f"{row.gflops:,.0f} GFLOPS; {us / row.median_us():.0%} {name}; {share:.0%} of the limit"


def _rate(results: Results, row: Row | None, operations: bool) -> str:
    if row is None:
        return ""
    share = Floors(results).share(row) or 0.0
    rate = f"{row.gflops:,.0f} GFLOPS" if operations else f"{row.gbs:,.0f} GB/s"
    speed = row.speed()
    beside = "" if speed is None else f"; {speed[0]:.2f} x PyTorch's"
    return f"{rate}; {share:.0%} of the limit{beside}"


def _transfer(results: Results) -> str:
    rows = [r for r in results.timed if r.category == "transfer" and "pageable" not in r.detail]
    if not rows:
        return ""
    largest = max(r.size for r in rows)
    best = max((r for r in rows if r.size == largest), key=lambda r: r.gbs)
    bus = "pinned, over the bus" if results.kind == "cuda" else "within memory, read and written"
    return f"{best.gbs:,.0f} GB/s at {short(largest)} ({bus})"


def _launch(results: Results) -> str:
    us = results.ceilings.launch_us
    device = f"; {us['device']:.1f} us on the device" if "device" in us else ""
    return f"{us.get('tensorlogic', 0):.1f} us (PyTorch {us.get('torch', 0):.1f} us{device})"


def _conversion(results: Results) -> str:
    """What a half costs beside a float32 on a machine that must convert."""
    half, single = (_row(results, "linear", 1024, d) for d in ("f16", "f32"))
    if half is None or single is None or results.kind != "cpu":
        return "none: the device multiplies halves"
    extra = half.median_us() / single.median_us() - 1
    return f"{extra:+.0%}: linear 1024 in f16 against f32 ({half.candidate})"


def _pool(results: Results, folder: Path) -> str:
    stem = results.path.stem if results.path else ""
    if results.kind != "cpu":
        measured = folder / f"pooling-{stem}.json"
        if not measured.exists():
            return "PyTorch's own allocator"
        row = json.loads(measured.read_text(encoding="utf-8"))["rows"][-1]
        return f"PyTorch's own allocator: {row['lower']:.0%} lower, add_relu into {row['mib']} MiB"
    path = folder / f"{stem}_peers.txt"
    found = PEER.search(path.read_text(encoding="utf-8")) if path.exists() else None
    if found is None:
        return ""
    return f"{1 - 1 / float(found[3]):.0%} lower: add_relu into {found[2]} MiB"
