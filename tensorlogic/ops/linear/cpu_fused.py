"""linear on CPUs: one product with a native epilogue."""

from __future__ import annotations

from ...op import Config, Launcher
from ...plans import Key
from ..common import cpu_products
from ..common.activations import SMOOTH
from . import LINEAR


def build(key: Key, config: Config) -> Launcher:
    """Bias, residual and activation in the product's epilogue; the pre-activation too where backward needs it."""
    keep = key.flag("save") and key.flag("activation") in SMOOTH
    run = cpu_products.finished(key, config, cpu_products.linear_shape(key), keep=keep)
    if keep:
        return run
    return lambda x, weight, bias, residual: (run(x, weight, bias, residual),)


cpu_products.add(LINEAR, "cpu.epilogue", build, __name__)
