"""Plan files on disk: read what can be read, and replace without losing anything.

JSON: format, schema, environments by kind of device, plans by key text; lockfiles add a checksum.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..system import atomic_file
from .environment import SCHEMA, Environment, digest

FORMAT = "tensorlogic plans"
HEAD = 4096  # bytes of a plan file that tell what it is about
LOG = logging.getLogger("tensorlogic")
_SAID: set[tuple[str, str]] = set()

Record = dict[str, Any]
Records = dict[str, Record]
Unread = Mapping[str, Record | str]  # each record, or its JSON until somebody asks for it
_KEY = re.compile(r'\{\s*"key":\s*')
_DECODER = json.JSONDecoder()


class PlanStoreWarning(UserWarning):
    """Plans could not be read or saved; calls go on, with what is known in memory."""


class Unusable(OSError):
    """A plan file that must be left as it is: written by a newer version."""


@dataclass
class Contents:
    """What a plan file holds; where `damage` says what is wrong, what could be read of it."""

    environments: dict[str, Record]
    records: Records
    damage: str | None = None
    checksum: str | None = None


def read_own(path: Path, environment: Environment) -> Contents:
    """`read` for the file of one environment; nothing is taken from that of another one."""
    found = read(path)
    if found.environments not in ({}, header(environment)):
        return Contents({}, {}, "the file of another environment")
    return found


def header(environment: Environment) -> dict[str, Record]:
    """What the plan file of one environment says about it."""
    return {environment.kind: environment.to_json()}


def read(path: Path) -> Contents:
    """The contents of a plan file; a missing file is empty, of a damaged one what can be read.

    Raises:
        Unusable: the file has a newer schema. OSError: it exists but cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return Contents({}, {})
    try:
        return _contents(json.loads(text), None)
    except (ValueError, RecursionError) as problem:
        return _contents(_salvage(text), f"damaged ({problem})")


def _contents(document: Any, damage: str | None) -> Contents:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return Contents({}, {}, damage or "not a plan file")
    schema = document.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        newer = f"it has schema {schema}, written by a newer version; this one knows {SCHEMA}"
        raise Unusable(newer)
    plans, environments = document.get("plans"), document.get("environments")
    if schema != SCHEMA or not isinstance(plans, dict) or not isinstance(environments, dict):
        return Contents({}, {}, damage or "not a plan file of this schema")
    records = {text: record for text, record in plans.items() if isinstance(record, dict)}
    return Contents(environments, records, damage, document.get("checksum"))


def skim(path: Path) -> tuple[Contents, Unread]:
    """`read` without reading the records, which stand apart: 4 MB of them take 0.1 s, of which a process needs a few.

    Of a file that was not laid out by `write`, or is not whole, everything is read.
    """
    text = path.read_bytes().decode("utf-8", errors="replace")
    head, begin, body = text.partition('\n "plans": {\n  "')
    records, end, rest = body.rpartition("\n }\n}\n")
    if begin and end and not rest:
        try:
            found = _contents(json.loads(head + '"plans": {}}'), None)
            if found.damage is None:
                return found, dict(map(_named, records.split(',\n  "')))
        except (ValueError, RecursionError):
            pass
    found = read(path)
    return found, found.records


def key_of(record: Record | str) -> Record:
    """What a record says of its key; of its JSON as `write` lays it out nothing else is read."""
    begin = _KEY.match(record) if isinstance(record, str) else None
    if begin is not None:
        key: Record = _DECODER.raw_decode(begin.string, begin.end())[0]
    else:
        key = (json.loads(record) if isinstance(record, str) else record)["key"]
    return key


def _named(text: str) -> tuple[str, str]:
    """Name and record of one plan, from behind the name's first quote; no string has a line's end in it."""
    name, _, record = text.partition('": {\n')
    return json.loads(f'"{name}"') if "\\" in name else name, "{" + record


def _salvage(text: str) -> Any:
    """The document with the plans that stand before the damage; None without a whole head."""
    head = re.search(r'"plans":\s*\{', text)
    if head is None:
        return None
    try:
        document = json.loads(text[: head.end()] + "}}")
    except (ValueError, RecursionError):
        return None
    records: Records = {}
    decoder, at = json.JSONDecoder(), head.end()
    while isinstance(document, dict):
        try:
            name, at = decoder.raw_decode(text, _past(text, at, ","))
            record, at = decoder.raw_decode(text, _past(text, at, ":"))
        except (ValueError, RecursionError):
            return document | {"plans": records}
        records[str(name)] = record
    return None


def _past(text: str, at: int, sign: str) -> int:
    """Where what follows `sign` begins, with white space around it."""
    while at < len(text) and (text[at].isspace() or text[at] == sign):
        at += 1
    return at


