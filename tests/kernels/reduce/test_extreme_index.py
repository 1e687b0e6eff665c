"""Extremes that keep where they are for the gradient: kernels against PyTorch, the recorded call, what the compiler makes of it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ...support.triton import (
    DEVICE,
    EXTREME_CONFIGS,
    EXTREME_LARGE,
    EXTREME_NAMES,
    EXTREME_SHAPES,
    TORCH,
    close,
    extreme_input,
    extreme_lines,
    poisoned,
    rand,
)

import tensorlogic  # isort: skip  (after the interpreter is asked for)
from tensorlogic.core import policy
from tensorlogic.plans import store

from tensorlogic.dispatch import candidate_loading  # isort: skip
from tensorlogic.core.candidate import EAGER

from tensorlogic.core.op import OPS  # isort: skip
from tensorlogic.kernels.triton_runtime import launch  # isort: skip
from tensorlogic.kernels.reduce import extreme_index as reduce_extreme_index  # isort: skip
from tensorlogic.system.compile_pool import CompileFailure  # isort: skip
from tensorlogic.kernels.row_access.strided import Lines  # isort: skip
from tensorlogic.ops.reduce import EXTREME_BACKWARD, MAX, extreme_backward

from tensorlogic.ops.reduce import joint_backward  # isort: skip

from ...support.compiled import nothing_spills  # isort: skip
from ...support.helpers import guessed_best  # isort: skip
from ...support.triton import default_device as default_device  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
PAIR = "extreme_together"
EXTREMES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "max": (tensorlogic.max, torch.amax),
    "min": (tensorlogic.min, torch.amin),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size: the interpreter is slow."""
    monkeypatch.setattr(joint_backward, "LEAST", 0)


@pytest.mark.parametrize("config", EXTREME_CONFIGS, ids=EXTREME_NAMES)
@pytest.mark.parametrize(
    ("dtype", "name"), [*itertools.product(("f16", "f32"), EXTREME_SHAPES), ("bf16", "columns")]
)
@pytest.mark.parametrize("kind", EXTREMES)
def test_places_stand_for_the_search(
    kind: str, dtype: str, name: str, config: dict[str, Any]
) -> None:
    lies = Lines(*EXTREME_SHAPES[name])
    x, dy = extreme_input(lies, dtype), rand(lies.outer, lies.inner, dtype=dtype, seed=1)
    dy[-1, -1] = 0
    if lies.length > 70:
        x[-1, 70, -1] = 50 if kind == "max" else -50  # beside ties, one alone
    want = EXTREMES[kind][1](x, 1)
    made, space = (
        reduce_extreme_index.Placed(lies, dtype, config, DEVICE),
        reduce_extreme_index.placed_space(lies, config),
    )
    best = torch.full((space + 64,), 1e9)
    part = torch.full((space + 64,), 12345, dtype=torch.int32)
    y = poisoned(lies.outer, lies.inner, dtype=dtype)
    place = torch.full((lies.outer, lies.inner), 12345, dtype=torch.int32)
    assert made.forward(kind == "max")(x, best, part, y, place)
    assert (best[space:] == 1e9).all(), "written beside"
    assert (part[space:] == 12345).all(), "written beside"
    assert torch.equal(y.nan_to_num(99.0), want.nan_to_num(99.0))
    assert torch.equal(y.isnan(), want.isnan())
    hit = x == want[:, None]
    ties = hit.sum(1)
    assert torch.equal(place.long(), torch.where(ties == 1, hit.int().argmax(1), -1 - ties))
    dx = poisoned(lies.outer, lies.length, lies.inner, dtype=dtype)
    dx = dx.as_strided(x.shape, lies.strides[1])
    assert made.backward()(dy, x, y, place, dx)
    exact = extreme_backward(dy.double(), x.double(), want.double(), (1,), False)[0]
    close(dx, exact.to(TORCH[dtype]), dtype, 0.01)
    plain = extreme_backward(dy, x, want, (1,), False)[0]
    assert torch.equal(dx.isnan(), plain.isnan())
    assert torch.equal(dx.signbit() & (dx == 0), plain.signbit() & (plain == 0))


