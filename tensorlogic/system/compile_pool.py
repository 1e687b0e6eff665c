"""Compiling ahead in worker processes: jobs fill the kernel cache on disk, so that the caller's process only loads."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from queue import PriorityQueue
from typing import Any, cast

from . import process, settings
from .compile_workers import SUPPORTED, ForkServer, Worker, attempt


class CompileFailure(RuntimeError):
    """A kernel could not be compiled, or needs more than the device has; the message says why."""


class _Workers:
    """Threads that each own one worker process and hand it one job at a time, who came to wait last before the others.

    A job is begun when a process that has started takes it: until then the caller may still compile it itself.
    """

    def __init__(self, count: int) -> None:
        self.count, self.threads, self.open, self.started = count, 0, 0, 0
        self.missing = False  # no process can be started here
        self.lock = threading.Lock()
        self.fork_server = ForkServer()
        self.entering = threading.Lock()  # one submits at a time
        self.queue: PriorityQueue[tuple[int, int, Any, Future[str | None]]] = PriorityQueue()
        self.entries = 0
        self.jobs: dict[Any, Future[str | None]] = {}
        atexit.register(self.close)

    def submit(self, jobs: Iterable[Any]) -> None:
        """Queue what nobody has begun; what is queued already moves to the front where somebody waits for it now."""
        with self.entering:
            for job in jobs:
                future = self.jobs.get(job) or self._new(job)
                if not future.running() and not future.done():
                    self.entries += 1
                    self.queue.put((-_scope.get(), self.entries, job, future))

    def _new(self, job: Any) -> Future[str | None]:
        future = self.jobs[job] = Future[str | None]()
        with self.lock:
            self.open += 1
            grow = self.threads < min(self.count, self.open)
            self.threads += grow
        future.add_done_callback(self._done)
        if grow:
            name = f"tensorlogic-compile-{self.threads}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        return future

    def _done(self, _: Future[str | None]) -> None:
        with self.lock:
            self.open -= 1

    def _serve(self) -> None:
        worker = self._start()
        while True:
            *_, job, future = self.queue.get()
            worker = self._served(worker, job, future)

    def _served(self, worker: Worker | None, job: Any, future: Future[str | None]) -> Worker | None:
        """Have a job done, by a new process where there is none; the worker that is left."""
        if worker is None and not future.cancelled():
            worker = self._start()
        if worker is None:
            future.cancel()  # no process can be started here: the caller compiles
        if worker is None or not self.taken(future):
            return worker
        try:
            future.set_result(worker.ask(job))
        except (OSError, EOFError) as problem:
            worker.close()
            future.set_result(f"the compile worker stopped: {problem}")
            return None
        return worker

    def taken(self, future: Future[str | None]) -> bool:
        """Whether who asks shall do this job: nobody has begun it, and somebody still wants it."""
        with self.lock:
            wanted = not future.running() and not future.done()
            return wanted and future.set_running_or_notify_cancel()

    def here(self, jobs: Sequence[Any]) -> None:
        """What of `jobs` no process has begun, done in threads of this one, side by side, until processes have started."""
        left = iter(jobs)  # a list's iterator gives each to one thread

        def work() -> None:
            for job in left:
                if self.started:
                    return
                future = self.jobs.get(job)  # None: dropped meanwhile
                if future is not None and self.taken(future):
                    future.set_result(attempt(job.run))

        for i in range(min(len(jobs), max(1, settings.usable_cores() // 4))):
            threading.Thread(target=work, name=f"tensorlogic-own-{i}", daemon=True).start()

    def _start(self) -> Worker | None:
        try:
            worker = self.fork_server.worker()
        except (OSError, EOFError):
            self.missing = True
            return None
        self.missing = False
        with self.lock:
            self.started += 1
        return worker

    def close(self) -> None:
        for future in list(self.jobs.values()):
            future.cancel()
        self.fork_server.close()


_numbers = itertools.count(1)  # of scopes in which somebody waits, as they begin ...
_scope: ContextVar[int] = ContextVar("tensorlogic_scope", default=0)  # ... the caller's own
_hurried: ContextVar[bool] = ContextVar("tensorlogic_hurried", default=False)
_workers: _Workers | None = None
_making = threading.Lock()
process.renew_after_fork(globals(), _making=threading.Lock)
_own: set[Any] = set()  # jobs that were this process's to compile


def _after_fork() -> None:
    """A forked process has none of the threads that serve the jobs: it starts workers of its own."""
    global _workers
    if _workers is not None:
        atexit.unregister(_workers.close)  # they are its parent's
    _workers = None


process.in_children(_after_fork)


def _pool() -> _Workers | None:
    global _workers
    count = settings.compile_workers() if SUPPORTED else 0
    with _making:
        if _workers is None and count > 0:
            _workers = _Workers(count)
    return _workers if count > 0 else None


def prepare() -> None:
    """Let the process that workers are forked from begin to import PyTorch, where jobs are expected soon; returns at once."""
    pool = _pool()
    if pool is not None:
        with contextlib.suppress(OSError):  # the caller will compile
            pool.fork_server.open()


def submit(jobs: Iterable[Any]) -> None:
    """Start compiling `jobs` (hashable, picklable, with a `run()`) in worker processes; returns at once.

    What this process will need to load them it begins with, too: their `ahead()`, if they have one.
    """
    pool, jobs = _pool(), list(jobs)
    for kind in {type(job) for job in jobs}:
        getattr(kind, "ahead", int)()
    if pool is not None:
        pool.submit(jobs)


def begin(jobs: Iterable[Any]) -> None:
    """`submit` what this process needs soon and would compile by itself: where no worker has started yet, threads of it do."""
    jobs = list(dict.fromkeys(jobs))
    submit(jobs)
    pool = _pool()
    if pool is not None and not pool.started:
        pool.here(jobs)


def ready(jobs: Iterable[Any]) -> bool:
    """True when no worker is still busy with one of `jobs`."""
    return all((future := _future(job)) is None or future.done() for job in jobs)


def there(jobs: Iterable[Any]) -> bool:
    """True when every one of `jobs` has been compiled by a worker or by this process, or has failed."""
    done = ((job, _future(job)) for job in jobs)
    return all(job in _own or (f is not None and f.done() and not f.cancelled()) for job, f in done)


def begun(jobs: Iterable[Any]) -> bool:
    """True while a worker is busy with one of `jobs`."""
    return any((future := _future(job)) is not None and future.running() for job in jobs)


@contextlib.contextmanager
def awaited() -> Iterator[None]:
    """Inside, somebody waits for kernels: what is submitted from here on is compiled first."""
    token = _scope.set(next(_numbers))
    try:
        yield
    finally:
        _scope.reset(token)


@contextlib.contextmanager
def no_new_compiles(wanted: bool = True) -> Iterator[None]:
    """Inside, what nobody has measured on a key serves it only where nothing has to be compiled for that first."""
    token = _hurried.set(wanted)
    try:
        yield
    finally:
        _hurried.reset(token)


new_compiles_forbidden = _hurried.get


def elsewhere() -> bool:
    """True when workers compile, or will once they have started."""
    return _workers is not None and not _workers.missing


def wait(jobs: Iterable[Any], timeout_s: float) -> None:
    """Return when a worker has finished another one of `jobs`, at the latest after `timeout_s`."""
    futures = [f for job in jobs if (f := _future(job)) is not None and not f.done()]
    if not futures:
        time.sleep(timeout_s)
    concurrent.futures.wait(futures, timeout_s, concurrent.futures.FIRST_COMPLETED)


def settle(job: Any) -> None:
    """Return when the job's result is on disk, or at once when no worker has begun it (the caller compiles it then):
    workers need seconds to start, in which the caller gets on.

    Raises:
        CompileFailure: the worker failed or died; the caller's process does not try what may take it down, too.
    """
    future = _future(job)
    if future is None or future.cancel():
        _own.add(job)
        return
    reason = future.result()
    if reason is not None:
        raise CompileFailure(reason)


def drop(jobs: Iterable[Any]) -> None:
    """Nobody waits for `jobs` any more: what no worker has begun is not compiled, unless it is submitted again."""
    for job in jobs:
        if (future := _future(job)) is not None and future.cancel():
            cast(_Workers, _workers).jobs.pop(job, None)


def _future(job: Any) -> Future[str | None] | None:
    return _workers.jobs.get(job) if _workers is not None else None
