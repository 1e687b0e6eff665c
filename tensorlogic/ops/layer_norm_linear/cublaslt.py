"""layer_norm_linear by a layer norm and a product, cuBLASLt's or Triton's; backward by two products around the norm's own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ...core.key import Key, TensorSpec
from ...kernels import register
from ...kernels.gemm import layer_plans
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Kernel, Plan, Product, Start
from ...kernels.norm import layer_norm
from ...kernels.reduce import contiguous
from . import LAYER_NORM_LINEAR, LAYER_NORM_LINEAR_BACKWARD, again, saves, triton

KEPT = ("normal", "mean", "rstd")


def _normalised(key: Key, save: bool, names: Sequence[str] = KEPT) -> Kernel:
    """layer_norm(x), and with `save` mean and 1/std of its rows, under `names`."""
    x, gamma, beta = _operands(key)
    rows, columns, dtype = prod(x.shape[:-1]), x.shape[-1], x.dtype

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
        mean if save else "x", rstd if save else "x", repr(key.flag("eps")),
    )  # fmt: skip
    configs = layer_norm.layer_norm_configs(columns, dtype)[: layer_plans.PASSES]
    return Kernel(given, made, tuple(configs), build)


def _operands(key: Key) -> tuple[TensorSpec, TensorSpec | None, TensorSpec | None]:
    """x, gamma and beta."""
    x = key.spec("x")
    assert x is not None
    return x, key.spec("gamma"), key.spec("beta")


def _strided(key: Key) -> str | None:
    for t in (key.spec("gamma"), key.spec("beta")):
        if t is not None and prod(t.shape) != 1 and t.stride[0] != 1:
            return "gamma or beta is strided"
    return None


def after(key: Key, engine: str) -> Plan | str:
    """A pass that normalises contiguous rows, then one product."""
    reason = register.one_dtype(key) or _strided(key)
    save = saves(key)
    found = reason or layer_plans.after(key, engine, lambda: _normalised(key, save), "normal")
    return replace(found, returns=("y", *KEPT)) if save and isinstance(found, Plan) else found


def _norm_backward(key: Key, mean: str, rstd: str) -> Kernel:
    """dx [..., K] and dparams [2, K] (dgamma, dbeta) of the layer norm, from the gradient of its output."""
    (x, gamma, _), needs = _operands(key), key.flag("needs")
    rows, columns, dtype = prod(x.shape[:-1]), x.shape[-1], x.dtype
    need_dx, need_params = needs[0] == "1", "1" in needs[1:3]

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return layer_norm.layer_norm_backward_launcher(
            rows, columns, (dtype, dtype, dtype), config, device,
            has_gamma=gamma is not None, need_dx=need_dx, need_params=need_params, align=align,
        )  # fmt: skip

    made = {"dx": ("dx", x.shape, dtype)} if need_dx else {}
    if need_params:
        made |= {"dparams": ("dparams", (2, columns), dtype)}
    outs = ("dx" if need_dx else "x", *(("dparams", "space") if need_params else ("x", "x")))
    configs = layer_norm.layer_norm_backward_configs(rows, columns, dtype, register.cores())
    return Kernel(
        ("x", "dnormal", "gamma" if gamma else "x", mean, rstd, *outs), made, tuple(configs[: layer_plans.PASSES]), build,
        space=lambda config: (2 * config["parts"] * columns if need_params else 0, 0),
    )  # fmt: skip


def backward(key: Key, engine: str) -> Plan | str:
    """The norm again with its statistics unless forward kept them, dnormal = dy · weight, dweight = dyᵀ · normal with dbias,
    then the norm's backward."""
    dy, x, weight, *kept = (key.spec(name) for name in ("dy", "x", "weight", *KEPT))
    assert dy is not None and x is not None and weight is not None
    needs, (normal, mean, rstd) = key.flag("needs"), kept
    found = layer_plans.matrices(("dy", dy), ("weight", weight))
    inner = layer_plans.flat(x, "x")
    reason = register.one_dtype(key, "dy", "x", "gamma", "beta", "weight", "normal")
    reason = reason or _strided(key)
    if any(t is not None and t.dtype != "f32" for t in (mean, rstd)):
        return "the kernels take statistics in f32"
    if not all(t is None or register.is_contiguous(t) for t in kept):
        return "what forward kept is not contiguous"
    if reason is not None or isinstance(found, str) or isinstance(inner, str):
        return reason or (found if isinstance(found, str) else str(inner))
    rows, m, (n, k), steps = found[0], prod(dy.shape[:-1]), weight.shape, list[Kernel | Product]()
    names = KEPT
    if again(normal, mean, needs):
        names = ("normal_again", "mean_again", "rstd_again")
        steps.append(_normalised(key, True, names))
    if needs[3] == "1":
        dw = layer_plans.weight_gradient(engine, "dy", rows, names[0], inner, m, n, k)
        steps.append(dw)
    if needs[4] == "1":
        if not register.is_contiguous(dy):
            return "dy is not contiguous"
        steps.append(layer_plans.column_sums("dy", dy.dtype, m, n))
    if "1" in needs[:3]:
        dnormal = layer_plans.input_gradient(engine, "dy", rows, weight, m, x.shape, "dnormal")
        steps += [dnormal, _norm_backward(key, *names[1:])]
    return layer_plans.asked(steps, ("dx", "dparams[0]", "dparams[1]", "dw", "db"), needs)


_PADDED, _SOURCES = ("cublaslt.padded", "triton.padded"), (layer_norm, contiguous)
gemm_register.add(
    LAYER_NORM_LINEAR, after, "cublaslt.after_norm", "triton.after_norm", *_PADDED, sources=_SOURCES
)
gemm_register.add(LAYER_NORM_LINEAR, triton.tiled, "triton.one_row")
gemm_register.add(
    LAYER_NORM_LINEAR_BACKWARD, backward, "cublaslt.products", "triton.products", *_PADDED, sources=_SOURCES
)  # fmt: skip
