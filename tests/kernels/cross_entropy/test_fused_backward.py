"""Cross-entropy that prepares its gradient in forward: right for every incoming gradient, with the same bits whatever was guessed."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ...support.triton import (
    DEVICE,
    TORCH,
    close,
    poisoned,
    rand,
)

import tensorlogic  # isort: skip  (after the interpreter is asked for)
from tensorlogic.plans import store

from tensorlogic.dispatch import candidate_loading  # isort: skip
from tensorlogic.core.op import OPS  # isort: skip
from tensorlogic.kernels.cross_entropy import fused_backward_smem  # isort: skip
from tensorlogic.kernels.triton_runtime import exact_exp

from tensorlogic.kernels.cross_entropy import fused_backward as cross_entropy_fused_backward  # isort: skip
from tensorlogic.kernels.triton_runtime import launch
from tensorlogic.system import compile_pool

from tensorlogic.kernels import register  # isort: skip
from ...support.compiled import resources  # isort: skip
from ...support.triton import default_device as default_device  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
GPU = DEVICE.type == "cuda"


def cell(guess: float, missed: int = 0) -> torch.Tensor:
    """What a device remembers: the guess, as bits beside those of 1, and whether it was wrong."""
    (bits,) = struct.unpack("<i", struct.pack("<f", guess))
    return torch.tensor([bits ^ exact_exp.ONE.value, missed], dtype=torch.int32)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.int32 if t.element_size() == 4 else torch.int16)


class Rows:
    """One problem, its kernels, and everything they write, poisoned."""

    def __init__(self, rows: int, columns: int, dtype: str, reduction: str, **config: Any) -> None:
        config = {"LANES": 16, "num_warps": 1, **config}
        self.dtype, self.reduction, self.shape = dtype, reduction, (rows, columns)
        self.x = rand(rows, columns, dtype=dtype, scale=3.0)
        self.t = torch.arange(rows) * 37 % columns
        self.t[2] = -100
        self.kept = poisoned(2 * rows), poisoned(1)
        self.y, self.used = poisoned(1, dtype=dtype), torch.full((2,), 7, dtype=torch.int32)
        self.counter = torch.zeros(1, dtype=torch.int64)
        where = (rows, columns, dtype)
        self.run = (
            fused_backward_smem.held_launcher(*where, reduction, -100, config, DEVICE, 2)
            if "AHEAD" in config
            else cross_entropy_fused_backward.together_launcher(
                *where, reduction, -100, config, DEVICE
            )
        )
        self.back = cross_entropy_fused_backward.settle_launcher(*where, dtype, -100, DEVICE, 1)

    def forward(self, remembered: torch.Tensor) -> torch.Tensor:
        """The gradient as forward leaves it."""
        dx, (lse, share) = poisoned(*self.shape, dtype=self.dtype), self.kept
        rest = (self.y, share, self.counter, remembered, self.used, dx)
        assert self.run(self.x, self.t, poisoned(self.shape[0]), lse, *rest)
        assert self.counter.item() == 0
        return dx

    def settle(self, dx: torch.Tensor, dy: float, remembered: torch.Tensor) -> torch.Tensor:
        given = torch.full((1,), dy).to(TORCH[self.dtype])
        assert self.back(
            self.x, self.t, self.kept[0], given, self.kept[1], self.used, remembered, dx
        )
        return dx


@pytest.mark.parametrize(("columns", "config", "dtype", "reduction"), [
    (256, {"LANES": 32}, "f16", "mean"), (200, {"LANES": 8}, "f16", "sum"),
    (504, {"LANES": 32}, "f32", "mean"), (504, {"num_warps": 4}, "bf16", "sum"),
    (77, {"LANES": 4}, "f16", "mean"), (333, {"LANES": 8}, "bf16", "sum"), (263, {"LANES": 16}, "f16", "sum"),  # from odd places
    (65, {"LANES": 4}, "f16", "mean"), (33, {"LANES": 4}, "f32", "sum"),  # whose last tile but one is ragged
    (201, {"LANES": 8}, "f32", "mean"), (522, {"LANES": 32}, "f16", "mean"), (47, {"LANES": 8}, "f32", "sum"),
])  # fmt: skip
def test_against_float64_with_the_same_bits_whatever_was_guessed(
    columns: int, config: dict[str, int], dtype: str, reduction: str
) -> None:
    check_bits(Rows(4, columns, dtype, reduction, **config))


@pytest.mark.parametrize("columns", [504, 501])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_gradients_at_the_ends_of_the_range(dtype: str, columns: int) -> None:
    """As a mask makes them: the most negative number alone, and with others; and a row of the largest."""
    made = Rows(4, columns, dtype, "sum", LANES=32)
    x, least = made.x, torch.finfo(made.x.dtype).min
    x[0, :300], x[1], x[3] = least, least, -least
    made.t[0], made.t[2] = 400, 5
    dx = made.forward(cell(1.0))
    want = torch.softmax(x.double(), 1) - F.one_hot(made.t, columns)
    close(dx, want, dtype, 0.1)
    close(made.y, F.cross_entropy(x.double(), made.t, reduction="sum")[None], dtype)


HELD = {"LANES": 32, "num_warps": 1, "per": 1, "KEPT": 2, "AHEAD": 2}


@pytest.mark.skipif(
    not register.bulk_copies(), reason="in Gluon for Hopper; on a CPU, test_gluon_standin.py has it"
)
@pytest.mark.parametrize(("columns", "config", "dtype", "reduction"), [
    (1000, HELD, "f16", "mean"), (1280, HELD, "bf16", "sum"), (504, HELD, "f32", "mean"),
    *((128256, config, "f16", "sum") for config in fused_backward_smem.held_configs(128256, "f16")),
    *((50000, config, "bf16", "mean") for config in fused_backward_smem.held_configs(32000, "bf16")),
    (1001, HELD, "f16", "mean"), (1285, HELD, "bf16", "sum"), (1281, {**HELD, "KEPT": 3}, "f32", "mean"),
    *((50257, config, "f16", "sum") for config in fused_backward_smem.held_configs(50257, "f16")),
])  # fmt: skip
def test_rows_held_in_shared_memory(
    columns: int, config: dict[str, int], dtype: str, reduction: str
) -> None:
    check_bits(Rows(9, columns, dtype, reduction, **config))


def check_bits(rows: Rows) -> None:
    """Loss and gradient against float64, with the same bits whatever was guessed."""
    dtype, reduction = rows.dtype, rows.reduction
    wide = rows.x.double().requires_grad_()
    loss = F.cross_entropy(wide, rows.t, reduction=reduction)
    loss.backward()
    assert wide.grad is not None
    for dy in (1.0, 512.0):
        remembered = cell(dy)
        prepared = rows.forward(remembered)
        close(rows.y[0], loss.detach(), dtype)
        right = rows.settle(prepared.clone(), dy, remembered)
        assert torch.equal(bits(right), bits(prepared))
        assert remembered[1] == 0
        close(right / dy, wide.grad, dtype, 0.1)
        wrong = rows.settle(rows.forward(learning := cell(0.25)), dy, learning)
        assert torch.equal(learning, cell(dy, 1))
        unsure = rows.forward(learning)
        assert not torch.equal(bits(unsure), bits(right))  # left alone
        made = rows.settle(unsure, dy, learning)
        assert torch.equal(learning, cell(dy))
        for other in (wrong, made):
            assert torch.equal(bits(other), bits(right))


@pytest.mark.parametrize("dy", [0.0, -0.0, float("inf"), float("nan")])
def test_gradients_that_are_no_usual_numbers(dy: float) -> None:
    rows = Rows(7, 256, "f16", "mean")
    want = (torch.softmax(rows.x.double(), 1) - F.one_hot(rows.t.clamp(min=0), 256)) * dy
    want[2] = 0.0
    for guess in (1.0, dy):
        got = rows.settle(rows.forward(known := cell(guess)), dy, known)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())
        assert torch.equal(got.signbit() & ~want.isnan(), want.signbit() & ~want.isnan())


@pytest.mark.parametrize("columns", [256, 261])
def test_special_rows(columns: int) -> None:
    """In the groups of a row, and with odd columns at its ends."""
    rows = Rows(7, columns, "f16", "sum")
    rows.x[0, 3], rows.x[1, :], rows.x[3, columns - 1] = float("nan"), float("-inf"), float("inf")
    rows.x[2, 5] = rows.x[2, 0] = float("nan")  # the row that is ignored
    rows.t[4], rows.t[5] = columns, -1
    for guess in (1.0, 2.0):
        dx = rows.settle(rows.forward(known := cell(guess)), 1.0, known)
        assert rows.y.isnan().all()
        assert dx[[0, 1, 3, 4, 5]].isnan().all()
        assert torch.equal(dx[2], torch.zeros_like(dx[2]))
        want = torch.softmax(rows.x[6].double(), 0) - F.one_hot(rows.t[6], columns)
        close(dx[6], want, "f16", 0.1)


def test_the_program_of_a_rows_ends_settles_a_target_there() -> None:
    """Here the program of the last tile runs before that of the first, which has the ends: it must leave the target to it."""
    rows = Rows(4, 4109, "f16", "sum", LANES=256, num_warps=8)
    rows.t = torch.full((4,), 4108)
    want = torch.softmax(rows.x.double(), 1) - F.one_hot(rows.t, 4109)
    close(rows.settle(rows.forward(known := cell(2.0)), 1.0, known), want, "f16", 0.1)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_targets_at_every_place_of_a_row_from_odd_places(dtype: str) -> None:
    """Before, in and behind its groups: the gradient there is that of the target."""
    for first in (0, 40, 69):
        rows = Rows(8, 77, dtype, "sum", LANES=8)
        rows.t = torch.arange(8) + first
        want = torch.softmax(rows.x.double(), 1) - F.one_hot(rows.t, 77)
        for guess in (1.0, 2.0):
            close(rows.settle(rows.forward(known := cell(guess)), 1.0, known), want, dtype, 0.1)


def test_large_logits_cost_no_accuracy() -> None:
    rows = Rows(5, 200, "f32", "sum", LANES=32)
    rows.x += 1e4
    want = torch.softmax(rows.x.double(), 1) - F.one_hot(rows.t.clamp(min=0), 200)
    want[2] = 0.0
    dx = rows.forward(cell(1.0))
    assert (dx.double() - want).abs().max() < 3e-6


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after another, those that return at once, too."""
    if not GPU:
        monkeypatch.setattr(register, "cores", lambda: 1)