@pytest.mark.parametrize("config", EXTREME_CONFIGS, ids=EXTREME_NAMES)
def test_what_comes_in_is_not_finite(config: dict[str, Any]) -> None:
    lies = Lines(1, 75, 6, ((0, 6, 1), (0, 6, 1)))
    x, dy = rand(1, 75, 6), torch.tensor([[float("inf"), float("nan"), -float("inf"), 0.0, 1.0, 2.0]])  # fmt: skip
    made, space = (
        reduce_extreme_index.Placed(lies, "f32", config, DEVICE),
        reduce_extreme_index.placed_space(lies, config),
    )
    best, part = torch.empty(max(1, space)), torch.empty(max(1, space), dtype=torch.int32)
    y, place, dx = torch.empty(1, 6), torch.empty(1, 6, dtype=torch.int32), torch.empty(1, 75, 6)
    assert made.forward(True)(x, best, part, y, place)
    assert made.backward()(dy, x, y, place, dx)
    close(dx, extreme_backward(dy, x, y, (1,), False)[0], "f32")


def recorded(fn: Any, *args: Any) -> Tensor:
    with tensorlogic.policy(force="triton.placed"):
        y: Tensor = fn(*args)
    return y


def has_places(y: Tensor) -> bool:
    """Whether backward of `y` reads places."""
    kept = getattr(y.grad_fn, "saved_tensors", ())
    return torch.int32 in [t.dtype for t in kept if t is not None]


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "rows": (lambda t: t, (2,)),
    "columns": (lambda t: t, (0,)),
    "between": (lambda t: t, (1,)),
    "turned": (lambda t: t.permute(2, 0, 1), (1, 2)),
    "with gaps": (lambda t: t[:, :, :7], (2,)),
    "with steps": (lambda t: t[:, :, ::2], (2,)),
    "all of it": (lambda t: t, (0, 1, 2)),
}


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", EXTREMES)
def test_the_public_call(kind: str, layout: str, keepdim: bool) -> None:
    lay, dim = LAYOUTS[layout]
    fn, plain = EXTREMES[kind]
    x = lay((2 * rand(4, 5, 9)).round() / 2).detach().requires_grad_()
    y, want = recorded(fn, x, dim, keepdim), plain(x, dim, keepdim)
    assert has_places(y)
    assert torch.equal(y, want)
    assert y.stride() == want.stride()
    turned = torch.randn(y.shape[::-1]).permute(tuple(reversed(range(y.dim()))))
    for dy in (torch.randn_like(y), torch.tensor(2.0).expand(y.shape), turned):
        (got,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        (due,) = torch.autograd.grad(want, x, dy, retain_graph=True)
        close(got, due, "f32")
        assert got.stride() == due.stride() or not dy.is_contiguous()


@pytest.mark.parametrize(
    ("x", "dim"),
    [
        (rand(4, 6, 5).permute(1, 0, 2), (2,)),
        (rand(6, 5).double(), (0,)),
        (rand(6, 1).expand(6, 5), (0,)),
        (rand(4, 5, 6), (0, 2)),
    ],
    ids=["output in another order", "float64", "one column repeated", "dimensions apart"],
)
def test_what_it_does_not_serve_is_served_as_before(x: Tensor, dim: tuple[int, ...]) -> None:
    x = x.detach().requires_grad_()
    y, want = recorded(tensorlogic.max, x, dim), torch.amax(x, dim)
    assert not has_places(y)
    got, due = (torch.autograd.grad(v.sum(), x)[0] for v in (y, want))
    assert torch.allclose(got, due)


def test_small_tensors_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_backward, "LEAST", 6 * 11 * 4)
    assert not has_places(recorded(tensorlogic.max, rand(6, 10).requires_grad_(), 1))
    assert has_places(recorded(tensorlogic.max, rand(6, 11).requires_grad_(), 1))


def test_a_key_and_its_parts() -> None:
    """Forward's key, and backward's, name one pair, whose parts are these keys; a minimum's is a maximum's to neighbours."""
    x, y = rand(6, 8), rand(6)
    forward = replace(MAX.key((x, (1,), False, True), "forward"), device="cuda")
    op, whole = joint_backward.of_forward(forward) or pytest.fail("not paired")
    assert op.name == whole.op == PAIR
    backward = replace(EXTREME_BACKWARD.key((y, x, y, (1,), False), "backward"), device="cuda")
    assert [*joint_backward.of_backward(backward)] == [(op, whole)]
    x3, dy = (
        rand(6, 8, 4),
        rand(4, 6).t(),
    )  # kernels of the gradient take what comes in as it lies nowhere else
    odd = EXTREME_BACKWARD.key((dy, x3, dy, (1,), False), "backward")
    assert not [*joint_backward.of_backward(replace(odd, device="cuda"))]
    (_, ahead), (_, back) = joint_backward.both(whole)
    assert (ahead, back) == (forward, backward)
    least = replace(forward, op="min")
    _, other = joint_backward.of_forward(least) or pytest.fail("not paired")
    assert other != whole
    assert op.normal(other).distance(op.normal(whole)) == 0.0


