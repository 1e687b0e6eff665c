"""The context of a call: tuning mode, forced candidate, determinism, lockfile. One immutable object per combination."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeVar

from ..system import settings
from ..system.settings import TUNE_MODES
from . import argument_checks
from .numeric_mode import Precision
from .op import OPS

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Policy:
    """What the selector must respect. `entries` holds the warm keys of this policy; the fast path looks nowhere else."""

    tune: str = "auto"
    force: Mapping[str, str] | str | None = None
    deterministic: bool = False
    lockfile: Path | None = None
    observer: Callable[..., None] | None = None
    precision: Precision | None = None
    placement: str | None = None  # "auto", a device, or None: tensors stay where they are
    entries: dict[Any, list[tuple[Any, Any]]] = field(default_factory=dict, repr=False)

    def forced(self, op: str) -> str | None:
        """The candidate id forced for `op`, or None."""
        if self.force is None or isinstance(self.force, str):
            return self.force
        return self.force.get(op)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes two policies interchangeable."""
        return (self.tune, self.observer, *self.meaning)

    @property
    def meaning(self) -> tuple[Any, ...]:
        """What of it decides how a call is computed."""
        force = tuple(sorted(self.force.items())) if isinstance(self.force, Mapping) else self.force
        return (force, self.deterministic, self.lockfile, self.precision, self.placement)

    @property
    def reproducible(self) -> bool:
        """True when one candidate per key must serve eager, captured, inference and recorded calls alike."""
        return self.deterministic or self.lockfile is not None


ROOT = Policy(tune=settings.tune_mode(), lockfile=settings.lockfile())
VARIABLE: ContextVar[Policy] = ContextVar("tensorlogic_policy", default=ROOT)
MOST = 256  # policies whose warm keys are kept
_INTERNED: dict[tuple[Any, ...], Policy] = {ROOT.identity: ROOT}
# what `with_precision` made, of policies that are interned
_WITH: dict[tuple[Policy, Precision], Policy] = {}
ON_FORGET: tuple[Callable[[], None], ...] = ()  # drop what else was decided by plans
ON_CHANGE: tuple[Callable[[int], None], ...] = ()  # +1: a policy is entered; -1: left

current = VARIABLE.get


def interned(policy: Policy) -> Policy:
    """The policy of the same meaning whose warm keys are kept."""
    known = _INTERNED.setdefault(policy.identity, policy)
    if len(_INTERNED) > MOST:  # an error budget that differs in every call, say
        others = (p for p in list(_INTERNED.values())[:3] if p is not ROOT and p is not known)
        oldest = next(others)
        _INTERNED.pop(oldest.identity, None)
        oldest.entries.clear()
        _WITH.clear()
    return known


def with_precision(asked: Precision) -> Policy:
    """The current policy with this precision."""
    policy = current()
    known = _WITH.get((policy, asked))
    if known is None:
        known = interned(replace(policy, precision=asked, entries={}))
        if _INTERNED.get(known.identity) is known:
            _WITH[policy, asked] = known
    return known


def forget_entries() -> None:
    """Drop every warm key: plans, sources or packages have changed."""
    for known in list(_INTERNED.values()):  # other threads may enter new ones meanwhile
        known.entries.clear()
    for drop in ON_FORGET:
        drop()


class use(AbstractContextManager[Policy]):
    """Make `chosen` the policy of this context (thread or task) inside a `with` block."""

    __slots__ = ("chosen", "token")

    def __init__(self, chosen: Policy) -> None:
        self.chosen = chosen

    def __enter__(self) -> Policy:
        for told in ON_CHANGE:
            told(1)
        self.token = VARIABLE.set(self.chosen)
        return self.chosen

    def __exit__(self, *problem: object) -> None:
        # first: an abandoned generator may be closed in another context, where the reset raises
        for told in ON_CHANGE:
            told(-1)
        VARIABLE.reset(self.token)


