"""What plans of other sizes lend: a candidate, and a configuration that is refused there or gives the right result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tensorlogic import attention_scores
from tensorlogic.core import policy as core_policy
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS, Op
from tensorlogic.dispatch import candidate_loading, dispatcher, nearest_plans
from tensorlogic.kernels.gemm import bind
from tensorlogic.kernels.triton_runtime import config_check
from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch
from tensorlogic.measure import verification
from tensorlogic.ops.softmax_cross_entropy import joint_backward
from tensorlogic.plans.plan import Evidence, Plan
from tensorlogic.system.compile_pool import CompileFailure

from ..support.helpers import DEVICE, cast, full

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
HERE = torch.device(DEVICE)
MOST = 3  # keys of a candidate, from the smallest to the largest; one less where they reduce as `sum` does
COARSE = 1e-5  # relative error that is none of a configuration's
PROGRAMS = 16  # of a launch: of more, the interpreter's take seconds and say no more
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
    assert abs(key.search_distance(near) - key.search_distance(other)) < 0.2
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


@pytest.mark.slow
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


# configurations that a neighbour brings ------------------------------------------------------------------------------


def _more(name: str) -> Iterator[tuple[Any, ...]]:
    """Calls beside an op's cases whose configurations differ: long and short lines, one value and two, one column and two."""
    if name == "sum":
        for shape, dim in (((16384,), (0,)), ((2, 16384), (1,)), ((700, 1), (0,)), ((700, 2), (0,))):  # fmt: skip
            yield torch.randn(shape), dim, False
    if name == "softmax_cross_entropy":
        for columns in (2048, 8192, 20000):
            yield torch.randn(3, columns), torch.tensor([0, -100, 5]), -100, 0.0, "mean"
    if name == "linear":
        for k in (300, 1100):
            yield torch.randn(1, k), torch.randn(24, k), torch.randn(24), None, None
    if name == "layer_norm_linear":
        yield torch.randn(3, 1500), None, None, torch.randn(24, 1500), None, 1e-5


@cache
def met() -> dict[str, list[Key]]:
    """Keys of every op: of its cases, recorded and not, of `_more`, and of the backward passes behind them."""
    found: dict[str, dict[str, Key]] = {name: {} for name in OPS}

    def observe(op: Op, key: Key, device: torch.device) -> None:
        found[op.name][key.text] = key

    watching = replace(core_policy.current(), tune="off", observer=observe, entries={})
    for name, op in OPS.items():
        for case in () if op.internal else [*op.cases(), *_more(name)]:
            args = cast(case, torch.float32)
            for key in (op.key(full(op, args, save), ("inference", "forward")[save]) for save in (False, True)):  # fmt: skip
                found[name][key.text] = key
            if op.gradient is not None:
                leaves = [a.requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in args]  # fmt: skip
                with core_policy.use(watching):
                    dispatcher.call(op, tuple(leaves)).sum().backward()
    for key in list(found["softmax_cross_entropy"].values()):
        if (joined := joint_backward.of_forward(key)) is not None:
            found[joined[0].name][joined[1].text] = joined[1]
    return {name: list(keys.values()) for name, keys in found.items()}


