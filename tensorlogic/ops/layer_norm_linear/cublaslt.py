"""layer_norm_linear by a Triton layer norm and a product; backward by two products around the norm's own kernels."""

from __future__ import annotations

import sys
from functools import partial
from math import prod
from typing import Any

import torch

from ...core.key import Key, TensorSpec
from ...kernels import register
from ...kernels.gemm import backward_steps, bind, padded
from ...kernels.gemm.bind import Kernel, Plan, Product, Start
from ...kernels.gemm.spec import GemmSpec, Operand
from ...kernels.norm import layer_norm
from ...kernels.reduce import contiguous
from . import LAYER_NORM_LINEAR, LAYER_NORM_LINEAR_BACKWARD, again, saves


def _normalised(
    x: TensorSpec,
    gamma: TensorSpec | None,
    beta: TensorSpec | None,
    eps: float,
    save: bool,
    names: tuple[str, str, str] = ("normal", "mean", "rstd"),
) -> Kernel:
    """layer_norm(x), and with `save` mean and 1/std of its rows, under `names`."""
    dtype, columns = x.dtype, x.shape[-1]
    rows = prod(x.shape[:-1])

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return layer_norm.layer_norm_launcher(
            rows, columns, (dtype, dtype, dtype), config, device,
            has_gamma=gamma is not None, has_beta=beta is not None, save=save, align=align,
        )  # fmt: skip

    normal, mean, rstd = names
    made = {normal: (normal, x.shape, dtype)}
    if save:
        made |= {mean: (mean, (rows,), "f32"), rstd: (rstd, (rows,), "f32")}
    given = (
        "x", "gamma" if gamma else "x", "beta" if beta else "x", normal,
        mean if save else "x", rstd if save else "x", repr(eps),
    )  # fmt: skip
    return Kernel(
        given,
        made,
        tuple(layer_norm.layer_norm_configs(columns, dtype)[: backward_steps.PASSES]),
        build,
    )


def _parameters(*given: TensorSpec | None) -> str | None:
    for t in given:
        if t is not None and prod(t.shape) != 1 and t.stride[0] != 1:
            return "gamma or beta is strided"
    return None


def describe(key: Key, engine: str = "cublaslt") -> Plan | str:
    """A pass that normalises contiguous rows, then one product."""
    x, gamma, beta, weight, bias = key.tensors
    assert x is not None and weight is not None
    rows = backward_steps.flat(x, "x")
    reason = register.one_dtype(key) or _parameters(gamma, beta)
    if reason is not None or isinstance(rows, str) or 0 in weight.shape:
        return reason or (rows if isinstance(rows, str) else "weight is empty")
    m, (n, k), dtype = prod(x.shape[:-1]), weight.shape, x.dtype
    w = Operand(dtype, weight.stride[1], weight.stride[0])
    spec = GemmSpec(m, n, k, rows, w, Operand(dtype, n, 1), bias=bias.dtype if bias else None)
    made = {"y": ("y", (*x.shape[:-1], n), dtype)}
    product = Product(spec, {"x": "normal", "w": "weight", "bias": "bias"}, made, engine)
    save = saves(key)
    returns = ("y", "normal", "mean", "rstd") if save else ("y",)
    return Plan((_normalised(x, gamma, beta, key.flag("eps"), save), product), returns)


def _norm_backward(
    x: TensorSpec, gamma: TensorSpec | None, mean: str, rstd: str, need_dx: bool, need_params: bool
) -> Kernel:
    """dx [..., K] and dparams [2, K] (dgamma, dbeta) of the layer norm, from the gradient of its output."""
    dtype, columns = x.dtype, x.shape[-1]
    rows = prod(x.shape[:-1])

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return layer_norm.layer_norm_backward_launcher(
            rows, columns, (dtype, dtype, dtype), config, device,
            has_gamma=gamma is not None, need_dx=need_dx, need_params=need_params, align=align,
        )  # fmt: skip

    made = {"dx": ("dx", x.shape, dtype)} if need_dx else {}
    if need_params:
        made |= {"dparams": ("dparams", (2, columns), dtype)}
    outs = (
        "dx" if need_dx else "x",
        "dparams" if need_params else "x",
        "space" if need_params else "x",
    )
    configs = layer_norm.layer_norm_backward_configs(rows, columns, dtype, register.cores())
    return Kernel(
        ("x", "dnormal", "gamma" if gamma else "x", mean, rstd, *outs), made, tuple(configs[: backward_steps.PASSES]), build,
        space=lambda config: (2 * config["parts"] * columns if need_params else 0, 0),
    )  # fmt: skip


