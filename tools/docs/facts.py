"""Single figures and small tables of the documents, each computed from one result file that is no run of the benchmark."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensorlogic.bench.terminal.user_error import Problem

Document = dict[str, Any]
GOAL = re.compile(r"(ok|MISS)\s+(.+?)\s{2,}(\S+) ?(\S*)\s+target ([≤≥]) (\S+)")
# of being right: not shown
CHECKS = ("error", "keeps its share", "leaves the parameters", "still gives")
#: Ways to compute a product that result files have and the package has no more.
GONE = {
    "cublaslt.bf16x6", "cublaslt.fp8", "cublaslt.int8", "torch.int8", "torch.int8x3", "triton.f16_rounded", "triton.fp8", "triton.int8",
}  # fmt: skip
MODEL = re.compile(r"\s*(.+): ours (\d+) us\s+eager (\d+) us\s+compile (\d+) us")


def fact(name: str, path: Path) -> str:
    """The text that the fact has by that file; Problem where either is unknown."""
    if name not in FACTS:
        raise Problem(f"fact is {name!r}; {', '.join(FACTS)} are known")
    try:
        text = path.read_text(encoding="utf-8")
        document = {"lines": text.splitlines()} if path.suffix == ".txt" else json.loads(text)
    except (OSError, ValueError) as problem:
        raise Problem(f"{path} cannot be read: {problem}") from problem
    return FACTS[name](document)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first column to the left, numbers to the right."""
    rule = "|" + "|".join([":---", *["---:"] * (len(head) - 1)]) + "|"
    return "\n".join(["| " + " | ".join(h) + " |" for h in (head,)] + [rule] + ["| " + " | ".join(r) + " |" for r in rows])  # fmt: skip


def enabled(result: Document) -> str:
    """A program with and without TENSORLOGIC_ENABLE=1 (`benchmarks/enable.py`)."""
    limits = " ".join(f"{name}={value}" for name, value in result.get("limited to", {}).items())
    about = (
        f"{result['machine']}{' limited by ' if limits else ''}{limits}, {result['threads']} threads; PyTorch {result['torch']}; "
        f"{result['date']}; answers {'the same' if result['same'] else 'DIFFER'}"
    )
    head = ("float16", "PyTorch, ms", "TENSORLOGIC_ENABLE=1, ms", "times faster")
    rows = [(w, f"{off:.1f}", f"{on:.1f}", f"{gain:.1f}") for w, off, on, gain in result["rows"]]
    return f"{about}\n\n{table(head, rows)}"


def guards(result: Document) -> str:
    """What the guards of enable() add to other calls (`benchmarks/guards.py`)."""
    e = result["environment"]
    about = f"{e['device']}, {e['threads']} threads; PyTorch {e['torch']}; {result['date']}; microseconds"
    rows = [
        (name, f"{alone:.1f}", *(f"{on - off:+.2f}" for off, on in (pair, result["us"]["without"][name])))
        for name, pair in result["us"]["with"].items()
        for alone in pair[:1]
    ]  # fmt: skip
    return f"{about}\n\n{table(('', 'PyTorch', 'with hooks', 'without'), rows)}"


def agreeing(result: Document) -> str:
    """Keys on which fresh stores agree (`benchmarks/stability.py`)."""
    agree = result["keys"] - len(result["differing"])
    e = result["environment"]
    return (
        f"{agree} of the benchmark's {result['keys']} keys ({e['device']}, {e['threads']} threads)"
    )


def imported(result: Document) -> str:
    """What the import takes (`benchmarks/import_time.py`)."""
    ours, torch = (statistics.median(result["samples"][n]) for n in ("import tensorlogic, after torch", "import torch"))  # fmt: skip
    e = result["machine"]
    return f"{ours:.0f} ms after PyTorch's own {torch:.0f} ms ({e['device']}, PyTorch {e['torch']})"


def models(result: Document) -> str:
    """Whole models by `optimize`, beside PyTorch and torch.compile; of several runs in one file the last. A loss is bold."""
    rows = {}
    for line in result["lines"]:
        if found := MODEL.match(line):
            ours, eager, compiled = (int(us) for us in found.groups()[1:])
            gains = [
                f"{us / ours:.2f}" if us >= ours else f"**{us / ours:.2f}**"
                for us in (eager, compiled)
            ]
            times = [f"{us / 1000:.2f}" for us in (eager, compiled, ours)]
            rows[found[1]] = (found[1], *times, *gains)
    head = ("", "PyTorch, ms", "torch.compile, ms", "optimize, ms", "x PyTorch", "x torch.compile")
    return table(head, list(rows.values()))


