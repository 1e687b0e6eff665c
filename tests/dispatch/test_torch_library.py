"""Gradients of registered ops: compiled, exported, twice, and what opcheck says of their backward ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.core.key import Key
from tensorlogic.core.op import Op
from tensorlogic.measure.verification import Checker

from ..support.helpers import TABLE, TWICE, Call, close, leaves

CPU = torch.device("cpu")


KEEPS_MORE = (  # their backward reads a second output, which has no gradient
    "matmul_gelu",
    "linear_silu",
    "linear_batch_norm_relu",
    "linear_batch_norm_relu_eval",
    "softmax_cross_entropy",
)


class Function(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fn(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", TWICE)
def test_double_backward_of_the_registered_op_is_right_or_raises(name: str) -> None:
    """Under a function mode the registered op runs; what it cannot differentiate twice it says, never a wrong value."""
    ours, theirs, _ = TABLE[name]

    def second(fn: Call) -> tuple[Tensor, ...]:
        mine = leaves(name)
        with Function():
            out = fn(*mine)
        first = torch.autograd.grad(out.square().sum(), mine, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), mine)

    if name in KEEPS_MORE:
        with pytest.raises(RuntimeError, match="double backward is not available through the reg"):
            second(ours)
    else:
        close(second(ours), second(theirs))


@pytest.mark.parametrize("name", TABLE)
def test_compiled_forward_and_backward(name: str) -> None:
    ours, theirs, _ = TABLE[name]
    torch._dynamo.reset()
    mine, plain = leaves(name), leaves(name)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    out, want = compiled(*mine), theirs(*plain)
    close(out, want)
    dy = torch.randn_like(want)
    close(torch.autograd.grad(out, mine, dy), torch.autograd.grad(want, plain, dy))
    with torch.no_grad(), torch.autocast("cpu"):
        assert compiled(*mine).dtype == theirs(*plain).dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear_residual_relu", "softmax_cross_entropy"])
def test_compiled_by_inductor(name: str) -> None:
    ours, theirs, _ = TABLE[name]
    torch._dynamo.reset()
    mine, plain = leaves(name), leaves(name)
    out, want = torch.compile(lambda *a: ours(*a) * 2)(*mine), theirs(*plain) * 2
    close(out, want)
    close(torch.autograd.grad(out.sum(), mine), torch.autograd.grad(want.sum(), plain))


def test_dynamic_shapes_and_transforms_compile() -> None:
    torch._dynamo.reset()
    fn = torch.compile(tensorlogic.relu, backend="aot_eager", dynamic=True, fullgraph=True)
    for n in (3, 5, 9):
        x = torch.randn(n, 4)
        close(fn(x), torch.relu(x))
    w = torch.randn(5, 4)
    grad = torch.func.grad(lambda t: tensorlogic.linear(t, w, activation="gelu").sum())
    x = torch.randn(2, 4)
    close(torch.compile(grad, backend="aot_eager", fullgraph=True)(x), grad(x))


@pytest.mark.parametrize("name", TABLE)
def test_exported(name: str) -> None:
    ours, theirs, _ = TABLE[name]
    if name == "linear_batch_norm_relu":
        pytest.skip("statistics made inside the function; see the module below")

    class Module(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return ours(*given)

    given = tuple(leaves(name, grad=False))
    program = torch.export.export(Module(), given)
    close(program.module()(*given), theirs(*given))


def test_an_exported_module_updates_its_statistics() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(5)
            self.fc = torch.nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            n = self.norm
            return tensorlogic.linear_batch_norm_relu(
                x, self.fc.weight, self.fc.bias, n.running_mean, n.running_var, n.weight, n.bias,
                training=True,
            )  # fmt: skip

    x, module = torch.randn(8, 6), Module()
    want = torch.relu(torch.nn.BatchNorm1d(5)(module.fc(x)))
    program = torch.export.export(module, (x,)).module()
    close(program(x), want)
    state = dict(program.named_buffers())
    assert any(
        float(b.abs().sum()) not in (0.0, 5.0) for n, b in state.items() if "running_mean" in n
    )


def met(name: str) -> list[tuple[Op, Key]]:
    found: dict[str, tuple[Op, Key]] = {}

    def seen(op: Op, key: Key, device: torch.device) -> None:
        found.setdefault(key.text, (op, key))

    with policy.use(replace(policy.current(), observer=seen, entries={})):
        out = TABLE[name][0](*leaves(name))
        out.square().sum().backward()
    return list(found.values())


@pytest.mark.parametrize("name", TABLE)
def test_registered_backward_ops_pass_opcheck(name: str) -> None:
    checked = 0
    for op, key in met(name):
        if not op.internal:
            continue
        args = op.full(key, Checker(op, key, CPU).sets[0].dynamic)
        torch.library.opcheck(
            getattr(torch.ops.tensorlogic, op.name).default,
            tuple(args),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
        )
        checked += 1
    assert checked == (0 if name in ("sum", "mean") else 1)


def test_a_registered_op_without_a_formula_says_so_in_backward() -> None:
    """PyTorch alone would warn and give gradients that lack this part."""
    op, key = next((op, key) for op, key in met("relu") if op.internal)
    args = op.full(key, Checker(op, key, CPU).sets[0].dynamic)
    leaf = next(a for a in args if isinstance(a, Tensor)).clone().requires_grad_()
    given = [leaf if isinstance(a, Tensor) else a for a in args]
    out = getattr(torch.ops.tensorlogic, op.name)(*given)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        (out if isinstance(out, Tensor) else out[0]).sum().backward()
