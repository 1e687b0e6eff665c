"""Gradients of element-wise ops with operands that rows or columns share against float64: on a GPU, else in the interpreter."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton")

import tensorlogic as tl
from tensorlogic.core.op import OPS, bits
from tensorlogic.dispatch import bound_call, candidate_loading
from tensorlogic.kernels.elementwise import broadcast_grad as elementwise_broadcast_grad
from tensorlogic.kernels.elementwise import column_passes as elementwise_column_passes
from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch
from tensorlogic.ops.pointwise import definitions
from tensorlogic.ops.pointwise.definitions import POINTWISE_BACKWARD, pointwise_backward
from tensorlogic.ops.pointwise.triton_broadcast_grad import READS

from ...support.compiled import made
from ...support.triton import DEVICE
from ...support.triton import close_to_largest as close
from ...support.triton import randn as rand

ID = "triton.shared"
MEANINGS: dict[str, Callable[..., Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "affine": lambda a, b, c: a * b + c,
    "add_relu": lambda a, b: torch.relu(a + b),
    "mul_relu": lambda a, b: torch.relu(a * b),
}
SMALL = [{"BLOCK_R": 8, "BLOCK_C": 16, "parts": parts, "num_warps": 4} for parts in (1, 3)]
FULL, ROW, COLUMN = (7, 37), (37,), (7, 1)
CASES = [
    *((kind, (FULL, ROW)) for kind in MEANINGS if kind != "affine"),
    *((kind, (ROW, FULL)) for kind in ("sub", "div", "mul_relu")),
    ("affine", (FULL, ROW, ROW)),
    ("affine", (ROW, FULL, ROW)),
    ("affine", (FULL, FULL, ROW)),
    ("mul", ((3, 4, 5), (1, 4, 5))),
    ("add", ((50, 129), (1, 129))),
    *((kind, (FULL, COLUMN)) for kind in MEANINGS if kind != "affine"),
    *((kind, (FULL, ())) for kind in ("sub", "div", "mul_relu")),
    *((kind, (COLUMN, FULL)) for kind in ("div", "add_relu")),
    ("affine", (FULL, COLUMN, COLUMN)),
    ("affine", ((3, 50), (), ())),
    ("mul", ((3, 4, 5), (3, 4, 1))),
    ("mul", ((3, 4, 5), (3, 1, 1))),
    ("add", ((50, 129), (50, 1))),
]


def operands(kind: str, shapes: tuple[tuple[int, ...], ...], dtype: str) -> list[Tensor]:
    """Values of `shapes`, divisors and factors away from 0, so that rounding decides no ReLU."""
    found = [rand(*shape, dtype=dtype) for shape in shapes]
    if kind in ("div", "mul_relu"):
        found[1] = found[1].sign() * (found[1].abs() + 0.5)
    return found


def wanted(kind: str, args: list[Tensor], dy: Tensor, needs: tuple[bool, ...]) -> list[Tensor | None]:  # fmt: skip
    leaves = [a.double().requires_grad_() for a in args]
    grads = torch.autograd.grad(MEANINGS[kind](*leaves), leaves, dy.double())
    return [g if n else None for g, n in zip(grads, needs, strict=False)]


def bound(config: dict[str, Any], *args: Any) -> Callable[..., Any]:
    """The candidate's launcher for these arguments of the backward op."""
    candidate_loading.ready("cuda" if DEVICE.type == "cuda" else "cpu")
    key, candidate = POINTWISE_BACKWARD.key(args, "backward"), POINTWISE_BACKWARD.candidates[ID]
    assert candidate.unfit(key) is None, candidate.unfit(key)
    return candidate.bind(key, config, DEVICE)


