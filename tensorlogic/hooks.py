"""The hooks: a small library built per version of PyTorch, for what its stable ABI does not reach; everything works without."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import native, starting

#: Held again by its holder: a collection while the hooks are loaded may leave a policy, which counts here.
_lock = threading.RLock()
starting.new_in_children(globals(), _lock=threading.RLock)
_apart = ctypes.c_int64(0)  # policies in force; where the guards look, once the hooks are loaded
_state: list[str | None] = []  # empty until tried, then what is missing


def library() -> Path:
    """Where the hooks for the running PyTorch are expected: beside the native library."""
    version = torch.__version__.partition("+")[0]
    return native.library().with_name(f"libtensorlogic_hooks-{version}.so")


def _load() -> str | None:
    path = library()
    if not path.exists():
        return (
            f"{path.name} is not built: it belongs to one version of PyTorch; "
            f"`python tools/build_native.py` in a source checkout builds it for the installed one"
        )
    if path.name in native.stale():
        return (
            f"the hooks {path.name} were built from other sources than these: {native.rebuilding()}"
        )
    try:
        if native.cut_short(path):
            return f"the hooks {path} are cut short, as by an interrupted copy: build them again"
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"the hooks {path} do not load: {error}"
    return None


def load() -> None:
    """Load the hooks where they are built, once: the native library does so when it has been loaded itself."""
    with _lock:
        if not _state:
            _state.append(_load())
            if loaded():
                _apart_at(op("policies_at")())


def available() -> str | None:
    """None where the hooks are loaded, else why not; loads the native library at first use, and them with it."""
    return native.available() or _state[0]


def loaded() -> bool:
    """True where the hooks are in this process; loads nothing."""
    return _state == [None]


def op(name: str) -> Callable[..., Any]:
    """The operator `tensorlogic_hooks::name`; raises RuntimeError where the hooks are absent."""
    if not loaded() and (reason := available()):
        raise RuntimeError(reason)
    return getattr(torch.ops.tensorlogic_hooks, name).default._op


class _Suspension(threading.local):
    now = False


_suspension = _Suspension()
enabled = False  # between `enable` and `disable`, which set it


def is_suspended() -> bool:
    """True where products of this thread are PyTorch's own although repairs are enabled."""
    return _suspension.now


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, in this thread, PyTorch's own kernels serve: what is measured there is what `disable` would give."""
    before, _suspension.now = _suspension.now, True
    switch = op("suspend") if available() is None else None
    try:
        if switch is not None:
            switch(1)
        yield
    finally:
        _suspension.now = before
        if switch is not None:
            switch(-1)


# what the guards remember -------------------------------------------------------------------------------------------


def leave() -> None:
    """Called inside a repair: later calls of these shapes go to PyTorch's kernel without asking, until `forget`."""
    if loaded():
        op("leave")()


def forget() -> None:
    """Let the guards ask again: plans have changed."""
    if loaded():
        op("forget")()


def apart(change: int) -> None:
    """While more +1 than -1 were given the guards always ask: a policy is in force somewhere."""
    with _lock:
        _apart.value += change


def _apart_at(address: int) -> None:
    """Count where the guards look, from what was counted before on."""
    global _apart
    theirs = ctypes.c_int64.from_address(address)
    theirs.value, _apart = _apart.value, theirs
