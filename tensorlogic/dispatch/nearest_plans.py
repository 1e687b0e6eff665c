"""What plans of other keys lend one that nobody has measured: a candidate, and the closest of its own configurations."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from ..core.candidate import BIND_ERRORS, EAGER, Candidate, Config
from ..core.key import Key
from ..core.op import Op
from ..plans.plan import Plan
from ..plans.store import REACH

LOG = logging.getLogger("tensorlogic")
ASKED = 8  # plans at most
# halvings of what a plan counts for each doubling of distance
FADES = 4.0
DETOUR = 1.0  # doublings more where the kernel goes another way
MOST = 3.0  # times the best, beyond which longer times say no more
# of its time that a neighbour's tiles may lose for each doubling of sizes; others a fifth
SLACK = 0.1
ANOTHER_WAY = 16.0  # between configurations for each word that differs
DERIVED = {"PART"}  # numbers that follow from the others and the key
Pick = tuple[str, Config]
Lent = tuple[Pick, Pick, str]  # for eager and captured calls, and where from
# of candidates to list their configurations, in this process
failures = 0


@dataclass
class _Heard:
    """What the plans around say of one candidate."""

    plan: Plan  # the nearest, which lends its configuration
    config: Config
    apart: float = math.inf  # doublings to it
    counts: float = 0.0  # what each counts, together
    lost: float = 0.0  # log of its time over the best's, by what each counts

    def hear(self, plan: Plan, config: Config, apart: float, over_best: float) -> None:
        """One more plan, on whose key the candidate took `over_best` times the best one's time."""
        counts = 2.0 ** (-FADES * apart)
        self.counts += counts
        self.lost += counts * math.log(min(over_best, MOST))
        if apart < self.apart:
            self.plan, self.config, self.apart = plan, config, apart

    def expected(self, id: str) -> float:
        """Log of its time over the best's here; a configuration of other sizes may cost some of it."""
        tiles = any("BLOCK_M" in part for part in self.config.get("products", ()))
        slack = 0.0 if id == EAGER else SLACK if tiles else SLACK / 5
        return self.lost / self.counts + math.log1p(slack * self.apart)


def lent(op: Op, key: Key, near: Iterable[Plan], here: Mapping[str, str]) -> Lent | None:
    """What eager and captured calls of `key` take by the plans nearest to it, and where that is from: of their winners the one closest
    to the best of each plan, the nearer counting more. None without plans, and where those that PyTorch won are too far away for that
    to say anything.

    The nearest alone says little: PyTorch may have won it by the noise of a measurement, or a candidate that is a tenth slower
    everywhere else. Tiles of products are the choosiest: on an H200 those of 384 x 384 x 1536, a tenth faster than PyTorch's product
    there, take 1.5 times its time at 640 x 512 x 2048; behind an epilogue that PyTorch runs apart they win all the same. A library's
    algorithm is its own first guess at these sizes, whichever won at others.
    """
    own = op.normal(key)
    around = []
    for plan in islice(near, ASKED):
        theirs = op.normal(plan.key)
        if {plan.eager, plan.captured} != {EAGER} or own.distance(theirs) <= REACH:
            around.append((plan, own.search_distance(theirs)))
        if plan.key == key:  # measured elsewhere, which no other size's plan can better
            break
    if not around:
        return None
    eager, captured = _fastest(op, key, around, False), _fastest(op, key, around, True)
    lender = eager[1].plan
    if eager[0] == captured[0] == EAGER and own.distance(op.normal(lender.key)) > REACH:
        return None
    where = _elsewhere(lender, here) if lender.key == key else ""
    picks = _borrowed(op, key, *eager, here), _borrowed(op, key, *captured, here)
    return *picks, f"neighbour {lender.key.text}{where}"