def loss_of(x: torch.Tensor, t: torch.Tensor, *flags: Any) -> torch.Tensor:
    with tensorlogic.policy(force="triton.together"):
        return tensorlogic.softmax_cross_entropy(x, t, *flags)


def by(loss: torch.Tensor) -> str:
    assert loss.grad_fn is not None
    return str(getattr(loss.grad_fn, "record").bound.choice.candidate.id)  # noqa: B009


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(6, 256), (2, 3, 256)])
def test_the_public_call_learns_the_scale_of_a_loss(shape: tuple[int, ...], reduction: str) -> None:
    x, t = rand(*shape, dtype="f16").requires_grad_(), torch.arange(6).view(shape[:-1]) * 40
    t.view(-1)[1] = 3
    wide = x.detach().double().requires_grad_()
    rows = [v.movedim(-1, 1) if v.dim() > 2 else v for v in (x, wide)]
    want = F.cross_entropy(rows[1], t, ignore_index=3, reduction=reduction)
    want.backward()
    assert wide.grad is not None
    first = None
    for scale in (1.0, 64.0, 64.0, 64.0, 2.0, 0.5):
        x.grad = None
        loss = loss_of(rows[0], t, 3, 0.0, reduction)
        assert by(loss) == "triton.together"
        close(loss.detach(), want.detach(), "f16")
        (loss * scale).backward()
        assert x.grad is not None
        close(x.grad / scale, wide.grad, "f16", 0.1)
        first = x.grad if first is None else first


