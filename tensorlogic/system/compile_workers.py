"""Worker processes: one nursery imports PyTorch and Triton once, and forks a worker for each socket it is handed."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from io import BufferedRWPair
from typing import Any

from . import settings

PRELOADED: list[str] = []  # modules that are imported before workers are forked
# of compilers that work ahead: a tenth of a core where the caller's threads take all
NICENESS = 10
SUPPORTED = hasattr(os, "fork") and hasattr(socket, "send_fds")


class Worker:
    """This process's end of one worker: `ask(job)` returns what `job.run()` failed with, or None."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self.stream = end, end.makefile("rwb")
        self.pid: int = _receive(self.stream)  # it has started

    def ask(self, job: Any) -> str | None:
        """Raises OSError or EOFError when the worker has gone."""
        _send(self.stream, job)
        answer: str | None = _receive(self.stream)
        return answer

    def close(self) -> None:
        """The worker ends when it has nobody left to answer."""
        with contextlib.suppress(OSError):
            self.stream.close()
        self.end.close()


class ForkServer:
    """A process that has imported what workers need, and forks them: the second costs milliseconds and shares its memory."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.line: socket.socket | None = None

    def open(self) -> None:
        """Start the process unless it runs; returns while it still imports. Raises OSError."""
        with self.lock:
            if self.process is not None and self.process.poll() is None:
                return
            ours, its = socket.socketpair()
            with its:
                self.process = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        f"from {__name__} import serve_forks; serve_forks({its.fileno()})",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # a compiler's prints are no output of this program
                    pass_fds=(its.fileno(),),
                    env=environment(),
                    process_group=0,  # Ctrl-C is this process's to handle
                )
            lower_priority(self.process.pid)
            self.line = ours

    def worker(self) -> Worker:
        """A worker, once it has started. Raises OSError or EOFError where none can."""
        self.open()
        ours, its = socket.socketpair()
        with its, self.lock:
            assert self.line is not None
            socket.send_fds(self.line, [b"w"], [its.fileno()])
        return Worker(ours)

    def close(self) -> None:
        """End the process with its workers and whatever compilers they have started."""
        if self.process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def environment() -> dict[str, str]:
    """What workers are started with: this process's modules, kernel cache and assembler."""
    path = os.pathsep.join(p for p in sys.path if p)
    inherited = {k: v for k, v in os.environ.items() if k not in settings.TRITON}
    found = {k: v for k, v in settings.TRITON.items() if v is not None}
    alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # to fork
    return inherited | found | alone | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}


def serve_forks(fd: int) -> None:
    """The nursery: forks a worker for every socket that comes; ends with its parent."""
    lower_priority(os.getpid())
    line = socket.socket(fileno=fd)
    for name in PRELOADED:  # what is called `warm` there is called
        with contextlib.suppress(ImportError):  # no Triton: a job that needs it will say so
            getattr(importlib.import_module(name), "warm", int)()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how workers ended
    while True:
        message, fds, _, _ = socket.recv_fds(line, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # compilers start processes of their own
            line.close()
            serve(socket.socket(fileno=fds[0]))
            os._exit(0)
        os.close(fds[0])


def lower_priority(pid: int) -> None:
    """Let a process, and those it starts, run where nobody else of this session wants to, and stop the moment somebody does.

    Threads that wait for each other, as PyTorch's do on a CPU, all wait where one of them shares its core: for slices of
    milliseconds, however nice the other one is.
    """
    if not hasattr(os, "SCHED_IDLE"):
        yield_priority(pid, 19)
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def yield_priority(pid: int, niceness: int) -> None:
    """Let a process run after others by this much, at least.

    That counts within a session. Two sessions Linux weighs as wholes, and on each core apart: a program whose threads run on all
    cores weighs little on any one, and a process of another session takes most of the core that it is on. So it has to
    be started in this session, with a process group of its own (Ctrl-C reaches the group in front alone).
    """
    if not niceness:
        return
    with contextlib.suppress(OSError):
        now = os.getpriority(os.PRIO_PROCESS, pid)
        os.setpriority(os.PRIO_PROCESS, pid, max(now, niceness))


def serve(end: socket.socket) -> None:
    """A worker: jobs in, None or the reason out, until the other end is closed."""
    stream = end.makefile("rwb")
    with contextlib.suppress(OSError, EOFError):
        _send(stream, os.getpid())
        while True:
            _send(stream, attempt(_receive(stream).run))


def attempt(run: Callable[[], object]) -> str | None:
    """None, or why it failed."""
    try:
        run()
    except Exception as problem:  # compilers raise what they like: the caller gets it by name
        return f"{type(problem).__name__}: {problem}"
    return None


def _send(stream: BufferedRWPair, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: BufferedRWPair) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("end of stream")
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))
