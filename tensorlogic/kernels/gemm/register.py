"""How the plans of an op around matrix products become its candidates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ...core.key import Key
from ...core.op import Op
from ...system.hardware import triton_missing
from .. import register
from . import bind, cublaslt, gemv, layer_plans, padded, spec, tiled
from .bind import Plan, Product

# (key, engine="triton") -> the launches of a key, or why it is not served
Describe = Callable[..., Plan | str]


def add(
    op: Op,
    describe: Describe,
    *ids: str,
    sources: tuple[Any, ...] = (),
    coarse: Callable[[Key], float] = lambda key: 0.0,
) -> None:
    """Register the plans of `describe(key, engine)` as candidates `engine.strategy`, in the order of `ids`.

    The strategies `padded` and `one_row` alter a plan: odd lines are copied first, a product of one row takes its own kernel.
    `sources` are the modules of the plan's other kernels; `coarse` is as `Candidate`'s. Nothing is registered without Triton:
    there the descriptions serve Metal.
    """
    if triton_missing() is not None:
        return
    from ..triton_runtime import device_math
    from . import gemv_kernel, hopper, hopper_kernel, padding_kernel, tiled_kernel

    module = sys.modules[getattr(describe, "func", describe).__module__]
    own = (tiled, spec, layer_plans, module, *sources)
    kernels = (tiled_kernel, device_math, hopper, hopper_kernel)
    for id in ids:
        engine, _, strategy = id.partition(".")
        library = engine == "cublaslt"
        plans: Describe = partial(describe, engine=engine)
        texts = (*own, cublaslt) if library else (*own, *kernels)
        if strategy == "padded":
            plans, texts = padded.padded(plans), (*texts, *kernels, padded, padding_kernel)
        elif strategy == "one_row":
            plans, texts = gemv.instead(plans), (*texts, gemv, gemv_kernel)
        register.described(
            op,
            id,
            partial(_checked, op, plans),
            bind.configurations,
            partial(bind.launcher, op),
            texts,
            cublaslt.lt_available if library else None,
            coarse=coarse,
        )


def _checked(op: Op, describe: Callable[[Key], Plan | str], key: Key) -> Plan | str:
    """The plan of a key by its tensors' alignment, or why one of its products or the op refuses it."""
    found = describe(key)
    if isinstance(found, str):
        return found
    reason = next((r for p in found.products if (r := bind.strided(key, p.given))), None)
    if reason is not None or (reason := _by_luck(op, key, found)) is not None:
        return reason
    align = register.weakest(key)
    plan = Plan(tuple(p.aligned(align) for p in found.products), found.returns)
    return next((reason for p in plan.products if (reason := p.refusal())), plan)


def _by_luck(op: Op, key: Key, plan: Plan) -> str | None:
    """Why one float32 column behind a ReLU is left to PyTorch, or None.

    Its elements near the ReLU's threshold have no neighbours in their row whose size could say what error is small, and eager's
    own is a matter of luck: of random draws 1 in 100 failed by sums as good as eager's (benchmarks/few_columns.py).
    """
    if op.internal or not ("relu" in op.name or dict(key.flags).get("activation") == "relu"):
        return None
    specs = [p.spec for p in plan.products if isinstance(p, Product)]
    if any(spec.n == 1 and spec.x.dtype == "f32" for spec in specs):
        return (
            "one float32 column behind a ReLU: how far its few numbers may be off is eager's luck"
        )
    return None
