"""Summaries and tables of the benchmark: losses show, and documents follow the result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensorlogic.bench import text_table
from tensorlogic.bench.report import summary as report_summary
from tensorlogic.bench.report import tables as report_tables
from tensorlogic.bench.result_file import OURS, Results
from tensorlogic.bench.terminal.user_error import Problem
from tools.docs import facts as docs_facts
from tools.docs import markdown_blocks, seed_figures

from ...support.bench import (
    held,
    made,
)
from ...support.bench import tiny as tiny  # a fixture


def test_summary_and_tables_show_losses() -> None:
    found = held(
        made(10, 20, size=128), made(30, 20, size=256), made(0, 0, size=512, status="failed")
    )
    found.rows[2].reason = "out of memory"
    text = "\n".join(report_summary.lines(found))
    assert "wins 1, even 0, loses 1 of 2" in text
    assert "loses: linear f16 (256 0.67x)" in text
    assert "not timed: fusion linear 512 f16: out of memory" in text
    lines = report_tables.markdown(report_tables.columns(found), found.timed).splitlines()
    assert "**0.67" in lines[3]
    assert "**" not in lines[2]
    assert (
        text_table.plain(report_tables.columns(found), found.timed)
        .splitlines()[0]
        .startswith("operation")
    )


def test_gpu_runs_show_host_time() -> None:
    found = held(made(10, 20, host=True), kind="cuda")
    head, row = text_table.plain(report_tables.columns(found), found.timed).splitlines()
    assert head.count("host") == 2
    assert row.count("2.00 [") == 3
    assert any(line.startswith("fusion, host time: 2.00x") for line in report_summary.lines(found))


def test_unsteady_runs_are_said() -> None:
    rows_ = [made(10, 20, size=n) for n in range(1, 6)]
    for row in rows_:
        row.device_us[OURS] = [1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0]
    assert "5 of 5 rows vary" in report_summary.lines(held(*rows_))[-1]


def test_readme_tables_follow_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held(made(10, 20, size=128), made(30, 20, size=256)).write(tmp_path / "r.json")
    page = tmp_path / "README.md"
    page.write_text(
        "# A\n<!-- bench r.json category=fusion size=256 -->\nold\n<!-- end bench -->\nrest\n"
    )
    assert markdown_blocks.main(["--check", str(page)]) == 1
    assert "make tables" in capsys.readouterr().err
    assert markdown_blocks.main([str(page)]) == 0
    assert markdown_blocks.main(["--check", str(page)]) == 0
    text = page.read_text()
    assert "| linear | 256 |" in text
    assert "| linear | 128 |" not in text
    assert text.endswith("rest\n")
    for strange in ("colour=red", "show=wins"):
        page.write_text(f"<!-- bench r.json {strange} -->\n<!-- end bench -->\n")
        with pytest.raises(Problem, match=f"'{strange}'.*show=losses are known"):
            markdown_blocks.main([str(page)])


def test_losses_stand_in_a_page_alone(tmp_path: Path) -> None:
    slow = made(30, 20, size=1024)
    slow.category, slow.op = "elementwise", "add"
    held(made(10, 20, size=128), made(30, 20, size=256), slow).write(tmp_path / "r.json")
    page = tmp_path / "README.md"
    page.write_text("<!-- bench r.json show=losses -->\n<!-- end bench -->\n")
    assert markdown_blocks.main([str(page)]) == 0
    lines = page.read_text().splitlines()[3:-2]
    assert lines == [
        "fusion, time: 1.15x the separate operations, 1.15x PyTorch's best; wins 1, even 0, loses 1 of 2",
        "  loses: linear f16 (256 0.67x)",
        "other losses against PyTorch, time: add f16 (1024 0.67x)",
    ]


def test_models_beside_torch_compile_are_told_with_losses(tmp_path: Path) -> None:
    fast = {"name": "a", "batch": 1, "eager_us": 3000.0, "compile_us": 800.0, "ours_us": 1000.0}
    fast |= {"over_peer": [1.25, 1.2, 1.3], "ready_s": 2.0, "compile_s": 9.0}
    fast["later"] = {"compile_us": 800.0, "ours_us": 400.0, "over_peer": [0.5, 0.4, 0.6]}
    same = {"name": "b", "batch": 8, "eager_us": 1000.0, "compile_us": 500.0}
    same |= {"over_peer": [2.0, 1.9, 2.1], "ready_s": 1.0, "compile_s": 5.0}
    models = [fast, same, {"name": "c", "batch": 1, "ok": None}]
    about = {"device": "D", "dtype": "torch.float16", "versions": {"torch": "2"}, "date": "today"}
    path = tmp_path / "zoo.json"
    path.write_text(json.dumps({**about, "models": models}))
    text = docs_facts.fact("zoo", path)
    assert "D; float16; torch 2; today; 2 models, 1 of them within 1.03" in text
    assert "1.00 times ahead" in text  # 2 and 1/2
    assert "| a, batch 1 | 3.00 | 0.80 | 1.00 | 3.00 | **0.80** | 2.0 | 9.0 |" in text
    assert "| a, batch 1, after Inductor | 3.00 | 0.80 | 0.40 | 7.50 | 2.00 |  |  |" in text
    assert "| b, batch 8 | 1.00 | 0.50 | 1.00 | 1.00 | **0.50** | 1.0 | 5.0 |" in text
    assert "| c" not in text


def test_facts_stand_in_sentences_and_tables(tmp_path: Path) -> None:
    environment = {"device": "C", "threads": 2, "torch": "2"}
    (tmp_path / "s.json").write_text(
        json.dumps({"keys": 9, "differing": {"a": {}}, "environment": environment})
    )
    pair = {"with": {"mm": [1.0, 1.25]}, "without": {"mm": [1.5, 4.0]}}
    (tmp_path / "g.json").write_text(
        json.dumps({"us": pair, "environment": environment, "date": "d"})
    )
    page = tmp_path / "page.md"
    page.write_text(
        "They agree on <!-- fact agreeing s.json -->all<!-- end fact -->, by far.\n<!-- fact guards g.json -->\n<!-- end fact -->\n"
    )
    assert markdown_blocks.main(["--check", str(page)]) == 1
    assert markdown_blocks.main([str(page)]) == markdown_blocks.main(["--check", str(page)]) == 0
    text = page.read_text()
    assert "-->8 of the benchmark's 9 keys (C, 2 threads)<!-- end fact -->, by far." in text
    assert "| mm | 1.0 | +0.25 | +2.50 |" in text
    for wrong, said in (
        ("nothing s.json", "fact is 'nothing'"),
        ("guards absent.json", "cannot be read"),
    ):
        page.write_text(f"<!-- fact {wrong} --><!-- end fact -->")
        with pytest.raises(Problem, match=said):
            markdown_blocks.main([str(page)])


def test_what_a_gpus_allocator_is_worth_stands_with_the_figures(tmp_path: Path) -> None:
    run = Results({"environment": {"kind": "cuda"}}, {}, complete=True)
    run.path = tmp_path / "g.json"
    assert seed_figures._pool(run, tmp_path) == "PyTorch's own allocator"
    rows = [{"mib": 1, "lower": 0.1}, {"mib": 256, "lower": 0.75}]
    (tmp_path / "pooling-g.json").write_text(json.dumps({"rows": rows}))
    assert seed_figures._pool(run, tmp_path).endswith("75% lower, add_relu into 256 MiB")


def test_latencies_are_told_to_the_worst(tmp_path: Path) -> None:
    us = {way: {"p50": 1.6, "p99": 20.0, "worst": 3000.4} for way in ("eager", "optimize")}
    about = {"device": "C", "driver": "", "torch": "2", "date": "d", "calls": 10_000}
    (tmp_path / "l.json").write_text(json.dumps({**about, "us": us}))
    text = docs_facts.fact("latency", tmp_path / "l.json")
    assert "C; PyTorch 2; d; microseconds, 10,000 calls" in text
    assert "|  | p50 | p99 | worst |" in text
    assert "| optimize | 2 | 20 | 3000 |" in text


def test_budgets_are_told_with_losses(tmp_path: Path) -> None:
    def row(rtol: float, dtype: str, size: int, speed: float, **more: Any) -> dict[str, Any]:
        about = {"rtol": rtol, "dtype": dtype, "size": size, "device": "cpu", "way": "cpu.f32"}
        return {**about, "speed": [9.0], "wall_speed": [speed], **more}

    rows = [row(1e-2, "f32", 512, 2.0), row(1e-6, "f32", 512, 0.5, watched_speed=[0.75])]
    rows += [row(1e-2, "f64", 512, 3.0), row(1e-2, "f32", 1000, 7.0), row(1e-2, "f32", 2048, 1.5)]
    machine = {"gpu": None, "processor": "C", "environment": {"torch": "2"}}
    whole = {"machine": machine, "before": {"time": "2026-11-23T03:00"}, "adaptive": rows}
    (tmp_path / "p.json").write_text(json.dumps(whole))
    text = docs_facts.fact("budgets", tmp_path / "p.json")
    assert "C; PyTorch 2; 2026-11-23; times as fast" in text
    assert "| error at most | f32 inputs, 512 | f32 inputs, 2048 | f64 inputs, 512 |" in text
    assert "| 1e-02 | 2.00 cpu.f32 | 1.50 cpu.f32 | 3.00 cpu.f32 |" in text
    assert "| 1e-06 | **0.75** cpu.f32 |  |  |" in text


def test_goals_are_told_with_misses(tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_text(
        "Some words, ok.\n\n"
        "ok   add 128 error of the timed output over eager's            0.74      target ≤ 2\n"
        "ok   add 128x1 over best peer (1.7 us, cuBLAS 2.7)              0.412      target ≤ 1.03\n"
        "MISS add 256x1 over best peer (1.7 us, cuBLAS 2.7)              1.05      target ≤ 1.03\n"
        "ok   add 1 forward+backward over best peer                      0.9      target ≤ 1.03\n"
        "MISS sum 1048576                                               2.71 us   target ≤ 2.6\n"
        "ok   scores 512 speed over torch.compile                          2 x    target ≥ 2\n"
        "2 missed: add, sum\n\nok   another run      3 x    target ≥ 2\n0 missed\n"
    )
    lines = docs_facts.fact("goals", tmp_path / "g.txt").splitlines()
    assert lines[0] == "|  | reached | asked |"
    assert lines[2:] == [
        "| sum 1048576 | **2.71 us** | ≤ 2.6 |",
        "| scores 512 speed over torch.compile | 2 x | ≥ 2 |",
        "| forward, over the better of eager and torch.compile: the worst of 2 rows | **1.05, 1 above** | ≤ 1.03 |",
        "| forward and backward, over the better of eager and torch.compile: the worst of 1 rows | 0.9 | ≤ 1.03 |",
    ]
