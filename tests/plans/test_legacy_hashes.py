"""Plans measured while candidates had other ids and hashes of whole texts: they serve, and nothing is measured again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS, Op
from tensorlogic.dispatch import candidate_loading, selector
from tensorlogic.kernels.mixed_precision.data_statistics import Statistics
from tensorlogic.mixed_precision.error_statistics import Known
from tensorlogic.plans import file_format, open_stores
from tensorlogic.plans import legacy_hashes as plans_legacy_hashes
from tensorlogic.plans.environment import Environment, environment
from tensorlogic.plans.lockfile import export_lockfile, load_lockfile
from tensorlogic.plans.plan import Evidence, Plan

CPU = torch.device("cpu")
OLD = {EAGER: "0123456789ab", "torch.former": "ba9876543210"}
WINNER = "torch.inplace"


@pytest.fixture
def renamed_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A table by which linear's candidate in place was called otherwise, and both had other hashes."""
    now = OPS["linear"].candidates
    table = {
        "linear": {
            EAGER: [OLD[EAGER], EAGER, now[EAGER].source],
            "torch.former": [OLD["torch.former"], WINNER, now[WINNER].source],
        }
    }
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    monkeypatch.setattr(plans_legacy_hashes, "PATH", path)
    plans_legacy_hashes._table.cache_clear()
    yield table
    plans_legacy_hashes._table.cache_clear()


def tensors() -> tuple[torch.Tensor, ...]:
    return torch.ones(4, 8), torch.ones(16, 8), torch.ones(16), torch.ones(4, 16)


def key() -> Key:
    x, w, b, r = tensors()
    seen: list[Key] = []
    watching = replace(
        policy.current(), observer=lambda op, key, device: seen.append(key), entries={}
    )
    with policy.use(watching):
        tensorlogic.linear(x, w, b, r, "relu")
    return seen[0]


def old_plan(key: Key, **sources: str) -> Plan:
    """As the version before wrote it."""
    source = {**OLD, **sources}
    return Plan(
        key,
        "torch.former",
        {"by": "torch.former", "ranks": [1, "torch.former"]},
        EAGER,
        {},
        [
            Evidence(EAGER, {}, "measured", 5.0, 6.0, 0.01, 1.0, "2 times", source[EAGER]),
            Evidence("torch.former", {}, "measured", 2.0, 3.0, 0.0, 1.0, "chosen", source["torch.former"]),
            Evidence("third.party", {}, "refused", reason="wrong", source="aaaaaaaaaaaa"),
        ],
        {"torch": "2.13.0"},
        "2026-11-20T10:00:00+00:00",
    )  # fmt: skip


def write(path: Path, plan: Plan, about: Environment) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file_format.write(path, file_format.header(about), {plan.key.text: plan.to_json()})


def test_a_store_of_the_version_before_serves(renamed_since: dict[str, Any]) -> None:
    about, k = environment(CPU), key()
    open_stores.forget()
    write(open_stores.current(CPU).path, old_plan(k), about)
    open_stores.forget()
    found = selector.decide(OPS["linear"], k, CPU, policy.current())
    assert (found.source, found.eager[0], found.captured[0]) == ("plan", WINNER, EAGER)
    assert found.eager[1] == {"by": WINNER, "ranks": (1, WINNER)}
    plan = open_stores.current(CPU).get(k)
    assert plan is not None
    assert [e.candidate for e in plan.evidence] == [EAGER, WINNER, "third.party"]
    assert [e.source for e in plan.evidence[:2]] == [
        OPS["linear"].candidates[id].source for id in (EAGER, WINNER)
    ]
    assert plan.evidence[2].source == "aaaaaaaaaaaa"
    assert replace(plan.evidence[1], candidate="", source="") == replace(
        old_plan(k).evidence[1], candidate="", source=""
    )
    open_stores.current(CPU).put(replace(plan, measured="2026-11-21T10:00:00+00:00"))
    open_stores.current(CPU).flush()
    saved = file_format.read(open_stores.current(CPU).path).records[k.text]
    assert (saved["eager"], saved["evidence"][1]["candidate"]) == (WINNER, WINNER)


def test_nothing_of_it_is_measured_again(renamed_since: dict[str, Any]) -> None:
    op, k = OPS["linear"], key()
    record = old_plan(k).to_json()
    plan = Plan.from_json(record)
    assert plan.valid({c.id: c.source for c in op.candidates.values()})
    assert not old_plan(k).valid({c.id: c.source for c in op.candidates.values()})


def test_a_lockfile_of_the_version_before_is_whole_and_serves(
    renamed_since: dict[str, Any], tmp_path: Path
) -> None:
    k, path = key(), tmp_path / "lock.json"
    export_lockfile(path, [old_plan(k)], [environment(CPU)])
    text = path.read_text()
    lock = load_lockfile(path)
    assert [p.eager for p in lock.plans()] == [WINNER]
    with tensorlogic.policy(lockfile=path):
        found = selector.decide(OPS["linear"], k, CPU, policy.current())
    assert (found.source, found.eager[0]) == ("lockfile", WINNER)
    assert path.read_text() == text
    path.write_text(text.replace(OLD[EAGER], "00000000000f"))
    with pytest.raises(ValueError, match="checksum"):
        load_lockfile(path)


