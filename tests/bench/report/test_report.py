"""The report: what the page holds, its forms, the opportunities it names, and files it cannot use."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tensorlogic.bench import result_file
from tensorlogic.bench.report import opportunities as report_opportunities
from tensorlogic.bench.report import render
from tensorlogic.bench.report import report as report_report
from tensorlogic.bench.report import summary as report_summary
from tensorlogic.bench.result_file import OURS, Ceilings, Results, Row
from tensorlogic.bench.terminal.user_error import Problem
from tensorlogic.cli import main

FILES = Path(__file__).parents[3] / "benchmarks" / "results"
LIMIT = 2 << 20  # bytes of a page


def row(op: str, size: int, us: float, eager: float, **about: object) -> Row:
    """A row with given microseconds of ours and of PyTorch's."""
    dtype, category = str(about.pop("dtype", "f16")), str(about.pop("category", "fusion"))
    times = {OURS: [us * f for f in (1, 1.01, 0.99, 1, 1.02, 0.98, 1)], "separate": [eager] * 7}
    id = f"{category} {op} {about.get('detail', '')} {size} {dtype}"
    made = Row(id, category, op, "", size, dtype, baselines=["separate"], device_us=times)
    return replace(made, **{"flops": 1.0, "bytes": 8192.0, "candidate": "cpu.fused"} | about)  # type: ignore[arg-type]


def run(*rows: Row, kind: str = "cpu", device: str = "A", **limits: dict[str, float]) -> Results:
    environment = {"device": device, "kind": kind, "threads": 2, "torch": "2.13.0", "driver": "x"}
    machine = {"id": "1", "environment": environment, "tensorlogic": "0.1.0"}
    ceilings = Ceilings([(8192, 1.0), (1 << 20, 100.0)], **limits)  # type: ignore[arg-type]
    before = {"time": "2026-01-02T03:04:05+00:00"}
    return Results(machine, {"before": before}, ceilings, list(rows), complete=True)


