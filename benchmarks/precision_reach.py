"""What error budgets, mixed products, transfers and placement were to reach, and what they do: a line a goal, misses named.

    python benchmarks/precision_reach.py [RESULT.json] [--problems PROBLEMS.json]

Without a result file the suite runs first (`tensorlogic bench --suite precision`: minutes) and is read then; of problems (`precision_problems.py`)
a file says how many budgets were broken unwarned. Times are of the device, with what looking after the budget costs there in brackets
where it was measured; a goal is held against the number without it. Exits 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tensorlogic.bench import precision_suite

Found = dict[str, Any]
BUDGETED = {  # device: inputs, budget, size -> at least so many times PyTorch's speed
    "cuda": {
        ("f32", 1e-5, 4096): 3.0, ("f32", 1e-6, 4096): 1.15, ("f32", 1e-3, 1024): 4.0, ("f32", 1e-3, 4096): 9.0,
        ("f32", 1e-3, 8192): 9.0, **{("f64", 1e-6, n): 1.8 for n in (1000, 1024, 2048, 4096)},
    },
    "cpu": {("f64", 1e-6, n): 1.8 for n in (512, 1000, 2048)},
}  # fmt: skip
ROUGH, BEST_F32 = (
    1.8,
    ("PyTorch f32", "torch.f32", "cpu.f32"),
)  # float32 within 1e-2 on a CPU, over the fastest float32
MIXED, PLACED, MOVED_GBS = 1.05, 1.05, 40.0


class Row(NamedTuple):
    """A goal: at least or at most so much of what was reached."""

    what: str
    value: float
    goal: float
    least: bool
    note: str = ""

    @property
    def missed(self) -> bool:
        return self.value < self.goal if self.least else self.value > self.goal

    def __str__(self) -> str:
        sign = "at least" if self.least else "at most"
        return f"{'MISS' if self.missed else 'ok':5}{self.what:68}{self.value:8.3f}  {sign} {self.goal:<6g}{self.note}"


def rows(found: Found) -> Iterator[Row]:
    """Every goal of the machine's own device that the file has numbers of."""
    device = "cuda" if found["machine"]["gpu"] else "cpu"
    mine = [r for r in found["adaptive"] if r["device"] == device]
    for (dtype, rtol, size), goal in BUDGETED[device].items():
        for r in mine:
            if (r["dtype"], r["rtol"], r["size"]) != (dtype, rtol, size):
                continue
            watched = r.get("watched_speed", r["wall_speed"])[0]
            what = f"{dtype} within {rtol:.0e}, {size}: times PyTorch's {dtype}, by {r['way']}"
            same = r["way"] == "torch.eager" and dtype == "f64"  # nothing else pays, and it is said
            yield Row(what, r["speed"][0], 1.0 / 1.05 if same else goal, True, f"  ({watched:.2f})")
    if device == "cpu":
        yield from rough(found, mine)
    for r in found["mixed"]:
        for mode in ("f32", "f16"):
            if r["device"] == device:
                what = f'f16 x f32 under "{mode}", {r["size"]}: of its time with operands converted'
                yield Row(what, r[mode][0], MIXED, False)
    for r in found["transfers"]:
        for way in ("up", "down"):
            what = f"ordinary memory {way}, {r['bytes'] >> 20} MiB: GB/s"
            yield Row(what, r[way], MOVED_GBS, True, f"  (PyTorch {r[f'{way} PyTorch']:.1f})")
    for r in found["placement"]:
        yield Row(f"placed, {r['size']}: of the better side's time", r["over_best"], PLACED, False)


def rough(found: Found, mine: list[Found]) -> Iterator[Row]:
    """float32 within 1e-2 on a CPU beside the fastest float32 of the same run."""
    for r in mine:
        if (r["dtype"], r["rtol"]) != ("f32", 1e-2) or r["size"] < 512:
            continue
        best = min(
            s["us"]
            for s in found["strategies"]
            if (s["device"], s["dtype"], s["size"]) == ("cpu", "f32", r["size"])
            and s["way"] in BEST_F32
            and "us" in s
        )
        what = f"f32 within 1e-02, {r['size']}: times the best float32, by {r['way']}"
        yield Row(what, best / r["us"], ROUGH, True, f"  ({best / r['wall_us']:.2f})")


def main() -> int:
    """Print the rows; 1 where one is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--problems", type=Path)
    asked = parser.parse_args()
    if asked.result is None:
        devices = [torch.device("cpu")]
        devices += [torch.device("cuda")] if torch.cuda.is_available() else []
        found = precision_suite.run(devices, quick=False)
    else:
        found = json.loads(asked.result.read_text())
    told = list(rows(found))
    if asked.problems:
        problems = json.loads(asked.problems.read_text())
        what = f"{problems['count']} random problems, {problems['warned']} warned of: budgets broken unwarned"
        told.append(Row(what, problems["broken"], 0, False))
    for row in told:
        print(row)
    missed = [row.what for row in told if row.missed]
    print(f"{len(missed)} missed" + (f": {'; '.join(missed)}" if missed else ""))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
