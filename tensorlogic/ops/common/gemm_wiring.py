"""From an op's key to the matrix product family: operands from tensor specs, and launchers that allocate and start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch

from ...numerics import DTYPES
from ...op import Config, Launcher, Op
from ...plans import Key, TensorSpec
from . import wiring
from .gemm import (
    GemmSpec,
    Operand,
    gemm_arguments,
    gemm_configs,
    gemm_launcher,
    gemm_refusal,
    gemm_workspace,
)


@dataclass(frozen=True)
class Product:
    """One launch of the family: which product, what is passed (kernel argument -> expression over the op's parameters and
    earlier outputs), and what it allocates (kernel argument -> name, shape and dtype)."""

    spec: GemmSpec
    given: Mapping[str, str]
    made: Mapping[str, tuple[str, tuple[int, ...], str]]


@dataclass(frozen=True)
class Plan:
    """The products that make up an op, in order, and the expressions of its outputs."""

    products: tuple[Product, ...]
    returns: tuple[str, ...]




def matrix(spec: TensorSpec) -> Operand | None:
    """A tensor [..., rows, columns] as one matrix of prod(...) * rows rows; None when its rows are not evenly spaced."""
    if not spec.shape:
        return None
    dims = [(n, s) for n, s in zip(spec.shape[:-1], spec.stride[:-1], strict=True) if n != 1]
    for (_, outer), (n, inner) in itertools.pairwise(dims):
        if outer != n * inner:
            return None
    return Operand(spec.dtype, dims[-1][1] if dims else spec.shape[-1], spec.stride[-1])


def launcher(op: Op, plan: Plan, configs: Sequence[Config], device: torch.device) -> Launcher:
    """Allocate the outputs and workspaces, start the kernels, return the outputs: one generated frame."""
    scope: dict[str, Any] = {"empty": wiring.empty(device), "counters": wiring.counters, "device": device, "f32": torch.float32}
    body = []
    for i, (product, config) in enumerate(zip(plan.products, configs, strict=True)):
        scope[f"start{i}"] = gemm_launcher(product.spec, config, device)
        space, count = gemm_workspace(product.spec, config)
        for name, shape, dtype in product.made.values():
            scope |= {f"{name}_shape": shape, f"{name}_stride": wiring.contiguous(shape), f"{name}_dtype": DTYPES[dtype]}
            body.append(f"{name} = empty({name}_shape, {name}_stride, {name}_dtype)")
        if count:
            body += [f"space = empty(({space},), (1,), f32)", f"counter = counters(device, {count})"]
        names = {**product.given, **{a: made[0] for a, made in product.made.items()}, "space": "space", "counter": "counter"}
        call = ", ".join(names[a] for a in gemm_arguments(product.spec, config))
        body += [f"if not start{i}({call}):", "    return None"]
    body.append(f"return ({', '.join(plan.returns)},)")
    source = f"def launch({', '.join(p.name for p in op.dynamic)}):\n" + "".join(f"    {line}\n" for line in body)
    exec(compile(source, f"<tensorlogic {op.name} gemm>", "exec"), scope)
    return cast(Launcher, scope["launch"])


def candidate(op: Op, id: str, describe: Callable[[Key], Plan | str], sources: tuple[Any, ...]) -> None:
    """Register a candidate of the family for `op`; `describe(key)` says which products the key is, or why it is none."""
    from . import gemm, triton_gemm, triton_math

    def checked(key: Key) -> Plan | str:
        found = describe(key)
        if isinstance(found, str):
            return found
        align = wiring.weakest(key)
        plan = Plan(tuple(replace(p, spec=replace(p.spec, align=align)) for p in found.products), found.returns)
        return next((reason for p in plan.products if (reason := gemm_refusal(p.spec))), plan)

    def configs(plan: Plan) -> list[dict[str, Any]]:
        """The i-th best guess of every product together; a product with fewer guesses repeats its best."""
        lists = []
        for p in plan.products:
            size = DTYPES[p.spec.x.dtype].itemsize
            lists.append(gemm_configs(p.spec.m * p.spec.batch, p.spec.n, p.spec.k, size, wiring.cores()))
        return [{"products": [c[i] if i < len(c) else c[0] for c in lists]} for i in range(max(map(len, lists)))]

    def build(plan: Plan, config: Config, device: torch.device) -> Launcher:
        return launcher(op, plan, config["products"], device)

    wiring.described(op, id, checked, configs, build, (gemm, triton_gemm, triton_math, *sources))


def product_of(x: TensorSpec, weight: TensorSpec) -> tuple[int, int, int, Operand, Operand] | str:
    """(M, N, K, x, w) of x [..., K] with weight [N, K], or why it is no plain product."""
    rows = matrix(x)
    if rows is None:
        return "x's rows are not evenly spaced"
    m, (n, k) = prod(x.shape[:-1]), weight.shape
    if 0 in (m, n, k):
        return "empty"
    return m, n, k, rows, Operand(weight.dtype, weight.stride[1], weight.stride[0])