def rewrite(
    path: Path, environment: Environment, change: Callable[[Records], None], timeout_s: float
) -> Records:
    """Under the file's lock read again, let `change` edit the records, and save; returns them.

    A damaged file is copied aside first. Raises OSError (Unusable and the lock's Timeout are
    such), and then the file is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    from filelock import FileLock  # 7 ms, which who measures nothing need not wait for

    with FileLock(f"{path}.lock", timeout=timeout_s):
        found = read_own(path, environment)
        if found.damage is not None:
            print_of = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
            shutil.copyfile(path, path.with_name(f"{path.name}.damaged-{print_of}"))
        change(found.records)
        atomic_file.sweep(path)
        write(path, header(environment), found.records)
    return found.records


def write(path: Path, environments: Records, records: Records, lock: bool = False) -> None:
    """Replace `path` in one step: readers see the old or the new. Lockfiles get a checksum."""
    document: Record = {"format": FORMAT, "schema": SCHEMA}
    if lock:
        document["checksum"] = checksum(environments, records)
    document |= {"environments": environments, "plans": records}
    atomic_file.replace(path, layout(document) + "\n")


def layout(value: Any, depth: int = 0) -> str:
    """JSON with a line for each field of a plan and each candidate, so that it diffs well."""
    pad = "\n" + " " * (depth + 1)
    close = "\n" + " " * depth
    if isinstance(value, dict) and value and depth < 3:
        items = [f"{json.dumps(name)}: {layout(item, depth + 1)}" for name, item in value.items()]
        return "{" + pad + f",{pad}".join(items) + close + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + pad + f",{pad}".join(json.dumps(item) for item in value) + close + "]"
    return json.dumps(value)


def checksum(environments: Records, records: Records) -> str:
    """Of the meaning, not the bytes: line ends and white space do not count."""
    return digest([environments, records])


def warn_once(path: Path, what: str, problem: object) -> None:
    """Warn once of each trouble with a file; never raise, whatever the warning filters say."""
    text = f"tensorlogic: plan file {path} {what}: {problem}"
    if (str(path), what) in _SAID:
        LOG.debug(text)
        return
    _SAID.add((str(path), what))
    try:
        warnings.warn(text, PlanStoreWarning, stacklevel=3)
    except PlanStoreWarning:
        LOG.warning(text)


@lru_cache
def shipped(folder: Path, environment: Environment) -> tuple[Unread, ...]:
    """The package's records for this device model, then those of each akin environment, this model's under another torch first."""
    own: dict[str, Record | str] = {}
    akin: list[tuple[bool, Unread]] = []
    for path in sorted(folder.glob("*.json")):
        try:
            if not _concerns(path, environment):
                continue
            found, records = skim(path)
            if found.damage is not None:
                warn_once(path, "was ignored", found.damage)
            elif environment.kind in found.environments:
                measured = Environment.from_json(found.environments[environment.kind])
                if environment.resembles(measured):
                    own.update(records)
                elif environment.akin(measured):
                    akin.append((measured.device != environment.device, records))
        except OSError as problem:
            warn_once(path, "was ignored", problem)
        except (TypeError, AttributeError, KeyError) as problem:
            said = f"its {environment.kind} environment is none: {problem!r}"
            warn_once(path, "was ignored", said)
    return own, *(records for _, records in sorted(akin, key=lambda one: one[0]))


def _concerns(path: Path, environment: Environment) -> bool:
    """False where a plan file's head, read without its plans, is all about other devices; what is wrong with it, reading all of it says."""
    with path.open("rb") as file:
        head = file.read(HEAD).decode("utf-8", errors="replace")
    begin = re.search(r'"environments"\s*:\s*', head)
    if begin is None:
        return True
    try:
        found, _ = json.JSONDecoder().raw_decode(head, begin.end())
        if isinstance(found, dict) and environment.kind not in found:
            return False
        measured = Environment.from_json(found[environment.kind])
        return environment.resembles(measured) or environment.akin(measured)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return True


def read_lockfile(path: Path) -> Contents:
    """The contents of a lockfile; ValueError when it is damaged or was edited by hand, Unusable when a newer version wrote it."""
    remedy = f"write it again with `tensorlogic plans export {path}`"
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"lockfile {path} {what}; {remedy}")
    try:
        found = read(path)
    except Unusable as problem:
        raise Unusable(
            f"lockfile {path} cannot be used: {problem}; upgrade tensorlogic, or {remedy}"
        ) from None
    if found.damage is None and found.checksum is None:
        found.damage = "it has no checksum: it is a plan store, not a lockfile"
    elif found.damage is None and found.checksum != checksum(found.environments, found.records):
        found.damage = "its checksum does not match: it was edited or merged by hand"
    if found.damage is not None:
        raise ValueError(f"lockfile {path} cannot be used: {found.damage}; {remedy}")
    return found
