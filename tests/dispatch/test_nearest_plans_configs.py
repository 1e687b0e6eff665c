"""A configuration that a neighbour brings is refused or gives the right result: every Triton candidate, on smaller and larger keys."""

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

from tensorlogic.core import policy
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS, Op
from tensorlogic.dispatch import dispatcher
from tensorlogic.kernels.gemm import bind
from tensorlogic.kernels.triton_runtime import config_check
from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch
from tensorlogic.measure import verification
from tensorlogic.ops.softmax_cross_entropy import joint_backward
from tensorlogic.system.compile_pool import CompileFailure

from ..support.helpers import DEVICE, cast, full

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
HERE = torch.device(DEVICE)
MOST = 3  # keys of a candidate, from the smallest to the largest; one less where they reduce as `sum` does
COARSE = 1e-5  # relative error that is none of a configuration's
PROGRAMS = 16  # of a launch: of more, the interpreter's take seconds and say no more


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

    watching = replace(policy.current(), tune="off", observer=observe, entries={})
    for name, op in OPS.items():
        for case in () if op.internal else [*op.cases(), *_more(name)]:
            args = cast(case, torch.float32)
            for key in (op.key(full(op, args, save), ("inference", "forward")[save]) for save in (False, True)):  # fmt: skip
                found[name][key.text] = key
            if op.gradient is not None:
                leaves = [a.requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in args]  # fmt: skip
                with policy.use(watching):
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
    text = "".join(p.read_text() for p in Path(config_check.__file__).parent.glob("triton_*.py"))
    for kernel in (*config_check.WHOLE, *config_check.COUNTED):
        assert f"def {kernel}(" in text
