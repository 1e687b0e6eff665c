"""How Metal kernels become candidates: products as the ops describe them, and launches of one kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from tensorlogic.kernels.gemm import spec

from ...core.candidate import Config, Launcher
from ...core.key import Key
from ...core.op import Op
from .. import register
from ..gemm import bind, tiled
from ..gemm.bind import Kernel, Plan, Product, Start
from . import gemm as metal_gemm
from . import launch as metal_launch
from . import shader_prelude

T = TypeVar("T")


def described(
    op: Op,
    id: str,
    describe: Callable[[Key], T | str],
    configs: Callable[[T], Sequence[Config]],
    build: Callable[[T, Config, torch.device], Launcher],
    sources: tuple[Any, ...],
) -> None:
    """Register a Metal candidate; no Mac has seen any of them yet, so each serves only keys it was checked on."""
    texts = (metal_launch, shader_prelude, *sources)
    register.described(
        op, id, describe, configs, build, texts, metal_launch.available, trusted=False
    )


def products(op: Op, describe: Callable[[Key], Plan | str], *strategies: str) -> None:
    """Register `metal.STRATEGY` for each of these (all if none is named), serving the products that `describe` finds."""
    for strategy in strategies or tuple(metal_gemm.CONFIGS):
        _register(op, describe, strategy)


def _register(op: Op, describe: Callable[[Key], Plan | str], strategy: str) -> None:
    def found(key: Key) -> Plan | str:
        plan = describe(key)
        if isinstance(plan, str):
            return plan
        steps = []
        for p in plan.products:
            assert isinstance(p, Product)
            reason = bind.strided(key, p.given) or metal_gemm.refusal(p.spec, strategy)
            if reason is not None:
                return reason
            steps.append(_step(p, strategy))
        return Plan(tuple(steps), plan.returns)

    described(
        op,
        f"metal.{strategy}",
        found,
        bind.configurations,
        partial(bind.launcher, op),
        (tiled, spec, metal_gemm, inspect.getmodule(describe)),
    )


def _step(product: Product, strategy: str) -> Kernel:
    """A product as a launch of the Metal family."""
    names: Mapping[str, str] = {**product.given, **{a: m[0] for a, m in product.made.items()}}
    eps = float(product.given.get("eps", "0"))

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return metal_gemm.gemm_launcher(product.spec, config, device, eps)

    return Kernel(
        tuple(names[a] for a in metal_gemm.arguments(product.spec)),
        product.made,
        tuple(metal_gemm.configs(product.spec, strategy)),
        build,
    )
