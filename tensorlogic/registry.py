"""When candidates are registered: an op's GPU candidates on its first use on a GPU, third-party ones on first choice."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from . import calls, capture_watch, starting
from .hardware import interpreting, triton_missing
from .op import OPS, Op

LOG = logging.getLogger("tensorlogic")
GROUP = "tensorlogic.candidates"
_LOCK = threading.RLock()
starting.new_in_children(globals(), _LOCK=threading.RLock)
_READY: set[str] = set()
NATIVE = (  # modules that register native CPU candidates
    "tensorlogic.ops.attention_scores.cpu_fused",
    "tensorlogic.ops.dropout_linear.cpu_fused",
    "tensorlogic.ops.gelu_linear.cpu_fused",
    "tensorlogic.ops.layer_norm_linear.cpu_fused",
    "tensorlogic.ops.linear.cpu_fused",
    "tensorlogic.ops.linear_batch_norm_relu.cpu_fused",
    "tensorlogic.ops.linear_batch_norm_relu.cpu_product",
    "tensorlogic.ops.matmul.cpu_fused",
    "tensorlogic.ops.pointwise.cpu_fused",
    "tensorlogic.ops.reduce.cpu_fused",
    "tensorlogic.ops.softmax.cpu_fused",
    "tensorlogic.ops.softmax_cross_entropy.cpu_fused",
)
TRITON = (  # modules that register candidates for NVIDIA GPUs
    "tensorlogic.ops.linear.triton_tiled",
    "tensorlogic.ops.linear.cublaslt_epilogue",
    "tensorlogic.ops.linear.cublaslt_columns",
    "tensorlogic.ops.matmul.triton_tiled",
    "tensorlogic.ops.matmul.cublaslt_epilogue",
    "tensorlogic.ops.matmul.products_backward",
    "tensorlogic.ops.gelu_linear.triton_tiled",
    "tensorlogic.ops.gelu_linear.cublaslt_after_gelu",
    "tensorlogic.ops.layer_norm_linear.triton_tiled",
    "tensorlogic.ops.layer_norm_linear.triton_rows",
    "tensorlogic.ops.layer_norm_linear.cublaslt_after_norm",
    "tensorlogic.ops.linear_batch_norm_relu.triton_tiled",
    "tensorlogic.ops.linear_batch_norm_relu.cublaslt_columns",
    "tensorlogic.ops.linear_batch_norm_relu.training",
    "tensorlogic.ops.dropout_linear.triton_tiled",
    "tensorlogic.ops.dropout_linear.cublaslt_after_dropout",
    "tensorlogic.ops.pointwise.triton_elementwise",
    "tensorlogic.ops.pointwise.triton_shared_gradients",
    "tensorlogic.ops.pointwise.triton_marked",
    "tensorlogic.ops.reduce.triton_reduce",
    "tensorlogic.ops.reduce.triton_spins",
    "tensorlogic.ops.reduce.triton_groups",
    "tensorlogic.ops.reduce.triton_shares",
    "tensorlogic.ops.reduce.triton_abreast",
    "tensorlogic.ops.reduce.triton_extreme",
    "tensorlogic.ops.reduce.triton_placed",
    "tensorlogic.ops.softmax.triton_rows",
    "tensorlogic.ops.softmax.triton_lines",
    "tensorlogic.ops.softmax.triton_parts",
    "tensorlogic.ops.softmax.triton_held",
    "tensorlogic.ops.softmax.triton_groups",
    "tensorlogic.ops.softmax.triton_shares",
    "tensorlogic.ops.softmax_cross_entropy.triton_rows",
    "tensorlogic.ops.softmax_cross_entropy.triton_ahead",
    "tensorlogic.ops.softmax_cross_entropy.triton_stays",
    "tensorlogic.ops.softmax_cross_entropy.triton_together",
    "tensorlogic.ops.attention_scores.triton_scores",
    "tensorlogic.ops.attention_scores.triton_after_product",
    "tensorlogic.ops.attention_scores.triton_specialised",
    "tensorlogic.ops.attention_scores.triton_held",
    "tensorlogic.ops.attention_scores.triton_direct",
    "tensorlogic.ops.attention_scores.triton_kept",
    "tensorlogic.ops.few_rows",
    "tensorlogic.ops.precise_cuda",
)
PRODUCTS = frozenset(  # packages and modules that register candidates with one another's ops
    (
        "linear",
        "matmul",
        "gelu_linear",
        "layer_norm_linear",
        "linear_batch_norm_relu",
        "dropout_linear",
        "few_rows",
        "precise_cuda",
    )
)
METAL = (  # modules that register candidates for Apple GPUs
    "tensorlogic.ops.linear.metal_tiled",
    "tensorlogic.ops.matmul.metal_tiled",
    "tensorlogic.ops.gelu_linear.metal_tiled",
    "tensorlogic.ops.layer_norm_linear.metal_tiled",
    "tensorlogic.ops.linear_batch_norm_relu.metal_tiled",
    "tensorlogic.ops.pointwise.metal_elementwise",
    "tensorlogic.ops.reduce.metal_simdgroup",
    "tensorlogic.ops.softmax_cross_entropy.metal_rows",
    "tensorlogic.ops.attention_scores.metal_scores",
)


def _begin() -> None:
    """What the first kernel of a process needs of Triton, half a second, begun in threads while modules are imported here."""
    from .ops.common import triton_tools

    triton_tools.begin()
    from .ops.common.triton_launch import CompileJob

    CompileJob.ahead()


def ready(device: str, op: Op | None = None) -> None:
    """Everything that could serve this device type, or one op on it at least, is registered; cheap after the first time.

    Half of what all of it takes is Triton reading its kernels' sources, and a process that multiplies needs no softmax.
    """
    kin = _kin(op.reference.__module__) if op is not None and device == "cuda" else ""
    if device in _READY or (kin and f"{device} {kin}" in _READY):
        return
    with _LOCK, starting.paused():
        if device in _READY or (kin and f"{device} {kin}" in _READY):
            return
        points = _foreign()
        if any(map(_adds, points)):
            kin = ""  # whoever registers candidates finds all of ours
        if device == "cpu":
            for name in NATIVE:
                importlib.import_module(name)
        if (device == "cuda" or (device == "cpu" and interpreting())) and triton_missing() is None:
            capture_watch.install()
            if device == "cuda":
                calls.load()
                _begin()
            for name in TRITON:
                if kin in ("", _kin(name)):
                    importlib.import_module(name)
        if device == "mps":
            for name in METAL:
                importlib.import_module(name)
        _plugins(points)
        _READY.add(f"{device} {kin}" if kin else device)


def _kin(module: str) -> str:
    """Which ops a module of an op's belongs to: its package, or all products, which share modules; "" for no module of ours."""
    ours, _, own = module.partition("tensorlogic.ops.")
    package = own.partition(".")[0]
    if ours or not package:
        return ""
    return "products" if package in PRODUCTS else package


