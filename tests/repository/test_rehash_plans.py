"""The tool that keeps shipped plans valid when code moves, on small checkouts of made-up candidates."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tensorlogic.core.key import Key
from tensorlogic.plans import file_format
from tensorlogic.plans.lockfile import export_lockfile, load_lockfile
from tensorlogic.plans.plan import Evidence, Plan

from ..support.plan_samples import CPU, linear

ROOT = Path(__file__).parents[2]
Hashes = dict[str, dict[str, str]]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rehash", ROOT / "tools" / "rehash_plans.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rehash", module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    return module


def checkout(root: Path, found: Hashes, precise: Hashes | None = None, moved: bool = False) -> Path:
    """A package with these candidates' hashes; `moved`: laid out by folders."""
    package = root / "tensorlogic"
    ops, loading = ("core/__init__", "dispatch/candidate_loading") if moved else ("op", "registry")
    made = {
        "__init__": "",
        ops: f"""
from types import SimpleNamespace as N
def op(name):
    own = {{id: N(source=hash) for id, hash in {found!r}[name].items()}}
    twin = {precise or {}!r}.get(name)
    twin = twin and N(candidates={{id: N(source=hash) for id, hash in twin.items()}})
    return N(candidates=own, precise=twin)
OPS = {{}}
""",
        loading: f"""
from tensorlogic.{ops.removesuffix("/__init__")} import OPS, op
def ready(device):
    print("ready", device)
    OPS.update({{name: op(name) for name in {list(found)!r}}})
""",
        "plans/legacy_hashes" if moved else "legacy_hashes": "",
    }
    for name, text in made.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def plan(key: Key, **sources: str) -> Plan:
    """One by `cpu.epilogue` with a few others, with these hashes."""
    us = {"torch.eager": 9.0, "torch.inplace": 5.0, "onednn.linear": 4.5, "cpu.epilogue": 2.0}
    reasons = ["4.50 times the chosen one", "2.50 times the chosen one", "not among the fastest few of a first look", "chosen"]  # fmt: skip
    hashes = {id: sources.get(id.replace(".", "_"), "0" * 16) for id in us}
    evidence = [
        Evidence(id, {"n": (1, 2)}, "measured", t, t + 1.5 * (id != "onednn.linear"), 0.01, 0.9, reason, hashes[id])
        for (id, t), reason in zip(us.items(), reasons, strict=True)
    ]  # fmt: skip
    evidence.append(Evidence("cpu.bad", {}, "refused", reason="wrong: row 3", source="b" * 16))
    about: dict[str, Any] = {"eager_config": {"n": (1, 2)}, "captured_config": {"n": (1, 2)}}
    return Plan(key, eager="cpu.epilogue", captured="cpu.epilogue", evidence=evidence, versions={}, measured="2026-11-20T10:00:00+00:00", **about)  # fmt: skip


BEFORE = {"linear": {"torch.eager": "a" * 16, "cpu.epilogue": "c" * 16, "cpu.bad": "b" * 16}}
AFTER = {"linear": {"torch.eager": "1" * 16, "cpu.fused": "2" * 16, "cpu.bad": "b" * 16}}
RENAMED = {"linear": {"cpu.epilogue": "cpu.fused"}}


def ship(root: Path, plans: list[Plan], folder: str = "shipped") -> Path:
    path = root / "tensorlogic" / folder / "cpu.json"
    export_lockfile(path, plans, [CPU])
    return path