def zoo(result: Document) -> str:
    """Models of timm and transformers, untouched, beside PyTorch and torch.compile (`benchmarks/zoo_more.py --compile`). A loss is bold."""
    rows, over = [], []
    for r in result["models"]:
        if "compile_us" not in r:
            continue
        now = {"": r} | ({", after Inductor": {**r, **r["later"]}} if "later" in r else {})
        for when, m in now.items():
            ours = m.get("ours_us", m["eager_us"])
            gains = [m[f"{n}_us"] / ours for n in ("eager", "compile")]
            times = [f"{m[f'{n}_us'] / 1000:.2f}" for n in ("eager", "compile")]
            told = [f"{g:.2f}" if g >= 1 else f"**{g:.2f}**" for g in gains]
            name = f"{r['name']}, batch {r['batch']}{when}"
            seconds = ("", "") if when else (f"{r['ready_s']:.1f}", f"{r['compile_s']:.1f}")
            rows.append((name, *times, f"{ours / 1000:.2f}", *told, *seconds))
        over.append([m["over_peer"][0] for m in now.values()][-1])
    mean = statistics.geometric_mean(1 / o for o in over)
    about = (
        f"{result['device']}; {result['dtype'].removeprefix('torch.')}; "
        f"{', '.join(f'{n} {v}' for n, v in result['versions'].items())}; {result['date']}; {len(over)} models, "
        f"{sum(o <= 1.03 for o in over)} of them within 1.03 of the better of the two, {mean:.2f} times ahead of it on the geometric mean"
    )
    head = ("", "PyTorch, ms", "torch.compile, ms", "optimize, ms", "x PyTorch", "x torch.compile", "ready, s", "torch.compile, s")  # fmt: skip
    return f"{about}\n\n{table(head, rows)}"


def latency(result: Document) -> str:
    """How late a call of a small network may be, to the worst (`benchmarks/realtime.py`)."""
    driver = f", driver {result['driver']}" if result["driver"] else ""
    about = f"{result['device']}{driver}; PyTorch {result['torch']}; {result['date']}; microseconds, {result['calls']:,} calls"
    marks = list(next(iter(result["us"].values())))
    rows = [(way, *(f"{us[m]:.0f}" for m in marks)) for way, us in result["us"].items()]
    return f"{about}\n\n{table(('', *marks), rows)}"


def without_gone(result: Document) -> Document:
    """A result of `bench --suite precision` without the ways that are gone."""
    parts = [p for p in ("strategies", "adaptive") if p in result]
    return result | {p: [r for r in result[p] if r["way"] not in GONE] for p in parts}


def budgets(result: Document) -> str:
    """Products within error budgets beside PyTorch's own of the same inputs, guard included (`bench --suite precision`). A loss is bold."""
    gpu = result["machine"]["gpu"]
    device, sizes = ("cuda", (1024, 4096)) if gpu else ("cpu", (512, 2048))
    found = {
        (r["rtol"], r["dtype"], r["size"]): r
        for r in without_gone(result)["adaptive"]
        if r["device"] == device and r["size"] in sizes
    }
    kinds = sorted({key[1:] for key in found})
    rows = []
    for rtol in sorted({key[0] for key in found}, reverse=True):
        cells = [f"{rtol:.0e}"]
        for kind in kinds:
            row = found.get((rtol, *kind))
            speed = 0.0 if row is None else row.get("watched_speed", row["wall_speed"])[0]
            told = f"{speed:.2f}" if speed >= 1 else f"**{speed:.2f}**"
            cells.append("" if row is None else f"{told} {row['way']}")
        rows.append(cells)
    name = gpu["name"] if gpu else result["machine"]["processor"]
    about = f"{name}; PyTorch {result['machine']['environment']['torch']}; {result['before']['time'][:10]}; times as fast as PyTorch, and by which way"
    head = ("error at most", *(f"{dtype} inputs, {size}" for dtype, size in kinds))
    return f"{about}\n\n{table(head, rows)}"


def goals(result: Document) -> str:
    """What the first run of a file asked and reached; rows beside the best peer as their number and the worst. A miss is bold."""
    rows: list[tuple[str, str, str]] = []
    beside: dict[str, list[tuple[float, str, bool]]] = {}
    for line in result["lines"]:
        if re.match(r"\d+ missed", line):
            break
        found = GOAL.match(line)
        if found is None or any(word in found[2] for word in CHECKS):
            continue
        missed, what, value, unit, sign, asked = found[1] == "MISS", *found.groups()[1:]
        if " over best peer" in what:
            kind = "forward and backward" if "backward" in what else "forward"
            beside.setdefault(kind, []).append((float(value), asked, missed))
            continue
        told = f"{value} {unit}".strip()
        rows.append((what, f"**{told}**" if missed else told, f"{sign} {asked}"))
    for kind, all_of in beside.items():
        told = f"{max(v for v, *_ in all_of):.3g}"
        missed = sum(m for *_, m in all_of)
        what = (
            f"{kind}, over the better of eager and torch.compile: the worst of {len(all_of)} rows"
        )
        rows.append((what, f"**{told}, {missed} above**" if missed else told, f"≤ {all_of[0][1]}"))
    return table(("", "reached", "asked"), rows)


FACTS: dict[str, Callable[[Document], str]] = {
    "enabled": enabled,
    "guards": guards,
    "agreeing": agreeing,
    "imported": imported,
    "models": models,
    "zoo": zoo,
    "latency": latency,
    "budgets": budgets,
    "goals": goals,
}
