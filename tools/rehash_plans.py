"""Keep shipped plans valid when code moves: `python tools/rehash_plans.py BEFORE [--rename NAMES.json] [--drop OP:ID ...]`.

BEFORE is a checkout of the commit whose code the plans are valid for, where code means the same as in this one. Evidence with the hash
that a candidate has there gets the one that it has here; all other evidence keeps its hash. NAMES.json is {op: {old id: new id}}.
A dropped candidate's evidence is removed, and where it had won, winners are chosen again by what else was measured.
The table of former hashes, by which users' plans are read, follows; `--legacy-table` writes it anew from BEFORE.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tensorlogic.autotune.ranking import Contender, pick  # noqa: E402
from tensorlogic.core.candidate import EAGER  # noqa: E402
from tensorlogic.core.op import OPS, Op  # noqa: E402
from tensorlogic.dispatch import candidate_loading  # noqa: E402
from tensorlogic.plans import file_format  # noqa: E402
from tensorlogic.plans.legacy_hashes import DIGITS, Place, Table, group, renamed  # noqa: E402
from tensorlogic.plans.plan import Evidence, Plan  # noqa: E402

DEVICES = ("cuda", "cpu", "mps")
# Where ops and the loading of their candidates lie inside the package: now, and before files moved.
PLACES = (("core", "dispatch.candidate_loading"), ("op", "registry"))
ASK = """
import importlib, json, sys
places, devices = json.loads(sys.argv[1])
for core, loading in places:
    try:
        ops = importlib.import_module("tensorlogic." + core).OPS
        ready = importlib.import_module("tensorlogic." + loading).ready
        break
    except ModuleNotFoundError as problem:
        if not (problem.name or "").startswith("tensorlogic."):
            raise
for device in devices:
    ready(device)
found = {}
for name, op in ops.items():
    for label, one in ((name, op), (name + " precise", getattr(op, "precise", None))):
        if one is not None:
            found[label] = {id: c.source for id, c in one.candidates.items()}
print(json.dumps(found))
"""
VERDICT = re.compile(r"[\d.]+ times the chosen one|chosen")  # in the reason of what was in the end

Record = dict[str, Any]
Hashes = dict[str, dict[str, str]]  # of each op, and of "OP precise", by candidate
Names = Mapping[str, Mapping[str, str]]  # new ids by op and old id


def hashes(tree: Path) -> Hashes:
    """What a checkout's candidates hash to, found in a process of its own."""
    if not (tree / "tensorlogic" / "__init__.py").is_file():
        raise FileNotFoundError(f"{tree} holds no package tensorlogic")
    with tempfile.TemporaryDirectory() as cache:
        variables = os.environ | {
            "PYTHONPATH": str(tree.resolve()),
            "PYTHONSAFEPATH": "1",
            "TENSORLOGIC_CACHE_DIR": cache,
            "TENSORLOGIC_ENABLE": "0",
        }
        command = [sys.executable, "-c", ASK, json.dumps([PLACES, DEVICES])]
        told = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    found: Hashes = json.loads(told.stdout.splitlines()[-1])
    return found


def names_of(label: str, names: Names) -> dict[str, str]:
    """New ids of an op's candidates; its precise twin's are renamed with it."""
    return {**names.get(label.removesuffix(" precise"), {}), **names.get(label, {})}


def moved(
    places: Iterable[Place],
    before: Mapping[str, str],
    after: Mapping[str, str],
    names: Mapping[str, str],
) -> dict[Place, Place]:
    """What each id and hash is called now: every old id has its new name, a hash follows where it is that of BEFORE."""
    found = {}
    for id, source in places:
        new = names.get(id, id)
        same = new in after and before.get(id) == source
        found[id, source] = new, after[new] if same else source
    return found


def rehashed(record: Record, before: Hashes, after: Hashes, names: Names) -> Record:
    """A plan's record by the ids and hashes of this tree; ValueError where two of its candidates would have one id."""
    label = group(record["key"])
    entries = (*record["evidence"], *record.get("accuracy", ()))
    places = [(e["candidate"], e["source"]) for e in entries]
    own = names_of(label, names)
    found = renamed(record, moved(places, before.get(label, {}), after.get(label, {}), own))
    most = Counter(e["candidate"] for e in found["evidence"]).most_common(1)
    if most and most[0][1] > 1:
        raise ValueError(f"{label}: more than one candidate of a plan would be {most[0][0]}")
    return dict(found)


def op_of(label: str) -> Op:
    """The op whose candidates are called so in the table: itself, or its precise twin."""
    op = OPS[label.removesuffix(" precise")]
    if op.name == label:
        return op
    assert op.precise is not None
    return op.precise


def without(record: Record, gone: set[str], op: Op) -> Record:
    """The record without these candidates; where one of them had won, by the tuner's rule the best of what is left."""
    plan = Plan.from_json(record)
    left = [e for e in plan.evidence if e.candidate not in gone]
    if len(left) == len(plan.evidence):
        return record
    plan = replace(plan, evidence=left)
    if plan.eager in gone:
        us = {e.candidate: plan.waited_us(e) for e in left if e.status == "measured"}
        best = chosen(plan, us, op)
        plan = replace(plan, eager=best.candidate, eager_config=best.config)
        plan.evidence = [judged(e, us, plan.eager) for e in left]
    if plan.captured in gone:
        us = {e.candidate: e.device_us for e in left if e.status == "measured"}
        best = chosen(plan, us, op)
        plan = replace(plan, captured=best.candidate, captured_config=best.config)
    return plan.to_json()