def served(op: Op, id: str) -> list[Key]:
    """Of the keys that a candidate serves, one for each list of configurations: the smallest, the largest, what lies between, evenly."""
    candidate, found = op.candidates[id], dict[str, Key]()
    keys = [key for key in met()[op.name] if candidate.unfit(key) is None]
    keys.sort(key=lambda key: sum(math.prod(t.shape) for t in key.tensors if t is not None))
    for key in keys:
        found.setdefault(str(candidate.configs(key)), key)
    keys = list(found.values())
    if op.name == "sum":
        return [key for key in keys if key.spec("x").shape[0] not in (3, 33, 3000)]  # type: ignore[union-attr]
    steps = min(MOST - (op.name in ("mean", "max", "min")), len(keys))
    return [keys[i * (len(keys) - 1) // max(steps - 1, 1)] for i in range(steps)]


def every() -> list[tuple[str, str]]:
    """Each Triton candidate that this machine runs."""
    return [
        (name, id)
        for name, op in OPS.items()
        for id, candidate in op.candidates.items()
        if id.startswith("triton.") and candidate.available(DEVICE) is None
    ]


@cache
def checker(op: str, key: Key) -> verification.Checker:
    """Of one key; few numbers are by luck a little further off than eager's, what is left out is far off."""
    found = verification.Checker(OPS[op], key, HERE)
    found.coarse = COARSE
    return found


class Long(Exception):
    """A launch of too many programs for a test."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of many programs are not made."""

    def check(kernel: Any, grid: tuple[int, int, int]) -> None:
        if math.prod(grid) > PROGRAMS:
            raise Long

    monkeypatch.setattr(triton_runtime_launch, "_check_grid", check)


def said(op: Op, id: str, key: Key, config: Any) -> str | None:
    """What is wrong with a configuration that was not refused as one that does not fit, in one call into memory full of NaN."""
    try:
        launch = op.candidates[id].bind(key, config, HERE)
    except (CompileFailure, Long):
        return None
    return checker(op.name, key)._probe(launch, 0, 0)[1].reason


@pytest.mark.parametrize(("name", "id"), every())
@pytest.mark.usefixtures("short")
def test_a_configuration_of_another_key_is_refused_or_right(name: str, id: str) -> None:
    op, tried = OPS[name], set[str]()
    keys = served(op, id)
    for brings in keys:
        for config in op.candidates[id].configs(brings):
            for key in keys:
                if key is brings or f"{key.text} {config}" in tried:
                    continue
                tried.add(f"{key.text} {config}")
                reason = said(op, id, key, config)
                assert reason is None, (key.text, config, reason)


def test_a_norm_before_a_product_takes_its_own_configuration_beside_a_neighbour_s_product() -> None:
    op = OPS["layer_norm_linear"]
    x, gamma, weight = torch.randn(48, 2048), torch.randn(2048), torch.randn(32, 2048)
    args = cast([x, gamma, gamma, weight / 45, None, 1e-5], torch.float16)
    key, candidate = op.key(full(op, args), "inference"), op.candidates["triton.after_norm"]
    norm = {"strategy": "registers", "BLOCK_R": 2, "BLOCK_C": 1024, "num_warps": 4}
    own = candidate.configs(key)[0]["products"]
    assert norm not in [config["products"][0] for config in candidate.configs(key)]
    product = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 8, "SPLIT": 1, "num_warps": 4, "num_stages": 3}  # fmt: skip
    launch = candidate.bind(key, {"products": [norm, product]}, HERE)
    assert (verdict := checker(op.name, key)._probe(launch, 0, 0)[1]), verdict.reason
    plan: list[Any] = []
    step = bind.Kernel(
        ("x",), {}, (own[0],), lambda c, d, a: plan.append(c) or (lambda: True), lambda c: (c["BLOCK_C"], 1)  # type: ignore[func-returns-value]
    )  # fmt: skip
    step.start(norm, HERE)
    assert plan == [own[0]]
    assert step.workspace(norm) == (own[0]["BLOCK_C"], 1)


@pytest.mark.parametrize(
    ("kernel", "fits", "integers", "constants"),
    [
        ("reduce_polled", 2**20, {"N": 2**31 - 4096, "PARTS": 128}, {"BLOCK": 8192}),
        ("reduce_rows", 2048, {"N": 2049}, {"BLOCK_C": 8}),
        ("attention_scores_fwd", 128, {"T": 129}, {"HELD": True, "BLOCK_N": 128}),
    ],
)
def test_what_a_launch_would_leave_out_is_refused(
    kernel: str, fits: int, integers: dict[str, int], constants: dict[str, Any]
) -> None:
    with pytest.raises(CompileFailure, match=rf"{kernel}: a configuration of .* does not fit"):
        config_check.check(kernel, integers, constants)
    config_check.check(kernel, {**integers, next(iter(integers)): fits}, constants)


def test_every_kernel_that_is_checked_exists() -> None:
    files = Path(config_check.__file__).parents[1].rglob("*.py")
    text = "".join(p.read_text() for p in files)
    for kernel in (*config_check.WHOLE, *config_check.COUNTED):
        assert f"def {kernel}(" in text
