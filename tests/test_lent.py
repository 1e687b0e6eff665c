"""What plans of other sizes lend: where their kernels go another way at these, a plan not much farther comes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tensorlogic import attention_scores, policies, registry, selector
from tensorlogic.op import EAGER, OPS
from tensorlogic.plans import Evidence, Key, Plan

pytestmark = pytest.mark.skipif(registry.triton_missing() is not None, reason="needs Triton")
HELD = {"strategy": "held", "BLOCK_M": 16, "BLOCK_N": 256, "num_warps": 4, "num_stages": 1}
REGISTERS = {"strategy": "registers", "BLOCK_R": 1, "BLOCK_C": 1024, "num_warps": 4}


def scores(rows: int, columns: int, depth: int = 64) -> Key:
    """The key of masked scores on a GPU."""
    seen: list[Any] = []
    policy = policies.current()
    q, k, mask = torch.ones(1, 4, rows, depth).half(), torch.ones(1, 4, columns, depth).half(), torch.ones(columns).bool()  # fmt: skip
    with policies.use(
        replace(policy, tune="off", force=EAGER, observer=lambda *s: seen.append(s), entries={})
    ):
        attention_scores(q, k, 0.125, mask=mask)
    return replace(next(key for _, key, *_ in seen), device="cuda")


def measured(key: Key, id: str, config: dict[str, Any]) -> Plan:
    """A plan by which `id` takes half of eager's time."""
    times = {EAGER: 20.0, id: 10.0}
    evidence = [Evidence(n, {}, "measured", us, us, 0.0, 1.0, "", "") for n, us in times.items()]
    return Plan(key, id, config, id, config, evidence)


def lent(key: Key, *plans: Plan) -> tuple[str, dict[str, Any]]:
    registry.ready("cuda", OPS["attention_scores"])
    found = selector._lent(OPS["attention_scores"], key, plans, {"torch": "2", "driver": ""})
    assert found is not None
    assert found.eager == found.captured
    return found.captured[0], dict(found.captured[1])


def test_a_plan_whose_kernel_goes_its_way_comes_before_a_nearer_one_whose_does_not() -> None:
    """Rows of 200 stay in registers, rows of 1,536 do not: 103 us instead of 9, where PyTorch takes 34 (H100)."""
    key = scores(80, 1536)
    near, other = scores(200, 200), scores(600, 600)
    held, registers = measured(near, "triton.scores", HELD), measured(other, "triton.after_product", REGISTERS)  # fmt: skip
    assert key.distance(near) < key.distance(other) + selector.NOT_MUCH
    id, config = lent(key, held, registers)
    assert (id, config["strategy"]) == ("triton.after_product", "registers")
    assert lent(key, registers, held)[0] == "triton.after_product"


@pytest.mark.parametrize(
    "other",
    [
        measured(scores(30000, 30000), "triton.after_product", REGISTERS),
        measured(scores(600, 600, 63), "triton.after_product", REGISTERS),
        measured(scores(80, 1000), EAGER, {}),
    ],
    ids=["much farther", "uneven", "PyTorch won"],
)
def test_else_the_nearest_lends_its_candidate(other: Plan) -> None:
    id, config = lent(scores(80, 1536), measured(scores(200, 200), "triton.scores", HELD), other)
    assert (id, config["strategy"]) == ("triton.scores", "sweeps")


def test_a_kernel_that_goes_its_way_needs_no_other_plan() -> None:
    other = measured(scores(80, 220), "triton.after_product", REGISTERS)
    id, config = lent(scores(80, 200), measured(scores(200, 200), "triton.scores", HELD), other)
    assert (id, config["strategy"]) == ("triton.scores", "held")
