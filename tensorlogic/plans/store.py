"""Sets of plans: the store of one environment, shipped plans behind it, and lockfiles."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..core.candidate import EAGER
from ..core.key import LAYOUT, Key
from ..system import process
from . import file_format
from .environment import Environment
from .file_format import Records, Unread
from .plan import Plan, merged

# how far a neighbour may be, as `Key.distance` tells; on a GPU gains are weighed against distances
REACH = 2.0
SHIPPED = Path(__file__).parent / "shipped"
INTERVAL_S = 2.0  # between saves of one store
SHARE = 0.02  # of the time at most goes into saving
RETRY_S = 30.0  # after a save that failed
MEMO = 256  # keys whose neighbours are remembered, and their ops
LOCK_TIMEOUT_S = 10.0  # for a file that another process is saving
BROKEN = (KeyError, TypeError, ValueError, AttributeError, RecursionError)  # raised by records

Valid = Callable[[Plan], bool]
Normal = Callable[[Key], Key]


class _Shelf:
    """Records of plans by key text, each parsed when it is first asked for, and their kinships, for which keys alone are read."""

    def __init__(self, records: Unread) -> None:
        self.records = dict(records)
        self.parsed: dict[str, Plan | None] = {}
        self.keys: dict[str, Key | None] = {}  # by text
        self.normal: dict[str, Key] = {}
        # "op direction " -> kin -> texts, keys and normal keys
        self.neighbor_groups: dict[str, dict[object, list[tuple[str, Key, Key]]]] = {}
        self.changes = 0

    def get(self, text: str) -> Plan | None:
        if text not in self.parsed and text in self.records:
            self.parsed[text] = _parse(text, self.records[text])
        return self.parsed.get(text)

    def texts(self, group: str = "") -> list[str]:
        return sorted({t for t in (*self.records, *self.parsed) if t.startswith(group)})

    def put(self, plan: Plan) -> None:
        self.parsed[plan.key.text] = plan
        self.keys[plan.key.text] = plan.key
        self.neighbor_groups.pop(_group(plan.key), None)
        self.changes += 1

    def adopt(self, records: Records) -> None:
        """Take what other processes have saved for keys that are unknown here."""
        new = {t: r for t, r in records.items() if t not in self.records and t not in self.parsed}
        self.records.update(new)
        if new:
            self.neighbor_groups.clear()
            self.changes += 1

    def remove(self, text: str) -> None:
        self.records.pop(text, None)
        self.parsed.pop(text, None)
        self.keys.pop(text, None)
        self.neighbor_groups.clear()
        self.changes += 1

    def relatives(self, key: Key, normal: Normal) -> list[tuple[str, Key, Key]]:
        """Texts, keys and normal keys of the kin of a normal key; `normal` is the same for all keys of an op."""
        group = _group(key)
        if group not in self.neighbor_groups:
            kin: dict[object, list[tuple[str, Key, Key]]] = {}
            with process.paused():
                for text in self.texts(group):
                    own = self._key(text)
                    if own is not None and own.form == key.form:  # of this version of the op
                        if text not in self.normal:
                            self.normal[text] = normal(own)
                        relative = (text, own, self.normal[text])
                        kin.setdefault(relative[2].neighbor_group, []).append(relative)
            self.neighbor_groups[group] = kin
        return self.neighbor_groups[group].get(key.neighbor_group, [])

    def _key(self, text: str) -> Key | None:
        if text not in self.keys:
            self.keys[text] = _key_of(text, self.records.get(text, ""))
        return self.keys[text]


class PlanView:
    """Plans to read: stored, behind them shipped, and as neighbours alone those of the same chip or of another PyTorch."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is in memory
        self._shelves: tuple[_Shelf, ...] = ()
        self._memo: tuple[int, dict[Any, Any]] = -1, {}

    def _read(self) -> tuple[Unread, ...]:
        """Records of stored and of shipped plans, then of each environment akin; called once, at the first access."""
        raise NotImplementedError

    def _loaded(self) -> tuple[_Shelf, ...]:
        if not self._shelves:
            with process.paused():
                self._shelves = tuple(map(_Shelf, self._read()))
        return self._shelves

    def memo(self) -> dict[Any, Any]:
        """What others keep that follows from these plans; an empty one after every change of any."""
        with self._lock:
            changes = sum(shelf.changes for shelf in self._loaded())
            if self._memo[0] != changes or len(self._memo[1]) >= MEMO:
                self._memo = changes, {}
            return self._memo[1]

    def get(self, key: Key, valid: Valid | None = None) -> Plan | None:
        """The stored plan of `key`, else the shipped one; with `valid`, the first that is."""
        return self.of(key.text, valid)

    def of(self, text: str, valid: Valid | None = None) -> Plan | None:
        """As `get`, by the key's text."""
        with self._lock:
            found = [shelf.get(text) for shelf in self._loaded()[:2]]
        return next((p for p in found if p is not None and (valid is None or valid(p))), None)

    def nearest(self, key: Key, allowed: Callable[[str], bool], **more: Any) -> Plan | None:
        """The first of `neighbours`, or None."""
        return next(self.neighbours(key, allowed, **more), None)

    def neighbours(
        self,
        key: Key,
        allowed: Callable[[str], bool],
        valid: Valid | None = None,
        reach: float | None = None,
        normal: Normal = lambda key: key,
    ) -> Iterator[Plan]:
        """Plans of the kin of `key`, the closest first and those laid out alike before others, whose winners are `allowed` to serve
        unchecked, both seen as `normal` keys.

        Plans measured at a stronger alignment than the key's do not count. At equal distance a stored plan
        comes before a shipped one, that before one of an environment akin, whose own plan of `key` is a neighbour too, then the
        smaller text. `reach` is REACH, on a GPU endless, unless given.
        """
        if reach is None:
            reach = math.inf if key.device == "cuda" else REACH
        with self._lock:
            here = normal(key)
            relatives = [
                (shelf, i, *relative)
                for i, shelf in enumerate(self._loaded())
                for relative in shelf.relatives(here, normal)
                if key.as_aligned(relative[1])
            ]
        ranked = []
        for shelf, i, text, _, own in relatives:
            apart = here.search_distance(own)
            if apart - LAYOUT * here.alignment_mismatches(own) <= reach:
                ranked.append((apart, i, text, shelf))
        for _, i, text, shelf in sorted(ranked, key=lambda rank: rank[:3]):
            with self._lock:
                plan = shelf.get(text)
            if (
                plan is not None
                and all(id == EAGER or allowed(id) for id in (plan.eager, plan.captured))
                and (text != key.text or i >= 2)
                and (valid is None or valid(plan))
            ):
                yield plan

    def refused(self, key: Key, candidate: str, source: str) -> str | None:
        """Why this candidate with this source was refused on `key` here; None if it was not."""
        with self._lock:
            plan = self._loaded()[0].get(key.text)
        told, known = (candidate, source, "refused"), plan.evidence if plan else ()
        return next((e.reason for e in known if (e.candidate, e.source, e.status) == told), None)

    def plans(self, shipped: bool = False) -> Iterator[Plan]:
        """Every stored plan, by text; with `shipped`, then shipped ones that none of them hides."""
        with self._lock:
            mine, theirs = self._loaded()[:2]
            stored = [plan for text in mine.texts() if (plan := mine.get(text))]
            known = {plan.key for plan in stored}
            behind = [plan for text in theirs.texts() if shipped and (plan := theirs.get(text))]
        return iter(stored + [plan for plan in behind if plan.key not in known])