@pytest.mark.parametrize("config", SMALL, ids=["alone", "shared"])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize(("kind", "shapes"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_gradients(
    kind: str, shapes: tuple[tuple[int, ...], ...], dtype: str, config: dict[str, Any]
) -> None:
    args = operands(kind, shapes, dtype)
    y = MEANINGS[kind](*args)
    dy = rand(*y.shape, dtype=dtype)
    for needs in ((True, True, len(args) > 2), *([(False, True, False)] if args[1].shape != y.shape else [])):  # fmt: skip
        given = (dy, *args, *[None] * (3 - len(args)), y if "relu" in kind else None)
        launch = bound(config, *given, kind, bits(needs))
        for _ in range(2):  # the second run finds the counters as the first one left them
            grads = launch(*given)
            for got, want in zip(grads, wanted(kind, args, dy, needs), strict=False):
                assert (got is None) == (want is None)
                if got is not None and want is not None:
                    assert got.shape == want.shape
                    close(got, want, dtype)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("shared", [(37,), (9, 1), ()], ids=str)
def test_any_even_layout(shared: tuple[int, ...], dtype: str) -> None:
    """Rows with gaps beside a gradient that is one number, every other column, and turned ones."""
    b = rand(*shared, dtype=dtype)
    one = torch.full((), 0.75, device=DEVICE).to(b.dtype).expand(9, 37)
    for a, dy in (
        (rand(9, 48, dtype=dtype)[:, :37], one),
        (rand(9, 74, dtype=dtype)[:, ::2], rand(9, 37, dtype=dtype)),
        (rand(9, 37, dtype=dtype), rand(37, 9, dtype=dtype).t()),
        (rand(37, 9, dtype=dtype).t(), rand(37, 9, dtype=dtype).t()),
        (rand(37, 18, dtype=dtype)[:, ::2].t(), rand(37, 9, dtype=dtype).t()),
    ):
        if not shared and a.stride() != dy.stride():
            continue  # one number is met by even elements only
        given = (dy, a, b, None, None)
        grads = bound(SMALL[1], *given, "mul", "110")(*given)
        for got, want in zip(grads, wanted("mul", [a, b], dy, (True, True)), strict=False):
            assert got is not None
            assert want is not None
            assert got.shape == want.shape
            close(got, want, dtype)
        if any(dy.stride()):
            assert grads[0].stride() == (dy * b).stride()


def test_what_a_row_holds_that_is_not_finite_stays_in_its_column() -> None:
    a, b = rand(5, 16), rand(16)
    a[2, 3], b[7] = float("inf"), float("nan")
    dy = rand(5, 16)
    given = (dy, a, b, None, None)
    da, db, _ = bound(SMALL[0], *given, "mul", "110")(*given)
    assert db[3].isinf()
    assert db[torch.arange(16, device=DEVICE) != 3].isfinite().all()
    assert da[:, 7].isnan().all()
    assert da[:, torch.arange(16, device=DEVICE) != 7].isfinite().all()


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (((7, 37), (7, 37)), "is shared"),
        (((2, 7, 37), (2, 1, 37)), "is shared"),
        (((2, 7, 37), (7, 1)), "is shared"),
    ],
)
def test_what_is_left_to_others(shapes: tuple[tuple[int, ...], ...], reason: str) -> None:
    a, b = (rand(*s) for s in shapes)
    dy = rand(*torch.broadcast_shapes(a.shape, b.shape))
    candidate_loading.ready("cpu")
    key = POINTWISE_BACKWARD.key((dy, a, b, None, None, "mul", "110"), "backward")
    assert reason in str(POINTWISE_BACKWARD.candidates[ID].unfit(key))


@pytest.mark.parametrize("kind", list(MEANINGS))
@pytest.mark.parametrize(
    "shapes", [((7, 37), (37,)), ((7, 37), (7, 1)), ((1, 37), (37,)), ((4, 1, 5), (3, 1)), ((6,), ())]
)  # fmt: skip
@pytest.mark.parametrize("which", [(0, 1), (1,), (0,)], ids=str)
def test_public_gradients_are_pytorchs(
    kind: str, shapes: tuple[tuple[int, ...], ...], which: tuple[int, ...]
) -> None:
    more = (shapes[1],) if kind == "affine" else ()
    args = operands(kind, (*shapes, *more), "f32")
    leaves = [args[i].requires_grad_() for i in which]
    ours, theirs = getattr(tl, kind)(*args), MEANINGS[kind](*args)
    dy = torch.randn_like(theirs)
    for got, want in zip(
        torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(theirs, leaves, dy), strict=True
    ):
        assert got.shape == want.shape
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def listed(rows: int, columns: int, along: bool) -> list[dict[str, Any]]:
    return elementwise_broadcast_grad.shared_gradient_configs(rows, columns, along, 132)


