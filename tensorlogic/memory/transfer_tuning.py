"""How transfers are shared by threads and stored: timed once a machine, on transfers of its own, and noted beside its plans."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..plans import open_stores
from ..plans.machine_notes import Notes
from ..system import settings

LOG = logging.getLogger("tensorlogic")
MIB = 1 << 20
BETWEEN = (32 * MIB, 96 * MIB)  # most bytes for the first rule and the second
TIMED = (16 * MIB, 64 * MIB, 128 * MIB)  # bytes that stand for either, and for what is larger
WALKED = 192 * MIB  # bytes that timed transfers walk through: no cache has them
ROUNDS = 7  # at most
BETTER = 0.95  # of the usual rule's time, below which another must stay
LIMIT_S = 0.155  # for the direction with more rules

_NOTES = Notes(".transfers")
open_stores.ON_FORGET.append(_NOTES.forget)


class Stores(enum.IntEnum):
    """How copies are stored: an engine reads slowest what lies in the caches of single processors, and everything more slowly while
    threads store past the caches faster than it reads. BOTH: past the caches and given up to the shared one, in turns."""

    USUAL, PAST_CACHES, GIVEN_UP, BOTH = range(4)


@dataclass(frozen=True)
class Rule:
    """Threads that copy, the caller among them, which only calls CUDA, and how they store."""

    workers: int
    stores: Stores


Rules = tuple[Rule, Rule, Rule]
Timer = Callable[[Rule, int], float]  # seconds of one transfer of so many bytes by a rule


@lru_cache
def processors() -> int:
    """Those that this process may use."""
    return settings.usable_cores()


def size_class(nbytes: int) -> int:
    """Which of the rules a transfer goes by."""
    return (nbytes > BETWEEN[0]) + (nbytes > BETWEEN[1])


def usual(up: bool) -> Rules:
    """What an H200's host with 16 processors is served well by."""
    return (_rule(15, Stores.GIVEN_UP) if up else _rule(14, Stores.PAST_CACHES),) * 3


def others(up: bool) -> list[Rule]:
    """What may be better on another host."""
    found = [_rule(workers, Stores.PAST_CACHES) for workers in (7, 10)]
    if up:
        found += [_rule(14, Stores.PAST_CACHES), _rule(10, Stores.USUAL), _rule(15, Stores.BOTH)]
    return found


def _rule(workers: int, how: Stores) -> Rule:
    return Rule(max(1, min(workers, processors() - 1)), how)


def known(device: torch.device, up: bool) -> Rules | None:
    """What was found on this machine for a direction; None until `settle`."""
    _NOTES.look(device)
    begin = f"{_name(device, up)} = "
    lines = [_parsed(n.removeprefix(begin)) for n in _NOTES.known if n.startswith(begin)]
    return next((rules for rules in reversed(lines) if rules is not None), None)


def settle(device: torch.device, up: bool, timer: Timer, begin: float) -> Rules:
    """Time the rules that there are, and note the best; `begin`: when preparing for it began."""
    found = chosen(up, timer, begin + LIMIT_S)
    path = _NOTES.look(device)
    line = f"{_name(device, up)} = " + " ".join(f"{r.workers} {r.stores:d}" for r in found)
    _NOTES.known[line] = None
    _NOTES.append(path, line)
    LOG.info("tensorlogic: transfers: %s, timed in %.3f s", line, time.perf_counter() - begin)
    return found


def chosen(up: bool, timer: Timer, end: float) -> Rules:
    """The best rule for every size: the usual one where none is clearly better."""
    begin, found = time.perf_counter(), []
    for share, rule, nbytes in zip((0.15, 0.5, 1.0), usual(up), TIMED, strict=True):
        rest = [r for r in dict.fromkeys(others(up)) if r != rule]
        found.append(_best(rule, rest, nbytes, timer, begin + share * (end - begin)))
    return found[0], found[1], found[2]


def _best(rule: Rule, rest: Sequence[Rule], nbytes: int, timer: Timer, end: float) -> Rule:
    """All in turns, and each beside the usual rule's transfer of the same round, for what slows the machine down for a while slows all."""
    ratios: dict[Rule, list[float]] = {other: [] for other in rest}
    timer(rule, nbytes)
    for turn in range(ROUNDS):
        if not rest or time.perf_counter() > end:
            break
        # whoever comes first has no advantage by it
        order = [*rest[turn % len(rest) :], *rest[: turn % len(rest)]]
        taken = timer(rule, nbytes)
        for other in order:
            ratios[other].append(timer(other, nbytes) / max(taken, 1e-9))
    import statistics  # 2 ms, which no other part of the package's import needs

    middle = {other: statistics.median(r) for other, r in ratios.items() if len(r) >= 3}
    best = min(middle, key=middle.__getitem__, default=rule)
    return best if middle.get(best, 1.0) < BETTER else rule


def _name(device: torch.device, up: bool) -> str:
    there = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{'to' if up else 'from'} {there}, {processors()} processors"


def _parsed(text: str) -> Rules | None:
    """What a line says, unless somebody edited it or another version wrote it."""
    try:
        numbers = [int(part) for part in text.split()]
        if len(numbers) != 6:
            return None
        first, second, third = (Rule(numbers[i], Stores(numbers[i + 1])) for i in (0, 2, 4))
    except ValueError:
        return None
    rules = first, second, third
    return rules if all(0 < r.workers <= processors() for r in rules) else None
