"""QuACK (quack-kernels): cross-entropy, softmax, layer norm, and products with bias, residual and activation."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.activations import SMOOTH
from ..core.candidate import Config, Launcher
from ..core.key import Key, TensorSpec
from ..core.op import Op
from ..kernels import register as kernels_register
from . import adapter
from .adapter import Call, Function, Package, Rows, aligned, matrix, present, warm

PACKAGE = QUACK = Package(
    "quack-kernels", "quack", extra="hopper", capability=9, needs=("nvidia-cutlass-dsl",)
)
# ours -> QuACK's
ACTIVATIONS = {"none": None, "relu": "relu", "gelu": "gelu_erf", "gelu_tanh": "gelu_tanh_approx", "silu": "silu"}  # fmt: skip
# on sm_90, after QuACK's own default (an empty configuration)
TILES: tuple[Config, ...] = (
    {"tile_m": 128, "tile_n": 128, "cluster_m": 1, "cluster_n": 2, "pingpong": True},
    {"tile_m": 128, "tile_n": 256, "cluster_m": 2, "cluster_n": 1, "pingpong": False},
    {"tile_m": 256, "tile_n": 128, "cluster_m": 2, "cluster_n": 1, "pingpong": False},
)


def register(ops: dict[str, Op]) -> None:
    """Entry point: add QuACK's candidates where it is installed."""
    adapter.add(QUACK, FUNCTIONS, ops)


def logits_rows(key: Key) -> Rows | str:
    """Logits that QuACK's cross-entropy takes."""
    found = adapter.logits_rows(key)
    if not isinstance(found, str) and key.flag("label_smoothing") != 0.0:
        return "QuACK has no label smoothing"
    return found


def cross_entropy(c: Call) -> Launcher:
    """(loss,) or (loss, log-sum-exp, weight of a row)."""
    from quack.cross_entropy import cross_entropy_fwd

    save = bool(c.key.flag("save"))

    def each(logits: Tensor, target: Tensor) -> Any:
        if save:
            return cross_entropy_fwd(logits, target, ignore_index=-1, return_lse=True)
        return cross_entropy_fwd(logits, target, ignore_index=-1), None

    return adapter.cross_entropy(c, each, vectors=True)


def cross_entropy_backward(c: Call) -> Launcher:
    """(dlogits,) from the log-sum-exp that forward kept."""
    from quack.cross_entropy import cross_entropy_bwd

    ignored = c.key.flag("ignore_index")

    def run(logits: Tensor, target: Tensor, dloss: Tensor, lse: Tensor) -> Any:
        return cross_entropy_bwd(logits, target, dloss, lse, ignore_index=ignored)

    def launch(dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, share: Tensor) -> Any:
        if not aligned(logits):
            return None
        scale = (dloss.reshape(-1).float() * share.float()).expand(c.rows)
        flat = logits.view(c.rows, c.columns)
        return (run(flat, target.reshape(c.rows), scale, lse.float()).view(logits.shape),)

    one = torch.zeros(1, device=c.device)
    warm(run, c.zeros(1, c.columns), c.labels(), one, one)
    return launch


def softmax_rows(key: Key) -> Rows | str:
    """Rows that QuACK's softmax takes: of x, or of dy and y."""
    first, *others = (present(key, name) for name in key.names)
    found = kernels_register.one_dtype(key) or matrix(first)
    if not isinstance(found, str) and key.flag("dim") != len(first.shape) - 1:
        return "not over the last dimension"
    return next((f for f in (found, *map(matrix, others)) if isinstance(f, str)), found)


def softmax(c: Call) -> Launcher:
    """(y,) from x, or (dx,) from dy and y."""
    from quack.softmax import softmax_bwd, softmax_fwd

    run = softmax_fwd if c.key.op == "softmax" else softmax_bwd

    def launch(*tensors: Tensor) -> Any:
        if not aligned(*tensors):
            return None
        return (run(*[t.view(c.rows, c.columns) for t in tensors]).view(tensors[0].shape),)

    warm(run, *[c.zeros(1, c.columns)] * len(c.key.names))
    return launch


def norm_rows(key: Key) -> Rows | str:
    """Inputs that QuACK's layer norm takes."""
    found = adapter.norm_rows(key)
    return "QuACK's layer norm needs gamma" if isinstance(found, tuple) and key.spec("gamma") is None else found  # fmt: skip


