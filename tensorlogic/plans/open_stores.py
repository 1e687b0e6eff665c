"""The plan stores of this process: one per device model, one per lockfile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from ..core import policy
from ..system import process, settings
from .environment import environment
from .lockfile import Lockfile, load_lockfile
from .store import PlanStore

_LOCK = threading.RLock()
process.renew_after_fork(globals(), _LOCK=threading.RLock)
_STORES: dict[str, PlanStore] = {}
_LOCKFILES: dict[Path, Lockfile] = {}
ON_FORGET: list[Callable[[], None]] = []  # what else a fresh process would not know
ON_TUNE: list[Callable[[], None]] = []  # what would keep new plans from being used


def current(device: torch.device) -> PlanStore:
    """The store of this device in the user's cache folder (read once per process)."""
    here = environment(device)
    store = _STORES.get(here.id)
    if store is None:
        with _LOCK:
            store = _STORES.setdefault(here.id, PlanStore(settings.cache_folder(), here))
    return store


def lockfile(path: Path) -> Lockfile:
    """The read-only store of a lockfile."""
    store = _LOCKFILES.get(path)
    if store is None:
        with _LOCK:
            store = _LOCKFILES.setdefault(path, load_lockfile(path))
    return store


def forget() -> None:
    """Close every store and drop every warm key, as a fresh process would see it."""
    with _LOCK:
        for store in _STORES.values():
            store.flush()
        _STORES.clear()
        _LOCKFILES.clear()
    for started in ON_FORGET:
        started()
    policy.forget_entries()


def distributed() -> bool:
    """True in a job of several ranks, which must not choose apart."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