def describe_backward(key: Key, engine: str = "cublaslt") -> Plan | str:
    """The norm again with its statistics unless forward kept them, dnormal = dy · weight, dweight = dyᵀ · normal with dbias,
    then the norm's backward."""
    dy, x, gamma, beta, weight, normal, mean, rstd = key.tensors
    assert dy is not None and x is not None and weight is not None
    needs = key.flag("needs")
    found = backward_steps.matrices(("dy", dy), ("weight", weight))
    inner = backward_steps.flat(x, "x")
    kept = [t for t in (normal, mean, rstd) if t is not None]
    reason = register.one_dtype(key, "dy", "x", "gamma", "beta", "weight", "normal")
    reason = reason or _parameters(gamma, beta)
    if any(t is not None and t.dtype != "f32" for t in (mean, rstd)):
        return "the kernels take statistics in f32"
    if not all(map(register.is_contiguous, kept)):
        return "what forward kept is not contiguous"
    if reason is not None or isinstance(found, str) or isinstance(inner, str):
        return reason or (found if isinstance(found, str) else str(inner))
    (rows, _), (n, k) = found, weight.shape
    m, through = prod(dy.shape[:-1]), "1" in needs[:3]
    steps: list[Kernel | Product] = []
    returns = ["None"] * 5
    names = ("normal", "mean", "rstd")
    if again(normal, mean, needs):
        names = ("normal_again", "mean_again", "rstd_again")
        steps.append(_normalised(x, gamma, beta, key.flag("eps"), True, names))
    if needs[3] == "1":
        steps.append(backward_steps.weight_gradient(engine, "dy", rows, names[0], inner, m, n, k))
        returns[3] = "dw"
    if needs[4] == "1":
        if not register.is_contiguous(dy):
            return "dy is not contiguous"
        steps.append(backward_steps.column_sums("dy", dy.dtype, m, n))
        returns[4] = "db"
    if through:
        params = "1" in needs[1:3]
        steps.append(
            backward_steps.input_gradient(engine, "dy", rows, weight, m, x.shape, "dnormal")
        )
        steps.append(_norm_backward(x, gamma, *names[1:], needs[0] == "1", params))
        wanted = zip(("dx", "dparams[0]", "dparams[1]"), needs[:3], strict=True)
        returns[:3] = [name if need == "1" else "None" for name, need in wanted]
    return Plan(tuple(steps), tuple(returns)) if steps else "nothing to compute"


_SOURCES = (layer_norm, contiguous, backward_steps, sys.modules[__name__])
bind.candidate(LAYER_NORM_LINEAR, "cublaslt.after_norm", describe, _SOURCES)
bind.candidate(LAYER_NORM_LINEAR, "triton.after_norm", partial(describe, engine="triton"), _SOURCES)
bind.candidate(LAYER_NORM_LINEAR_BACKWARD, "cublaslt.products", describe_backward, _SOURCES)
bind.candidate(
    LAYER_NORM_LINEAR_BACKWARD,
    "triton.products",
    partial(describe_backward, engine="triton"),
    _SOURCES,
)
for _engine in ("cublaslt", "triton"):
    for _op, _describe in (
        (LAYER_NORM_LINEAR, describe),
        (LAYER_NORM_LINEAR_BACKWARD, describe_backward),
    ):
        padded.candidate(_op, f"{_engine}.padded", partial(_describe, engine=_engine), _SOURCES)
