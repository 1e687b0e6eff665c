"""Shipped plans, lockfiles, the environment of this machine, and settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorlogic.plans import file_format
from tensorlogic.plans import file_format as plans_file_format
from tensorlogic.plans import store as plans_store
from tensorlogic.plans.environment import Environment, environment
from tensorlogic.plans.lockfile import export_lockfile, load_lockfile
from tensorlogic.plans.store import PlanStore
from tensorlogic.system import settings

from ..support.plan_samples import CPU, GPU, anything, linear, plan


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PlanStore]:
    made = PlanStore(tmp_path / "cache", CPU)
    yield made
    made.flush()


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(plans_store, "SHIPPED", folder)
    measured = replace(GPU, driver="570.9", torch="2.11.3+cu129", libraries=())
    keys = [linear(128, 128, 128, device="cuda"), linear(256, 256, 256, device="cuda")]
    export_lockfile(folder / "h200.json", [plan(key) for key in keys], [measured])
    return folder


def test_shipped_plans_stand_behind_stored_ones(shipped: Path, tmp_path: Path) -> None:
    store, key = PlanStore(tmp_path, GPU), linear(128, 128, 128, device="cuda")
    found = store.get(key)
    assert found is not None
    assert found.eager == "triton.tiled"
    assert list(store.plans()) == []
    assert len(list(store.plans(shipped=True))) == 2
    assert store.refused(key, "cpu.bad", "b0") is None
    store.put(plan(key, "cublaslt.epilogue"))
    found = store.get(key)
    assert found is not None
    assert found.eager == "cublaslt.epilogue"
    assert [p.eager for p in store.plans(shipped=True)] == ["cublaslt.epilogue", "triton.tiled"]
    behind = store.get(key, valid=lambda p: p.eager != "cublaslt.epilogue")
    assert behind is not None
    assert behind.eager == "triton.tiled"
    near = store.nearest(linear(240, 256, 256, device="cuda"), anything)
    assert near is not None
    assert near.key == linear(256, 256, 256, device="cuda")
    assert store.flush()
    assert len(file_format.read(store.path).records) == 1


@pytest.mark.parametrize("change", [{"device": "NVIDIA B200"}, {"device": "NVIDIA B200", "torch": "2.12.0"}])  # fmt: skip
def test_shipped_plans_of_another_machine_are_not_used(
    change: dict[str, Any], shipped: Path, tmp_path: Path
) -> None:
    store = PlanStore(tmp_path, replace(GPU, **change))
    assert list(store.plans(shipped=True)) == []


@pytest.mark.parametrize(
    ("change", "serves"),
    [
        ({"device": "NVIDIA H100 80GB HBM3"}, True),
        ({"device": "NVIDIA H100 80GB HBM3", "torch": "2.12.0"}, True),
        ({"torch": "2.12.0"}, True),
        ({"device": "NVIDIA B200"}, False),
        ({"kind": "mps", "torch": "2.12.0"}, False),
    ],
)
def test_shipped_plans_of_the_same_chip_or_another_torch_are_neighbours_until_their_key_is_measured(
    change: dict[str, Any], serves: bool, shipped: Path, tmp_path: Path
) -> None:
    store, key = PlanStore(tmp_path, replace(GPU, **change)), linear(128, 128, 128, device="cuda")
    assert store.get(key) is None
    assert list(store.plans(shipped=True)) == []
    near = store.nearest(key, anything)
    assert (near is not None) == serves
    if near is None:
        return
    assert near.key == key
    assert store.nearest(key, lambda id: id == "torch.eager") is None
    store.put(plan(linear(144, 128, 128, device="cuda"), "cublaslt.epilogue"))
    for m, winner in ((144, "triton.tiled"), (160, "cublaslt.epilogue")):  # not itself; the closer
        near = store.nearest(linear(m, 128, 128, device="cuda"), anything)
        assert near is not None
        assert near.eager == winner


def test_a_broken_shipped_file_is_skipped(shipped: Path, tmp_path: Path) -> None:
    (shipped / "a.json").write_text("{")
    with pytest.warns(plans_file_format.PlanStoreWarning, match=r"a\.json was ignored"):
        assert PlanStore(tmp_path, GPU).get(linear(128, 128, 128, device="cuda")) is not None


def test_of_a_file_about_other_devices_the_head_alone_is_read(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, skim = linear(128, 128, 128, device="cuda"), file_format.skim
    paths: list[Path] = []

    def watched(path: Path) -> tuple[file_format.Contents, file_format.Unread]:
        paths.append(path)
        return skim(path)

    monkeypatch.setattr(file_format, "skim", watched)
    for device in ("NVIDIA B200", "NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        paths.clear()
        PlanStore(tmp_path, replace(GPU, device=device)).get(key)
        assert (shipped / "h200.json" in paths) == (device != "NVIDIA B200"), device
    PlanStore(tmp_path, CPU).get(key)
    assert paths.count(shipped / "h200.json") == 1  # of the H200 alone


def test_each_file_about_the_same_chip_is_asked(shipped: Path, tmp_path: Path) -> None:
    """Two GPUs' plans of one key, of which a changed kernel made the later file's useless."""
    key, device = linear(128, 128, 128, device="cuda"), "NVIDIA H100 80GB HBM3"
    export_lockfile(shipped / "h100.json", [plan(key, "cublaslt.epilogue")], [replace(GPU, device=device)])  # fmt: skip
    store = PlanStore(tmp_path, replace(GPU, device="NVIDIA GH200 480GB"))
    winners = [p.eager for p in store.neighbours(key, anything) if p.key == key]
    assert winners == ["cublaslt.epilogue", "triton.tiled"]
    near = store.nearest(key, anything, valid=lambda p: p.eager == "cublaslt.epilogue")
    assert near is not None
    assert (near.key, near.eager) == (key, "cublaslt.epilogue")


def test_environments_of_one_chip_or_another_torch_are_akin_on_gpus_alone() -> None:
    assert not GPU.akin(GPU)
    assert GPU.akin(replace(GPU, torch="2.12.0"))
    assert not GPU.akin(replace(GPU, kind="mps", torch="2.12.0"))
    assert not CPU.akin(replace(CPU, torch="2.12.0"))  # whose plans hold for its threads, too
    assert not CPU.akin(replace(CPU, threads=CPU.threads + 1))


def test_this_gpus_plans_under_another_torch_come_before_those_of_another_gpu(
    shipped: Path, tmp_path: Path
) -> None:
    key, h100 = linear(128, 128, 128, device="cuda"), "NVIDIA H100 80GB HBM3"
    export_lockfile(shipped / "h100.json", [plan(key, "cublaslt.epilogue")], [replace(GPU, device=h100)])  # fmt: skip
    for device, first in ((h100, "cublaslt.epilogue"), (GPU.device, "triton.tiled")):
        near = PlanStore(tmp_path, replace(GPU, device=device, torch="2.12.0")).nearest(key, anything)  # fmt: skip
        assert near is not None
        assert near.eager == first


@pytest.mark.parametrize(
    "about",
    ['{"cuda": {"device": "NVIDIA H200", "kind": "cuda"}}', '{"cuda": 1}', '{"cuda": null}', "[]"],
)
def test_a_shipped_file_about_no_environment_is_skipped(
    about: str, shipped: Path, tmp_path: Path
) -> None:
    text = (shipped / "h200.json").read_text()
    head = text.index('"environments"')
    plans_at = text.index('"plans"')
    (shipped / "a.json").write_text(f'{text[:head]}"environments" : {about}, {text[plans_at:]}')
    with pytest.warns(plans_file_format.PlanStoreWarning, match=r"a\.json was ignored"):
        assert PlanStore(tmp_path, GPU).get(linear(128, 128, 128, device="cuda")) is not None


@pytest.mark.parametrize(
    ("told", "cores"), [("max 100000", 64), ("150000 100000", 2), ("20000 100000", 1), ("?", 64)]
)
def test_a_container_s_share_counts(
    told: str, cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container with the time of two cores sees all of the machine's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.setattr(settings, "QUOTA", tmp_path / "cpu.max")
    assert settings.usable_cores() == 64
    (tmp_path / "cpu.max").write_text(told + "\n")
    assert settings.usable_cores() == cores
    monkeypatch.delenv("TENSORLOGIC_COMPILE_WORKERS", raising=False)
    assert settings.compile_workers() == min(settings.MOST_WORKERS, max(1, cores - 1))


@pytest.mark.parametrize(
    "path", sorted(plans_store.SHIPPED.glob("*.json")), ids=lambda path: path.stem
)
def test_shipped_records_are_read_when_they_are_asked_for(path: Path) -> None:
    found, (skimmed, records) = file_format.read(path), file_format.skim(path)
    assert {type(record) for record in records.values()} == {str}
    assert {name: json.loads(str(record)) for name, record in records.items()} == found.records
    assert skimmed == replace(found, records={})


def skimmed(path: Path, text: str) -> dict[str, file_format.Record | str]:
    path.write_bytes(text.encode())
    found, records = file_format.skim(path)
    assert replace(file_format.read(path), records={}) == replace(found, records={})
    return dict(records)


def test_what_is_laid_out_otherwise_or_is_not_whole_is_read_at_once(tmp_path: Path) -> None:
    path, names = tmp_path / "a.json", ['a "b": {c', "d\\n  e", "f"]
    file_format.write(path, {"cuda": GPU.to_json()}, {name: {"key": {name: [1]}} for name in names})
    text = path.read_text()
    records = skimmed(path, text)
    assert [json.loads(str(record)) for record in records.values()] == [{"key": {n: [1]}} for n in names]  # fmt: skip
    assert list(records) == names
    same = file_format.read(path).records
    assert skimmed(path, text.replace("\n", "\r\n")) == same
    assert skimmed(path, json.dumps(json.loads(text))) == same
    assert skimmed(path, text + " ") == same
    assert skimmed(path, text[:-9]) == {name: same[name] for name in names[:2]}
    assert skimmed(path, text.replace('"schema": 1', '"schema": 0')) == {}
    assert skimmed(path, text.replace('"plans": {', '"plan": {')) == {}
    file_format.write(path, {}, {})
    assert skimmed(path, path.read_text()) == {}


def test_of_a_damaged_shipped_record_the_others_serve(shipped: Path, tmp_path: Path) -> None:
    path, key = shipped / "h200.json", linear(128, 128, 128, device="cuda")
    more = [linear(128, 128, n, device="cuda") for n in (256, 512)]
    export_lockfile(path, [plan(k, "cublaslt.epilogue") for k in (key, *more)], [GPU])
    path.write_text(path.read_text().replace('"eager":', '"eager"', 1))
    store = PlanStore(tmp_path, GPU)
    assert [store.get(k) is not None for k in (key, *more)] == [False, True, True]


@pytest.mark.parametrize("padding", ["", "x" * 2 * file_format.HEAD])
def test_heads_of_any_length_and_layout(padding: str, shipped: Path, tmp_path: Path) -> None:
    path = shipped / "h200.json"
    path.write_text(path.read_text().replace("{", f'{{"more": "{padding}", ', 1).replace('ments":', 'ments" : '))  # fmt: skip
    assert PlanStore(tmp_path, GPU).get(linear(128, 128, 128, device="cuda")) is not None


def test_a_lockfile_holds_the_plans_of_several_kinds(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "tensorlogic.lock"
    mine = [plan(linear(8, 4, 2)), plan(linear(8, 4, 2, device="cuda"), "cublaslt.epilogue")]
    assert export_lockfile(path, mine, [GPU, CPU]) == 2
    first = path.read_bytes()
    export_lockfile(path, reversed(mine), [CPU, GPU])
    assert path.read_bytes() == first
    locked = load_lockfile(path)
    assert list(locked.plans()) == mine
    assert locked.environments == {"cpu": CPU, "cuda": GPU}
    path.write_bytes(first.replace(b"\n", b"\r\n"))  # as git may check it out
    assert load_lockfile(path).get(mine[1].key) == mine[1]


def test_one_changed_plan_changes_few_lines(tmp_path: Path) -> None:
    mine = [plan(linear(8, 4, n)) for n in range(9)]
    export_lockfile(tmp_path / "a", mine, [CPU])
    mine[4].eager = "torch.eager"
    export_lockfile(tmp_path / "b", mine, [CPU])
    a, b = ((tmp_path / name).read_text().splitlines() for name in "ab")
    assert sum(x != y for x, y in zip(a, b, strict=True)) == 2  # the choice and the checksum
    assert max(map(len, a)) < 400


def test_a_lockfile_that_was_touched_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    export_lockfile(path, [plan(linear(8, 4, 2))], [CPU])
    text = path.read_text()
    for broken, why in (
        (text.replace('"eager": "triton.tiled"', '"eager": "torch.eager"'), "checksum"),
        (text.replace("AVX2", "AVX512"), "checksum"),
        (text[:-40], "damaged"),
        ("<<<<<<< HEAD\n" + text, "damaged"),
        ('{"name": "other"}', "not a plan file"),
    ):
        path.write_text(broken)
        with pytest.raises(ValueError, match=f"{why}.*tensorlogic plans export"):
            load_lockfile(path)
    path.write_text(text.replace('"schema": 1', '"schema": 2'))
    with pytest.raises(OSError, match=f"lockfile {path} .*newer version.*upgrade tensorlogic"):
        load_lockfile(path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_lockfile(tmp_path / "missing")


def test_a_store_is_no_lockfile(store: PlanStore) -> None:
    store.put(plan(linear(8, 4, 2)))
    assert store.flush()
    with pytest.raises(ValueError, match="no checksum"):
        load_lockfile(store.path)


def test_a_lockfile_needs_one_environment_for_each_kind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without their environment"):
        export_lockfile(tmp_path / "lock", [plan(linear(8, 4, 2))], [GPU])
    with pytest.raises(ValueError, match="one environment of each kind"):
        export_lockfile(tmp_path / "lock", [], [CPU, replace(CPU, driver="AVX512")])
    assert not (tmp_path / "lock").exists()


def test_this_machine() -> None:
    here = environment(torch.device("cpu"))
    assert here is environment(torch.device("cpu"))
    assert here.kind == "cpu"
    assert here.device
    assert here.threads == torch.get_num_threads()
    assert here.versions()["torch"] == torch.__version__
    assert Environment.from_json(json.loads(json.dumps(here.to_json()))) == here
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert environment(torch.device("cpu")).id != here.id
    finally:
        torch.set_num_threads(before)


def test_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in settings.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    assert settings.tune_mode() == "auto"
    assert settings.lockfile() is None
    assert settings.cache_folder().name == "tensorlogic"
    assert 1 <= settings.compile_workers() <= settings.MOST_WORKERS
    monkeypatch.setenv("TENSORLOGIC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TENSORLOGIC_LOCKFILE", str(tmp_path / "lock"))
    monkeypatch.setenv("TENSORLOGIC_TUNE", "off")
    monkeypatch.setenv("TENSORLOGIC_COMPILE_WORKERS", "0")
    assert settings.cache_folder() == tmp_path
    assert settings.lockfile() == tmp_path / "lock"
    assert settings.tune_mode() == "off"
    assert settings.compile_workers() == 0
    monkeypatch.setenv("TENSORLOGIC_TUNE", "always")
    with pytest.raises(ValueError, match=r"TENSORLOGIC_TUNE is 'always'.*off, auto, full"):
        settings.tune_mode()
    monkeypatch.setenv("TENSORLOGIC_COMPILE_WORKERS", "-1")
    with pytest.raises(ValueError, match="TENSORLOGIC_COMPILE_WORKERS is '-1'"):
        settings.compile_workers()
