"""Measuring a key into the plan store of its device, in one process or agreed by several ranks."""

from __future__ import annotations

import torch

from ..core import policy
from ..core.key import Key
from ..core.op import Op
from ..measure.isolation import preserved
from ..plans import open_stores
from ..plans.environment import environment
from ..plans.plan import Plan
from .tuner import PROMPT_S, KeyTuner


def complete(op: Op, plan: Plan | None, key: Key) -> bool:
    """True when the plan's evidence covers every candidate that could serve the key, with today's sources, undisturbed and whole."""
    if plan is None or plan.disturbed or plan.incomplete:
        return False
    known = {(e.candidate, e.source) for e in plan.evidence}
    return all((c.id, c.source) in known for c in op.known if c.unfit(key) is None)


def neighbour(op: Op, key: Key, device: torch.device) -> Plan | None:
    """The closest plan by candidates that are here: what won there is likely to win, and compiled first."""
    store = open_stores.current(device)
    return store.nearest(key, op.candidates.__contains__, normal=op.normal)


def measured(
    op: Op, key: Key, device: torch.device, budget_s: float = 0.3, prompt_s: float = PROMPT_S
) -> Plan | None:
    """The plan of this key, measured now unless the store's is complete; `prompt_s`: for how long kernels are waited for."""
    store = open_stores.current(device)
    plan = store.get(key)
    if complete(op, plan, key):
        return plan
    near, here = neighbour(op, key, device), environment(device)
    study = KeyTuner(op, key, device, here, plan, budget_s, prompt_s=prompt_s, near=near)
    with preserved(device, op):
        fresh = study.run()
    if fresh is not None:
        store.put(fresh)
        policy.forget_entries()
    return fresh


def agreed(op: Op, key: Key, device: torch.device, prompt_s: float = PROMPT_S) -> Plan | None:
    """The plan that rank 0 measures, in every rank; all ranks must call this for the same keys in the same order."""
    first = torch.distributed.get_rank() == 0
    mine = measured(op, key, device, prompt_s=prompt_s) if first else None
    box = [mine.to_json() if mine is not None else None]
    torch.distributed.broadcast_object_list(box, src=0)
    if box[0] is None:
        return None
    plan = Plan.from_json(box[0])
    open_stores.current(device).put(plan)
    policy.forget_entries()
    return plan
