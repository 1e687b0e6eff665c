"""Compiling ahead in worker processes: jobs fill the kernel cache on disk, so that the caller's process only loads."""

from __future__ import annotations

import atexit
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import IO, Any, cast

from . import settings


class CompileFailure(RuntimeError):
    """A kernel could not be compiled, or needs more than the device has; the message says why."""


class _Workers:
    """Threads that each own one worker process and hand it one job at a time.

    A job is begun when a process that has started takes it: until then the caller may still compile it itself.
    """

    def __init__(self, count: int) -> None:
        self.count, self.threads, self.open = count, 0, 0
        self.lock = threading.Lock()
        self.queue: SimpleQueue[tuple[Any, Future[str | None]]] = SimpleQueue()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.jobs: dict[Any, Future[str | None]] = {}
        atexit.register(self.close)

    def submit(self, job: Any) -> None:
        if job in self.jobs:
            return
        future = self.jobs[job] = Future()
        with self.lock:
            self.open += 1
            grow = self.threads < min(self.count, self.open)
            self.threads += grow
        future.add_done_callback(self._done)
        self.queue.put((job, future))
        if grow:
            name = f"tensorlogic-compile-{self.threads}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _done(self, _: Future[str | None]) -> None:
        with self.lock:
            self.open -= 1

    def _serve(self) -> None:
        worker = self._start()
        while True:
            job, future = self.queue.get()
            if (worker is None or worker.poll() is not None) and not future.cancelled():
                worker = self._start()
            if worker is None:
                future.cancel()  # no process can be started here: the caller compiles
            if worker is None or not future.set_running_or_notify_cancel():
                continue
            try:
                _send(cast(IO[bytes], worker.stdin), job)
                future.set_result(cast("str | None", _receive(cast(IO[bytes], worker.stdout))))
            except (OSError, EOFError) as problem:
                worker.kill()  # it may not have ended yet
                worker = None
                future.set_result(f"the compile worker stopped: {problem}")

    def _start(self) -> subprocess.Popen[bytes] | None:
        """A worker that has imported what it needs; None where it failed to."""
        try:
            worker = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
            )
            self.processes.append(worker)
            _receive(cast(IO[bytes], worker.stdout))
        except (OSError, EOFError):
            return None
        return worker

    def close(self) -> None:
        for future in self.jobs.values():
            future.cancel()
        for process in self.processes:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """What a worker is started with: this process's modules and kernel cache."""
    path = os.pathsep.join(p for p in sys.path if p)
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"}
    cache = {} if settings.TRITON_CACHE is None else {"TRITON_CACHE_DIR": settings.TRITON_CACHE}
    return inherited | cache | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}


_workers: _Workers | None = None


def _after_fork() -> None:
    """A forked process has none of the threads that serve the jobs: it starts workers of its own."""
    global _workers
    _workers = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def submit(jobs: Iterable[Any]) -> None:
    """Start compiling `jobs` (hashable, picklable, with a `run()`) in worker processes; returns at once."""
    global _workers
    count = settings.compile_workers()
    for job in jobs:
        if count == 0:
            return
        if _workers is None:
            _workers = _Workers(count)
        _workers.submit(job)


def ready(jobs: Iterable[Any]) -> bool:
    """True when no worker is still busy with one of `jobs`."""
    return all(_future(job) is None or cast(Future[Any], _future(job)).done() for job in jobs)


def settle(job: Any) -> None:
    """Return when the job's result is on disk, or at once when no worker has begun it (the caller compiles it then):
    workers need seconds to start, in which the caller gets on.

    Raises:
        CompileFailure: the worker failed or died; the caller's process does not try what may take it down, too.
    """
    future = _future(job)
    if future is None or future.cancel():
        return
    reason = future.result()
    if reason is not None:
        raise CompileFailure(reason)


def _future(job: Any) -> Future[str | None] | None:
    return _workers.jobs.get(job) if _workers is not None else None


def _send(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("end of stream")
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def _attempt(run: Callable[[], object]) -> str | None:
    try:
        run()
    except Exception as problem:  # compilers raise what they like: the caller gets it by name
        return f"{type(problem).__name__}: {problem}"
    return None


def serve() -> None:
    """A worker: jobs in on stdin, None or the reason out on stdout; ends with its parent."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a compiler prints must not disturb the protocol
    _send(results, None)
    while True:
        try:
            job = _receive(sys.stdin.buffer)
        except EOFError:
            return
        _send(results, _attempt(job.run))
