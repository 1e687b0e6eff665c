"""No garbage collection while modules are imported, plans are read or a graph is recorded: imported first, `resume`d last.

Nothing an import makes is garbage, and a full collection walks all that torch has made: 65 of 140 ms (AMD EPYC, 2026-11-21). While
a model is optimised only what was made lately is collected.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

_LOCK = threading.Lock()
_inside = 0
_was = False


def pause() -> None:
    """Until as many `resume`, from any thread, nothing is collected."""
    global _inside, _was
    with _LOCK:
        if not _inside:
            _was = gc.isenabled()
            gc.disable()
        _inside += 1


def resume() -> None:
    """Collect again, if the program did before."""
    global _inside
    with _LOCK:
        _inside = max(_inside - 1, 0)  # 0 in a child process that was forked inside
        if not _inside and _was:
            gc.enable()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """`pause` inside."""
    pause()
    try:
        yield
    finally:
        resume()


NEVER = 1 << 30
_young = 0
_thresholds = (0, 0, 0)


@contextlib.contextmanager
def no_full_gc() -> Iterator[None]:
    """No full collection inside, unless asked for: each takes 70 ms where torch has traced a model (AMD EPYC, 2026-11-28)."""
    global _young, _thresholds
    with _LOCK:
        if not _young:
            _thresholds = gc.get_threshold()
            gc.set_threshold(*_thresholds[:2], NEVER)
        _young += 1
    try:
        yield
    finally:
        with _LOCK:
            _young = max(_young - 1, 0)
            _collect_all()


def _collect_all() -> None:
    if not _young and gc.get_threshold() == (*_thresholds[:2], NEVER):
        gc.set_threshold(*_thresholds)


def _forked() -> None:
    """A child process has none of the threads that were inside."""
    global _LOCK, _inside, _young
    _LOCK = threading.Lock()
    if _inside and _was:
        gc.enable()
    _inside = _young = 0
    _collect_all()


def renew_after_fork(scope: dict[str, Any], **locks: Callable[[], Any]) -> None:
    """Locks of a module that a forked process makes anew: whichever thread held one there does not exist in it."""
    in_children(lambda: scope.update({name: make() for name, make in locks.items()}))


def in_children(renew: Callable[[], object]) -> None:
    """Call `renew` in every forked process, where there are such."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


in_children(_forked)
pause()