def test_backward_twice_and_what_must_raise() -> None:
    x, t = rand(6, 256, dtype="f16").requires_grad_(), torch.arange(6)
    loss = loss_of(x, t)
    (one,) = torch.autograd.grad(loss, x, retain_graph=True)
    kept = one.clone()
    one.add_(1)  # the caller's own
    (two,) = torch.autograd.grad(loss, x, retain_graph=True)
    (half,) = torch.autograd.grad(loss, x, torch.full_like(loss, 0.5))
    assert torch.equal(bits(two), bits(kept))
    assert one.data_ptr() != two.data_ptr() != half.data_ptr()
    close(half * 2, two, "f16", 0.1)
    loss = loss_of(x, t)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(loss, x, create_graph=True)
    y = x * 1
    loss = loss_of(y, t)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_an_incoming_gradient_at_any_address() -> None:
    x, t = rand(6, 256, dtype="f16").requires_grad_(), torch.arange(6)
    (want,) = torch.autograd.grad(loss_of(x, t), x, torch.tensor(8.0).half())
    (got,) = torch.autograd.grad(loss_of(x, t), x, torch.full((3,), 8.0).half()[1])
    assert torch.equal(bits(got), bits(want))


def test_gradients_of_many_vectors_at_once() -> None:
    x, t = rand(6, 256).requires_grad_(), torch.arange(6)
    t[2] = -100
    loss, want = loss_of(x, t), F.cross_entropy(x, t)
    many = torch.tensor([1.0, -2.0, 8.0])
    assert by(loss) == "triton.together"
    got, due = (
        torch.autograd.grad(v, x, many, is_grads_batched=True, retain_graph=True)[0]
        for v in (loss, want)
    )
    close(got, due, "f32", 0.1)
    close(torch.autograd.grad(loss, x)[0], torch.autograd.grad(want, x)[0], "f32", 0.1)


