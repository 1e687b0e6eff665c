"""The plan store under many processes and threads, kills, damaged files, disks that refuse."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tensorlogic.core.key import Key, TensorSpec
from tensorlogic.plans import file_format
from tensorlogic.plans import store as plans_store
from tensorlogic.plans.environment import Environment
from tensorlogic.plans.file_format import PlanStoreWarning
from tensorlogic.plans.plan import Evidence, Plan
from tensorlogic.plans.store import PlanStore

if os.name != "posix":
    pytest.skip("real kills and limits need POSIX", allow_module_level=True)

CPU = Environment("Test CPU 9000", "cpu", "AVX2", "2.13.0+cpu", None, (), threads=2)
multiprocessing.set_forkserver_preload(["tensorlogic.plans.store"])


def key(n: int, op: str = "relu") -> Key:
    spec = TensorSpec("f16", (n, 8), (8, 1))
    return Key(op, (spec,), ("x",), (), "cpu", "inference", "default")


def plan(n: int, op: str = "relu", second: int = 0, winner: str = "cpu.fused") -> Plan:
    evidence = [Evidence(winner, {"block": 16}, "measured", 1.0, 2.0, source="s0")]
    measured = f"2026-11-20T10:00:{second:02}+00:00"
    return Plan(key(n, op), winner, {}, winner, {}, evidence, {"torch": "2.13.0"}, measured)


def start(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*args, there), daemon=True)
    process.start()
    there.close()
    return process, here


def finish(process: BaseProcess) -> None:
    process.join(30)
    assert process.exitcode == 0


def kill(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


def stored(folder: Path) -> dict[str, Plan]:
    """What a fresh process finds, and that the file is whole."""
    store = PlanStore(folder, CPU)
    assert file_format.read(store.path).damage is None
    return {p.key.text: p for p in store.plans()}


def filled(folder: Path, count: int = 20) -> Path:
    store = PlanStore(folder, CPU)
    for n in range(count):
        store.put(plan(n, "old"))
    assert store.flush()
    return store.path


@pytest.fixture(autouse=True)
def only_flush_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the background of this process, so that each test knows when a save happens."""
    monkeypatch.setattr(PlanStore, "_schedule", lambda self: None)


def put_many(folder: Path, op: str, count: int, pipe: Connection) -> None:
    store = PlanStore(folder, CPU)
    for n in range(count):
        store.put(plan(n, op))
        store.put(plan(n, "shared", second=n % 60 if op == "relu" else 30, winner=f"cpu.{op}"))
        if n % 10 == 9 and not store.flush():
            sys.exit(1)
    pipe.send(len(list(store.plans())))


@pytest.mark.slow
def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    started = [start(put_many, tmp_path, op, 200) for op in ("relu", "gelu")]
    for process, pipe in started:
        assert pipe.recv() >= 400
        finish(process)
    found = stored(tmp_path)
    expected = {key(n, op).text for n in range(200) for op in ("relu", "gelu", "shared")}
    assert found.keys() == expected
    for n in range(200):
        winner = found[key(n, "shared").text].eager
        assert n % 60 == 30 or winner == ("cpu.relu" if n % 60 > 30 else "cpu.gelu")


