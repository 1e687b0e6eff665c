"""linear on CPUs: a float32 product with a native epilogue, and for few rows one pass over the weights as they are."""

from __future__ import annotations

from math import prod
from typing import Any

from ... import native
from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key
from ..common import cpu_products, native_wiring
from ..common.activations import SMOOTH
from . import LINEAR

FEW_ROWS = 8


def build(key: Key, config: Config) -> Launcher:
    """product, then bias, residual and activation in one pass; the pre-activation too where backward needs it."""
    product, shape = cpu_products.product(config), cpu_products.linear_shape(key)
    if key.flag("save") and key.flag("activation") in SMOOTH:
        run, code = native.op("epilogue_pre"), native.ACTIVATIONS[key.flag("activation")]
        dtype = DTYPES[native_wiring.dtype_of(key, "x")]

        def keeping(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
            acc = product(cpu_products.widened(x), cpu_products.weight32(weight))
            y, z = run(
                acc, bias, None if residual is None else residual.reshape(acc.shape), code, dtype
            )
            return y.view(shape), z.view(shape)

        return keeping
    finish = cpu_products.finish(key, shape)

    def launch(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        return (
            finish(product(cpu_products.widened(x), cpu_products.weight32(weight)), bias, residual),
        )

    return launch


def supports_skinny(key: Key) -> str | None:
    """None for few rows of contiguous x and a contiguous weight."""
    x = key.spec("x")
    assert x is not None
    if prod(x.shape[:-1]) > FEW_ROWS:
        return f"more than {FEW_ROWS} rows"
    if key.flag("save") and key.flag("activation") in SMOOTH:
        return "the pre-activation must be kept"
    return native_wiring.contiguous(key, "weight") or cpu_products.supports(key)


def build_skinny(key: Key) -> Launcher:
    """The weights are read once, in their own dtype."""
    run, code = native.op("linear_skinny"), native.ACTIVATIONS[key.flag("activation")]
    k, n, shape = key.tensors[1].shape[1], key.tensors[1].shape[0], cpu_products.linear_shape(key)  # type: ignore[union-attr]

    def launch(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        flat = None if residual is None else residual.reshape(-1, n)
        return (run(x.reshape(-1, k), weight, bias, flat, code).view(shape),)

    return launch


def guess_skinny(key: Key) -> float:
    """One row of a half-precision product is bound by the weights' bytes."""
    slow = native_wiring.dtype_of(key, "x") == "f16" and native_wiring.half_is_slow()
    return 0.09 if slow else 1.0


native_wiring.add(LINEAR, "cpu.skinny", build_skinny, supports_skinny, guess_skinny, __name__)
cpu_products.add(LINEAR, "cpu.epilogue", build, __name__)
