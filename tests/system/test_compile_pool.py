"""Compile jobs in worker processes: done elsewhere, failures said, crashes survived, forks not hung."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tensorlogic.system import compile_pool, compile_workers, settings

from ..support.plans import (
    JOBS,
    begun,
    finish,  # the fixture
)
from ..support.plans import job as job  # a fixture
from ..support.plans import kept as kept  # a fixture
from ..support.plans import nursed as nursed  # a fixture
from ..support.plans import source as source  # a fixture


def never_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are started by a program that sleeps."""
    slow = folder / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))


def test_what_workers_share_is_there() -> None:
    assert compile_workers.PRELOADED
    assert all(map(importlib.util.find_spec, compile_workers.PRELOADED))


@pytest.mark.slow
def test_workers_compile_and_report(job: Any, nursed: None) -> None:
    """Work happens in another process; what fails or dies is a CompileFailure, and the next job is served again."""
    done, fails, odd, dies, after = (
        job("fine"), job("fail"), job("odd"), job("die"), job("fine", "after")
    )  # fmt: skip
    jobs = (done, fails, odd, dies, after)
    compile_pool.submit(jobs)
    compile_pool.submit(jobs)  # known already
    finish(*jobs)
    compile_pool.settle(done)
    assert int(Path(done.path).read_text()) != os.getpid()
    with pytest.raises(compile_pool.CompileFailure, match="ValueError: no such instruction"):
        compile_pool.settle(fails)
    with pytest.raises(compile_pool.CompileFailure, match=r"beyond the usual"):
        compile_pool.settle(odd)
    with pytest.raises(compile_pool.CompileFailure, match="worker stopped"):
        compile_pool.settle(dies)
    compile_pool.settle(after)
    assert Path(after.path).exists()
    assert compile_pool._workers.started == 2  # type: ignore[union-attr]


def test_a_job_that_nobody_began_is_the_callers(job: Any, nursed: None) -> None:
    slow, waiting = job("wait", "slow"), job("fine", "waiting")
    compile_pool.submit((slow, waiting))
    begun(slow)
    assert not compile_pool.ready((slow,))
    begin = time.monotonic()
    compile_pool.settle(waiting)
    assert time.monotonic() - begin < 20
    assert not Path(waiting.path).exists()
    Path(slow.path + ".go").touch()
    finish(slow)
    compile_pool.settle(slow)
    assert Path(slow.path).exists()


@pytest.mark.slow
def test_until_a_process_has_started_threads_do_what_is_needed_soon(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side, each job once; a failure is told like a worker's. Where a process has started, jobs are left to it."""
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(settings, "usable_cores", lambda: 8)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(slow))
        first, second, fails = job("wait", "first"), job("wait", "second"), job("fail")
        compile_pool.begin((first, second, first, fails))
        begun(first)
        begun(second)  # while the first one runs
        for each in (first, second):
            Path(each.path + ".go").touch()
            compile_pool.settle(each)
        finish(fails)
        with pytest.raises(compile_pool.CompileFailure, match="ValueError: no such instruction"):
            compile_pool.settle(fails)
        assert {int(Path(j.path).read_text()) for j in (first, second)} == {os.getpid()}
        compile_pool._workers.close()  # type: ignore[union-attr]
    monkeypatch.setattr(compile_pool, "_workers", None)
    compile_pool.submit((job("fine", "elsewhere"),))
    finish(job("fine", "elsewhere"))
    later = job("fine", "later")
    compile_pool.begin((later,))
    finish(later)
    assert int(Path(later.path).read_text()) != os.getpid()


