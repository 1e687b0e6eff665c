"""TensorLogic: the fastest correct way to run half-precision tensor work on this machine, found by measuring."""

from __future__ import annotations

from importlib import import_module as _import
from typing import TYPE_CHECKING
from typing import Any as _Any

from .system import process as _starting

# isort: split
from .system import settings as _settings

if _settings.wrong():
    _settings.exit_if_wrong()  # no import would come further

from . import ops as _ops
from .core.numeric_mode import PrecisionWarning
from .core.policy import policy
from .core.precision_policy import precision
from .core.weight_cache import constant, invalidate
from .cpu_overrides.enable import disable, enable
from .device_placement.placement import placement
from .dispatch.startup import activate as _activate
from .dispatch.startup import warn_of_namesakes as _warn
from .memory.transfer import to
from .memory.unified import unified
from .ops.attention_scores import attention_scores
from .ops.dropout_linear import dropout_linear
from .ops.gelu_linear import gelu_linear
from .ops.layer_norm_linear import layer_norm_linear
from .ops.linear import linear, linear_residual_relu
from .ops.linear_batch_norm_relu import linear_batch_norm_relu
from .ops.matmul import matmul
from .ops.pointwise import add, add_relu, affine, div, gelu, mul, mul_relu, relu, silu, sub
from .ops.reduce import max, mean, min, sum
from .ops.softmax import softmax
from .ops.softmax_cross_entropy import softmax_cross_entropy

if TYPE_CHECKING:
    from .autotune.tune import tune
    from .compiler.optimize import optimize
    from .cuda_graphs.capture import capture
    from .dispatch.explain import candidates, explain
    from .memory import pool

# what is no such setting fails before anything is registered
_wanted = _settings.enable()
_activate()
_warn()
if _wanted != "0":
    enable(pool=_wanted == "pool")
_starting.resume()
del _activate, _ops, _settings, _starting, _wanted, _warn

_LATER = {  # what not every program needs
    "candidates": "dispatch.explain",
    "capture": "cuda_graphs.capture",
    "explain": "dispatch.explain",
    "optimize": "compiler.optimize",
    "pool": "memory.pool",
    "tune": "autotune.tune",
}


# Type checkers know all names, and call any other one a mistake.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> _Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _import(f".{_LATER[name]}", __name__)
        value = getattr(module, name, module)  # a name that the module does not have is its own
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


__version__ = "0.1.0"
__all__ = [
    "PrecisionWarning",
    "add",
    "add_relu",
    "affine",
    "attention_scores",
    "candidates",
    "capture",
    "constant",
    "disable",
    "div",
    "dropout_linear",
    "enable",
    "explain",
    "gelu",
    "gelu_linear",
    "invalidate",
    "layer_norm_linear",
    "linear",
    "linear_batch_norm_relu",
    "linear_residual_relu",
    "matmul",
    "max",
    "mean",
    "min",
    "mul",
    "mul_relu",
    "optimize",
    "placement",
    "policy",
    "pool",
    "precision",
    "relu",
    "silu",
    "softmax",
    "softmax_cross_entropy",
    "sub",
    "sum",
    "to",
    "tune",
    "unified",
]
