"""How a command ends: its exit code, and one line on what stopped it."""

from __future__ import annotations

import _thread
import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..bench.terminal.user_error import Problem
from ..system.settings import Wrong

DONE, FOUND, REFUSED, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141
AGAIN_S = 0.01  # after which a dropped Ctrl-C is raised once more


def ended(run: Callable[[], object]) -> int:
    """Run a command; its exit code, that of what a person can change said in one line, too."""
    if sys.stdout is None:  # closed: `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without a sign shows another one
            stream.reconfigure(errors="replace")
    try:
        with _heard():
            code = run()
        sys.stdout.flush()
    except (Problem, Wrong) as problem:
        return _say(str(problem), REFUSED)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except (BrokenPipeError, SystemExit) as stop:  # whoever read our output has gone: `| head`
        if not isinstance(stop.__context__ if isinstance(stop, SystemExit) else stop, BrokenPipeError):  # fmt: skip
            raise
        _discard()
        return UNREAD
    except OSError as problem:
        why = _unwritable()
        if why is None:
            return _say(str(problem), REFUSED)
        _discard()
        return _say(f"the output cannot be written: {why}", REFUSED)
    return code if isinstance(code, int) else DONE


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    """A Ctrl-C that falls into a finalizer or a weak reference's callback, where Python drops it, is raised again."""
    usual, timers = sys.unraisablehook, list[threading.Timer]()

    def hook(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            usual(dropped)
            return
        timers.append(threading.Timer(AGAIN_S, _thread.interrupt_main))  # here it would be dropped
        timers[-1].daemon = True
        timers[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
        for timer in timers:
            timer.cancel()


def _say(text: str, code: int) -> int:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # the exit code says it, too
            sys.stderr.write(f"tensorlogic: {text}\n")
    return code


def _unwritable() -> str | None:
    """Why nothing can be printed; None where a line can."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as problem:
        return problem.strerror or str(problem)
    return None


def _discard() -> None:
    """Send what is still to be printed nowhere, so that the flush at exit does not fail as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