@pytest.mark.parametrize(
    ("rows", "columns", "along"),
    [
        *((r, c, False) for r in (1, 5, 16, 25, 33, 110, 128) for c in (8, 256, 869, 8192, 50257)),
        *((r, c, True) for r in (1, 16, 174, 500) for c in (5, 400, 2061, 4096, 8192)),
    ],
)
def test_what_one_program_can_hold_is_not_left_in_parts(
    rows: int, columns: int, along: bool
) -> None:
    configs = listed(rows, columns, along)
    assert 1 < len(configs) <= 8
    assert [c for i, c in enumerate(configs) if c in configs[:i]] == []
    assert {c["parts"] for c in configs} == {1}
    for config in configs:
        assert elementwise_broadcast_grad.shared_gradient_space(columns, along, 2, config) == (0, 0)
        elements = config["BLOCK_R"] * config["BLOCK_C"]
        assert elements <= 32 * config["num_warps"] * elementwise_broadcast_grad.ACCESSES


@pytest.mark.parametrize(
    ("rows", "columns", "programs"),
    [(33, 2189, 132), (25, 869, 50), (110, 1000, 60), (16, 256, 8), (5, 20000, 132)],
)
def test_few_rows_are_asked_for_at_once_by_many_programs(
    rows: int, columns: int, programs: int
) -> None:
    first, *others = listed(rows, columns, False)
    assert first["BLOCK_R"] >= rows
    assert programs <= -(-columns // first["BLOCK_C"]) <= 264
    assert first["BLOCK_R"] * first["BLOCK_C"] <= 8 * 32 * first["num_warps"]
    assert others


def test_few_wide_rows_are_taken_in_steps_that_waste_little() -> None:
    for rows, columns in ((72, 50257), (40, 100000)):
        first = listed(rows, columns, False)[0]
        steps = -(-rows // first["BLOCK_R"]) * first["BLOCK_R"]
        assert steps <= 1.25 * rows
        assert first["BLOCK_C"] >= 128
        assert -(-columns // first["BLOCK_C"]) >= 264


def test_rows_are_held_whole() -> None:
    """One access to what is summed, and the first guess where parts would be waited for."""
    for rows, columns in ((174, 2061), (16, 400), (1, 4096)):
        first = listed(rows, columns, True)[0]
        assert first["BLOCK_C"] >= columns
    assert listed(4096, 1280, True)[0] == {"BLOCK_R": 2, "BLOCK_C": 1024, "parts": 1, "num_warps": 4}  # fmt: skip
    assert listed(1, 1 << 20, True)[0]["parts"] > 1


def test_some_hundred_rows_may_be_one_programs() -> None:
    assert [c["parts"] for c in listed(256, 256, False)[:2]] == [1, 1]
    for rows, columns in ((256, 50257), (4096, 256)):
        assert listed(rows, columns, False) == [
            *elementwise_column_passes.backward_configs(rows, columns, 132)
        ]


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("div", ((33, 219), (219,))),
        ("mul_relu", ((25, 139), (139,))),
        ("affine", ((110, 40), (40,), (40,))),
        ("div", ((7, 2061), (7, 1))),
        ("mul", ((3, 700), ())),
    ],
    ids=str,
)
def test_gradients_by_each_configuration(
    kind: str, shapes: tuple[tuple[int, ...], ...], dtype: str
) -> None:
    args = operands(kind, shapes, dtype)
    y = MEANINGS[kind](*args)
    dy = rand(*y.shape, dtype=dtype)
    given = (dy, *args, *[None] * (3 - len(args)), y if "relu" in kind else None)
    needs = (True, True, len(args) > 2)
    want = wanted(kind, args, dy, needs)
    candidate_loading.ready("cuda" if DEVICE.type == "cuda" else "cpu")
    key = POINTWISE_BACKWARD.key((*given, kind, bits(needs)), "backward")
    for config in POINTWISE_BACKWARD.candidates[ID].configs(key):
        assert config["parts"] == 1
        grads = bound(dict(config), *given, kind, bits(needs))(*given)
        for got, expected in zip(grads, want, strict=False):
            assert (got is None) == (expected is None)
            if got is not None and expected is not None:
                close(got, expected, dtype)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_wide_rows_of_every_other_element(dtype: str) -> None:
    """Steps of rows that do not divide them, beside columns that tiles do not divide."""
    a, b, dy = rand(40, 600, dtype=dtype)[:, ::2], rand(300, dtype=dtype), rand(40, 300, dtype=dtype)  # fmt: skip
    given = (dy, a, b, None, None)
    for config in listed(40, 100000, False):
        assert config["BLOCK_R"] < 40
        grads = bound(config, *given, "mul", "110")(*given)
        for got, want in zip(grads, wanted("mul", [a, b], dy, (True, True)), strict=False):
            assert got is not None
            assert want is not None
            close(got, want, dtype)


@pytest.mark.slow
def test_configurations_compile_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: dict[triton_runtime_launch.CompileJob, None] = {}

    def record(kernel: Any, *, device: torch.device, **options: Any) -> Any:
        for sm in (80, 90):
            jobs[triton_runtime_launch.compile_job(kernel, sm=sm, **options)] = None
        return lambda *args: True

    monkeypatch.setattr(elementwise_broadcast_grad, "prepare", record)
    whole = {"dy": "full", "y": "none", "da": "full", "db": "sum", "dc": "none"}
    for along, shared in ((False, "row"), (True, "column")):
        for op, modes in (
            ("affine", {"a": "full", "b": shared, "dc": "sum"}),
            ("div", {"a": "full", "b": shared}),
            ("mul_relu", {"a": "full", "b": shared}),
            ("add_relu", {"a": "none", "b": "none", "y": "full"}),
        ):
            for config in elementwise_broadcast_grad.shared_gradient_configs(4096, 1280, along, 132)[: 5 if op == "affine" else 1]:  # fmt: skip
                elementwise_broadcast_grad.shared_gradient_launcher(op, "f16", 4096, 1280, along, {**whole, **modes}, ((1280, 1), (1280, 1)), config, torch.device("cuda", 0), 16)  # fmt: skip
    for rows, columns, along in ((33, 2189, False), (110, 1001, False), (72, 50257, False), (256, 333, False), (174, 2061, True)):  # fmt: skip
        met = {**whole, "a": "full", "b": "column" if along else "row"}
        for config in listed(rows, columns, along)[:2]:
            elementwise_broadcast_grad.shared_gradient_launcher("div", "f16", rows, columns, along, met, ((2 * columns, 2), (columns, 1)), config, torch.device("cuda", 0), 16)  # fmt: skip
    for job, answer in zip(jobs, made("resources", list(jobs)), strict=True):
        assert not isinstance(answer, str), answer
        assert not answer.stack, f"{job.constexprs} sm_{job.sm} spills"


@pytest.mark.parametrize(("kind", "shapes"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_the_reference_reads_what_was_kept(kind: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """What no asked gradient reads may be a stand-in: nobody wrote it."""
    args = operands(kind, shapes, "f32")
    y = MEANINGS[kind](*args)
    dy, count = rand(*y.shape, dtype="f32"), len(args)
    for needs in itertools.product((False, True), repeat=count):
        if not any(needs):
            continue
        reads = "".join(r for r, n in zip(READS[kind], needs, strict=False) if n)
        given = [a if n in reads else torch.full_like(a, float("nan")) for n, a in zip("abc", args, strict=False)]  # fmt: skip
        asked = bits((*needs, False)[:3])
        grads = pointwise_backward(dy, *given, *[None] * (3 - count), y if "relu" in kind else None, kind, asked)  # fmt: skip
        for got, want in zip(grads, wanted(kind, args, dy, needs), strict=False):
            assert (got is None) == (want is None)
            if got is not None and want is not None:
                assert got.shape == want.shape
                close(got, want, "f32")


def test_sizes_of_one_are_no_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operand that lacks dimensions of size 1 alone comes to the backward op with what comes in's shape, and leaves with its own."""
    met: list[Tensor] = []
    served = definitions.backward_call
    monkeypatch.setattr(definitions, "backward_call", lambda *a: met.extend(a[:3]) or served(*a))
    monkeypatch.setattr(bound_call, "FOLLOWED", (DEVICE.type,))
    monkeypatch.setattr(bound_call, "HEAVY_BYTES", -1.0)
    a, b = rand(1, 37, dtype="f32").requires_grad_(), rand(37, dtype="f32").requires_grad_()
    dy = rand(1, 37, dtype="f32")
    got = torch.autograd.grad(tl.mul(a, b), (a, b), dy)
    assert [t.shape for t in met] == [dy.shape] * 3
    for g, want in zip(got, torch.autograd.grad(a * b, (a, b), dy), strict=True):
        assert g.shape == want.shape
        torch.testing.assert_close(g, want)


def test_what_backward_reads_again_is_not_asked_to_leave_the_cache() -> None:
    candidate_loading.ready("cpu")
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    for name in ("mul", "affine", "silu"):
        op, args = OPS[name], (a, b, a)[: {"mul": 2, "affine": 3, "silu": 1}[name]]
        asked = op.candidates["triton.flat"].configs
        assert any(c["stream"] for c in asked(op.key((*args, False), "inference")))
        assert not any(c["stream"] for c in asked(op.key((*args, True), "forward")))
