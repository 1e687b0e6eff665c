"""The hooks: a small library built per version of PyTorch, for what its stable ABI does not reach; everything works without."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..system import process
from . import library_files

#: Held again by its holder: a collection while the hooks are loaded may leave a policy, which counts here.
_lock = threading.RLock()
process.renew_after_fork(globals(), _lock=threading.RLock)
# policies in force; where the guards look, once the hooks are loaded
_apart = ctypes.c_int64(0)
_state: list[str | None] = []  # empty until tried, then what is missing


def library() -> Path:
    """Where the hooks for the running PyTorch are expected: beside the native library."""
    version = torch.__version__.partition("+")[0]
    return library_files.library().with_name(f"libtensorlogic_hooks-{version}.so")


def _load() -> str | None:
    path = library()
    if not path.exists():
        return (
            f"{path.name} is not built: it belongs to one version of PyTorch; "
            f"`python tools/build_native.py` in a source checkout builds it for the installed one"
        )
    if path.name in library_files.stale():
        return f"the hooks {path.name} were built from other sources than these: {library_files.rebuilding()}"
    try:
        if library_files.is_truncated(path):
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
                _apart_at(direct("policies_at")())


def loaded() -> bool:
    """True where the hooks are in this process; loads nothing."""
    return _state == [None]


def missing() -> str | None:
    """What loading the hooks gave: None where they are there, else why not. They have been tried."""
    return _state[0]


def direct(name: str) -> Callable[..., Any]:
    """The operator `tensorlogic_hooks::name` of hooks that are loaded."""
    return getattr(torch.ops.tensorlogic_hooks, name).default._op


class _Suspension(threading.local):
    now = False


SUSPENSION = _Suspension()
enabled = False  # between `enable` and `disable`, which set it


def is_suspended() -> bool:
    """True where products of this thread are PyTorch's own although repairs are enabled."""
    return SUSPENSION.now


# what the guards remember -------------------------------------------------------------------------------------------


def skip_until_invalidated() -> None:
    """Called inside a repair: later calls of these shapes go to PyTorch's kernel without asking, until `forget`."""
    if loaded():
        direct("leave")()


def forget() -> None:
    """Let the guards ask again: plans have changed."""
    if loaded():
        direct("forget")()


def count_policies(change: int) -> None:
    """While more +1 than -1 were given the guards always ask: a policy is in force somewhere."""
    with _lock:
        _apart.value += change


def _apart_at(address: int) -> None:
    """Count where the guards look, from what was counted before on."""
    global _apart
    theirs = ctypes.c_int64.from_address(address)
    theirs.value, _apart = _apart.value, theirs