def test_threads_leave_the_rest_to_processes_that_have_started(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_starts(tmp_path, monkeypatch)
    monkeypatch.setattr(settings, "usable_cores", lambda: 4)  # one thread
    first, rest = job("wait", "first"), job("fine", "rest")
    compile_pool.begin((first, rest))
    begun(first)
    compile_pool._workers.started = 1  # type: ignore[union-attr]
    Path(first.path + ".go").touch()
    compile_pool.settle(first)
    time.sleep(0.2)
    assert not Path(rest.path).exists()
    assert not compile_pool.begun((rest,))


def test_threads_pass_over_what_nobody_waits_for_any_more(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_starts(tmp_path, monkeypatch)
    monkeypatch.setattr(settings, "usable_cores", lambda: 4)  # one thread
    problems = list[Any]()
    monkeypatch.setattr(threading, "excepthook", problems.append)
    first, dropped, last = job("wait", "first"), job("fine", "dropped"), job("fine", "last")
    compile_pool.begin((first, dropped, last))
    begun(first)
    compile_pool.drop((dropped,))
    Path(first.path + ".go").touch()
    finish(first, last)
    assert (Path(last.path).exists(), Path(dropped.path).exists(), problems) == (True, False, [])


def test_what_nobody_waits_for_is_compiled_only_when_asked_for_again(
    job: Any, nursed: None
) -> None:
    slow, waiting = job("wait", "slow"), job("fine", "waiting")
    compile_pool.submit((slow, waiting))
    begun(slow)
    compile_pool.drop((slow, waiting))  # the first is under way
    Path(slow.path + ".go").touch()
    finish(slow)
    assert compile_pool.there((slow,))
    assert not compile_pool.there((waiting,))
    assert not Path(waiting.path).exists()
    compile_pool.submit((waiting,))
    finish(waiting)
    assert Path(waiting.path).exists()


def test_what_somebody_waits_for_now_is_compiled_first(job: Any, nursed: None) -> None:
    slow = job("wait", "slow")
    a, b, c, d, e = (job("fine", name) for name in "abcde")
    compile_pool.submit((slow, a, b))
    begun(slow)
    with compile_pool.awaited():
        compile_pool.submit((c, d))
        with compile_pool.awaited():
            compile_pool.submit((e, b))  # which is known already
    order: list[str] = []
    for each in (a, b, c, d, e):
        compile_pool._workers.jobs[each].add_done_callback(  # type: ignore[union-attr]
            lambda _, each=each: order.append(Path(each.path).name)
        )
    Path(slow.path + ".go").touch()
    finish(slow, a, b, c, d, e)
    assert order == ["e", "b", "c", "d", "a"]


def test_while_a_worker_starts_the_caller_gets_on(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process takes seconds to import PyTorch: the job it was started for does not wait for it."""
    never_starts(tmp_path, monkeypatch)
    compile_pool.submit((job("fine"),))
    begin = time.monotonic()
    compile_pool.settle(job("fine"))
    assert time.monotonic() - begin < 20
    assert compile_pool._workers.jobs[job("fine")].cancelled()  # type: ignore[union-attr]


def test_where_no_worker_starts_the_caller_compiles(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    compile_pool.submit((job("fine"),))
    finish(job("fine"))
    compile_pool.settle(job("fine"))
    assert not Path(job("fine").path).exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_does_not_wait_for_threads_it_does_not_have(
    job: Any, nursed: None
) -> None:
    slow = job("wait")
    compile_pool.submit((slow,))
    begun(slow)
    child = os.fork()
    if child == 0:
        compile_pool.settle(slow)
        os._exit(0 if compile_pool.ready((slow,)) else 1)
    begin = time.monotonic()
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() - begin > 20:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    Path(slow.path + ".go").touch()
    finish(slow)
    assert os.waitstatus_to_exitcode(ended[1]) == 0, "the child hung"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="no /proc on this system")
def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "compile_jobs.py").write_text(textwrap.dedent(JOBS))
    code = f"""
import time
from tensorlogic.system import compile_pool as compiling, compile_workers as workers
from compile_jobs import Job
compiling.submit([Job("sleep", {str(tmp_path / "out")!r})])
pool = compiling._workers
while pool.started == 0:
    time.sleep(0.01)
print(pool.fork_server.process.pid, flush=True)
time.sleep(60)
"""
    path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path, "TENSORLOGIC_COMPILE_WORKERS": "1"},
    )
    assert parent.stdout is not None
    nursery = int(parent.stdout.readline())
    assert len(members(nursery)) == 2
    parent.kill()
    parent.wait()
    begin = time.monotonic()
    while members(nursery):
        assert time.monotonic() - begin < 240  # idle processes wait for every other one
        time.sleep(0.02)


def members(group: int) -> list[int]:
    """Processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_preparing_starts_no_worker(job: Any) -> None:
    compile_pool.prepare()
    pool = compile_pool._workers
    assert pool is not None
    assert pool.fork_server.process is not None
    assert pool.started == 0
    compile_pool.submit((job("fine"),))
    finish(job("fine"))
    assert pool.started == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no such class of processes here")
def test_workers_run_where_nobody_else_wants_to(job: Any) -> None:
    """Threads that wait for each other lose a whole slice of time, all of them, to one process on one of their cores; what it
    imports takes seconds. Beside another session Linux weighs this one as a whole: so it is in this one, out of Ctrl-C's reach."""
    compile_pool.prepare()
    assert compile_pool._workers is not None
    nursery = compile_pool._workers.fork_server.process
    assert nursery is not None
    classes = [os.sched_getscheduler(nursery.pid)]  # before it has imported anything
    compile_pool.submit((job("fine"),))
    finish(job("fine"))
    mine = members(nursery.pid)
    assert len(mine) == 2
    classes += [os.sched_getscheduler(pid) for pid in mine]
    assert set(classes) == {os.SCHED_IDLE}
    assert {os.getsid(pid) for pid in mine} == {os.getsid(0)}
    assert os.getpgid(0) not in mine


def test_no_workers_means_nothing_is_submitted(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLOGIC_COMPILE_WORKERS", "0")
    one = job("fine")
    compile_pool.submit((one,))
    assert compile_pool._workers is None
    assert compile_pool.ready((one,))
    compile_pool.settle(one)
    assert not Path(one.path).exists()


def test_one_pool_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    class Slow:
        def __init__(self, count: int) -> None:
            made.append(count)
            time.sleep(0.05)

    monkeypatch.setattr(compile_pool, "_Workers", Slow)
    monkeypatch.setattr(compile_pool, "_workers", None)
    monkeypatch.setattr(compile_pool, "SUPPORTED", True)
    monkeypatch.setenv("TENSORLOGIC_COMPILE_WORKERS", "1")
    threads = [threading.Thread(target=compile_pool._pool) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
