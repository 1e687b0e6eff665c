"""The plan stores of this process: one per device model, one per lockfile; and measuring a key into them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from . import hooks, modes, policies, settings, starting
from .op import Op
from .plans import Key, Lockfile, Plan, PlanStore, environment, load_lockfile
from .study import PROMPT_S, Study

_LOCK = threading.RLock()
starting.new_in_children(globals(), _LOCK=threading.RLock)
_STORES: dict[str, PlanStore] = {}
_LOCKFILES: dict[Path, Lockfile] = {}
ON_FORGET: list[Callable[[], None]] = []  # what else a fresh process would not know
ON_TUNE: list[Callable[[], None]] = []  # what would keep new plans from being used


def current(device: torch.device) -> PlanStore:
    """The store of this device in the user's cache folder (read once per process)."""
    name = environment(device).id
    store = _STORES.get(name)
    if store is None:
        with _LOCK:
            store = _STORES.setdefault(
                name, PlanStore(settings.cache_folder(), environment(device))
            )
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
    policies.forget_entries()


def complete(op: Op, plan: Plan | None, key: Key) -> bool:
    """True when the plan's evidence covers every candidate that could serve the key, with today's sources, undisturbed and whole."""
    if plan is None or plan.doubtful or plan.unfinished:
        return False
    known = {(e.candidate, e.source) for e in plan.evidence}
    return all((c.id, c.source) in known for c in op.known if c.unfit(key) is None)


def neighbour(op: Op, key: Key, device: torch.device) -> Plan | None:
    """The closest plan by candidates that are here: what won there is likely to win, and compiled first."""
    return current(device).nearest(key, lambda id: id in op.candidates, normal=op.normal)


def measured(
    op: Op, key: Key, device: torch.device, budget_s: float = 0.3, prompt_s: float = PROMPT_S
) -> Plan | None:
    """The plan of this key, measured now unless the store's is complete; `prompt_s`: for how long kernels are waited for."""
    store = current(device)
    plan = store.get(key)
    if complete(op, plan, key):
        return plan
    near = neighbour(op, key, device)
    study = Study(
        op, key, device, environment(device), plan, budget_s, prompt_s=prompt_s, near=near
    )
    with preserved(device, op):
        fresh = study.run()
    if fresh is not None:
        store.put(fresh)
        policies.forget_entries()
    return fresh


def distributed() -> bool:
    """True in a job of several ranks, which must not choose apart."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agreed(op: Op, key: Key, device: torch.device, prompt_s: float = PROMPT_S) -> Plan | None:
    """The plan that rank 0 measures, in every rank; all ranks must call this for the same keys in the same order."""
    first = torch.distributed.get_rank() == 0
    mine = measured(op, key, device, prompt_s=prompt_s) if first else None
    box = [mine.to_json() if mine is not None else None]
    torch.distributed.broadcast_object_list(box, src=0)
    if box[0] is None:
        return None
    plan = Plan.from_json(box[0])
    current(device).put(plan)
    policies.forget_entries()
    return plan


class preserved:
    """Keep what the caller may notice: default device, autocast and inference mode, current device and stream.

    Inside, PyTorch is what it is without `enable`. A default generator is put back only for an op that draws from it, as candidates
    on a CPU never do: another thread may draw meanwhile, and would be given the same numbers again.
    """

    def __init__(self, device: torch.device, op: Op | None = None) -> None:
        self.device = device
        self.draws = op is not None and op.draws

    def __enter__(self) -> None:
        kind = self.device.type if self.draws else "cpu"
        self.cuda = torch.cuda.get_rng_state(self.device) if kind == "cuda" else None
        self.mps = torch.mps.get_rng_state() if kind == "mps" else None
        self.modes = contextlib.ExitStack()
        self.modes.enter_context(torch.inference_mode(mode=False))
        self.modes.enter_context(torch.autocast(self.device.type, enabled=False))
        self.modes.enter_context(hooks.suspended())
        self.modes.enter_context(modes.aside())

    def __exit__(self, *problem: object) -> None:
        self.modes.close()
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)