def layer_norm_linear(c: Call) -> Launcher:
    """(y,): QuACK's layer norm takes gamma and beta in float32 only, so that they are widened in each call."""
    from quack.rmsnorm import layernorm_fwd

    eps, wide = c.key.flag("eps"), torch.float32

    def launch(
        x: Tensor, gamma: Tensor, beta: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> Any:
        if not aligned(x):
            return None
        shift = None if beta is None else beta.to(wide).contiguous()
        flat = x.view(c.rows, c.columns)
        normal = layernorm_fwd(flat, gamma.to(wide).contiguous(), shift, eps)
        return (F.linear(normal.view(x.shape), weight, bias),)

    scale = torch.ones(c.columns, device=c.device)
    shift = None if c.key.spec("beta") is None else scale
    warm(layernorm_fwd, c.zeros(1, c.columns), scale, shift, eps)
    return launch


def linear_product(key: Key) -> Rows | str:
    """The rows [m, k] of a linear key."""
    for name in ("bias", "residual"):
        spec = key.spec(name)
        if spec is not None and (not kernels_register.is_contiguous(spec) or spec.align < 16):
            return f"{name} is not contiguous and aligned to 16 bytes"
    return _product(key, present(key, "x"), _transposed(present(key, "weight")))


def matmul_product(key: Key) -> Rows | str:
    """The rows [m, k] of a matmul key."""
    a, b = present(key, "a"), present(key, "b")
    if len(a.shape) < 2 or len(b.shape) != 2:
        return "only a of at least two dimensions times a b of two"
    return _product(key, a, b)


def _transposed(t: TensorSpec) -> TensorSpec:
    return TensorSpec(t.dtype, t.shape[::-1], t.stride[::-1], t.align, t.constant)


def _product(key: Key, a: TensorSpec, b: TensorSpec) -> Rows | str:
    """(m, k) of a [m, k] in rows times b [k, n] in rows or in columns."""
    if any(t is not None and t.dtype not in ("f16", "bf16") for t in key.tensors):
        return "QuACK's products are used in f16 and bf16"
    found = kernels_register.one_dtype(key) or matrix(a)
    if isinstance(found, str):
        return found
    if isinstance(matrix(b), str) and isinstance(matrix(_transposed(b)), str):
        return "the weight is not in aligned rows or columns of a multiple of 16 bytes"
    n = b.shape[1]
    if n % 8 or found[0] * n > adapter.MOST_ELEMENTS:
        return f"{n} outputs are not a multiple of 8, or too many"
    return found


def gemm_act(c: Call) -> Launcher:
    """activation(a · b + bias + residual) as (y,), or (y, pre-activation) where backward needs it."""
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_act as act

    linear, activation = c.key.op == "linear", c.key.flag("activation")
    keep = bool(c.key.flag("save")) and activation in SMOOTH
    options = {
        "activation": ACTIVATIONS[activation],
        "store_preact": keep,
        "tuned": False,
        "config": GemmConfig(is_dynamic_persistent=False, device_capacity=9, **c.config) if c.config else None,
    }  # fmt: skip

    def run(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None) -> Any:
        return act(a, b, C=residual, bias=bias, **options)

    def launch(
        a: Tensor, b: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Any:
        if not aligned(a, b, bias, residual):
            return None
        b = b.t() if linear else b
        n = b.shape[1]
        other = None if residual is None else residual.view(c.rows, n)
        found = run(a.view(c.rows, c.columns), b, bias, other)  # pre-activation, y
        return tuple(t.view(*a.shape[:-1], n) for t in (found[::-1] if keep else found[1:]))

    rows = isinstance(matrix(present(c.key, "weight" if linear else "b")), tuple)
    b = c.zeros(128, 64).t() if rows == linear else c.zeros(64, 128)
    has = [linear and c.key.spec(name) is not None for name in ("bias", "residual")]
    warm(run, c.zeros(128, 64), b, c.zeros(128) if has[0] else None, c.zeros(128, 128) if has[1] else None)  # fmt: skip
    return launch


def tiles() -> tuple[Config, ...]:
    """QuACK's default tile, and on sm_90 a few others; QuACK's own tuner would time them again."""
    return ({}, *TILES) if _capability() == 9 else ({},)


@lru_cache
def _capability() -> int:
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


FUNCTIONS = (
    Function("softmax_cross_entropy", "quack.cross_entropy", logits_rows, cross_entropy),
    Function("softmax_cross_entropy_backward", "quack.cross_entropy", logits_rows, cross_entropy_backward),
    Function("softmax", "quack.softmax", softmax_rows, softmax),
    Function("softmax_backward", "quack.softmax", softmax_rows, softmax),
    Function("layer_norm_linear", "quack.layer_norm", norm_rows, layer_norm_linear),
    Function("linear", "quack.gemm_act", linear_product, gemm_act, tiles),
    Function("matmul", "quack.gemm_act", matmul_product, gemm_act, tiles),
)  # fmt: skip
