"""Keys in the fewest dimensions: what a GPU has measured on one shape is found from every shape of the same work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading
from tensorlogic.plans.environment import environment
from tensorlogic.plans.plan import Plan
from tensorlogic.plans.store import PlanStore

from dataclasses import replace  # isort: skip

H, B = torch.float16, torch.bfloat16


def key(fn: Any, *args: Any, **more: Any) -> Key:
    """The key that a call meets, as if its tensors lay on a GPU."""
    met: list[Key] = []
    watching = replace(
        policy.current(), tune="off", force="torch.eager", observer=lambda op, k, d: met.append(k), entries={}
    )  # fmt: skip
    with policy.use(watching), torch.no_grad():
        fn(*args, **more)
    tensors = tuple(t and replace(t, constant=False) for t in met[0].tensors)
    return replace(met[0], device="cuda", tensors=tensors)


def x(*shape: int, dtype: torch.dtype = H) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


PAIRS: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "element-wise": (tensorlogic.add, (x(64, 32), x(64, 32)), (x(2048), x(2048))),
    "beside a row": (tensorlogic.mul, (x(4, 8, 32), x(32)), (x(32, 32), x(32))),
    "linear": (tensorlogic.linear, (x(4, 8, 32), x(16, 32), x(16)), (x(32, 32), x(16, 32), x(16))),
    "activations": (tensorlogic.linear, (x(32, 32), x(16, 32), x(16), None, "silu"), (x(32, 32), x(16, 32), x(16), None, "gelu_tanh")),
    "matmul": (tensorlogic.matmul, (x(4, 8, 32), x(32, 16)), (x(32, 32), x(32, 16))),
    "softmax": (tensorlogic.softmax, (x(4, 8, 32), -1), (x(32, 32), 1)),
    "reductions": (tensorlogic.sum, (x(4, 8, 32), (0, 1), True), (x(1, 32, 32), 1)),
    "rows of reductions": (tensorlogic.max, (x(4, 8, 32), -1), (x(32, 32), 1)),
    "heads": (tensorlogic.attention_scores, (x(2, 4, 32, 16), x(2, 4, 48, 16), 0.25), (x(8, 32, 16), x(8, 48, 16), 0.25)),
    "halves": (tensorlogic.gelu, (x(2048),), (x(2048, dtype=B),)),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_work_is_near(name: str, tmp_path: Path) -> None:
    fn, first, second = PAIRS[name]
    asked, known = key(fn, *first), key(fn, *second)
    op = OPS[asked.op]
    store = PlanStore(tmp_path, environment(torch.device("cpu")))
    store.put(Plan(known, "torch.eager", {}, "torch.eager", {}))
    found = store.nearest(asked, lambda id: True, normal=op.normal)
    assert found is not None
    assert found.key == known
    assert op.normal(asked).distance(op.normal(known)) <= 0.5
    elsewhere = [replace(k, device="cpu") for k in (asked, known)]
    assert [
        op.normal(k) for k in elsewhere
    ] == elsewhere  # on CPUs plans are measured for what they are


OTHERS: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "batches are no rows": (tensorlogic.matmul, (x(4, 8, 32), x(4, 32, 16)), (x(32, 32), x(32, 16))),
    "another dimension": (tensorlogic.softmax, (x(4, 8, 32), 1), (x(32, 32), 1)),
    "strided": (tensorlogic.add, (x(32, 64).t(), x(64, 32)), (x(2048), x(2048))),
    "transposed or padded": (tensorlogic.sum, (x(32, 40)[:, :32], 1), (x(32, 32).t(), 1)),
    "expanded or padded": (tensorlogic.add, (x(32, 40)[:, :32], x(32, 32)), (x(32, 1).expand(32, 32), x(32, 32))),
    "transposed or expanded": (tensorlogic.gelu, (x(32, 32).t(),), (x(32, 1).expand(32, 32),)),
    "a mask": (tensorlogic.attention_scores, (x(4, 32, 16), x(4, 32, 16), 0.25, x(32, 32)), (x(4, 32, 16), x(4, 32, 16), 0.25)),
    "causal": (tensorlogic.attention_scores, (x(4, 32, 16), x(4, 32, 16), 0.25, None, True), (x(4, 32, 16), x(4, 32, 16), 0.25)),
    "float32": (tensorlogic.gelu, (x(2048),), (x(2048, dtype=torch.float32),)),
    "an activation or none": (tensorlogic.linear, (x(32, 32), x(16, 32), x(16)), (x(32, 32), x(16, 32), x(16), None, "relu")),
    "dimensions apart": (tensorlogic.sum, (x(4, 8, 32), (0, 2)), (x(32, 32), 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_work_is_further_than_its_sizes(name: str, tmp_path: Path) -> None:
    fn, first, second = OTHERS[name]
    asked, known = key(fn, *first), key(fn, *second)
    op = OPS[asked.op]
    store = PlanStore(tmp_path, environment(torch.device("cpu")))
    store.put(Plan(known, "torch.eager", {}, "torch.eager", {}))
    found = store.nearest(asked, lambda id: True, normal=op.normal)
    assert (found is None) == (name == "float32")  # which takes other tiles of other candidates
    assert op.normal(asked).distance(op.normal(known)) >= 1.0
    elsewhere = [replace(k, device="cpu") for k in (asked, known)]
    store.put(Plan(elsewhere[1], "torch.eager", {}, "torch.eager", {}))
    assert store.nearest(elsewhere[0], lambda id: True, normal=op.normal) is None


def test_the_nearest_of_other_work_is_found_however_far(tmp_path: Path) -> None:
    store = PlanStore(tmp_path, environment(torch.device("cpu")))
    asked = key(tensorlogic.softmax_cross_entropy, x(64, 1001), torch.zeros(64, dtype=torch.long), reduction="sum")  # fmt: skip
    known = [
        key(tensorlogic.softmax_cross_entropy, x(n, n), torch.zeros(n, dtype=torch.long))
        for n in (4, 700, 2048)
    ]
    for one in known:
        store.put(Plan(one, "torch.eager", {}, "torch.eager", {}))
    near = store.nearest(asked, lambda id: True, normal=OPS[asked.op].normal)
    assert near is not None
    assert near.key == known[1]


def test_layouts_of_one_kind_are_alike() -> None:
    for fn, first, second in (
        (tensorlogic.sum, x(4, 8, 40)[..., :32], x(32, 48)[:, :32]),
        (tensorlogic.sum, x(32, 4, 8).permute(1, 2, 0), x(32, 32).t()),
        (tensorlogic.mean, x(4, 1, 32).expand(4, 8, 32), x(1, 32).expand(32, 32)),
    ):
        one, other = (key(fn, t, -1) for t in (first, second))
        normal = OPS[one.op].normal
        assert normal(one).distance(normal(other)) == 0.0, (one.text, other.text)
    single = key(tensorlogic.affine, x(1, 1), x(1, 1), x(2)[:1].as_strided((1,), (0,)))
    assert OPS["affine"].normal(OPS["affine"].normal(single)) == OPS["affine"].normal(single)


def test_normal_keys_are_keys_of_their_ops() -> None:
    candidate_loading.ready("cpu")
    for op in OPS.values():
        for case in op.cases() if not op.internal else ():
            args = [*case, False] if op.gradient is not None else [*case]
            asked = replace(op.key(args, "inference"), device="cuda")
            normal = op.normal(asked)
            assert (normal.op, normal.names) == (asked.op, asked.names)
            assert [t is None for t in normal.tensors] == [t is None for t in asked.tensors]
            assert op.normal(normal) == normal


def test_lines_that_a_product_makes_count_as_those_it_reads(tmp_path: Path) -> None:
    """A weight of 1,003 rows is read by whole lines; what is made of it is not written so."""
    for fn, odd, near, far in (
        (tensorlogic.linear, (x(64, 64), x(1003, 64)), (x(64, 64), x(1000, 64)), (x(64, 64), x(301, 64))),
        (tensorlogic.matmul, (x(64, 64), x(1003, 64).t()), (x(64, 64), x(1000, 64).t()), (x(64, 64), x(301, 64).t())),
        (tensorlogic.matmul, (x(3, 64, 64), x(3, 1003, 64).mT), (x(3, 64, 64), x(3, 1000, 64).mT), (x(3, 64, 64), x(3, 301, 64).mT)),
    ):  # fmt: skip
        asked, even, other = (key(fn, *args) for args in (odd, near, far))
        normal = OPS[asked.op].normal
        assert normal(asked).distance(normal(even)) < normal(asked).distance(normal(other))
        assert (
            normal(asked).alignment_mismatches(normal(even)),
            normal(asked).alignment_mismatches(normal(other)),
        ) == (2, 0)
        assert normal(normal(asked)).made == normal(asked).made
        store = PlanStore(tmp_path, environment(torch.device("cpu")))
        for one in (even, other):
            store.put(Plan(one, "torch.eager", {}, "torch.eager", {}))
        found = store.nearest(asked, lambda id: True, normal=normal)
        assert found is not None
        assert found.key == other
    gradient = OPS["linear_backward"]
    dy = replace(key(tensorlogic.linear, x(8, 8), x(9, 8)), names=("dy", "x", "weight", "kept"))
    assert gradient.normal(dy).made is None  # which has it among its tensors


def test_a_gradient_is_nearer_to_one_that_does_the_same() -> None:
    """Of another size, beside one of its size that PyTorch hands on for nothing."""

    def gradient(kind: str, count: int, *kept: str) -> Key:
        t = torch.empty(count)
        args = [t, *[t if name in kept else None for name in "abcy"], kind, "110"]
        return replace(OPS["pointwise_backward"].key(args, "backward"), device="cuda")

    def apart(key: Key, other: Key) -> float:
        normal = OPS["pointwise_backward"].normal
        return normal(key).search_distance(normal(other))

    key, alike = gradient("div", 1024, "a", "b"), gradient("div", 4096, "a", "b")
    handed_on = gradient("add", 1024)
    assert key.distance(handed_on) < key.distance(alike)
    assert apart(key, alike) == key.distance(alike) == 2.0
    assert apart(key, handed_on) == key.distance(handed_on) + 3  # the kind, and two tensors
    here = replace(key, device="cpu")
    assert OPS["pointwise_backward"].normal(here) is here
