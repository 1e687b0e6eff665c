"""Programs with one way for all of their regions, tried beside the one with the fastest way of each."""

from __future__ import annotations

from typing import Any

import pytest

from tensorlogic.compiler.program_search import Plan
from tensorlogic.compiler.reporting.report import Row
from tensorlogic.compiler.tune.decision_store import Decision


def decision(way: str, before_us: float, **paying: float) -> Decision:
    """Of a region whose ways passed their check, and take these times where they pay."""
    rows = {name.replace("__", "."): Row("r", "linear", "", before_us=before_us, after_us=us) for name, us in paying.items()}  # fmt: skip
    own = next(row for name, row in rows.items() if name == way)
    return Decision(way, ("onednn.packed", "cpu.epilogue", "torch.inplace"), own, rows)


def uniform(*found: Decision) -> list[list[Any]]:
    plan = Plan.__new__(Plan)
    plan.found, plan.regions = {str(i): d for i, d in enumerate(found)}, []
    return [[d.way for d in variant.values()] for variant in plan._uniform()]


OURS = decision("cpu.epilogue", 160.0, cpu__epilogue=80.0, onednn__packed=140.0)
THEIRS = decision(
    "onednn.packed", 140.0, onednn__packed=125.0
)  # ours takes no less than the original there


def test_one_kind_of_threads_is_tried_where_two_would_take_turns() -> None:
    """A transformer of batch 1 on two cores of a Xeon: 0.98 to 1.0 of torch.compile's time with both, 0.86 to 0.9 with ours."""
    assert uniform(OURS, OURS, OURS, THEIRS) == [["cpu.epilogue"] * 4]


def test_not_where_it_would_take_clearly_more() -> None:
    slow = decision("onednn.packed", 300.0, onednn__packed=125.0)
    assert uniform(OURS, OURS, OURS, slow) == []


@pytest.mark.parametrize(
    "others",
    [
        ("triton.tiled", "cublaslt.epilogue"),
        ("onednn.packed", "onednn.linear"),
        ("cpu.epilogue", "chosen"),
    ],
)
def test_not_where_all_run_on_the_same_threads(others: tuple[str, str]) -> None:
    first, second = (decision(way, 140.0, **{way.replace(".", "__"): 125.0}) for way in others)
    assert uniform(first, first, second) == []


def test_each_region_takes_the_fastest_way_of_ours() -> None:
    chosen = decision("chosen", 40.0, chosen=21.0, cpu__epilogue=22.0)
    fused = decision("onednn.packed", 100.0, onednn__packed=77.0, cpu__fused=79.0)
    fused.ready = ("onednn.packed", "cpu.epilogue", "cpu.fused")
    alone = decision("torch.eager", 30.0, torch__eager=29.0)
    alone.ready = ("torch.eager",)
    tried = uniform(fused, chosen, OURS, THEIRS, alone)
    assert ["cpu.fused", *["cpu.epilogue"] * 3, "torch.eager"] in tried
