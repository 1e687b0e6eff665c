"""The suite `precision` in its smallest form: every part is there, and the page says what the committed results say."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensorlogic.bench import precision_suite
from tensorlogic.core.candidate import EAGER
from tensorlogic.system import heap_trim
from tools.docs import precision_page as docs_precision_page

CPU = torch.device("cpu")


@pytest.mark.slow
def test_every_part_of_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_suite, "SIZES", {"cpu": (48,)})
    monkeypatch.setattr(precision_suite, "BUDGETS", (1e-2, 1e-6))
    kept: list[int] = []
    found = precision_suite.run(
        [torch.device("cpu")], False, keep=lambda so_far: kept.append(len(so_far["strategies"]))
    )
    precision_suite.write(found, tmp_path / "r.json")
    again = json.loads((tmp_path / "r.json").read_text())
    rows = {r["way"]: r for r in again["strategies"] if r["dtype"] == "f32"}
    assert rows[EAGER]["error"] < 1e-7 < rows["torch.bf16"]["error"] < 1e-2
    assert all(r["us"] > 0 and r["total_us"] >= r["us"] for r in rows.values())
    assert {(r["dtype"], r["rtol"]) for r in again["adaptive"]} == {
        (dtype, rtol) for dtype in ("f32", "f64") for rtol in (1e-2, 1e-6)
    }
    assert all(r["kept"] for r in again["adaptive"])
    assert kept == sorted(kept)
    text = precision_suite.table(again)
    assert "x PyTorch" in text
    monkeypatch.setattr(docs_precision_page, "ASKED", 48)
    page = docs_precision_page.tables(again)
    assert "torch.bf16" in page
    asked = page.partition("48×48, from ordinary memory")[2].partition("\n\n**")[0]
    lines = [line.split(" | ") for line in asked.splitlines() if line.startswith("| CPU")]
    totals = [float(line[5]) for line in lines]
    assert len(lines) == sum(r["dtype"] == "f64" for r in again["strategies"])
    assert totals == sorted(totals)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(heap_trim._c(), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
@pytest.mark.parametrize("others", [0, 4096], ids=["alone", "another moves the break"])
def test_memory_that_the_heap_had_kept_is_counted(others: int) -> None:
    """Freed blocks of this size stay in glibc's heap, where the next call finds them without growing the process;
    behind a program break that another part of the process has moved, glibc itself never gives them back."""
    program = (
        "import ctypes, torch\n"
        "from tensorlogic.bench import precision_suite as precision\n"
        "for mib in (31, 20): torch.ones(mib << 20, dtype=torch.uint8)\n"  # the second one stays in the heap
        f"ctypes.CDLL(None).sbrk({others})\n"
        "ones = lambda: torch.ones(8 << 20, dtype=torch.uint8)\n"
        "print(*(precision._peak(ones, torch.device('cpu')) for _ in range(6)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = [int(word) for word in ran.stdout.split()]
    assert min(found) > 7 << 20
    assert max(found) < 12 << 20


def test_the_page_says_what_the_results_say() -> None:
    text = docs_precision_page.PAGE.read_text()
    assert docs_precision_page.filled(text) == text
    assert "NVIDIA H200" in text


def test_goals_are_read_out_of_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(docs_precision_page.ROOT / "benchmarks")
    reach = importlib.import_module("precision_reach")
    gpu = {"device": "cuda", "dtype": "f64", "rtol": 1e-6, "wall_speed": [0.5]}
    found = {
        "machine": {"gpu": {"name": "G"}},
        "adaptive": [
            {**gpu, "size": 1024, "way": "torch.eager", "speed": [0.99]},  # itself, and said
            {**gpu, "size": 2048, "way": "b", "speed": [1.7], "watched_speed": [1.6]},
            {**gpu, "size": 4096, "way": "b", "speed": [1.9], "watched_speed": [1.85]},
            {**gpu, "size": 4096, "way": "b", "speed": [0.1], "device": "cpu"},
            {**gpu, "size": 4096, "way": "b", "speed": [0.1], "rtol": 1e-2},
        ],
        "mixed": [{"device": "cuda", "size": 64, "f32": [1.0], "f16": [1.06]}],
        "transfers": [
            {"bytes": 1 << 24, "up": 39.0, "down": 41.0, "up PyTorch": 9.0, "down PyTorch": 9.0}
        ],
        "placement": [{"size": 32, "over_best": 1.04}, {"size": 64, "over_best": 1.06}],
    }
    rows = list(reach.rows(found))
    assert [(r.value, r.missed) for r in rows] == [
        (0.99, False), (1.7, True), (1.9, False), (1.0, False), (1.06, True), (39.0, True), (41.0, False),
        (1.04, False), (1.06, True),
    ]  # fmt: skip
    assert "MISS" in str(rows[1])
    assert "(1.60)" in str(rows[1])
    cpu = {"device": "cpu", "dtype": "f32", "size": 512}
    ways = {"PyTorch f32": 300.0, "cpu.f32": 190.0, "cpu.bf16": 90.0}
    found |= {"machine": {"gpu": None}, "transfers": [], "placement": [], "mixed": []}
    found["strategies"] = [{**cpu, "way": way, "us": us} for way, us in ways.items()]
    served = {"rtol": 1e-2, "way": "cpu.bf16", "us": 100.0, "wall_us": 110.0}
    found["adaptive"] = [{**cpu, **served, "speed": [3.0], "wall_speed": [2.7]}]
    (row,) = reach.rows(found)
    assert (row.value, row.missed) == (1.9, False)
