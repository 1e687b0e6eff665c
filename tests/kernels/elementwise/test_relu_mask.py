"""ReLU that marks where its output is above 0: kernels against PyTorch, the recorded call, what the compiler makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from ...support.triton import (
    DEVICE,
    TORCH,
    close,
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
from tensorlogic.kernels.elementwise import relu_mask as elementwise_relu_mask  # isort: skip
from tensorlogic.ops.pointwise import definitions

from tensorlogic.ops.pointwise import joint_backward  # isort: skip

from ...support.compiled import nothing_spills  # isort: skip
from ...support.helpers import guessed_best  # isort: skip
from ...support.triton import default_device as default_device  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
NAN, INF = float("nan"), float("inf")
CONFIGS = ({"BLOCK": 64, "num_warps": 1}, {"BLOCK": 256, "num_warps": 1})
SPECIAL = (NAN, INF, -INF, 0.0, -0.0, 1e-7, -1e-7, 6e-8, 65504.0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of any size are marked: the interpreter is slow."""
    monkeypatch.setattr(joint_backward, "LEAST", 0)


def values(count: int, dtype: str, seed: int = 0) -> Tensor:
    """Normal numbers, special ones at the beginning and at the end."""
    x = rand(count, dtype=dtype, seed=seed)
    some = torch.tensor(SPECIAL)[: min(count, len(SPECIAL))].to(TORCH[dtype])
    x[: len(some)] = some
    x[-len(some) :] = some.roll(seed)
    return x


@pytest.mark.parametrize("config", CONFIGS, ids=["64", "256"])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("count", [1, 7, 8, 63, 64, 257, 1021])
@pytest.mark.parametrize("adds", [False, True])
def test_marks_stand_for_the_output(
    count: int, dtype: str, adds: bool, config: dict[str, Any]
) -> None:
    a, b, dy = (values(count, dtype, seed) for seed in range(3))
    given = (a, b) if adds else (a,)
    y, dx = poisoned(count, dtype=dtype), poisoned(count, dtype=dtype)
    whole = torch.full((elementwise_relu_mask.marks(count) + 64,), 77, dtype=torch.uint8)
    mark = whole[: elementwise_relu_mask.marks(count)]
    assert elementwise_relu_mask.marked_launcher(dtype, count, adds, config, DEVICE)(
        *given, y, mark
    )
    assert (whole[elementwise_relu_mask.marks(count) :] == 77).all(), "written beside the marks"
    want = torch.relu(a + b) if adds else torch.relu(a)
    close(y, want, dtype, 0.1)
    live = (mark[:, None] >> torch.arange(8)) & 1
    assert torch.equal(live.flatten()[:count].bool(), ~(y <= 0))
    assert elementwise_relu_mask.unmarked_launcher(dtype, count, False, config, DEVICE)(
        dy, mark, dx
    )
    gradient = torch.ops.aten.threshold_backward(dy, y, 0)
    assert torch.equal(dx.nan_to_num(3.0), gradient.nan_to_num(3.0))
    assert torch.equal(dx.isnan(), gradient.isnan())
    one = dy[:1].clone()
    assert elementwise_relu_mask.unmarked_launcher(dtype, count, True, config, DEVICE)(
        one, mark, dx
    )
    gradient = torch.ops.aten.threshold_backward(one.expand(count), y, 0)
    assert torch.equal(dx.nan_to_num(3.0), gradient.nan_to_num(3.0))


def recorded(fn: Any, *args: Tensor) -> Tensor:
    with tensorlogic.policy(force="triton.marked"):
        y: Tensor = fn(*args)
    return y


def marked(y: Tensor) -> bool:
    """Whether backward of `y` reads marks."""
    kept = getattr(y.grad_fn, "saved_tensors", ())
    return [t.dtype for t in kept if t is not None] == [torch.uint8]