def test_hashes_follow_their_code_and_ids_their_names(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = checkout(tmp_path / "before", BEFORE)
    after = checkout(tmp_path / "after", AFTER, moved=True)
    names = tmp_path / "names.json"
    names.write_text(json.dumps(RENAMED))
    keys = [linear(8, 8, 8), linear(8, 8, 16), linear(8, 8, 32)]
    current = plan(keys[0], torch_eager="a" * 16, cpu_epilogue="c" * 16)
    stale = plan(keys[1], torch_eager="d" * 16, cpu_epilogue="e" * 16)
    named = replace(stale, key=keys[2], eager_config={"by": "cpu.epilogue"})
    path = ship(after, [current, stale, named], "plans/shipped")
    order = list(file_format.read(path).records)
    assert tool.main([str(before), "--after", str(after), "--rename", str(names)]) == 0
    lock = load_lockfile(path)
    found = {p.key: p for p in lock.plans()}
    assert [found[k].eager for k in keys] == ["cpu.fused"] * 3
    assert [found[k].captured for k in keys] == ["cpu.fused"] * 3
    assert found[keys[2]].eager_config == {"by": "cpu.fused"}
    places = [(e.candidate, e.source) for e in found[keys[0]].evidence]
    assert places == [
        ("torch.eager", "1" * 16),
        ("torch.inplace", "0" * 16),
        ("onednn.linear", "0" * 16),
        ("cpu.fused", "2" * 16),
        ("cpu.bad", "b" * 16),
    ]
    assert [e.source[0] for e in found[keys[1]].evidence] == ["d", "0", "0", "e", "b"]
    without_names = [replace(e, candidate="", source="") for e in found[keys[0]].evidence]
    assert without_names == [replace(e, candidate="", source="") for e in current.evidence]
    assert list(file_format.read(path).records) == order
    text = path.read_text()
    assert text == file_format.layout(json.loads(text)) + "\n"
    said = capsys.readouterr().out
    assert "3 plans, 3 changed, 0 with another winner, 1 valid" in said
    assert "gone" not in said
    assert said.count("has another hash") == 2


def test_nothing_moved_nothing_written(tool: ModuleType, tmp_path: Path) -> None:
    tree = checkout(tmp_path / "same", BEFORE)
    path = ship(tree, [plan(linear(8, 8, 8), torch_eager="a" * 16)])
    text = path.read_bytes()
    assert tool.main([str(tree), "--after", str(tree)]) == 0
    assert path.read_bytes() == text
    assert not list(tree.rglob("legacy_hashes.json"))


def test_two_candidates_of_one_id_are_no_plan(tool: ModuleType, tmp_path: Path) -> None:
    before, after = checkout(tmp_path / "before", BEFORE), checkout(tmp_path / "after", AFTER)
    path = ship(after, [plan(linear(8, 8, 8))])
    text = path.read_bytes()
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"linear": {"cpu.epilogue": "cpu.bad"}}))
    with pytest.raises(ValueError, match="more than one candidate"):
        tool.main([str(before), "--after", str(after), "--rename", str(names)])
    assert path.read_bytes() == text