class PlanStore(PlanView):
    """The plans of one environment: read at first access, kept in memory, saved in the background.

    A key's plan stays what this process first saw until it puts another one itself. Trouble with
    the disk is said once and never raised; what is unsaved stays in memory and is tried again.
    """

    def __init__(self, folder: Path, environment: Environment) -> None:
        super().__init__()
        self.environment = environment
        self.path = Path(folder) / environment.file_name
        self._saving = threading.Lock()  # one save at a time
        self._unsaved: dict[str, Plan] = {}
        self._timer: threading.Timer | None = None
        self._next_save = 0.0
        _STORES.add(self)

    def _read(self) -> tuple[Unread, ...]:
        shipped = file_format.shipped(SHIPPED, self.environment)
        try:
            found = file_format.read_own(self.path, self.environment)
        except OSError as problem:
            self._say_unusable(problem)
            return {}, *shipped
        if found.damage is not None:
            readable = f"{len(found.records)} plans could be read"
            kept = f"{found.damage}; {readable}, the next save keeps a copy of the file"
            file_format.warn_once(self.path, "is not as it was saved", kept)
        return found.records, *shipped

    def put(self, plan: Plan) -> None:
        """Keep `plan`, or the known one if measured later; save it soon, in the background."""
        json.dumps(plan.to_json())  # what cannot be saved shows here, not in the background
        with self._lock:
            mine = self._loaded()[0]
            known = mine.get(plan.key.text)
            plan = plan if known is None else merged(known, plan)
            mine.put(plan)
            self._unsaved[plan.key.text] = plan
            _UNSAVED.add(self)
            self._schedule()

    def flush(self, timeout_s: float = LOCK_TIMEOUT_S) -> bool:
        """Save now what is not saved yet; False when that failed (which has been said)."""
        if not self._saving.acquire(timeout=timeout_s):
            self._say_unusable(TimeoutError(f"another thread has been saving it for {timeout_s} s"))
            return False
        try:
            return self._save_unsaved(timeout_s)
        finally:
            self._saving.release()

    def _save_unsaved(self, timeout_s: float) -> bool:
        with self._lock:
            unsaved = dict(self._unsaved)
        if not unsaved:
            return True

        def change(records: Records) -> None:
            for text, plan in unsaved.items():
                known = _parse(text, records[text]) if text in records else None
                records[text] = (plan if known is None else merged(known, plan)).to_json()

        records = self._save(change, timeout_s)
        if records is None:
            return False
        with self._lock:
            for text, plan in unsaved.items():
                if self._unsaved.get(text) is plan:
                    del self._unsaved[text]
            if not self._unsaved:
                _UNSAVED.discard(self)
            self._loaded()[0].adopt(records)
        return True

    def forget(self, select: Callable[[Plan], bool] = lambda plan: True) -> int:
        """Remove the stored plans that `select` picks, on disk too; returns how many there were."""
        gone: set[str] = set()

        def change(records: Records) -> None:
            for text in list(records):
                plan = _parse(text, records[text])
                if plan is None or select(plan):
                    del records[text]
                    gone.add(text)

        with self._saving:
            with self._lock:
                mine = self._loaded()[0]
                for text in mine.texts():
                    plan = mine.get(text)
                    if plan is None or select(plan):
                        mine.remove(text)
                        self._unsaved.pop(text, None)
                        gone.add(text)
            self._save(change, LOCK_TIMEOUT_S)
        return len(gone)

    def _save(self, change: Callable[[Records], None], timeout_s: float) -> Records | None:
        begin = time.monotonic()
        try:
            records = file_format.rewrite(self.path, self.environment, change, timeout_s)
        except (OSError, NotImplementedError) as problem:  # the latter: a file system without locks
            self._say_unusable(problem)
            self._next_save = time.monotonic() + RETRY_S
            return None
        end = time.monotonic()
        self._next_save = end + max(INTERVAL_S, (end - begin) / SHARE)
        return records

    def _say_unusable(self, problem: Exception) -> None:
        file_format.warn_once(self.path, "cannot be used; plans stay in this process", problem)

    def _schedule(self) -> None:
        if self._timer is not None:
            return
        timer = threading.Timer(max(0.0, self._next_save - time.monotonic()), self._on_time)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no more threads, or Python ends: saved at exit
            timer.start()
            self._timer = timer

    def _on_time(self) -> None:
        saved = self.flush()
        with self._lock:
            self._timer = None
            if saved and self._unsaved:  # put while the file was being written
                self._schedule()


def _group(key: Key) -> str:
    return f"{key.op} {key.direction} "


def _parse(text: str, record: file_format.Record | str) -> Plan | None:
    """The plan of a record; None when it is not one, or not of the key it stands under."""
    try:
        plan = Plan.from_json(json.loads(record) if isinstance(record, str) else record)
        return plan if plan.key.text == text else None
    except BROKEN:
        return None


def _key_of(text: str, record: file_format.Record | str) -> Key | None:
    """The key of a record, which is read no further where its key comes first."""
    try:
        key = Key.from_json(file_format.key_of(record))
        return key if key.text == text else None
    except BROKEN:
        return None


def _save_all() -> None:
    for store in list(_UNSAVED):
        store.flush(timeout_s=LOCK_TIMEOUT_S / 2)


def _after_fork() -> None:
    for store in list(_STORES):
        store._lock, store._saving, store._timer = threading.RLock(), threading.Lock(), None


_STORES: weakref.WeakSet[PlanStore] = weakref.WeakSet()
_UNSAVED: set[PlanStore] = set()  # keeps them alive until they are saved
atexit.register(_save_all)
process.in_children(_after_fork)
