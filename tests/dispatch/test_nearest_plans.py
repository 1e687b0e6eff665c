"""What plans of other sizes lend: of their winners the one that was closest to the best of each, the nearer counting more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tensorlogic import attention_scores
from tensorlogic.core import policy as core_policy
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading, nearest_plans
from tensorlogic.plans.plan import Evidence, Plan
from tensorlogic.system import hardware

pytestmark = pytest.mark.skipif(hardware.triton_missing() is not None, reason="needs Triton")
SCORES = OPS["attention_scores"]
HELD = {"strategy": "held", "BLOCK_M": 16, "BLOCK_N": 256, "num_warps": 4, "num_stages": 1}
SWEEPS = {"strategy": "sweeps", "BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
REGISTERS = {"strategy": "registers", "BLOCK_R": 1, "BLOCK_C": 1024, "num_warps": 4}


def scores(rows: int, columns: int, depth: int = 64) -> Key:
    """The key of masked scores on a GPU."""
    seen: list[Any] = []
    policy = core_policy.current()
    q, k, mask = torch.ones(1, 4, rows, depth).half(), torch.ones(1, 4, columns, depth).half(), torch.ones(columns).bool()  # fmt: skip
    with core_policy.use(
        replace(policy, tune="off", force=EAGER, observer=lambda *s: seen.append(s), entries={})
    ):
        attention_scores(q, k, 0.125, mask=mask)
    return replace(next(key for _, key, *_ in seen), device="cuda")


def measured(key: Key, id: str, config: dict[str, Any], **others: float) -> Plan:
    """A plan by which `id` takes half of eager's 20 us, and others what they are said to."""
    candidate_loading.ready("cuda", SCORES)
    times = {id: 10.0} | {EAGER: 20.0} | {f"triton.{name}": us for name, us in others.items()}
    if id == EAGER:
        times[EAGER] = 10.0
    evidence = [
        Evidence(n, config if n == id else {}, "measured", us, us, 0.0, 1.0, "", SCORES.candidates[n].source)
        for n, us in times.items()
    ]  # fmt: skip
    return Plan(key, id, config, id, config, evidence)


def lent(key: Key, *plans: Plan) -> tuple[str, dict[str, Any]]:
    found = nearest_plans.lent(SCORES, key, plans, {"torch": "2", "driver": ""})
    assert found is not None
    assert found[0] == found[1]
    return found[1][0], dict(found[1][1])


def test_a_plan_whose_kernel_goes_its_way_counts_more_than_one_as_near_whose_does_not() -> None:
    """Rows of 200 are held, rows of 1,536 are swept: 103 us instead of 9, where PyTorch takes 34 (H100)."""
    key, near, other = scores(80, 1536), scores(200, 200), scores(600, 600)
    assert abs(key.remoteness(near) - key.remoteness(other)) < 0.2
    plans = [
        measured(near, "triton.scores", HELD, after_product=25.0),
        measured(other, "triton.after_product", REGISTERS, scores=18.0),
    ]
    plans[1].evidence[-1].config.update(SWEEPS)
    id, config = lent(key, *plans)
    assert (id, config["strategy"]) == ("triton.after_product", "registers")
    assert lent(scores(80, 250), *plans)[0] == "triton.scores"
    plans[0].captured_config = plans[0].eager_config = SWEEPS
    assert lent(key, *plans)[0] == "triton.scores"


def test_what_won_everywhere_else_is_not_given_up_for_one_plan_that_noise_decided() -> None:
    key = scores(500, 500, 80)
    others = [measured(scores(n, n, 80), "triton.scores", {}) for n in (900, 260, 1000)]
    noise = measured(scores(510, 510, 80), EAGER, {}, scores=10.1)
    assert lent(key, noise)[0] == EAGER
    assert lent(key, noise, *others)[0] == "triton.scores"
    loss = measured(scores(510, 510, 80), EAGER, {}, scores=19.0)
    assert lent(key, loss, *others)[0] == EAGER


def test_the_nearer_counts_more() -> None:
    near = measured(scores(620, 620), "triton.scores", {}, after_product=14.0)
    far = measured(scores(5000, 5000), "triton.after_product", REGISTERS, scores=25.0)
    assert lent(scores(700, 700), near, far)[0] == "triton.scores"
    assert lent(scores(4000, 4000), far, near)[0] == "triton.after_product"
    even = measured(scores(640, 640), "triton.scores", {}, after_product=14.0)
    odd = measured(scores(704, 703), "triton.after_product", REGISTERS, scores=25.0)
    assert lent(scores(704, 704), even, odd)[0] == "triton.scores"


def test_the_very_key_measured_elsewhere_decides_alone() -> None:
    key = scores(500, 500)
    others = [measured(scores(n, n), "triton.scores", {}) for n in (501, 502, 503, 504)]
    assert lent(key, measured(key, EAGER, {}, scores=10.5), *others)[0] == EAGER


def test_who_is_not_current_says_nothing() -> None:
    """Its time is another kernel's."""
    key = scores(500, 500, 80)
    near = measured(scores(510, 510, 80), "triton.after_product", REGISTERS, scores=29.0)
    far = measured(scores(900, 900, 80), "triton.scores", {}, after_product=15.0)
    assert lent(key, near, far)[0] == "triton.after_product"
    near.evidence[-1].source = "another"
    assert lent(key, near, far)[0] == "triton.scores"


def test_callers_wait_for_the_host_as_well_even_where_it_was_not_measured() -> None:
    """Who was out of the running at a first look has no host's time; it is not taken for none."""
    plan = measured(scores(510, 510), "triton.scores", {}, after_product=3.0)
    plan.captured, plan.captured_config = "triton.after_product", REGISTERS
    for e in plan.evidence:
        if e.candidate != "triton.after_product":
            e.device_us, e.host_us = 2.0 * e.device_us / 5, e.device_us
    runs = plan.measured_us(False, {e.candidate: e.source for e in plan.evidence})
    assert {id: us for id, (us, _) in runs.items()} == {
        "triton.scores": 10.0, EAGER: 20.0, "triton.after_product": 20.0,
    }  # fmt: skip
    found = nearest_plans.lent(SCORES, scores(500, 500), [plan], {"torch": "2", "driver": ""})
    assert found is not None
    assert (found[0][0], found[1][0]) == ("triton.scores", "triton.after_product")