class Reader(HTMLParser):
    """Tags that are open and never closed, and what a page would load."""

    VOID = ("meta", "br", "path", "use", "rect", "circle", "line", "polygon", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.anchors: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self._look(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._look(tag, attrs)

    def _look(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.loads.append(f"{tag} {value}")
            if tag == "a" and name == "href":
                self.anchors.append((value or "")[1:])
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page() -> str:
    """The page of the largest committed file."""
    return render.html(report_report.read([FILES / "h200.json"]))


def test_the_page_needs_nothing_else(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.loads == []
    assert not re.search(r"<script|@import|url\((?!#)|<iframe|<object", page)
    assert len(page.encode()) < LIMIT
    assert set(reader.anchors) <= set(reader.ids)
    assert "width=device-width" in page
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"(?:fill|stroke): ?#", page), "a colour that does not follow the scheme"


def test_every_operation_has_a_plot_with_units_and_a_legend(page: str) -> None:
    drawn = re.findall(r"<figcaption>([^<]+).*?(<svg.*?</svg>)", page, re.DOTALL)
    ops = dict.fromkeys(r.op for r in result_file.load(FILES / "h200.json").timed)
    assert [title.split(" (")[0] for title, _ in drawn] == list(ops)
    for title, svg in drawn:
        texts = re.findall(r"<text[^>]*>([^<]+)</text>", svg)
        product = re.search(r"matmul|linear|scores|requests", title)
        assert ("GFLOPS" if product else "GB/s of the least traffic") in texts, f"{title}: {texts}"
        assert (
            "elements" in texts or "side of the matrices" in texts or "requests in a batch" in texts
        )
        transfer = title.startswith("transfer")
        for line in ("ours", "PyTorch", "limit"):
            assert any(t.endswith(f", {line}") for t in texts) != transfer, f"{title}: {line}"
        assert transfer == ("to host, pinned" in texts)


def test_losses_are_marked_in_the_table_of_rows(page: str) -> None:
    loaded = result_file.load(FILES / "h200.json")
    lost = sum(len(report_summary.standing(loaded.timed, c)["loses"]) for c in ("device", "host"))
    assert lost > 0
    assert len(re.findall(r'<td [^>]*class="n bad"', page)) == lost
    assert "td.bad { color: var(--loss)" in page


def test_parts_of_the_page(page: str) -> None:
    for title in (
        "In short", "Opportunities", "Every row", "Over size", "Choices, and what the others would cost",
    ):  # fmt: skip
        assert f">{title}" in page
    assert "132 multiprocessors" in page
    assert "of the chosen one" in page
    assert "PyTorch&#39;s error" in page
    assert "x separate" in page


def test_before_and_after() -> None:
    old = run(row("linear", 128, 20, 20), row("linear", 256, 20, 20), row("affine", 128, 10, 20))
    new = run(row("linear", 128, 10, 20), row("linear", 256, 30, 20), row("affine", 128, 10, 20))
    made = report_report.make(new, old)
    (part,) = (p for p in made.parts if p.title == "Before and after")
    assert "1 worse, 1 better, 1 unchanged" in part.texts[0]
    changed = next(t for t in part.tables if t.title == "rows that changed")
    assert [(line[1], line[4]) for line in changed.lines] == [("256", "worse"), ("128", "better")]
    expected = next(t for t in part.tables if t.title == "expected and obtained")
    linear = next(line for line in expected.lines if line[0] == "linear f16")
    assert linear[3] == "1.00x"  # 40 us before, 40 us after
    assert ">Before and after<" in render.html(made)
    with pytest.raises(Problem, match="device: B before, A after"):
        report_report.make(new, run(row("linear", 128, 1, 1), device="B"))


def test_files_that_cannot_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*tokens: object) -> str:
        assert main.main(["report", *map(str, tokens)]) == 2
        return capsys.readouterr().err

    good, other, bad = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "bad.json"
    run(row("linear", 128, 10, 20)).write(good)
    run(row("linear", 128, 10, 20), device="B").write(other)
    assert "does not exist" in refused(tmp_path / "none.json")
    bad.write_text(good.read_text()[:300])
    assert "truncated" in refused(bad)
    bad.write_text(good.read_text().replace('"schema": 1', '"schema": 7'))
    assert "schema 7" in refused(bad)
    assert "different machines" in refused(good, other)
    assert "3 result files were given" in refused(good, good, good)
    run().write(bad)
    assert "no timed row" in refused(bad)
    assert "cannot be written" in refused(good, "--out", good / "page.html")
    monkeypatch.setenv("TENSORLOGIC_CACHE_DIR", str(tmp_path / "empty"))
    assert "no result file was given" in refused()
    assert main.main(["report", str(good), str(other), "--mixed"]) == 0
    assert (tmp_path / "b.html").exists()


@pytest.mark.parametrize("rich", [True, False])
def test_a_narrow_terminal_without_colour(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    render.show(report_report.read([FILES / "cpu.json"], drawn=False))
    out = capsys.readouterr().out
    assert "\x1b[" not in out
    assert max(map(len, out.splitlines())) <= 60
    assert "Opportunities" in out
    assert re.search(r"loses: \w+ f32 \(\S+ 0\.\d\dx", out)  # a loss without colour


def test_markdown_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", str(FILES / "cpu.json"), "--markdown"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# TensorLogic on AMD EPYC")
    assert re.search(r"\| f32 \|.* \*\*0\.\d\d \[[^|]*\*\* \|", text)  # a loss
    assert "## Opportunities" in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1


def test_opportunities_of_the_program() -> None:
    product = row("matmul", 512, 200, 210, dtype="f32", category="matmul", flops=2e7)
    found = report_opportunities.found(run(product, gflops={"f32": 100.0, "bf16": 400.0}))
    (other,) = (o for o in found if "bf16" in o.cause)
    assert (other.what, other.priority, other.effort) == ("products in f32: matmul", "high", "low")
    assert other.above_us == pytest.approx(200 - 50, rel=0.02)  # 2e7 operations at 400 GFLOPS
    assert other.gain == pytest.approx(4, rel=0.05)
    small = row("add_relu", 128, 10, 20)
    small.host_us = {OURS: [45.0] * 7, "separate": [60.0] * 7}
    (launch,) = (
        o for o in report_opportunities.found(run(small, kind="cuda")) if "launch" in o.cause
    )
    assert launch.above_us == pytest.approx(35)
    assert "tensorlogic.capture" in launch.remedy
    small.host_us = {OURS: [15.0] * 7, "separate": [60.0] * 7}
    assert not [
        o for o in report_opportunities.found(run(small, kind="cuda")) if "launch" in o.cause
    ]
    moves = [row("transfer", 1 << 20, us, us, category="transfer", detail=detail)
             for us, detail in ((50, "to device, pageable"), (20, "to device, pinned"))]  # fmt: skip
    (moved,) = report_opportunities.found(run(*moves, kind="cuda"))
    assert (moved.what, moved.above_us) == ("transfer: to device, pageable", pytest.approx(30))
    served = [
        row("linear", n, us, us, category="batch") for n, us in ((1, 100), (8, 120), (64, 800))
    ]
    (batch,) = (o for o in report_opportunities.found(run(*served)) if "small requests" in o.what)
    assert "collect requests up to batch 64" in batch.remedy
    assert batch.above_us == pytest.approx(64 * 100 - 800)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (row("linear", 512, 50, 30), "PyTorch's `separate` is 1.67 times"),
        (row("linear", 512, 50, 90, candidate="torch.widened"), "conversion"),
        (row("linear", 512, 50, 50, candidate="torch.eager"), "extra passes over memory"),
        (row("gelu_linear", 512, 50, 90, candidate="triton.after_gelu"), "an extra pass"),
        (row("attention_scores", 512, 50, 90), "exponentials"),
        (row("relu", 512, 500, 500, candidate="torch.eager", category="activation", dtype="f32", bytes=4e6), "unpooled"),
        (row("linear", 512, 50, 90, dtype="f32"), "waits inside the kernel"),
    ],
)  # fmt: skip
def test_causes(given: Row, cause: str) -> None:
    limits = run(given, gflops={"f16": 1.0, "f32": 1.0})
    limits.ceilings.copy.append((1 << 24, 200.0))
    (found,) = report_opportunities.found(limits)
    assert cause in found.cause
    assert found.remedy