class Block(ContextDecorator, AbstractContextManager[Policy]):
    """The current policy with changes, each time it is entered: one after another, inside itself, in any thread or task."""

    def __init__(self, changes: Mapping[str, Any]) -> None:
        self.changes = changes
        self.open: list[use] = []

    def __enter__(self) -> Policy:
        entered = use(interned(replace(current(), entries={}, **self.changes)))
        chosen = entered.__enter__()
        self.open.append(entered)
        _ENTERED.set((*_ENTERED.get(), entered))
        return chosen

    def __exit__(self, *problem: object) -> None:
        if not self.open:
            raise RuntimeError(
                "policy: left without having been entered; use it in a with statement"
            )
        here = [e for e in _ENTERED.get() if e in self.open]
        last = (here or self.open)[-1]  # the latter: an abandoned generator's, see `use`
        self.open.remove(last)
        _ENTERED.set(tuple(e for e in _ENTERED.get() if e is not last))
        last.__exit__(*problem)


_ENTERED: ContextVar[tuple[use, ...]] = ContextVar("tensorlogic_entered", default=())


@contextmanager
def measuring() -> Iterator[Policy]:
    """For who measures on purpose: nothing in the background, and no lockfile, which the environment may name for programs."""
    with use(interned(replace(current(), tune="off", lockfile=None, entries={}))) as chosen:
        yield chosen


def _check_force(force: str | Mapping[str, str]) -> None:
    """A candidate id, or one for each of some ops."""
    ids = list(force.values()) if isinstance(force, Mapping) else [force]
    strange = next((id for id in ids if not isinstance(id, str)), None)
    if strange is not None:
        raise TypeError(
            f"policy: force is {force!r}; it must be a candidate id such as 'triton.tiled' or a mapping op -> id"
        )
    unknown = [str(op) for op in force if op not in OPS] if isinstance(force, Mapping) else []
    if unknown:
        public = ", ".join(sorted(name for name, op in OPS.items() if not op.internal))
        raise ValueError(
            f"policy: force names {', '.join(sorted(unknown))}; the ops are {public}, and their *_backward"
        )


def outside_of_graphs(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn`, which torch.compile breaks its graph at, and refuses by this reason where it may not."""
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    fn._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "a policy of tensorlogic holds for calls, not inside a graph: enter it around the compiled function, or leave out fullgraph=True"
    )
    return fn


@outside_of_graphs
def policy(
    tune: Literal["off", "auto", "full"] | None = None,
    force: str | Mapping[str, str] | None = None,
    deterministic: bool | None = None,
    lockfile: str | os.PathLike[str] | None = None,
) -> Block:
    """Set how candidates are chosen inside the `with` block; what is not given stays as it was. May be entered again.

    Args:
        tune: "off" measures nothing, "auto" (default) measures in the background of later calls within 5 % of the
            time spent in a key, "full" measures a key when it is first seen.
        force: a candidate id such as "triton.tiled" for every op that has it (the others use "torch.eager"), or a
            mapping from op name to candidate id.
        deterministic: one candidate per key for every kind of call, nothing measured, no floating-point atomics; what a
            key first met stays for the process, until `tune` is called. A later process has what was measured meanwhile.
        lockfile: path of an exported lockfile, the same in every process; keys that it lacks use "torch.eager".

    Raises:
        TypeError: an argument of another type. ValueError: an unknown tuning mode, or an op that does not exist.
        FileNotFoundError: the lockfile does not exist.

    Example:
        >>> import torch, tensorlogic
        >>> with tensorlogic.policy(force="torch.eager"):
        ...     tensorlogic.add_relu(torch.tensor([-1.0, 2.0]), torch.tensor([0.5, 0.5]))
        tensor([0.0000, 2.5000])
    """
    if tune is not None:
        argument_checks.one_of("policy", "tune", tune, TUNE_MODES)
    if force is not None:
        _check_force(force)
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"policy: deterministic is {deterministic!r}; it must be True or False")
    if lockfile is not None and not isinstance(lockfile, (str, os.PathLike)):
        raise TypeError(
            f"policy: lockfile is {type(lockfile).__name__}; it must be the path of an exported lockfile"
        )
    given = {"tune": tune, "force": force, "deterministic": deterministic}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if isinstance(force, Mapping):
        changes["force"] = MappingProxyType(dict(force))
    if lockfile is not None:
        path = settings.expanded("policy: lockfile", lockfile).resolve()
        if not path.is_file():
            what = "is no file" if path.exists() else "does not exist"
            raise FileNotFoundError(
                f"policy: lockfile {str(lockfile)!r} {what}; write one with `tensorlogic plans export {lockfile}`"
            )
        changes["lockfile"] = path
    return Block(changes)