LAYOUTS = {
    "rows": lambda t: t,
    "across": lambda t: t.mT,
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_the_public_call(dtype: str, layout: str) -> None:
    lay = LAYOUTS[layout]
    a, b = (lay(rand(2, 3, 5, 4, dtype=dtype, seed=s)).detach().requires_grad_() for s in range(2))
    for fn, plain, args in (
        (tensorlogic.relu, torch.relu, (a,)),
        (tensorlogic.add_relu, lambda a, b: torch.relu(a + b), (a, b)),
    ):
        y, want = recorded(fn, *args), plain(*args)
        assert marked(y)
        assert torch.equal(y, want)
        assert y.stride() == want.stride()
        for dy in (
            torch.randn_like(y),
            torch.randn(y.shape).to(y.dtype),
            torch.tensor(2.0, dtype=y.dtype).expand(y.shape),
            torch.randn(y.shape[-1]).to(y.dtype).expand(y.shape),
        ):
            got = torch.autograd.grad(y, args, dy, retain_graph=True)
            due = torch.autograd.grad(want, args, dy, retain_graph=True)
            for g, d in zip(got, due, strict=True):
                assert torch.equal(g, d)
                assert g.stride() == d.stride() or dy.stride() != y.stride()


def test_one_of_two_gradients_and_what_must_raise() -> None:
    a, b = rand(6, 8).requires_grad_(), rand(6, 8, seed=1)
    y = recorded(tensorlogic.add_relu, b, a)
    assert marked(y)
    (got,) = torch.autograd.grad(y, a, torch.ones_like(y), retain_graph=True)
    assert torch.equal(got, (y > 0).float())
    (again,) = torch.autograd.grad(y, a, torch.ones_like(y), retain_graph=True)
    assert torch.equal(got, again)
    assert got.data_ptr() != again.data_ptr()
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(y, a, torch.ones_like(y), create_graph=True)
    y = recorded(tensorlogic.relu, a)
    with torch.no_grad():
        y.mul_(-1)  # backward does not read it
    y.sum().backward()
    assert torch.equal(a.grad, (a > 0).float())


@pytest.mark.parametrize(
    "args",
    [
        (rand(6, 8), rand(8)),
        (rand(6, 8), rand(6, 8).half()),
        (rand(6, 16)[:, ::2], rand(6, 8)),
        (rand(49)[1:], rand(48)),
        (rand(6, 8), rand(8, 6).t()),
        (rand(0, 8), rand(0, 8)),
    ],
    ids=["broadcast", "mixed", "steps", "unaligned", "turned", "empty"],
)
def test_what_it_does_not_serve_is_served_as_before(args: tuple[Tensor, ...]) -> None:
    args = tuple(a.detach().requires_grad_() for a in args)
    y, want = recorded(tensorlogic.add_relu, *args), torch.relu(args[0] + args[1])
    assert not marked(y)
    got, due = (torch.autograd.grad(v.sum(), args) for v in (y, want))
    for g, d in zip(got, due, strict=True):
        assert torch.allclose(g, d, atol=1e-3)


def test_small_outputs_are_kept_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_backward, "LEAST", 6 * 11 * 4)
    assert not marked(recorded(tensorlogic.relu, rand(6, 10).requires_grad_()))
    assert marked(recorded(tensorlogic.relu, rand(6, 11).requires_grad_()))


def test_a_key_and_its_parts() -> None:
    """Forward's key, and backward's, name one pair, whose parts are these keys."""
    a = rand(6, 8)
    forward = replace(definitions.ADD_RELU.key((a, a, True), "forward"), device="cuda")
    op, whole = joint_backward.of_forward(forward) or pytest.fail("not paired")
    assert op.name == whole.op == "pointwise_together"
    backward = definitions.POINTWISE_BACKWARD.key(
        (a, None, None, None, a, "add_relu", "10"), "backward"
    )
    for needs in ("100", "110"):
        flags = (("kind", "add_relu"), ("needs", needs))
        found = [*joint_backward.of_backward(replace(backward, flags=flags, device="cuda"))]
        assert found == [(op, whole)]
    (_, ahead), (_, back) = joint_backward.both(whole)
    assert ahead == forward
    assert back == replace(backward, flags=(("kind", "add_relu"), ("needs", "110")), device="cuda")
    for away in (8, 2):  # kernels take whole groups of 16 bytes
        odd = tuple(replace(t, align=away) for t in forward.tensors if t is not None)
        assert joint_backward.of_forward(replace(forward, tensors=odd)) is None
    gelu = replace(backward, flags=(("kind", "gelu"), ("needs", "100")), device="cuda")
    assert not [*joint_backward.of_backward(gelu)]


