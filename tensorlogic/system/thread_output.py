"""Streams of the process that keep what one thread writes, while others write on."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any

from . import process

#: `sys.stdout` and what else of the process is set for a while: by one thread at a time, lest one restores what another has set.
TURN = threading.RLock()
process.renew_after_fork(globals(), TURN=threading.RLock)


class ThreadOutput(io.TextIOBase):
    """Stands for a stream of the process: keeps what one thread writes until it is over, and hands on what others do.

    None is ever freed. CPython's `print` holds no reference to the stream that it writes to (its issue 130163): another thread may
    be between the text and the end of its line when `sys.stdout` is the old one again.
    """

    kept: io.StringIO | None = None  # None: it is over
    other: Any = None
    thread = 0

    def begin(self, kept: io.StringIO, other: Any) -> None:
        # put back by who had found it there
        while isinstance(other, ThreadOutput) and other.kept is None:
            other = other.other
        self.other, self.thread, self.kept = other, threading.get_ident(), kept

    def end(self) -> None:
        self.kept = None

    def _stream(self) -> Any:
        kept = self.kept
        return self.other if kept is None or threading.get_ident() != self.thread else kept

    def write(self, text: str) -> int:
        stream = self._stream()
        return len(text) if stream is None else stream.write(text)

    def flush(self) -> None:
        stream = self._stream()
        if stream is not None:
            stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.other, name)


_KNOWN: list[ThreadOutput] = []  # to somebody else, who may write to them at any time
_SPARE: list[ThreadOutput] = []


@contextlib.contextmanager
def capture_output(*names: str) -> Iterator[io.StringIO]:
    """What this thread writes to `sys.stdout` or `sys.stderr` goes nowhere else."""
    out = io.StringIO()
    with TURN, contextlib.ExitStack() as after:
        for name in names:
            after.enter_context(_stands_for(name, out))
        yield out


@contextlib.contextmanager
def _stands_for(name: str, out: io.StringIO) -> Iterator[None]:
    mine, before = _SPARE.pop() if _SPARE else ThreadOutput(), getattr(sys, name)
    alone = sys.getrefcount(mine)
    mine.begin(out, before)
    try:
        setattr(sys, name, mine)
        yield
    finally:
        setattr(sys, name, before)
        mine.end()
        # A handler of the model's that keeps it writes on to where it wrote.
        (_SPARE if sys.getrefcount(mine) <= alone else _KNOWN).append(mine)