def _foreign() -> list[importlib.metadata.EntryPoint]:
    """Third-party candidates' entry points: each is a function that takes the registry of ops."""
    return list(importlib.metadata.entry_points(group=GROUP))


def _adds(point: importlib.metadata.EntryPoint) -> bool:
    """Whether an entry point may register candidates here: our own adapters do where what they adapt is installed."""
    if not point.value.startswith(f"{__package__}.providers."):
        return True
    return importlib.import_module(point.value.partition(":")[0]).PACKAGE.missing() is None


def _plugins(points: list[importlib.metadata.EntryPoint]) -> None:
    """Load third-party candidates once."""
    if "plugins" in _READY:
        return
    _READY.add("plugins")
    for point in points:
        known = {name: set(op.candidates) for name, op in OPS.items()}
        try:
            register: Callable[[dict[str, Op]], None] = point.load()
            register(OPS)
        except Exception as problem:  # whatever a third party's package raises must not take ours down; it is said by name
            LOG.warning(
                "tensorlogic: candidates of %s (%s) were not loaded: %s: %s",
                point.name,
                point.value,
                type(problem).__name__,
                problem,
            )
        finally:
            _distrust(known)


def _distrust(known: dict[str, set[str]]) -> None:
    """Only what is shipped here may serve a key it was not checked on, whatever a plug-in says of itself."""
    for name, op in OPS.items():
        for id in op.candidates.keys() - known[name]:
            op.candidates[id] = replace(op.candidates[id], trusted=False)