def test_what_was_stale_then_is_stale(renamed_since: dict[str, Any]) -> None:
    plan = Plan.from_json(old_plan(key(), **{"torch.former": "bbbbbbbbbbbb"}).to_json())
    assert plan.eager == "torch.former"
    assert plan.evidence[1].source == "bbbbbbbbbbbb"
    assert plan.evidence[0].source == OPS["linear"].candidates[EAGER].source


def test_code_that_has_changed_since_is_stale(
    renamed_since: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table names the hash of the code that was measured, which is today's no more."""
    op = OPS["linear"]
    monkeypatch.setitem(op.candidates, WINNER, replace(op.candidates[WINNER], sources=("changed",)))
    plan = Plan.from_json(old_plan(key()).to_json())
    assert plan.eager == WINNER
    assert not plan.valid({c.id: c.source for c in op.candidates.values()})


def test_ids_may_change_places(renamed_since: dict[str, Any]) -> None:
    renamed_since["linear"]["torch.former"][1] = EAGER
    renamed_since["linear"][EAGER][1] = "torch.former"
    plans_legacy_hashes.PATH.write_text(json.dumps(renamed_since))
    plans_legacy_hashes._table.cache_clear()
    plan = Plan.from_json(old_plan(key()).to_json())
    assert (plan.eager, plan.captured) == (EAGER, "torch.former")
    assert [e.device_us for e in plan.evidence] == [5.0, 2.0, 0.0]
    assert [e.candidate for e in plan.evidence[:2]] == ["torch.former", EAGER]


def test_errors_on_callers_data_follow_and_precise_ops_have_their_own_rows(
    renamed_since: dict[str, Any],
) -> None:
    renamed_since["linear precise"] = {EAGER: [OLD[EAGER], "f64.eager", "1" * 16]}
    plans_legacy_hashes.PATH.write_text(json.dumps(renamed_since))
    plans_legacy_hashes._table.cache_clear()
    known = Known(
        EAGER, OLD[EAGER], 0.5, Statistics(*([0.0] * len(Statistics.__dataclass_fields__)))
    )
    plan = replace(old_plan(replace(key(), precision="f32")), accuracy=[known.to_json()])
    found = Plan.from_json(plan.to_json())
    assert found.captured == found.evidence[0].candidate == "f64.eager"
    assert found.eager == "torch.former"
    assert Known.from_json(found.accuracy[0]) == replace(
        known, candidate="f64.eager", source="1" * 16
    )


def test_the_table_is_not_read_for_records_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_legacy_hashes, "_table", lambda: pytest.fail("read"))
    sources = {
        id: OPS["linear"].candidates[new].source
        for id, new in zip(OLD, (EAGER, WINNER), strict=True)
    }
    record = old_plan(key(), **sources)
    record.evidence.pop()
    assert Plan.from_json(record.to_json()) == replace(
        record, eager_config={"by": "torch.former", "ranks": (1, "torch.former")}
    )


def test_without_the_table_plans_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plans_legacy_hashes, "PATH", tmp_path / "none.json")
    plans_legacy_hashes._table.cache_clear()
    assert Plan.from_json(old_plan(key()).to_json()).eager == "torch.former"
    plans_legacy_hashes._table.cache_clear()


# the table in the package -------------------------------------------------------------------------------------------


def twins() -> dict[str, Op]:
    """Every op and precise twin by its name in the table."""
    found = dict(OPS)
    for name, op in OPS.items():
        if op.precise is not None:
            found[f"{name} precise"] = op.precise
    return found


def test_most_of_the_table_is_of_today() -> None:
    """Who moves code or renames candidates runs tools/rehash_plans.py; a candidate whose code changes keeps its row."""
    pytest.importorskip("triton")
    for device in ("cuda", "cpu", "mps"):
        candidate_loading.ready(device)
    table, known = plans_legacy_hashes._table(), twins()
    assert table.keys() <= known.keys()
    rows = [(known[name], row) for name, own in table.items() for row in own.values()]
    assert len(rows) > 300
    assert all(len(old) == plans_legacy_hashes.DIGITS != len(now) for _, (old, _, now) in rows)

    gone = {id for op, (_, id, _) in rows if id not in op.candidates}
    # tests of Metal take its candidates out of their ops
    assert {id.partition(".")[0] for id in gone} <= {"metal"}
    there = [(op.candidates[id], now) for op, (_, id, now) in rows if id in op.candidates]
    assert sum(c.source == now for c, now in there) >= 0.9 * len(there)


def test_old_ids_of_an_op_have_different_hashes() -> None:
    for name, own in plans_legacy_hashes._table().items():
        assert len({old for old, _, _ in own.values()}) == len(own), name
        assert len({new for _, new, _ in own.values()}) == len(own), name
