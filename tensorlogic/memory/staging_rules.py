"""How transfers are cut into chunks and shared by threads: timed once a machine, on transfers of its own, and noted beside its plans."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .. import stores
from ..notes import Notes

LOG = logging.getLogger("tensorlogic")
MIB = 1 << 20
BETWEEN = (
    32 * MIB
)  # transfers up to so many bytes go by the first rule of a direction, larger ones by the second
TIMED = (16 * MIB, 64 * MIB)  # bytes that stand for either
WORKERS = (5, 7, 10, 13)
CHUNKS = ((MIB // 2, 4 * MIB), (MIB, 4 * MIB), (MIB // 2, 2 * MIB))
ROUNDS = 5
BETTER = 0.97  # of the usual rule's time, which another must stay below, so that choices repeat
LIMIT_S = 0.1  # for one direction

_NOTES = Notes(".transfers")
stores.ON_FORGET.append(_NOTES.forget)


@dataclass(frozen=True)
class Rule:
    """Threads that copy, the caller among them, which only calls CUDA; bytes of the chunk that is waited for, from which the others double
    to the largest."""

    workers: int
    least: int
    most: int


Rules = tuple[Rule, Rule]
Timer = Callable[[Rule, int], float]  # seconds of one transfer of so many bytes by a rule


@lru_cache
def processors() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usual() -> Rules:
    """What an H200's host with 16 processors is served best by; threads: not all that there are, for others have work, too."""
    most = max(1, processors() - 1)
    return Rule(min(7, most), MIB // 2, 4 * MIB), Rule(min(10, most), MIB // 2, 4 * MIB)


def known(device: torch.device, up: bool) -> Rules | None:
    """What was found on this machine for a direction; None until `settle`."""
    _NOTES.look(device)
    name = _name(device, up)
    line = next((n for n in _NOTES.known if n.startswith(f"{name} = ")), None)
    return None if line is None else _parsed(line.rpartition(" = ")[2])


def settle(device: torch.device, up: bool, timer: Timer) -> Rules:
    """Time the rules that there are, and note the best."""
    begin = time.perf_counter()
    found = chosen(timer, begin + LIMIT_S)
    path = _NOTES.look(device)
    line = f"{_name(device, up)} = " + " ".join(f"{r.workers} {r.least} {r.most}" for r in found)
    _NOTES.known[line] = None
    _NOTES.append(path, line)
    LOG.info("tensorlogic: transfers: %s, timed in %.3f s", line, time.perf_counter() - begin)
    return found


def chosen(timer: Timer, end: float) -> Rules:
    """The best rule for either size: first the number of threads, then the chunks; the usual one where none is clearly better."""
    found = []
    for rule, nbytes in zip(usual(), TIMED, strict=True):
        counts = {min(count, max(1, processors() - 1)) for count in WORKERS} - {rule.workers}
        rule = _best(
            [rule, *(replace(rule, workers=n) for n in sorted(counts))], nbytes, timer, end
        )
        chunks = [replace(rule, least=least, most=most) for least, most in CHUNKS]
        rule = _best([rule, *(r for r in chunks if r != rule)], nbytes, timer, end)
        found.append(rule)
    return found[0], found[1]


def _best(rules: Sequence[Rule], nbytes: int, timer: Timer, end: float) -> Rule:
    """All in turns, so that what slows the machine down for a while slows all of them."""
    taken: dict[Rule, list[float]] = {rule: [] for rule in rules}
    for _ in range(ROUNDS):
        if time.perf_counter() > end:
            break
        for rule, seconds in taken.items():
            seconds.append(timer(rule, nbytes))
    if len(taken[rules[0]]) < 3:
        return rules[0]
    import statistics  # 2 ms, which no other part of the package's import needs

    middle = {rule: statistics.median(seconds) for rule, seconds in taken.items()}
    best = min(rules, key=middle.__getitem__)
    return best if middle[best] < BETTER * middle[rules[0]] else rules[0]


def _name(device: torch.device, up: bool) -> str:
    there = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{'to' if up else 'from'} {there}, {processors()} processors"


def _parsed(text: str) -> Rules | None:
    """What a line says, unless somebody edited it."""
    try:
        numbers = [int(part) for part in text.split()]
    except ValueError:
        return None
    if len(numbers) != 6:
        return None
    rules = Rule(*numbers[:3]), Rule(*numbers[3:])
    good = all(0 < r.workers <= processors() and 0 < r.least <= r.most <= 4 * MIB for r in rules)
    return rules if good else None
