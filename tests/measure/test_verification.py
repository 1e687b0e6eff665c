"""Sample inputs for measuring, where elements share memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorlogic.core import tolerance
from tensorlogic.core.activations import activate
from tensorlogic.core.op import OPS
from tensorlogic.measure.verification import STRESS_SLACK, Checker
from tensorlogic.ops.common import sample_inputs

CPU = torch.device("cpu")
ROWS = torch.randn(1, 12).expand(5, 12)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("softmax", (ROWS, -1, False)),
        ("softmax_cross_entropy", (ROWS, torch.arange(5), -100, 0.0, "mean", False)),
        ("sum", (ROWS, (1,), False, False)),
        ("linear", (ROWS, torch.randn(3, 12), None, None, None, False)),
        ("matmul", (ROWS, torch.randn(12, 3), "none", False)),
    ],
)
def test_expanded_tensors_are_checked_like_any(name: str, args: tuple[Any, ...]) -> None:
    op = OPS[name]
    key = op.key(args, "inference")
    checker = Checker(op, key, CPU)
    assert checker.check(op.candidates["torch.eager"].bind(key, {}, CPU))


def test_shared_numbers_are_multiplied_once() -> None:
    t = torch.ones(1, 3, 1).expand(4, 3, 2)
    sample_inputs.multiply(t, 5.0)
    assert torch.equal(t, torch.full((4, 3, 2), 5.0))
    number = torch.tensor(2.0)
    sample_inputs.multiply(number, 3.0)
    assert number == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh"])
def test_partial_sums_rounded_to_a_half_are_found_out(dtype: torch.dtype, activation: str) -> None:
    """As PyTorch lets cuBLASLt round them on GPUs, by algorithms that eager need not get."""
    op = OPS["linear"]
    x, weight, bias = (torch.zeros(*size, dtype=dtype) for size in ((19, 48), (66, 48), (66,)))
    key = op.key((x, weight, bias, None, activation, False), "inference")

    def launch(parts: int) -> Any:
        def run(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
            halves = [
                (a.float() @ w.float().mT).to(dtype).float() if parts > 1 else a.float() @ w.float().mT
                for a, w in zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)
            ]  # fmt: skip
            return (activate(sum(halves) + bias.float(), activation).to(dtype),)

        return run

    checker = Checker(op, key, CPU)
    assert checker.check(launch(1))
    assert not checker.check(launch(2))


def _cut(sums: torch.Tensor) -> torch.Tensor:
    """Float64 sums as float32, what does not fit cut off, as tensor cores do."""
    near = sums.float()
    return torch.where(near.double().abs() > sums.abs(), near.nextafter(torch.zeros(())), near)


@pytest.mark.parametrize("k", [1975, 2048, 6000])
@pytest.mark.parametrize("activation", ["none", "gelu_tanh"])
@pytest.mark.parametrize("overflown", [False, True])
def test_sums_in_one_accumulator_are_no_error_where_eager_adds_parts(k: int, activation: str, overflown: bool) -> None:  # fmt: skip
    """Where all but one in 3,000 cancels, the order of float32 sums is all that tells them apart. PyTorch lets cuBLAS add parts
    as halves, and may have nothing but NaN. Eager's product is put in by hand: that of a processor that multiplies halves in
    hardware is less exact."""
    op, dtype = OPS["linear"], torch.float16
    x, weight, bias = (torch.zeros(*size, dtype=dtype) for size in ((30, k), (40, k), (40,)))
    checker = Checker(op, op.key((x, weight, bias, None, activation, False), "inference"), CPU)

    def launch(way: Any) -> Any:
        def run(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
            out = activate(way(x, weight) + bias.float(), activation).to(dtype)
            return (out,)

        return run

    def accumulated(x: Any, weight: Any) -> Any:
        sums = torch.zeros(len(x), len(weight))
        for a, w in zip(x.double().split(16, 1), weight.double().split(16, 1), strict=True):
            sums = _cut(sums + a @ w.mT)
        return sums

    def halved(parts: int) -> Any:
        def run(x: Any, weight: Any) -> Any:
            pairs = zip(x.float().chunk(parts, 1), weight.float().chunk(parts, 1), strict=True)
            return sum((a @ w.mT).to(dtype).float() for a, w in pairs)

        return run

    def exact(x: Any, weight: Any) -> Any:
        return (x.double() @ weight.double().mT).float()

    (made,) = launch(accumulated)(*checker.probes[2].dynamic)
    plain, ref = (outs[0] for outs in checker.expected[2])
    assert plain is not None
    assert ref is not None
    plain.copy_(launch(exact)(*checker.probes[2].dynamic)[0])
    apart = tolerance.relative_error(made, ref) / tolerance.relative_error(plain, ref)
    assert apart > 2 * STRESS_SLACK  # only what the sums are known to lose explains it
    if overflown:
        plain.fill_(float("nan"))
    assert checker.check(launch(accumulated))
    for parts in (16, 64):
        assert not checker.check(launch(halved(parts)))
