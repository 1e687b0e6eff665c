"""Tables between markers of a Markdown file, made from result files: `python -m tools.docs.markdown_blocks [--check] FILE...`.

A marker names a result file (relative to the Markdown file) and what to show of it:

    <!-- bench benchmarks/results/cpu.json category=fusion dtype=f16 -->
    <!-- end bench -->

or names the figures of the notes that this work began from, and result files to put beside them:

    <!-- figures fused benchmarks/results/cpu.json benchmarks/results/h200.json -->
    <!-- end figures -->

or a table or a figure of another result file, the latter within a sentence (`facts.py` has their names):

    <!-- fact enabled benchmarks/results/enable.json -->
    <!-- end fact -->

`category`, `op`, `dtype` and `size` select rows (several values separated by commas), `show=summary` gives the summary, `show=losses` what loses.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tensorlogic.bench.report import summary as report_summary
from tensorlogic.bench.report import tables as report_tables
from tensorlogic.bench.result_file import Results, Row, load
from tensorlogic.bench.terminal.size_text import parse
from tensorlogic.bench.terminal.user_error import Problem
from tensorlogic.system.hardware import title

from . import facts as docs_facts
from . import seed_figures

BLOCK = re.compile(
    r"<!-- (?P<kind>bench|figures|fact) (?P<spec>[^>]+?) -->(?P<break>\n?)(?P<body>.*?)<!-- end (?P=kind) -->",
    re.DOTALL,
)
HEADS = (
    "operation",
    "size",
    "dtype",
    "candidate",
    "avg ms",
    "of limit",
    "x eager",
    "x eager, host",
    "x separate",
    "error",
)
FIELDS = ("category", "op", "dtype", "size")


def rendered(text: str, folder: Path) -> str:
    """The text with every marked block made anew."""
    made = {"bench": _block, "figures": _figures, "fact": _fact}

    def fresh(m: re.Match[str]) -> str:
        body = made[m["kind"]](m["spec"], folder)
        return f"<!-- {m['kind']} {m['spec']} -->{m['break']}{body}{m['break']}<!-- end {m['kind']} -->"

    return BLOCK.sub(fresh, text)


def _fact(spec: str, folder: Path) -> str:
    """A name of `facts.py`, then the result file."""
    name, _, path = spec.partition(" ")
    return docs_facts.fact(name, folder / path)


def _figures(spec: str, folder: Path) -> str:
    """`fused` or `others`, then the result files whose columns follow one another."""
    part, *names = spec.split()
    return seed_figures.tables([load(folder / n) for n in names], (folder / names[0]).parent, part)


def _block(spec: str, folder: Path) -> str:
    name, *options = spec.split()
    results = load(folder / name)
    given = dict(o.split("=", 1) for o in options if "=" in o)
    shown = {"show=summary": report_summary.lines, "show=losses": report_summary.losses}
    strange = [o for o in options if o.partition("=")[0] not in FIELDS and o not in shown]
    if strange:
        raise Problem(
            f"marker {spec!r} has {strange[0]!r}; {', '.join((*FIELDS, *shown))} are known"
        )
    about = _about(results)
    for option in options:
        if option in shown:
            return "\n".join(["```text", about, *shown[option](results), "```"])
    rows = [r for r in results.timed if _wanted(r, given)]
    known = [c for c in report_tables.columns(results) if c.head in HEADS]
    chosen = [c for c in known if c.essential or any(c.cell(r) for r in rows)]
    return f"{about}\n\n{report_tables.markdown(chosen, rows)}"


def _about(results: Results) -> str:
    machine, environment = results.machine, results.machine["environment"]
    date = str(results.run["before"]["time"])[:10]
    version = f"PyTorch {environment['torch']}, Triton {environment['triton']}"
    return f"{title(environment)}; {version}; TensorLogic {machine['tensorlogic']}; {date}"


def _wanted(row: Row, given: dict[str, str]) -> bool:
    values = {"category": row.category, "op": row.op, "dtype": row.dtype}
    chosen = all(values[n] in given[n].split(",") for n in values if n in given)
    return chosen and (
        "size" not in given or row.size in [parse(s) for s in given["size"].split(",")]
    )


def main(arguments: Sequence[str]) -> int:
    """Rewrite the files, or with `--check` say which ones have drifted from their result files (exit code 1)."""
    paths = [Path(a) for a in arguments if a != "--check"]
    drifted = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        fresh = rendered(text, path.parent)
        if fresh != text:
            drifted.append(str(path))
            if "--check" not in arguments:
                path.write_text(fresh, encoding="utf-8")
    if drifted and "--check" in arguments:
        sys.stderr.write(
            f"tables differ from their result files: {', '.join(drifted)}; run `make tables`\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