def test_threads_lose_nothing(tmp_path: Path) -> None:
    store = PlanStore(tmp_path, CPU)
    missing: list[str] = []

    def work(op: str) -> None:
        for n in range(40):
            store.put(plan(n, op))
            store.nearest(key(n + 16, op), bool)
            if store.get(key(n, op)) is None:
                missing.append(key(n, op).text)
            if n % 20 == 0:
                store.flush()

    threads = [threading.Thread(target=work, args=(f"op{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not missing
    assert store.flush()
    assert len(stored(tmp_path)) == 240


def test_a_process_keeps_the_plan_it_first_saw(tmp_path: Path) -> None:
    mine, other = PlanStore(tmp_path, CPU), PlanStore(tmp_path, CPU)
    mine.put(plan(1, winner="cpu.mine"))
    assert mine.flush()
    other.put(plan(1, second=9, winner="cpu.other"))
    other.put(plan(2, winner="cpu.other"))
    assert other.flush()
    mine.put(plan(3))
    assert mine.flush()
    first, second = mine.get(key(1)), mine.get(key(2))
    assert first is not None
    assert first.eager == "cpu.mine"
    assert second is not None
    assert second.eager == "cpu.other"
    assert stored(tmp_path)[key(1).text].eager == "cpu.other"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_save_does_not_hang(tmp_path: Path) -> None:
    store = PlanStore(tmp_path, CPU)
    with store._lock, store._saving:
        child = os.fork()
        if child == 0:
            done = False
            thread = threading.Thread(target=store.put, args=(plan(1),), daemon=True)
            thread.start()
            thread.join(10)
            done = not thread.is_alive() and store.flush()
            os._exit(0 if done else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert key(1).text in stored(tmp_path)


def test_what_is_unsaved_is_saved_at_exit(tmp_path: Path) -> None:
    code = """
        import sys, pathlib, test_store_processes as t
        t.PlanStore._schedule = lambda self: None  # only the end of the process saves
        t.PlanStore(pathlib.Path(sys.argv[1]), t.CPU).put(t.plan(1))
    """
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environ = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    subprocess.run(command, env=environ, check=True, timeout=60)
    assert key(1).text in stored(tmp_path)


def put_until_killed(folder: Path, start_at: int, pipe: Connection) -> None:
    store = PlanStore(folder, CPU)
    for n in range(start_at, start_at + 10**6):
        store.put(plan(n))
        if store.flush():
            pipe.send(n)


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    filled(tmp_path, 300)  # a save takes longer, so that most kills fall into one
    chance, promised = random.Random(0), set[int]()
    for attempt in range(12):
        process, pipe = start(put_until_killed, tmp_path, 1000 * attempt)
        promised.add(pipe.recv())
        time.sleep(chance.uniform(0, 0.1))
        kill(process)
        while pipe.poll():
            try:
                promised.add(pipe.recv())
            except EOFError:
                break
    found = stored(tmp_path)
    assert {key(n).text for n in promised} <= found.keys()
    assert {key(n, "old").text for n in range(300)} <= found.keys()


def stop_in(step: str, folder: Path, pipe: Connection) -> None:
    """Save, and stand still just before `os.<step>`, with the lock held."""

    def still(*args: Any, **kwargs: Any) -> None:
        pipe.send(step)
        time.sleep(60)

    setattr(os, step, still)
    store = PlanStore(folder, CPU)
    store.put(plan(1))
    store.flush()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_kill_between_the_steps_of_a_save(step: str, tmp_path: Path) -> None:
    path = filled(tmp_path)
    before = path.read_bytes()
    process, pipe = start(stop_in, step, tmp_path)
    assert pipe.recv() == step
    assert path.read_bytes() == before
    busy = PlanStore(tmp_path, CPU)
    busy.put(plan(2))
    with pytest.warns(PlanStoreWarning, match=r"cannot be used.*\.lock"):
        assert not busy.flush(timeout_s=0.1)  # the lock is held
    kill(process)
    assert path.read_bytes() == before
    assert busy.flush()
    assert len(stored(tmp_path)) == 21
    (leftover,) = tmp_path.glob(".*.tmp")
    os.utime(leftover, (1, 1))
    busy.put(plan(3))
    assert busy.flush()
    assert not leftover.exists()


def after_damage(path: Path, reason: str) -> dict[str, Plan]:
    """Use the store on a damaged file: one warning, the file kept aside byte for byte, then a whole file."""
    damaged = path.read_bytes()
    store = PlanStore(path.parent, CPU)
    with pytest.warns(PlanStoreWarning, match=reason):
        store.get(key(0))
    store.put(plan(999))
    assert store.flush()
    (aside,) = path.parent.glob("*.damaged-*")
    assert aside.read_bytes() == damaged
    found = stored(path.parent)
    assert key(999).text in found
    return found


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.97])
def test_of_a_truncated_file_the_readable_plans_stay(share: float, tmp_path: Path) -> None:
    path = filled(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    whole = len(re.findall(rb'"measured": "[^"]*"\n  \}', path.read_bytes()))
    found = after_damage(path, "damaged")
    assert len(found) == 1 + whole
    assert (whole > 4) == (share > 0.2)


def other_environment(data: bytes) -> bytes:
    return data.replace(b"AVX2", b"AVX512")


@pytest.mark.parametrize(
    "foreign",
    [b"\x00\xff\x80" * 99, b'{"a": 1}', b"[1, 2]", b"null", b"[" * 100_000, other_environment],
    ids=["binary", "object", "list", "null", "deep", "environment"],
)
def test_a_foreign_file_is_moved_aside(
    foreign: bytes | Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = filled(tmp_path)
    path.write_bytes(foreign(path.read_bytes()) if callable(foreign) else foreign)
    assert after_damage(path, "not as it was saved").keys() == {key(999).text}


def test_one_strange_record_does_not_cost_the_others(tmp_path: Path) -> None:
    path = filled(tmp_path)
    document = json.loads(path.read_text())
    strange = {
        key(0, "old").text: {"key": 7},
        key(1, "old").text: document["plans"][key(2, "old").text],
    }
    document["plans"] |= strange
    path.write_text(json.dumps(document))
    store = PlanStore(tmp_path, CPU)
    assert store.get(key(0, "old")) is None
    assert store.get(key(1, "old")) is None
    store.put(plan(1))
    assert store.flush()
    assert len(stored(tmp_path)) == 19
    kept = json.loads(path.read_text())["plans"]
    assert {text: kept[text] for text in strange} == strange


def test_a_newer_file_is_left_alone(tmp_path: Path) -> None:
    path = filled(tmp_path)
    newer = path.read_text().replace('"schema": 1', '"schema": 2')
    path.write_text(newer)
    store = PlanStore(tmp_path, CPU)
    with pytest.warns(PlanStoreWarning, match="cannot be used.*newer version"):
        assert store.get(key(0, "old")) is None
    store.put(plan(1))
    assert not store.flush()
    assert path.read_text() == newer
    assert store.get(key(1)) is not None
    assert not list(tmp_path.glob("*.damaged-*"))


def test_a_folder_that_cannot_be_written(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    (tmp_path / "file").write_text("")
    store = PlanStore(tmp_path / "file" / "cache", CPU)
    for n in range(5):
        store.put(plan(n))
        assert not store.flush()
        assert store.get(key(n)) is not None
    assert store.forget() == 5
    (said,) = recwarn
    assert "cannot be used; plans stay in this process" in str(said.message)


def test_a_file_that_cannot_be_read_is_not_replaced(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    store = PlanStore(tmp_path, CPU)
    store.path.mkdir(parents=True)
    store.put(plan(1))
    assert not store.flush()
    assert store.path.is_dir()
    assert not list(tmp_path.glob("*.damaged-*"))
    assert len(recwarn) == 1


def test_warnings_as_errors_do_not_reach_the_caller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = PlanStore(tmp_path / "file" / "cache", CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put(plan(1))
        assert not store.flush()
    assert "cannot be used" in caplog.text


def save_on_a_full_disk(folder: Path, pipe: Connection) -> None:
    import resource

    store = PlanStore(folder, CPU)
    before = store.path.read_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for n in range(3):
            store.put(plan(n))
            pipe.send(store.flush() or store.path.read_bytes() != before)
    pipe.send([str(w.message) for w in said])
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    pipe.send(store.flush())


def test_a_full_disk(tmp_path: Path) -> None:
    path = filled(tmp_path)
    assert path.stat().st_size > 2000
    process, pipe = start(save_on_a_full_disk, tmp_path)
    assert [pipe.recv() for _ in range(3)] == [False] * 3
    (said,) = pipe.recv()
    assert "cannot be used" in said
    assert "too large" in said.lower()
    assert pipe.recv() is True  # there is room again
    finish(process)
    assert len(stored(tmp_path)) == 23
    assert not list(tmp_path.glob(".*.tmp"))


def test_forgetting_reaches_other_processes(tmp_path: Path) -> None:
    filled(tmp_path)
    store = PlanStore(tmp_path, replace(CPU))
    assert store.forget(lambda p: p.key.spec("x").shape[0] % 2 == 0) == 10  # type: ignore[union-attr]
    assert len(stored(tmp_path)) == 10
    assert plans_store.PlanStore(tmp_path, CPU).get(key(2, "old")) is None
