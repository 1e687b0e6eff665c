"""matmul on CPUs: halves in a float32 product with a native epilogue, and few rows in one pass over b as it is."""

from __future__ import annotations

from math import prod
from typing import Any

from ... import native
from ...op import Config, Launcher
from ...plans import Key
from ..common import cpu_products, native_wiring
from ..common.activations import SMOOTH
from . import MATMUL

FEW_ROWS = 8


def _shape(key: Key) -> tuple[int, ...]:
    a, b = key.spec("a"), key.spec("b")
    assert a is not None and b is not None
    return (*a.shape[:-1], b.shape[1])


def supports(key: Key) -> str | None:
    """None for a contiguous a and a two-dimensional b."""
    if key.flag("save") and key.flag("activation") in SMOOTH:
        return "the pre-activation must be kept"
    return cpu_products.supports(key, "a", "b")


def supports_skinny(key: Key) -> str | None:
    """None for few rows of contiguous a and a contiguous b."""
    a = key.spec("a")
    assert a is not None
    if prod(a.shape[:-1]) > FEW_ROWS:
        return f"more than {FEW_ROWS} rows"
    return native_wiring.contiguous(key, "b") or supports(key)


def build(key: Key, config: Config) -> Launcher:
    """product, then the activation and rounding in one pass."""
    product, finish = cpu_products.product(config), cpu_products.finish(key, _shape(key), "a")

    def launch(a: Any, b: Any) -> Any:
        return (finish(product(cpu_products.widened(a), cpu_products.weight32(b).t()), None, None),)

    return launch


def build_skinny(key: Key) -> Launcher:
    """b is read once, in its own dtype."""
    run, code, shape = (
        native.op("matmul_skinny"),
        native.ACTIVATIONS[key.flag("activation")],
        _shape(key),
    )
    return lambda a, b: (run(a.reshape(-1, a.shape[-1]), b, None, None, code).view(shape),)


def guess_skinny(key: Key) -> float:
    """One row of a half-precision product is bound by the bytes of b."""
    slow = native_wiring.dtype_of(key, "a") == "f16" and native_wiring.half_is_slow()
    return 0.09 if slow else 1.0


native_wiring.add(MATMUL, "cpu.skinny", build_skinny, supports_skinny, guess_skinny, __name__)
cpu_products.add(
    MATMUL,
    "cpu.epilogue",
    build,
    __name__,
    supports,
    lambda key: cpu_products.half_guess(key, "a", "b"),
)