@pytest.mark.parametrize("id", [EAGER, "chosen.apart", "triton.placed"])
@pytest.mark.parametrize("kind", EXTREMES)
def test_candidates_of_the_pair_agree(id: str, kind: str) -> None:
    candidate_loading.ready(DEVICE.type)
    op = OPS[PAIR]
    args = [rand(6, seed=2), (2 * rand(6, 40)).round() / 2, (1,), False, kind]
    key = op.key(args, "backward")
    candidate = op.candidates[id]
    assert candidate.unfit(key) is None
    got = candidate.bind(key, candidate.configs(key)[0], DEVICE)(*args[:2])
    assert got is not None
    for g, w in zip(got, op.reference(*args), strict=True):
        assert g is not None
        close(g, w, "f32")


def test_it_is_chosen_by_the_time_of_both() -> None:
    """Not where all calls must take one candidate, nor under hooks on what is saved."""
    x = rand(6, 8).requires_grad_()
    with policy.policy(deterministic=True, force={PAIR: "triton.placed"}):
        assert not has_places(tensorlogic.max(x, 1))
    with policy.policy(force={PAIR: "triton.placed"}):
        assert has_places(tensorlogic.max(x, 1))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert not has_places(tensorlogic.max(x, 1))
    assert not has_places(tensorlogic.max(x, 1))


@pytest.mark.parametrize("name", ["max", "extreme_backward"])
def test_a_forced_part_is_not_paired(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "none")  # a GPU's would be heard first
    guessed_best(monkeypatch, OPS[PAIR], "triton.placed", DEVICE)
    x = rand(3, 77).requires_grad_()
    with tensorlogic.policy(tune="off", force={"mul": EAGER}):
        assert has_places(tensorlogic.max(x, 1))
    with tensorlogic.policy(tune="off", force={name: EAGER}):
        assert not has_places(tensorlogic.max(x, 1))


def test_gradients_that_kernels_cannot_take_and_what_must_raise() -> None:
    x = rand(4, 16).requires_grad_()
    y, want = recorded(tensorlogic.max, x, 1), torch.amax(x, 1)
    many = torch.randn(3, 4)
    assert has_places(y)
    for fn in (
        lambda y: torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)[0],
        lambda y: torch.autograd.grad(y, x, torch._neg_view(many[0]), retain_graph=True)[0],
    ):
        assert torch.equal(fn(y), fn(want))
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    y = recorded(tensorlogic.max, x, 1)
    with torch.no_grad():
        x.mul_(-1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_no_program_adds_up_is_refused() -> None:
    lies = Lines(1, 10**6, 64, ((0, 64, 1), (0, 64, 1)))
    for config in (EXTREME_CONFIGS[0], EXTREME_CONFIGS[6] | {"parts": 600}):
        with pytest.raises(CompileFailure, match="does not fit lines of 1000000"):
            reduce_extreme_index.Placed(lies, "f32", config, DEVICE)


@pytest.mark.slow
def test_kernels_are_hashed_in_any_order() -> None:
    """Triton compares globals that two kernels share with a third, and takes a NaN for another one."""
    code = "import sys; from tensorlogic.kernels.reduce import extreme_index as k\nfor n in sys.argv[1:]: getattr(k, n).cache_key"
    names = ("extreme_fwd_placed", "extreme_fwd_joined", "extreme_bwd_placed")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    for order in (names, names[::-1]):
        subprocess.run([sys.executable, "-c", code, *order], check=True, env=env, timeout=120)


@pytest.mark.slow
def test_it_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, jobs = torch.device("cuda", 0), list[Any]()
    for sm, name, dtype in (
        *itertools.product((90,), EXTREME_LARGE, ("f16", "f32")),
        *itertools.product((80, 100), ("many rows", "one value", "columns"), ("f16",)),
    ):
        monkeypatch.setattr(launch, "_capability", lambda device, sm=sm: sm)
        for config in reduce_extreme_index.placed_configs(extreme_lines(name), dtype)[
            : None if sm == 90 else 2
        ]:

            def build(name: str = name, dtype: str = dtype, config: Any = config) -> object:
                made = reduce_extreme_index.Placed(extreme_lines(name), dtype, config, cuda)
                return made.forward(True), made.backward()

            jobs += launch.collect(build, cuda)
    nothing_spills(list(dict.fromkeys(jobs)))
