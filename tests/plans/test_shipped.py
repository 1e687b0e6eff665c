"""The plans in the package: readable, for the device they name, and what the first call on such a device is served by."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.core.activations import activate
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading
from tensorlogic.plans import file_format, open_stores, store
from tensorlogic.plans.environment import Environment, environment
from tensorlogic.plans.lockfile import export_lockfile
from tensorlogic.plans.plan import Plan

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
PATHS = sorted(store.SHIPPED.glob("*.json"))


def packaged(path: Path) -> list[Plan]:
    found = file_format.read(path)
    assert found.damage is None
    return [Plan.from_json(record) for record in found.records.values()]


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_packaged_plans_are_whole_and_of_the_device_they_name(path: Path) -> None:
    about = Environment.from_json(file_format.read(path).environments["cuda"])
    assert about.device.lower().replace(" ", "-") == path.stem
    candidate_loading.ready("cuda")
    names = {"torch.eager"} | {c for op in OPS.values() for c in op.candidates}
    for plan in packaged(path):
        assert plan.key.op in OPS
        assert plan.key.device == "cuda"
        assert {e.candidate for e in plan.evidence} >= {plan.eager, plan.captured}
        assert plan.eager in names or plan.eager.split(".")[0] in ("triton", "cublaslt")


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_packaged_plans_serve(path: Path) -> None:
    """What was measured is what runs: kernels that changed are measured anew (benchmarks/device/ship.py), or their plans taken out."""
    pytest.importorskip("triton")
    candidate_loading.ready("cuda")
    found = packaged(path)
    sources = {name: {c.id: c.source for c in op.candidates.values()} for name, op in OPS.items()}
    serve = [plan for plan in found if plan.valid(sources[plan.key.op])]
    assert len(serve) >= 0.9 * len(found), f"{len(found) - len(serve)} of {len(found)} are stale"
    won = Counter((plan.key.op, plan.eager) for plan in found)
    current = Counter((plan.key.op, plan.eager) for plan in serve)
    stale = {winner: n for winner, n in won.items() if current[winner] < 0.5 * n}
    assert not stale, f"most plans that these win are stale: {stale}"


def test_the_first_call_on_the_device_takes_the_shipped_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU under the H200's name, where Triton's interpreter stands for its kernels, whose sources are today's."""
    pytest.importorskip("triton")
    candidate_loading.ready("cpu")
    op, h200 = OPS["linear"], replace(environment(CPU), device="NVIDIA H200")
    if op.candidates["triton.tiled"].available("cpu"):
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(open_stores, "environment", lambda device: h200)
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    plan = min(
        (
            p
            for p in packaged(next(path for path in PATHS if path.stem == "nvidia-h200"))
            if p.eager == "triton.tiled"
            and (p.key.op, p.key.direction) == ("linear", "inference")
            and p.key.spec("residual") is None
            and p.key.spec("x").dtype == "f16"  # type: ignore[union-attr]
        ),
        key=lambda p: math.prod(p.key.spec("weight").shape),  # type: ignore[union-attr]
    )
    x, w, b = (torch.randn(plan.key.spec(n).shape).half() for n in ("x", "weight", "bias"))
    evidence = [
        replace(e, source=op.candidates[e.candidate].source)
        for e in plan.evidence
        if e.candidate in op.candidates
    ]
    here = replace(plan, key=replace(plan.key, device="cpu"), evidence=evidence)
    measured = replace(h200, driver="an older one")
    export_lockfile(tmp_path / "shipped" / "nvidia-h200.json", [here], [measured])
    open_stores.forget()
    bound: list[Any] = []

    tiled = op.candidates["triton.tiled"]

    def bind(key: Any, config: Any, device: torch.device) -> Any:
        bound.append((key.text, dict(config)))
        return tiled.bind(key, config, device)

    watched = replace(tiled, bind=bind)
    assert watched.source == tiled.source
    monkeypatch.setitem(op.candidates, "triton.tiled", watched)
    activation = here.key.flag("activation")
    y = tensorlogic.linear(x, w, b, None, None if activation == "none" else activation)
    assert bound == [(here.key.text, dict(plan.eager_config))]
    want = activate(x.double() @ w.double().T + b, activation)
    assert (y.double() - want).norm() <= 1e-3 * want.norm()
