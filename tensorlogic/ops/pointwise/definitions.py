"""What the element-wise ops are: meanings, gradients, cases, and PyTorch's ways to compute them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import saved_tensors
from ...core.candidate import Outputs
from ...core.key import Key
from ...core.op import Args, Gradient, Kept, Needs, Op, bits
from ...dispatch import dispatcher
from ..common import canonical_keys, costs, sample_inputs
from . import reference


def _op(
    meaning: Callable[..., tuple[Tensor, ...]],
    uses: tuple[str, ...],
    flops: float,
    direct: Callable[..., Tensor] | None = None,
    numbers: Callable[..., Tensor] | None = None,
) -> Op:
    """An element-wise op; `direct` is PyTorch's own; `uses` says for each operand what its gradient reads: "a", "b" (operands) and "y" (the output)."""

    def kind(flags: SimpleNamespace) -> str:
        return "gelu_tanh" if getattr(flags, "approximate", None) == "tanh" else op.name

    def save(flags: SimpleNamespace, needs: Needs, dynamic: Args, outs: Outputs) -> Kept:
        y = outs[0]
        assert y is not None
        reads = "".join(read for read, n in zip(uses, needs, strict=True) if n)
        operands = [
            t if name in reads else saved_tensors.SavedMeta(t) if n and t.shape != y.shape else None
            for name, t, n in zip("abc", dynamic, needs, strict=False)
        ]
        kept_of = (y if "y" in reads else None,) if len(outs) == 1 else (None, *outs[1:])
        return (*operands, *[None] * (3 - len(operands)), *kept_of)

    def backward(
        flags: SimpleNamespace, needs: Needs, saved: Args, scalars: Args, dy: Tensor
    ) -> Args:
        # forward has marked where its output is above 0: see joint_backward.py
        if len(saved) > 4:
            if dispatcher.ordinary(dy):
                dz = flags.settle(dy, saved[4])
                return tuple([dz if n else None for n in needs])
            saved = (*saved[:3], flags.settle.output(saved[4]))
        wanted = (*needs, False, False)[:3]
        operands = [_met(k, dy) for k in saved[:3]]
        grads = backward_call(dy, *operands, saved[3], kind(flags), bits(wanted))
        pairs = zip(grads, needs, saved, strict=False)
        return tuple([None if not n else g if k is None or g.shape == k.shape else g.reshape(k.shape) for g, n, k in pairs])  # fmt: skip

    op = Op(
        reference=meaning,
        flops=lambda key: flops * max(costs.size(t) for t in key.tensors),
        traffic=costs.pointwise_traffic,
        elementwise=True,
        normal=canonical_keys.one_line,
        landmarks=sample_inputs.round_numbers,
        cases=lambda: _cases(len(op.dynamic), op.name),
        gradient=Gradient(save, backward, light=True),
        numbers=numbers,
        direct=lambda key: direct,
    )
    op.candidate("torch.eager", trusted=True)(meaning)
    return op


# by the number of operands
SHAPES: dict[int, tuple[tuple[tuple[int, ...], ...], ...]] = {
    1: (((7,),), ((33, 65),), ((0, 4),), ((),)),
    2: (((7,),) * 2, ((33, 65),) * 2, ((4, 33), (33,)), ((2, 3, 5), (3, 1)), ((6,), ()), ((0, 4), (4,))),
    3: (((7,),) * 3, ((4, 33), (33,), (33,)), ((5, 8), (), (8,)), ((2, 3, 5), (3, 1), (5,)), ((0, 4), (4,), (4,))),
}  # fmt: skip


def _cases(operands: int, name: str) -> Any:
    for case in SHAPES[operands]:
        values = [torch.randn(s) for s in case]
        if name == "gelu":
            yield (*values, "none")
            yield (*values, "tanh")
        else:
            yield tuple(values)
    if operands == 1 and name != "gelu":
        yield (torch.randn(9, 6).t(),)
    if operands == 2:
        yield torch.randn(9, 6).t(), torch.randn(6, 18)[:, ::2]


def _met(k: saved_tensors.Saved, dy: Tensor) -> Tensor | None:
    """A kept operand as backward takes it: with dy's shape where dimensions of size 1 are all that it lacks, a stand-in where nobody reads
    its values."""
    if k is None or k.shape == dy.shape:
        return None if isinstance(k, saved_tensors.SavedMeta) else k
    alike = prod(k.shape) == dy.numel()
    if isinstance(k, saved_tensors.SavedMeta):
        return None if alike else k.beside(dy)
    return k.expand(dy.shape) if alike else k


def _sum_to(g: Tensor | None, operand: Tensor | None) -> Tensor | None:
    return g if g is None or operand is None else g.sum_to_size(operand.shape)


