"""The configurations of a key's candidates in the order in which their kernels come out of the compilers."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.candidate import BIND_ERRORS, EAGER, Candidate, Config
from ..core.key import Key
from ..core.op import Op
from ..plans.plan import Plan
from ..system import compile_pool

LOG = logging.getLogger("tensorlogic")
LOOK_S = 0.05  # between two looks at the time


@dataclass(frozen=True)
class PendingConfig:
    """A candidate with one of its configurations, and what has to be compiled for it."""

    candidate: Candidate
    config: Config
    jobs: tuple[Any, ...]
    rank: int  # 0: its best guess


def listed(candidate: Candidate, key: Key, device: torch.device) -> list[PendingConfig]:
    """The candidate's configurations, best guess first. Raises whatever listing them does."""
    found = [
        PendingConfig(candidate, config, tuple(candidate.jobs(key, config, device)), rank)
        for rank, config in enumerate(candidate.configs(key))
    ]
    hash(tuple(turn.jobs for turn in found))  # what cannot be told apart or sent to a worker fails
    return found


def likely(lists: Sequence[Sequence[PendingConfig]], near: Plan) -> list[list[PendingConfig]]:
    """The same with what won a key nearby before all best guesses; of a winner without that configuration here, its own first one."""
    winners = {(near.eager, _text(near.eager_config)), (near.captured, _text(near.captured_config))}

    def ranked(own: Sequence[PendingConfig]) -> list[PendingConfig]:
        won = [(turn.candidate.id, _text(turn.config)) in winners for turn in own]
        if not any(won) and own[0].candidate.id in (near.eager, near.captured):
            won[0] = True
        pairs = zip(own, won, strict=True)
        return sorted((replace(t, rank=-1) if w else t for t, w in pairs), key=lambda t: t.rank)

    found = [ranked(own) for own in lists]
    return sorted(found, key=lambda own: own[0].rank)


def _text(config: Config) -> str:
    return json.dumps(config, sort_keys=True, default=str)


def jobs(lists: Sequence[Sequence[PendingConfig]]) -> list[Any]:
    """What has to be compiled: every candidate's best guess before any second one."""
    ranks = itertools.zip_longest(*lists)
    return [job for rank in ranks for turn in rank if turn is not None for job in turn.jobs]


def kernels(op: Op, key: Key, device: torch.device, near: Plan | None = None) -> list[Any]:
    """Compile jobs of every candidate that may serve the key, for workers to begin with before its turn comes; what won `near` first."""
    lists: list[list[PendingConfig]] = []
    for candidate in op.known:
        if candidate.id == EAGER or candidate.unfit(key) is not None:
            continue
        try:
            lists.append(listed(candidate, key, device))
        except BIND_ERRORS as problem:  # the study refuses it by name
            LOG.debug("tensorlogic: %s lists no kernels: %s", candidate.id, problem)
    lists = [own for own in lists if own]
    return jobs(lists if near is None else likely(lists, near))


def as_compiled(late: list[PendingConfig], until: float) -> Iterator[PendingConfig]:
    """What was not compiled, as it comes, best guesses first, taken out of `late`; when the time (`time.perf_counter`) is up, the rest stays there.

    The caller compiles while workers start or have enough to do, but begins nothing in the second half of its time.
    """
    begin = time.perf_counter()
    late.sort(key=lambda turn: turn.rank)
    while late and (now := time.perf_counter()) < until:
        turn = next((t for t in late if compile_pool.there(t.jobs)), None)
        if turn is None and (now - begin < until - now or not compile_pool.elsewhere()):
            turn = next((t for t in late if not compile_pool.begun(t.jobs)), None)
        if turn is None:
            compile_pool.wait([job for t in late for job in t.jobs], min(until - now, LOOK_S))
            continue
        late.remove(turn)
        yield turn
