"""Which kernels deciding about a model's regions will need: known once they are keyed, and begun by workers meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...autotune import measure_key
from ...core import policy
from ...core.candidate import BIND_ERRORS, EAGER, Candidate
from ...core.key import Key
from ...core.op import Op
from ...dispatch import selector as dispatch_selector
from ...plans import open_stores


def jobs(op: Op, key: Key, device: torch.device) -> list[Any]:
    """Compile jobs of what the op's plan serves this key by."""
    chosen = dispatch_selector.decide(op, key, device, policy.current())
    found: dict[Any, None] = {}
    for id, config in (chosen.eager, chosen.captured):
        try:
            found |= dict.fromkeys(op.candidates[id].jobs(key, config, device))
        except BIND_ERRORS:  # it will fail by name where it is bound
            continue
    return list(found)


def rivals(op: Op, key: Key, device: torch.device) -> Iterator[tuple[Candidate, list[Any]]]:
    """Candidates worth a trial on a key whose plan does not tell of all, each with the jobs of its best guess."""
    if measure_key.complete(op, open_stores.current(device).get(key), key):
        return
    for candidate in op.known:
        if not candidate.trusted or candidate.id == EAGER or candidate.unfit(key) is not None:
            continue
        try:
            configs = candidate.configs(key)
            own = [list(candidate.jobs(key, config, device)) for config in configs[:1]]
        except BIND_ERRORS:  # as above
            continue
        yield from ((candidate, each) for each in own)