def pointwise_backward(
    dy: Tensor, a: Tensor | None, b: Tensor | None, c: Tensor | None, y: Tensor | None, kind: str, needs: str
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dy -> da, db, dc, each summed to its operand's shape (an absent operand has dy's); y is the output where a ReLU ends the op."""
    if kind == "sub":  # a sum is changed in sign, not what is summed
        db = _sum_to(dy, b) if needs[1] == "1" else None
        return _sum_to(dy, a) if needs[0] == "1" else None, None if db is None else -db, None
    read, inner = (a, b), reference.RELU.get(kind, kind)
    if inner in ("mul", "div", "affine"):  # what no gradient asked for reads may be a stand-in
        read = a if needs[1] == "1" else None, b if inner == "div" or needs[0] == "1" else None
    grads = reference.backward(dy, *read, y, kind)
    return tuple(
        _sum_to(g, t) if n == "1" else None for g, t, n in zip(grads, (a, b, c), needs, strict=True)
    )


def _consistent(key: Key, values: dict[str, Any]) -> None:
    """The output that forward would have kept, where a candidate may make it again from the operands."""
    if key.flag("kind") == "mul_relu" and all(values[n] is not None for n in "aby"):
        values["y"].copy_(torch.relu(values["a"] * values["b"]))


POINTWISE_BACKWARD = Op(
    normal=canonical_keys.one_line_of_work,
    reference=pointwise_backward,
    elementwise=True,
    landmarks=sample_inputs.round_numbers,
    prepare=_consistent,
    flops=lambda key: 4.0 * costs.size(key.tensors[0]),
    traffic=lambda key: costs.inputs(key) * 1.5,
    outputs=3,
    internal=True,
)
POINTWISE_BACKWARD.candidate("torch.eager", trusted=True)(pointwise_backward)
backward_call = dispatcher.internal(POINTWISE_BACKWARD)


def _add(a: Tensor, b: Tensor, save: bool) -> tuple[Tensor, ...]:
    """a + b."""
    return (a + b,)


def _sub(a: Tensor, b: Tensor, save: bool) -> tuple[Tensor, ...]:
    """a - b."""
    return (a - b,)


def _mul(a: Tensor, b: Tensor, save: bool) -> tuple[Tensor, ...]:
    """a * b."""
    return (a * b,)


def _div(a: Tensor, b: Tensor, save: bool) -> tuple[Tensor, ...]:
    """a / b."""
    return (a / b,)


def _relu(x: Tensor, save: bool) -> tuple[Tensor, ...]:
    """max(x, 0)."""
    return (torch.relu(x),)


def _gelu(x: Tensor, approximate: str, save: bool) -> tuple[Tensor, ...]:
    """x * Phi(x), or its tanh approximation."""
    return (F.gelu(x, approximate=approximate),)


def _silu(x: Tensor, save: bool) -> tuple[Tensor, ...]:
    """x * sigmoid(x)."""
    return (F.silu(x),)


def _add_relu(a: Tensor, b: Tensor, save: bool) -> tuple[Tensor, ...]:
    """max(a + b, 0)."""
    return (torch.relu(a + b),)


def _mul_relu(a: Tensor, b: Tensor, save: bool) -> tuple[Tensor, ...]:
    """max(a * b, 0)."""
    return (torch.relu(a * b),)


def _affine(x: Tensor, scale: Tensor, bias: Tensor, save: bool) -> tuple[Tensor, ...]:
    """x * scale + bias."""
    return (x * scale + bias,)


for _meaning in (_add, _sub, _mul, _div, _relu, _gelu, _silu, _add_relu, _mul_relu, _affine):
    _meaning.__name__ = _meaning.__name__.removeprefix("_")  # the op's name is its reference's

ADD, SUB, MUL, DIV = (
    _op(_add, ("", ""), 1.0, torch.add, operator.add),
    _op(_sub, ("", ""), 1.0, torch.sub, operator.sub),
    _op(_mul, ("b", "a"), 1.0, torch.mul, operator.mul),
    _op(_div, ("b", "ab"), 1.0, torch.div, operator.truediv),
)
RELU, SILU = _op(_relu, ("y",), 1.0, torch.relu), _op(_silu, ("a",), 5.0, torch._C._nn.silu)
GELU = _op(_gelu, ("a",), 10.0)
GELU.direct = lambda key: (
    torch._C._nn.gelu
    if key.flag("approximate") == "none"
    else partial(torch._C._nn.gelu, approximate="tanh")
)
# The kernels of mul_relu's gradient read a and b whichever is asked for: they make the output again rather than read it.
ADD_RELU, MUL_RELU, AFFINE = (
    _op(_add_relu, ("y", "y"), 2.0, lambda a, b: torch.relu(a + b)),
    _op(_mul_relu, ("aby", "aby"), 2.0, lambda a, b: torch.relu(a * b)),
    _op(_affine, ("b", "a", ""), 2.0, lambda x, scale, bias: x * scale + bias),
)
FAMILY = (ADD, SUB, MUL, DIV, RELU, GELU, SILU, ADD_RELU, MUL_RELU, AFFINE)


@ADD_RELU.candidate("torch.inplace", trusted=True)
def add_relu_in_place(a: Tensor, b: Tensor, save: bool) -> tuple[Tensor, ...]:
    """The ReLU in the sum's own memory."""
    return ((a + b).relu_(),)


@MUL_RELU.candidate("torch.inplace", trusted=True)
def mul_relu_in_place(a: Tensor, b: Tensor, save: bool) -> tuple[Tensor, ...]:
    """The ReLU in the product's own memory."""
    return ((a * b).relu_(),)


def _no_addcmul(key: Key) -> str | None:
    present = [t for t in key.tensors if t is not None]
    if len({t.dtype for t in present}) > 1:
        return "dtypes are mixed"
    alike = len({(t.shape, t.stride) for t in present}) == 1
    if alike or all(t.layout == ("contiguous",) for t in present):
        return None
    return "its output would lie in memory as the bias does, not as PyTorch's"


@AFFINE.candidate("torch.addcmul", supports=_no_addcmul, trusted=True)
def affine_addcmul(x: Tensor, scale: Tensor, bias: Tensor, save: bool) -> tuple[Tensor, ...]:
    """PyTorch's own fused form."""
    return (torch.addcmul(bias, x, scale),)