def test_few_tiles_leave_multiprocessors_idle() -> None:
    given = row("linear", 128, 50, 90, candidate="triton.tiled", shapes=[[128, 128]])
    small = run(given, kind="cuda", gflops={"f16": 1.0})
    small.machine["gpu"] = {"multiprocessors": 132}
    assert "low occupancy" in report_opportunities.found(small)[0].cause


MISSED = re.compile(r"^MISS (\w+) .*?\s([\d.e-]+) x?\s+target ([≤≥]) ([\d.]+)$", re.MULTILINE)


@pytest.mark.parametrize("name", ["cpu-xeon", "h200"])
def test_opportunities_name_the_largest_gaps_beside_other_peers(name: str) -> None:
    """What torch.compile, cuBLAS and fixed goals show as far off, the run shows by its own limits."""
    text = (FILES / f"{name}_peers.txt").read_text()
    gaps = {
        (op, number): float(value) / float(goal) if sign == "≤" else float(goal) / float(value)
        for number, (op, value, sign, goal) in enumerate(MISSED.findall(text))
    }
    largest = sorted(gaps, key=gaps.__getitem__, reverse=True)[:3]
    assert bool(largest) == ("\nMISS " in text)
    found = report_opportunities.found(result_file.load(FILES / f"{name}.json"))
    for op, number in largest:
        small = gaps[op, number] < 1.05  # of the time: named, but nothing to begin with
        named = " ".join(o.what for o in found if small or o.priority != "low")
        assert re.search(rf"\b{op}\b", named), f"{op} is not among {named}"


def test_bench_ends_with_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorlogic.bench import measure_case

    monkeypatch.setattr(measure_case, "QUICK", measure_case.Effort(5, 0.005))
    monkeypatch.setattr(
        "tensorlogic.bench.machine_limits.find",
        lambda *_: Ceilings([(8192, 1.0)], {"f32": 1.0}, {}),
    )
    path = tmp_path / "a.json"
    tokens = "bench --quick --op add --size 64 --dtype f32 --device cpu --report --json"
    assert main.main([*tokens.split(), str(path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"report: {tmp_path / 'a.html'}"
    assert "<svg" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("measured", "peers"),
    [("cpu-xeon.json", "cpu-xeon_peers.txt"), ("h200.json", "h200_peers.txt")],
)
def test_goals_that_are_missed_are_among_the_opportunities(measured: str, peers: str) -> None:
    """What is furthest from its goal beside the peers is named to whoever reads the list."""
    lines = (FILES / peers).read_text().splitlines()
    missed = {line.split()[1] for line in lines if line.startswith("MISS")}
    named = [o.what for o in report_opportunities.found(result_file.load(FILES / measured))]
    assert missed or "0 missed" in lines
    for op in missed:
        assert any(op in what.replace(",", " ").split() for what in named), op


def test_a_page_never_replaces_what_it_is_made_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, link = tmp_path / "a.html", tmp_path / "b.html"
    run(row("add_relu", 512, 10, 20)).write(path)
    link.symlink_to(path)
    text = path.read_text()
    for tokens in ([path], [path, path, "--out", link], [link, "--out", path]):
        assert main.main(["report", *map(str, tokens)]) == 2
        assert "would replace the result file" in capsys.readouterr().err
        assert path.read_text() == text
    assert main.main(["report", str(path), "--out", str(tmp_path / "c.html")]) == 0
    assert main.main(["report", str(path), "--markdown"]) == 0