def _fastest(
    op: Op, key: Key, around: Sequence[tuple[Plan, float]], captured: bool
) -> tuple[str, _Heard]:
    """Of the plans' winners the one expected to be the fastest, and what is said of it."""
    heard: dict[str, _Heard] = {}
    winners = {EAGER, *(plan.captured if captured else plan.eager for plan, _ in around)}
    sources = {id: op.candidates[id].source for id in winners}
    listed = cache(lambda id: _listed(op.candidates[id], key))
    for plan, apart in around:
        runs = plan.measured_us(captured, sources)
        least = min(us for us, _ in runs.values())
        for id, (us, config) in runs.items():
            words = {name: word for name, word in config.items() if isinstance(word, str)}
            alike = not words or any(words.items() <= c.items() for c in listed(id) or [config])
            said = heard.setdefault(id, _Heard(plan, config))
            said.hear(plan, config, apart + (0.0 if alike else DETOUR), us / least)
    best = min(heard, key=lambda id: (heard[id].expected(id), id))
    return best, heard[best]


def _borrowed(op: Op, key: Key, id: str, said: _Heard, here: Mapping[str, str]) -> Pick:
    """The candidate in that of its own configurations which is the closest to the lent one."""
    if id == EAGER:
        return id, {}
    there = op.normal(said.plan.key)
    same = op.normal(key).distance(there) == 0.0 and _alike(said.plan, here)
    return id, closest(op.candidates[id], key, said.config, same)


def _elsewhere(plan: Plan, here: Mapping[str, str]) -> str:
    """Where a plan of the very key was measured that is not this machine's."""
    version = plan.versions.get("torch", here["torch"])
    return " on a GPU of the same chip" if version == here["torch"] else f" under PyTorch {version}"


def _alike(plan: Plan, here: Mapping[str, str]) -> bool:
    """Whether the software beneath a plan is today's, whatever the driver: libraries number their algorithms as they like."""
    return {**plan.versions, "driver": ""} == {**here, "driver": ""}


def _listed(candidate: Candidate, key: Key) -> list[Config]:
    """The configurations that a candidate would try on a key; none where it lists none."""
    global failures
    try:
        return list(candidate.configs(key))
    except BIND_ERRORS as problem:
        LOG.debug("tensorlogic: %s lists nothing for %s: %s", candidate.id, key.text, problem)
        failures += 1
        return []


def closest(candidate: Candidate, key: Key, config: Config, same: bool = False) -> Config:
    """The key's own configuration closest to one measured on another key, else its best guess; `same`: sizes and versions are."""
    own = _listed(candidate, key)
    if not own or (same and dict(config) in [dict(c) for c in own]):
        return config
    nearest = min(own, key=lambda c: _apart(c, config) + _fuller(c, config))
    return nearest if _apart(nearest, config) < ANOTHER_WAY else own[0]


def _apart(config: Any, other: Any) -> float:
    """How far two configurations are apart: log2 of numbers, 1 for a switch or what one leaves out, ANOTHER_WAY for words."""
    if isinstance(config, dict) and isinstance(other, dict):
        # a rank is an order of the key's own, whose first is its best guess wherever another key's is
        names = {*config, *other} - DERIVED
        known = [(config.get(n), 0 if n == "rank" else other.get(n)) for n in names]
        return sum(_apart(a, b) for a, b in known)
    if isinstance(config, (list, tuple)) and isinstance(other, (list, tuple)):
        rest = abs(len(config) - len(other)) * ANOTHER_WAY
        return rest + sum(_apart(a, b) for a, b in zip(config, other, strict=False))
    if config == other:
        return 0.0
    kinds = {type(config), type(other)}
    if not kinds <= {int, float, bool, type(None)}:
        return ANOTHER_WAY
    if bool in kinds or type(None) in kinds or min(config, other) < 0:
        return 1.0
    return abs(math.log2((config + 1) / (other + 1)))


def _fuller(config: Any, other: Any) -> float:
    """How far apart what the tiles of two configurations hold is, in log2 of elements: where sizes cut one side, another makes up for it."""
    if isinstance(config, (list, tuple)) and isinstance(other, (list, tuple)):
        return sum(_fuller(a, b) for a, b in zip(config, other, strict=False))
    if not (isinstance(config, dict) and isinstance(other, dict)):
        return 0.0
    within = sum(_fuller(config[n], other[n]) for n in config.keys() & other.keys())
    mine, theirs = _held(config), _held(other)
    return within + abs(mine - theirs)


def _held(config: Config) -> float:
    """Elements of a configuration's tile, in log2."""
    blocks = [n for name, n in config.items() if name.startswith("BLOCK") and isinstance(n, int)]
    return sum(math.log2(max(n, 1)) for n in blocks)