def test_what_it_does_not_serve_is_served_as_before() -> None:
    t = torch.arange(6)
    x = rand(6, 256, dtype="f16").requires_grad_()
    for loss in (loss_of(x, t, -100, 0.1), loss_of(x[:, 1:], t), loss_of(x.t()[:6], t)):
        assert "together" not in str(type(loss.grad_fn).__name__)
        assert getattr(loss.grad_fn, "record", None) is None  # torch.eager
        loss.backward()
    assert loss_of(x, t, -100, 0.0, "none").shape == (6,)
    with tensorlogic.policy(force={"softmax_cross_entropy_together": "chosen.apart", "softmax_cross_entropy": "triton.rows"}):  # fmt: skip
        assert by(tensorlogic.softmax_cross_entropy(x, t)) == "triton.rows"
    with tensorlogic.policy(force="triton.together", deterministic=True):
        assert getattr(tensorlogic.softmax_cross_entropy(x, t).grad_fn, "record", None) is None


@pytest.mark.parametrize("name", ["softmax_cross_entropy", "softmax_cross_entropy_backward"])
def test_a_forced_part_is_not_paired(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "none")  # a GPU's would be heard first
    candidate_loading.ready(DEVICE.type)
    pair = OPS["softmax_cross_entropy_together"]
    likely = replace(pair.candidates["triton.together"], guess=lambda key: 0.1)
    monkeypatch.setitem(pair.candidates, "triton.together", likely)
    x, t = rand(6, 264, dtype="f16").requires_grad_(), torch.arange(6)
    with tensorlogic.policy(tune="off", force={"mul": "torch.eager"}):
        assert by(tensorlogic.softmax_cross_entropy(x, t)) == "triton.together"
    with tensorlogic.policy(tune="off", force={name: "torch.eager"}):
        loss = tensorlogic.softmax_cross_entropy(x, t)
    assert getattr(loss.grad_fn, "record", None) is None or by(loss) != "triton.together"


