"""The suite `precision` in its smallest form: every part is there, and the page says what the committed results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tensorlogic.bench import precision, precision_page
from tensorlogic.op import EAGER


def test_every_part_of_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "SIZES", {"cpu": (48,)})
    monkeypatch.setattr(precision, "BUDGETS", (1e-2, 1e-6))
    monkeypatch.setattr(precision.tensorlogic, "tune", lambda *_: None)  # measured elsewhere
    kept: list[int] = []
    found = precision.run(
        [torch.device("cpu")], False, keep=lambda so_far: kept.append(len(so_far["strategies"]))
    )
    precision.write(found, tmp_path / "r.json")
    again = json.loads((tmp_path / "r.json").read_text())
    rows = {r["way"]: r for r in again["strategies"] if r["dtype"] == "f32"}
    assert rows[EAGER]["error"] < 1e-7 < rows["torch.bf16"]["error"] < 1e-2
    assert all(r["us"] > 0 and r["total_us"] >= r["us"] for r in rows.values())
    assert {(r["dtype"], r["rtol"]) for r in again["adaptive"]} == {
        (dtype, rtol) for dtype in ("f32", "f64") for rtol in (1e-2, 1e-6)
    }
    assert all(r["kept"] for r in again["adaptive"])
    assert kept == sorted(kept)
    text = precision.table(again)
    assert "x PyTorch" in text
    assert "torch.bf16" in precision_page.tables(again)


def test_the_page_says_what_the_results_say() -> None:
    text = precision_page.PAGE.read_text()
    assert precision_page.filled(text) == text
    assert "NVIDIA H200" in text
