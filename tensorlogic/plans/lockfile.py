"""Lockfiles: plans that a project commits, so that the same choices are made everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from . import file_format
from .environment import Environment
from .file_format import Unread
from .plan import Plan
from .store import PlanView


class Lockfile(PlanView):
    """The plans of a lockfile, read only; they may be of several kinds of device."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        found = file_format.read_lockfile(path)
        self.path = path
        self.environments = {k: Environment.from_json(e) for k, e in found.environments.items()}
        self._records = found.records

    def _read(self) -> tuple[Unread, ...]:
        return self._records, {}


def load_lockfile(path: Path) -> Lockfile:
    """Read a lockfile.

    Raises:
        FileNotFoundError: there is none. ValueError: it is damaged, or edited or merged by hand.
        OSError: it cannot be read, or a newer version wrote it.
    """
    return Lockfile(Path(path))


def export_lockfile(path: Path, plans: Iterable[Plan], environments: Iterable[Environment]) -> int:
    """Write plans as a lockfile or as shipped plans (equal plans, equal bytes); returns how many.

    Raises:
        ValueError: two environments of one kind of device, or a plan without its environment.
    """
    given = list(environments)
    about = {e.kind: e for e in sorted(given, key=lambda e: e.kind)}
    if len(about) < len(given):
        raise ValueError(
            "a lockfile holds one environment of each kind of device; "
            "export the plans of each machine apart"
        )
    records = {p.key.text: p.to_json() for p in sorted(plans, key=lambda p: p.key.text)}
    strange = {r["key"]["device"] for r in records.values()} - about.keys()
    if strange:
        raise ValueError(f"plans for {', '.join(sorted(strange))} came without their environment")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file_format.write(Path(path), {k: e.to_json() for k, e in about.items()}, records, lock=True)
    return len(records)
