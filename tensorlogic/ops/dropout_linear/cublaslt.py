"""dropout_linear by a pass that draws the mask and a product; backward draws it again, in passes around two products."""

from __future__ import annotations

import sys
from functools import partial
from math import prod
from typing import Any

import torch

from ...core.key import Key
from ...kernels import register
from ...kernels.elementwise import dropout
from ...kernels.gemm import backward_steps, bind, padded
from ...kernels.gemm.bind import Kernel, Plan, Product, Start
from ...kernels.gemm.spec import GemmSpec, Operand
from ...kernels.reduce import contiguous
from . import DROPOUT_LINEAR, DROPOUT_LINEAR_BACKWARD


def _dropped(given: str, name: str, dtype: str, shape: tuple[int, ...], seeded: bool) -> Kernel:
    """`name` = dropout of contiguous `given`."""

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return dropout.dropout_launcher(dtype, prod(shape), seeded, config, device, align)

    numbers = ("p", "seed", "offset") if seeded else ("p",)
    state = () if seeded else ("state",)
    return Kernel(
        (given, *state, name, *numbers), {name: (name, shape, dtype)}, dropout.CONFIGS, build
    )


def describe(key: Key, engine: str = "cublaslt") -> Plan | str:
    """A dropout pass over contiguous x, then one product."""
    x, weight, bias, state = key.tensors
    assert x is not None and weight is not None
    rows = backward_steps.flat(x, "x")
    if isinstance(rows, str) or 0 in weight.shape:
        return rows if isinstance(rows, str) else "weight is empty"
    m, (n, k), dtype = prod(x.shape[:-1]), weight.shape, x.dtype
    w = Operand(dtype, weight.stride[1], weight.stride[0])
    spec = GemmSpec(m, n, k, rows, w, Operand(dtype, n, 1), bias=bias.dtype if bias else None)
    made = {"y": ("y", (*x.shape[:-1], n), dtype)}
    product = Product(spec, {"x": "dropped", "w": "weight", "bias": "bias"}, made, engine)
    first = _dropped("x", "dropped", dtype, x.shape, state is None)
    return Plan((first, product), ("y", "None") if key.flag("save") else ("y",))


def describe_backward(key: Key, engine: str = "cublaslt") -> Plan | str:
    """dx = dropout(dy · weight), dweight = dyᵀ · dropout(x), dbias = column sums of dy."""
    dy, x, weight, mask, state = key.tensors
    assert dy is not None and x is not None and weight is not None
    needs = key.flag("needs")
    if mask is not None:
        return "forward kept a mask of PyTorch's"
    found = backward_steps.matrices(("dy", dy), ("x", x), ("weight", weight))
    if isinstance(found, str):
        return found
    if not (register.is_contiguous(x) and register.is_contiguous(dy)):
        return "x or dy is not contiguous"
    (rows, _, _), dtype, (n, k), seeded = found, dy.dtype, weight.shape, state is None
    m, steps = prod(dy.shape[:-1]), list[Kernel | Product]()
    if needs[0] == "1":
        steps.append(
            backward_steps.input_gradient(engine, "dy", rows, weight, m, x.shape, "dropped_dx")
        )
        steps.append(_dropped("dropped_dx", "dx", dtype, x.shape, seeded))
    if needs[1] == "1":
        steps.append(_dropped("x", "dropped", dtype, x.shape, seeded))
        other = Operand(dtype, k, 1)
        steps.append(backward_steps.weight_gradient(engine, "dy", rows, "dropped", other, m, n, k))
    if needs[2] == "1":
        steps.append(backward_steps.column_sums("dy", dtype, m, n))
    names = ("dx", "dw", "db")
    returns = tuple(a if need == "1" else "None" for a, need in zip(names, needs, strict=True))
    return Plan(tuple(steps), returns) if steps else "nothing to compute"


_SOURCES = (dropout, contiguous, backward_steps, sys.modules[__name__])
for _engine in ("triton", "cublaslt"):
    bind.candidate(
        DROPOUT_LINEAR, f"{_engine}.after_dropout", partial(describe, engine=_engine), _SOURCES
    )
    bind.candidate(
        DROPOUT_LINEAR_BACKWARD,
        f"{_engine}.after_dropout",
        partial(describe_backward, engine=_engine),
        _SOURCES,
    )
    for _op, _describe in (
        (DROPOUT_LINEAR, describe),
        (DROPOUT_LINEAR_BACKWARD, describe_backward),
    ):
        padded.candidate(_op, f"{_engine}.padded", partial(_describe, engine=_engine), _SOURCES)