@pytest.mark.parametrize("id", [EAGER, "chosen.apart", "triton.marked"])
@pytest.mark.parametrize("kind", ["relu", "add_relu"])
def test_candidates_of_the_pair_agree(id: str, kind: str) -> None:
    candidate_loading.ready(DEVICE.type)
    op = OPS["pointwise_together"]
    a, b = rand(6, 40), rand(6, 40, seed=1) if kind == "add_relu" else None
    args = [rand(6, 40, seed=2), a, b, kind]
    key = op.key(args, "backward")
    candidate = op.candidates[id]
    assert candidate.unfit(key) is None
    got = candidate.bind(key, candidate.configs(key)[0], a.device)(*args[:3])
    want = op.reference(*args)
    assert got is not None
    for g, w in zip(got, want, strict=True):
        assert g is not None
        close(g, w, "f32")


def test_it_is_chosen_by_the_time_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where all calls must take one candidate, and not by its name among those of forward."""
    assert "triton.marked" not in OPS["relu"].candidates
    a = rand(6, 8).requires_grad_()
    with policy.policy(deterministic=True, force={"pointwise_together": "triton.marked"}):
        assert not marked(tensorlogic.relu(a))
    with policy.policy(force={"pointwise_together": "triton.marked"}):
        assert marked(tensorlogic.relu(a))
    assert not marked(tensorlogic.relu(a))


def test_gradients_that_kernels_cannot_take_are_made_of_the_output() -> None:
    x = rand(4, 16).requires_grad_()
    y, want = recorded(tensorlogic.relu, x), torch.relu(x)
    many = torch.randn(3, 4, 16)
    assert marked(y)
    for fn in (
        lambda y: torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)[0],
        lambda y: torch.func.vmap(lambda d: torch.autograd.grad(y, x, d, retain_graph=True)[0])(
            many
        ),
        lambda y: torch.autograd.grad(y, x, torch._neg_view(many[0]), retain_graph=True)[0],
    ):
        assert torch.equal(fn(y), fn(want))


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((4, 1, 5, 5), (25, 1, 5, 1)), ((1, 1, 64), (384, 64, 1)), ((1, 8), (1, 1)), ((8, 1), (1, 8))],
)
def test_it_lies_as_in_pytorch(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    x = rand(1000).as_strided(shape, stride).detach().requires_grad_()
    y, want = recorded(tensorlogic.relu, x), torch.relu(x)
    assert marked(y)
    got, due = (torch.autograd.grad(v, x, torch.ones_like(want))[0] for v in (y, want))
    assert (y.stride(), got.stride()) == (want.stride(), due.stride())


def test_under_hooks_the_output_is_kept() -> None:
    """One that stores floats in fewer bits would lose marks; a checkpoint compares what is kept with what another choice keeps."""
    x = rand(1, 200).requires_grad_()
    assert marked(recorded(tensorlogic.relu, x))  # a warm key, too
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        y = recorded(tensorlogic.relu, x)
    (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got, (x > 0).float())

    def part(x: Tensor) -> Tensor:
        return tensorlogic.relu(x).square()

    with tensorlogic.policy(force="triton.marked"):
        y = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
    with tensorlogic.policy(force="torch.eager"):
        (got,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(got, 2 * torch.relu(x.detach()))


@pytest.mark.parametrize("name", ["relu", "pointwise_backward"])
def test_a_forced_part_is_not_paired(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "none")  # a GPU's would be heard first
    guessed_best(monkeypatch, OPS["pointwise_together"], "triton.marked", DEVICE)
    x = rand(3, 77).requires_grad_()
    with tensorlogic.policy(tune="off", force={"mul": EAGER}):
        assert marked(tensorlogic.relu(x))
    with tensorlogic.policy(tune="off", force={name: EAGER}):
        assert not marked(tensorlogic.relu(x))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_nothing_spills(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_capability", lambda device: 90)
    cuda, jobs = torch.device("cuda", 0), list[Any]()
    for config in elementwise_relu_mask.marked_configs(dtype):
        for on in (False, True):
            for make in (
                elementwise_relu_mask.marked_launcher,
                elementwise_relu_mask.unmarked_launcher,
            ):

                def build(make: Any = make, on: bool = on, config: Any = config) -> object:
                    return make(dtype, 100_000, on, config, cuda)

                jobs += launch.collect(build, cuda)
    nothing_spills(list(dict.fromkeys(jobs)))
