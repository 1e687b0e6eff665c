"""What candidates and their hashes are called now, for plans that were measured while they had other ids or hashes of whole texts.

The table is written by `tools/rehash_plans.py`: op, then former id, to former hash, id of today and hash of the same code today.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("legacy_hashes.json")
DIGITS = 12  # of a hash of whole texts; `source_hash.DIGITS` are more

Record = Mapping[str, Any]
Place = tuple[str, str]  # a candidate's id and the hash of its source
Table = dict[str, dict[str, tuple[str, str, str]]]


def updated(record: Record) -> Record:
    """A plan's record by today's ids and hashes, as far as what was measured is in the table; nothing else is changed."""
    if all(len(e["source"]) != DIGITS for e in _entries(record)):
        return record
    known = _table().get(group(record["key"]), {})
    return renamed(record, {(id, old): (new, now) for id, (old, new, now) in known.items()})


def renamed(record: Record, moved: Mapping[Place, Place]) -> Record:
    """The record with other ids and hashes of evidence and errors, and of winners and of what configurations name by the evidence."""
    places = [_place(e) for e in record["evidence"]]
    ids = {place[0]: moved[place][0] for place in places if place in moved}

    def entry(e: Record) -> dict[str, Any]:
        candidate, source = moved.get(_place(e), _place(e))
        config = {"config": _replaced(e["config"], ids)} if "config" in e else {}
        return {**e, "candidate": candidate, **config, "source": source}

    found = dict(record)
    for name in ("eager", "eager_config", "captured", "captured_config"):
        found[name] = _replaced(record[name], ids)
    for name in ("evidence", "accuracy"):
        if name in record:
            found[name] = [entry(e) for e in record[name]]
    return found


def group(key: Record) -> str:
    """Under which name a key's candidates stand in the table: under a precision policy an op has others."""
    return key["op"] if key["precision"] == "default" else f"{key['op']} precise"


@lru_cache
def _table() -> Table:
    """Read when a record asks for it that was written before; whoever has no such file has no such records."""
    try:
        found: Table = json.loads(PATH.read_text())
    except FileNotFoundError:
        return {}
    return found


def _entries(record: Record) -> Iterable[Record]:
    return (*record["evidence"], *record.get("accuracy", ()))


def _place(e: Record) -> Place:
    return e["candidate"], e["source"]


def _replaced(value: Any, ids: Mapping[str, str]) -> Any:
    """A value of a record with other ids in place of these, however deep they stand."""
    if isinstance(value, str):
        return ids.get(value, value)
    if isinstance(value, dict):
        return {name: _replaced(inner, ids) for name, inner in value.items()}
    return [_replaced(inner, ids) for inner in value] if isinstance(value, list) else value
