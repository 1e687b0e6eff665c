"""layer_norm_linear on CPUs: a native layer norm into float32, the product, the bias and rounding in one pass."""

from __future__ import annotations

from typing import Any

import torch

from ... import native
from ...op import Config, Launcher
from ...plans import Key
from ..common import cpu_products
from . import LAYER_NORM_LINEAR


def build(key: Key, config: Config) -> Launcher:
    """The launcher over (x, gamma, beta, weight, bias)."""
    norm, eps = native.op("layer_norm"), key.flag("eps")
    run = cpu_products.finished(key, config, cpu_products.linear_shape(key))

    def launch(x: Any, gamma: Any, beta: Any, weight: Any, bias: Any) -> Any:
        normal = norm(x, gamma, beta, eps, torch.float32)[0]
        return (run(normal, weight, bias, None),)

    return launch


cpu_products.add(LAYER_NORM_LINEAR, "cpu.fused", build, __name__, cpu_products.supports_dense)
