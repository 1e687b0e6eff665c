"""matmul on CPUs: our own product of operands as they lie."""

from __future__ import annotations

from functools import partial

from ... import native
from ...op import Config, Launcher
from ...plans import Key
from ..common import cpu_products, wiring
from ..common.activations import SMOOTH
from . import MATMUL


def supports(key: Key) -> str | None:
    """None for non-empty operands of one kernel dtype."""
    a, b = key.tensors
    assert a is not None and b is not None
    if 0 in (*a.shape, *b.shape):
        return "an operand is empty"
    return wiring.one_dtype(key)


def build(key: Key, config: Config) -> Launcher:
    """Any layout and batch; the activation in the epilogue, the pre-activation too where backward needs it."""
    code = native.ACTIVATIONS[key.flag("activation")]
    if key.flag("save") and key.flag("activation") in SMOOTH:
        both = native.op("matmul_pre")
        return lambda a, b: both(a, b, code)
    run = native.op("matmul")
    if code:
        return lambda a, b: (run(a, b, code),)
    return lambda a, b: (run(a, b),)


cpu_products.add(
    MATMUL,
    "cpu.epilogue",
    build,
    __name__,
    supports,
    lambda key: [{"product": "native"}],
    partial(cpu_products.guess, x="a", weight="b", linear=False),
)