@pytest.mark.parametrize("id", ["torch.eager", "chosen.apart", "triton.together"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_candidates_of_the_pair_agree(id: str, reduction: str) -> None:
    candidate_loading.ready(DEVICE.type)
    op = OPS["softmax_cross_entropy_together"]
    x, t = rand(2, 3, 256, dtype="f32"), torch.arange(6).view(2, 3)
    args = [torch.tensor(3.0), x, t, -100, 0.0, reduction]
    key = op.key(args, "backward")
    candidate = op.candidates[id]
    assert candidate.unfit(key) is None
    got = candidate.bind(key, candidate.configs(key)[0], x.device)(*args[:3])
    want = op.reference(torch.tensor(3.0).double(), x.double(), *args[2:])
    assert got is not None
    for g, w in zip(got, want, strict=True):
        assert g is not None
        assert g.shape == w.shape
        close(g, w, "f32", 0.1)


@pytest.mark.skipif(
    not GPU or "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ,
    reason="graphs are captured on GPUs, with PyTorch's own allocator",
)
def test_a_captured_step_learns_its_scale_over_replays() -> None:
    x, t = rand(64, 4096, dtype="f16").requires_grad_(), torch.arange(64)
    scale = torch.full((), 256.0)

    def step() -> torch.Tensor:
        (dx,) = torch.autograd.grad(loss_of(x, t) * scale, x)
        return dx

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(4):
        got.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(got), bits(want))
    scale.fill_(2.0)
    graph.replay()
    assert torch.equal(bits(got), bits(step()))


@pytest.mark.slow
def test_configurations_hold_a_row_and_compile_without_spilling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_capability", lambda device: 90)
    cuda, jobs = torch.device("cuda", 0), []
    even = ((32000, "f16"), (50000, "bf16"), (1024, "f16"), (16384, "f32"))
    for columns, dtype in (*even, (30522, "f16"), (50257, "bf16"), (1001, "f16"), (16001, "f32")):
        for config in cross_entropy_fused_backward.together_configs(columns, dtype)[:1]:

            def build(c: int = columns, d: str = dtype, config: Any = config) -> object:
                return cross_entropy_fused_backward.together_launcher(
                    4096, c, d, "mean", -100, config, cuda
                )

            jobs += launch.collect(build, cuda)
    for columns, dtype in (
        (128256, "f16"),
        (50000, "bf16"),
        (50000, "f32"),
        (50257, "f16"),
        (128257, "bf16"),
    ):
        for config in fused_backward_smem.held_configs(columns, dtype):

            def holding(c: int = columns, d: str = dtype, config: Any = config) -> object:
                return fused_backward_smem.held_launcher(
                    4096, c, d, "mean", -100, config, cuda, 132
                )

            jobs += launch.collect(holding, cuda)
    one = {**HELD, "LANES": 1024, "num_warps": 16}
    jobs += launch.collect(  # a row, and an index, that the compiler takes for constants
        lambda: fused_backward_smem.held_launcher(1, 50000, "f16", "sum", 1, one, cuda, 132), cuda
    )
    for columns in (32000, 30522):
        jobs += launch.collect(
            lambda c=columns: cross_entropy_fused_backward.settle_launcher(
                4096, c, "f16", "f16", -100, cuda, 132
            ),
            cuda,
        )
    jobs = list(dict.fromkeys(jobs))
    for job, answer in zip(jobs, resources(jobs), strict=True):
        assert isinstance(answer, launch.Resources), answer
        assert answer.stack == 0, (job, answer)
        assert answer.registers <= 128, (
            job,
            answer,
        )


def test_refusals() -> None:
    assert "smoothing" in str(
        cross_entropy_fused_backward.together_refusal(4096, "f16", "mean", 0.1, 16)
    )
    assert "reduced" in str(
        cross_entropy_fused_backward.together_refusal(4096, "f16", "none", 0.0, 16)
    )
    assert "too short to be cut" in str(
        cross_entropy_fused_backward.together_refusal(31, "f16", "mean", 0.0, 16)
    )
    assert cross_entropy_fused_backward.together_refusal(4097, "f16", "mean", 0.0, 16) is None
    assert "16-byte" in str(
        cross_entropy_fused_backward.together_refusal(4096, "f16", "mean", 0.0, 2)
    )
    assert cross_entropy_fused_backward.together_refusal(32000, "f16", "mean", 0.0, 16) is None
    config = {"LANES": 256, "num_warps": 8}
    with pytest.raises(compile_pool.CompileFailure, match="does not hold"):
        cross_entropy_fused_backward.together_launcher(
            4, 128256, "f16", "mean", -100, config, DEVICE
        )
    held = {**config, "per": 1, "KEPT": 8, "AHEAD": 2}
    with pytest.raises(compile_pool.CompileFailure, match="does not hold"):
        fused_backward_smem.held_launcher(4, 300000, "f16", "mean", -100, held, DEVICE, 1)


@pytest.mark.parametrize("hopper", [False, True])
def test_long_rows_are_held_on_hopper_only(hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate_loading.ready(DEVICE.type)
    monkeypatch.setattr(register, "bulk_copies", lambda: hopper)
    op, t = OPS["softmax_cross_entropy_together"], torch.arange(2)
    candidate = op.candidates["triton.together"]
    for columns, dtype, there in ((128256, "f16", hopper), (300000, "f16", False), (1024, "f16", True), (4096, "f32", True)):  # fmt: skip
        x = rand(2, columns, dtype=dtype)
        key = op.key([torch.tensor(1.0).to(x), x, t, -100, 0.0, "mean"], "backward")
        assert (candidate.unfit(key) is None) == there, candidate.unfit(key)
        if not there:
            assert "no program holds" in str(candidate.unfit(key))