def chosen(plan: Plan, us: Mapping[str, float], op: Op) -> Evidence:
    """The evidence of the candidate that wins with these times, among those that are as they were measured."""
    rest = {
        e.candidate: e for e in plan.evidence if e.candidate in us.keys() & op.candidates.keys()
    }
    valid = {id: e for id, e in rest.items() if op.candidates[id].source == e.source}
    rest = valid if EAGER in valid else rest
    final = [
        Contender(candidate, rest[id].config, lambda *_: None, rest[id].error, us[id])
        for id, candidate in op.candidates.items()
        if id in rest
    ]
    best = pick(final, {id: us[id] for id in rest}, plan.key, plan.key.device)
    return rest[best.candidate.id]


def judged(e: Evidence, us: Mapping[str, float], best: str) -> Evidence:
    """The evidence with the verdict beside another winner, where it had one."""
    if e.candidate == best:
        verdict = "chosen"
    elif e.status == "measured":
        verdict = f"{us[e.candidate] / us[best]:.2f} times the chosen one"
    else:
        return e
    if not VERDICT.search(e.reason):  # it was out of the running, and is no more
        return replace(e, reason=verdict) if e.candidate == best else e
    return replace(e, reason=VERDICT.sub(verdict, e.reason, count=1))


def table_of(before: Hashes, after: Hashes, names: Names) -> Table:
    """The table of former hashes of all candidates that are still there; ValueError where BEFORE hashes as this tree does."""
    if any(len(source) != DIGITS for own in before.values() for source in own.values()):
        raise ValueError("--legacy-table: the code before has no former hashes")
    table: Table = {}
    for label, own in before.items():
        new, now = names_of(label, names), after.get(label, {})
        table[label] = {
            id: (source, new.get(id, id), now[new.get(id, id)])
            for id, source in own.items()
            if new.get(id, id) in now
        }
    return table


def followed(
    table: Table, before: Hashes, after: Hashes, names: Names, gone: Mapping[str, set[str]]
) -> Table:
    """The table by the ids and hashes of this tree, as `rehashed` does it for plans."""
    found: Table = {}
    for label, rows in table.items():
        places = moved(
            [(id, source) for _, id, source in rows.values()],
            before.get(label, {}),
            after.get(label, {}),
            names_of(label, names),
        )
        found[label] = {
            former: (old, *places[id, source])
            for former, (old, id, source) in rows.items()
            if id not in gone.get(label, ())
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the shipped plans and the table of former hashes; say what has changed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("--after", type=Path, default=ROOT, help="this checkout unless given")
    parser.add_argument("--rename", type=Path, help="JSON: {op: {old id: new id}}")
    parser.add_argument("--drop", nargs="*", default=[], metavar="OP:ID")
    parser.add_argument("--legacy-table", action="store_true")
    given = parser.parse_args(argv)
    names: Names = json.loads(given.rename.read_text()) if given.rename else {}
    gone: dict[str, set[str]] = {}
    for pair in given.drop:
        label, _, id = pair.partition(":")
        gone.setdefault(label, set()).add(id)
    before, after = hashes(given.before), hashes(given.after)
    package = given.after / "tensorlogic"
    if gone:
        for device in DEVICES:
            candidate_loading.ready(device)
    for path in sorted(package.rglob("shipped/*.json")):
        print(f"{path.name}: {rewrite(path, before, after, names, gone)}")
    paths = sorted(package.rglob("legacy_hashes.json"))
    table = followed(read_table(paths), before, after, names, gone)
    if given.legacy_table:
        table = table_of(before, after, names)
    if table:
        path = paths[0] if paths else next(package.rglob("legacy_hashes.py")).with_suffix(".json")
        path.write_text(file_format.layout(table) + "\n")
        print(f"{path.name}: {sum(map(len, table.values()))} candidates")
    for label, own in before.items():
        new, now = names_of(label, names), after.get(label, {})
        for id in sorted(own.keys() - gone.get(label, set())):
            if new.get(id, id) not in now:
                print(f"{label}: {id} is gone; --drop {label}:{id} takes it out of the plans")
            elif now[new.get(id, id)] != own[id]:
                print(f"{label}: {id} has another hash")
    return 0


def read_table(paths: Sequence[Path]) -> Table:
    """What the file holds; nothing where there is none yet."""
    return json.loads(paths[0].read_text()) if paths else {}


def rewrite(
    path: Path, before: Hashes, after: Hashes, names: Names, gone: Mapping[str, set[str]]
) -> str:
    """Rewrite one file of plans; what has changed in it, in words."""
    found = file_format.read(path)
    if found.damage is not None:
        raise ValueError(f"{path}: {found.damage}")
    records, changes = {}, Counter[str]()
    for text, old in found.records.items():
        record = rehashed(old, before, after, names)
        label = group(record["key"])
        if gone.get(label):
            record = without(record, gone[label], op_of(label))
        changes["changed"] += record != old
        changes["with another winner"] += any(
            record[name] != names_of(label, names).get(old[name], old[name])
            for name in ("eager", "captured")
        )
        known = after.get(label, {})
        changes["valid"] += Plan.from_json(record).valid(known)
        records[text] = record
    file_format.write(path, found.environments, records, lock=found.checksum is not None)
    return f"{len(records)} plans, " + ", ".join(f"{n} {what}" for what, n in changes.items())


if __name__ == "__main__":
    sys.exit(main())