def test_a_candidate_that_is_gone_is_said_and_dropped_when_asked(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = checkout(tmp_path / "before", BEFORE)
    after = checkout(tmp_path / "after", {"linear": {"torch.eager": "a" * 16}})
    key = linear(8, 8, 8)
    path = ship(after, [plan(key), replace(plan(linear(8, 8, 16)), eager="torch.inplace")])
    assert tool.main([str(before), "--after", str(after)]) == 0
    assert "--drop linear:cpu.epilogue" in capsys.readouterr().out
    given = [str(before), "--after", str(after), "--drop", "linear:cpu.epilogue", "linear:cpu.bad"]
    assert tool.main(given) == 0
    said = capsys.readouterr().out
    assert "gone" not in said
    assert "2 plans, 2 changed, 2 with another winner" in said
    found = {p.key: p for p in load_lockfile(path).plans()}
    # a caller waits longest for what has the longest host time; of oneDNN's that was not measured
    assert (found[key].eager, found[key].captured) == ("torch.inplace", "onednn.linear")
    assert found[key].eager_config == found[key].captured_config == {"n": (1, 2)}
    assert {e.candidate: e.reason for e in found[key].evidence} == {
        "torch.eager": "1.62 times the chosen one",
        "torch.inplace": "chosen",
        "onednn.linear": "not among the fastest few of a first look",
    }
    other = found[linear(8, 8, 16)]
    assert (other.eager, other.captured) == ("torch.inplace", "onednn.linear")
    text = path.read_text()
    assert text == file_format.layout(json.loads(text)) + "\n"


def test_only_what_is_as_it_was_measured_takes_a_dropped_ones_place(
    tool: ModuleType, tmp_path: Path
) -> None:
    from tensorlogic.core.op import OPS

    own = {id: OPS["linear"].candidates[id].source for id in ("torch.eager", "torch.inplace")}
    before = checkout(tmp_path / "before", {"linear": {**own, "cpu.epilogue": "c" * 16}})
    after = checkout(tmp_path / "after", {"linear": own})
    given = {id.replace(".", "_"): source for id, source in own.items()}
    path = ship(after, [plan(linear(8, 8, 8), **given)])
    assert tool.main([str(before), "--after", str(after), "--drop", "linear:cpu.epilogue"]) == 0
    (found,) = load_lockfile(path).plans()
    assert (found.eager, found.captured) == ("torch.inplace", "torch.inplace")
    assert found.valid(own)


def test_the_table_of_former_hashes_is_written_and_follows(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {"linear": {"torch.eager": "a" * 12, "cpu.epilogue": "c" * 12, "cpu.bad": "b" * 12}}
    twin = {"linear": {"torch.eager": "d" * 12, "cpu.epilogue": "e" * 12}}
    first = checkout(tmp_path / "first", old, twin)
    twin = {"linear": {"torch.eager": "d" * 16, "cpu.epilogue": "e" * 16}}
    second = checkout(tmp_path / "second", BEFORE, twin)
    assert tool.main([str(first), "--after", str(second), "--legacy-table"]) == 0
    path = second / "tensorlogic" / "legacy_hashes.json"
    table = json.loads(path.read_text())
    assert table == {
        "linear": {id: [old["linear"][id], id, source] for id, source in BEFORE["linear"].items()},
        "linear precise": {
            "torch.eager": ["d" * 12, "torch.eager", "d" * 16],
            "cpu.epilogue": ["e" * 12, "cpu.epilogue", "e" * 16],
        },
    }
    # files move, a candidate is renamed, another one was changed before, a third is taken out
    table["linear"]["torch.eager"][2] = "f" * 16
    twin = {"linear": {"torch.eager": "d" * 16, "cpu.fused": "9" * 16}}
    third = checkout(tmp_path / "third", AFTER, twin, moved=True)
    path = third / "tensorlogic" / "plans" / "legacy_hashes.json"
    path.write_text(file_format.layout(table) + "\n")
    names = tmp_path / "names.json"
    names.write_text(json.dumps(RENAMED))
    given = [str(second), "--after", str(third), "--rename", str(names), "--drop", "linear:cpu.bad"]
    assert tool.main(given) == 0
    assert json.loads(path.read_text()) == {
        "linear": {
            "torch.eager": ["a" * 12, "torch.eager", "f" * 16],
            "cpu.epilogue": ["c" * 12, "cpu.fused", "2" * 16],
        },
        "linear precise": {
            "torch.eager": ["d" * 12, "torch.eager", "d" * 16],
            "cpu.epilogue": ["e" * 12, "cpu.fused", "9" * 16],
        },
    }
    assert "legacy_hashes.json: 4 candidates" in capsys.readouterr().out


def test_the_table_is_of_former_hashes(tool: ModuleType, tmp_path: Path) -> None:
    tree = checkout(tmp_path / "same", BEFORE)
    with pytest.raises(ValueError, match="no former hashes"):
        tool.main([str(tree), "--after", str(tree), "--legacy-table"])
    assert not list(tree.rglob("legacy_hashes.json"))


def test_a_folder_without_the_package_is_refused(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no package"):
        tool.hashes(tmp_path)
