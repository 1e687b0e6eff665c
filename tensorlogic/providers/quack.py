"""QuACK (quack-kernels): cross-entropy, softmax, layer norm, and products with bias, residual and activation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.activations import SMOOTH
from ..core.candidate import Config, Launcher
from ..core.dtypes import DTYPES
from ..core.key import Key, TensorSpec
from ..core.op import Op
from ..kernels import register as kernels_register
from ..ops.layer_norm_linear import saves
from . import adapter
from .adapter import Package, adapted, aligned, matrix, warm

PACKAGE = QUACK = Package(
    "quack-kernels", "quack", extra="hopper", capability=9, needs=("nvidia-cutlass-dsl",)
)
ACTIVATIONS = {  # ours -> QuACK's
    "none": None,
    "relu": "relu",
    "gelu": "gelu_erf",
    "gelu_tanh": "gelu_tanh_approx",
    "silu": "silu",
}
# on sm_90, after QuACK's own default (an empty configuration)
TILES: tuple[Config, ...] = (
    {"tile_m": 128, "tile_n": 128, "cluster_m": 1, "cluster_n": 2, "pingpong": True},
    {"tile_m": 128, "tile_n": 256, "cluster_m": 2, "cluster_n": 1, "pingpong": False},
    {"tile_m": 256, "tile_n": 128, "cluster_m": 2, "cluster_n": 1, "pingpong": False},
)


def register(ops: dict[str, Op]) -> None:
    """Entry point: add QuACK's candidates where it is installed."""
    if QUACK.missing() is not None:
        return
    loss, loss_backward = ops["softmax_cross_entropy"], ops["softmax_cross_entropy_backward"]
    adapted(loss, "quack.cross_entropy", QUACK, rows, cross_entropy)
    adapted(loss_backward, "quack.cross_entropy", QUACK, rows, cross_entropy_backward)
    adapted(ops["softmax"], "quack.softmax", QUACK, softmax_rows, softmax)
    adapted(ops["softmax_backward"], "quack.softmax", QUACK, softmax_rows, softmax_backward)
    adapted(ops["layer_norm_linear"], "quack.layer_norm", QUACK, norm_rows, layer_norm_linear)
    adapted(ops["linear"], "quack.gemm_act", QUACK, linear_product, gemm_act, tiles)
    adapted(ops["matmul"], "quack.gemm_act", QUACK, matmul_product, gemm_act, tiles)


# Rows ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Contiguous rows and the flags of a loss over them."""

    rows: int
    columns: int
    dtype: str
    shape: tuple[int, ...]
    reduction: str = "none"
    ignore_index: int = -100
    save: bool = False


def rows(key: Key) -> Rows | str:
    """Logits that QuACK's cross-entropy takes."""
    logits, target = _spec(key, "logits"), _spec(key, "target")
    found = kernels_register.one_dtype(key, "logits") or matrix(logits)
    if isinstance(found, str):
        return found
    if not kernels_register.is_contiguous(target):
        return "targets are not contiguous"
    if key.flag("label_smoothing") != 0.0:
        return "QuACK has no label smoothing"
    save = key.op == "softmax_cross_entropy" and bool(key.flag("save"))
    return Rows(
        *found, logits.dtype, logits.shape, key.flag("reduction"), key.flag("ignore_index"), save
    )


def cross_entropy(r: Rows, config: Config, device: torch.device) -> Launcher:
    """(loss,) or (loss, log-sum-exp, weight of a row)."""
    from quack.cross_entropy import cross_entropy_fwd

    def run(logits: Tensor, target: Tensor) -> Any:
        safe = adapter.in_range(target, r.columns)
        if r.save:
            return cross_entropy_fwd(logits, safe, ignore_index=-1, return_lse=True)
        return cross_entropy_fwd(logits, safe, ignore_index=-1), None

    def launch(logits: Tensor, target: Tensor) -> Any:
        if not aligned(logits):
            return None
        target = target.reshape(r.rows)
        each, lse = run(logits.view(r.rows, r.columns), target)
        loss, share = adapter.reduced(each, target, r.columns, r.ignore_index, r.reduction)
        loss = loss.to(logits.dtype).view(r.shape[:-1] if r.reduction == "none" else ())
        if not r.save:
            return (loss,)
        # nothing is kept of rows that do not count
        lse = torch.where(target.reshape(-1) != r.ignore_index, lse, 0)
        return loss, lse, loss.new_ones(1, dtype=torch.float32) if share is None else share

    warm(run, *_small(device, r), torch.zeros(1, dtype=torch.int64, device=device))
    return launch


def cross_entropy_backward(r: Rows, config: Config, device: torch.device) -> Launcher:
    """(dlogits,) from the log-sum-exp that forward kept."""
    from quack.cross_entropy import cross_entropy_bwd

    def run(logits: Tensor, target: Tensor, dloss: Tensor, lse: Tensor) -> Any:
        return cross_entropy_bwd(logits, target, dloss, lse, ignore_index=r.ignore_index)

    def launch(dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, share: Tensor) -> Any:
        if not aligned(logits):
            return None
        scale = (dloss.reshape(-1).float() * share.float()).expand(r.rows)
        dx = run(logits.view(r.rows, r.columns), target.reshape(r.rows), scale, lse.float())
        return (dx.view(r.shape),)

    one = torch.zeros(1, device=device)
    warm(run, *_small(device, r), torch.zeros(1, dtype=torch.int64, device=device), one, one)
    return launch


def softmax_rows(key: Key) -> Rows | str:
    """Rows that QuACK's softmax takes."""
    first = key.tensors[0]
    assert first is not None
    found = kernels_register.one_dtype(key) or matrix(first)
    if isinstance(found, str):
        return found
    if key.flag("dim") != len(first.shape) - 1:
        return "not over the last dimension"
    for other in key.tensors[1:]:
        again = matrix(_present(other))
        if isinstance(again, str):
            return again
    return Rows(*found, first.dtype, first.shape)


def softmax(r: Rows, config: Config, device: torch.device) -> Launcher:
    """(y,)."""
    from quack.softmax import softmax_fwd

    def launch(x: Tensor) -> Any:
        return (softmax_fwd(x.view(r.rows, r.columns)).view(r.shape),) if aligned(x) else None

    warm(softmax_fwd, *_small(device, r))
    return launch


def softmax_backward(r: Rows, config: Config, device: torch.device) -> Launcher:
    """(dx,) from dy and y."""
    from quack.softmax import softmax_bwd

    def launch(dy: Tensor, y: Tensor) -> Any:
        if not aligned(dy, y):
            return None
        flat = (r.rows, r.columns)
        return (softmax_bwd(dy.view(flat), y.view(flat)).view(r.shape),)

    warm(softmax_bwd, *_small(device, r), *_small(device, r))
    return launch


@dataclass(frozen=True)
class Norm:
    """Rows to normalise before a product."""

    rows: Rows
    eps: float
    beta: bool


def norm_rows(key: Key) -> Norm | str:
    """Inputs that QuACK's layer norm takes; the product after it is PyTorch's."""
    x = _spec(key, "x")
    found = kernels_register.one_dtype(key) or matrix(x)
    if isinstance(found, str):
        return found
    if saves(key):
        return "normalised rows and their statistics are kept for backward"
    if key.spec("gamma") is None:
        return "QuACK's layer norm needs gamma"
    return Norm(Rows(*found, x.dtype, x.shape), key.flag("eps"), key.spec("beta") is not None)


def layer_norm_linear(n: Norm, config: Config, device: torch.device) -> Launcher:
    """(y,): QuACK's layer norm takes gamma and beta in float32 only, so that they are widened in each call."""
    from quack.rmsnorm import layernorm_fwd

    flat, wide = (n.rows.rows, n.rows.columns), torch.float32

    def launch(
        x: Tensor, gamma: Tensor, beta: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> Any:
        if not aligned(x):
            return None
        shift = None if beta is None else beta.to(wide).contiguous()
        normal = layernorm_fwd(x.view(flat), gamma.to(wide).contiguous(), shift, n.eps)
        return (F.linear(normal.view(n.rows.shape), weight, bias),)

    scale = torch.ones(n.rows.columns, device=device)
    warm(layernorm_fwd, *_small(device, n.rows), scale, scale if n.beta else None, n.eps)
    return launch


# Products -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """activation(a · b + bias + residual), a [m, k] in rows, b [k, n] in rows or in columns."""

    m: int
    n: int
    k: int
    dtype: str
    shape: tuple[int, ...]
    activation: str
    turned: bool  # b is given as [n, k]
    columns: bool  # b's memory runs along k
    keep: bool
    bias: bool = False
    residual: bool = False


def linear_product(key: Key) -> Product | str:
    """The product behind a linear key."""
    for name in ("bias", "residual"):
        spec = key.spec(name)
        if spec is not None and (not kernels_register.is_contiguous(spec) or spec.align < 16):
            return f"{name} is not contiguous and aligned to 16 bytes"
    return _product(key, _spec(key, "x"), _spec(key, "weight"), turned=True)


def matmul_product(key: Key) -> Product | str:
    """The product behind a matmul key."""
    a, b = _spec(key, "a"), _spec(key, "b")
    if len(a.shape) < 2 or len(b.shape) != 2:
        return "only a of at least two dimensions times a b of two"
    return _product(key, a, b, turned=False)


def _product(key: Key, a: TensorSpec, b: TensorSpec, turned: bool) -> Product | str:
    if any(t is not None and t.dtype not in ("f16", "bf16") for t in key.tensors):
        return "QuACK's products are used in f16 and bf16"
    found = kernels_register.one_dtype(key) or matrix(a)
    if isinstance(found, str):
        return found
    as_is = isinstance(matrix(b), tuple)
    flipped = TensorSpec(b.dtype, b.shape[::-1], b.stride[::-1], b.align, b.constant)
    if not as_is and not isinstance(matrix(flipped), tuple):
        return "the weight is not in aligned rows or columns of a multiple of 16 bytes"
    (m, k), n = found, b.shape[0 if turned else 1]
    if n % 8 or m * n > adapter.MOST_ELEMENTS:
        return f"{n} outputs are not a multiple of 8, or too many"
    keep = bool(key.flag("save")) and key.flag("activation") in SMOOTH
    return Product(
        m, n, k, a.dtype, (*a.shape[:-1], n), key.flag("activation"), turned, as_is == turned, keep
    )


def gemm_act(p: Product, config: Config, device: torch.device) -> Launcher:
    """(y,), or (y, pre-activation) where backward needs it."""
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_act as act

    tile = GemmConfig(is_dynamic_persistent=False, device_capacity=9, **config) if config else None
    options = {
        "activation": ACTIVATIONS[p.activation],
        "store_preact": p.keep,
        "tuned": False,
        "config": tile,
    }

    def run(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None) -> Any:
        return act(a, b, C=residual, bias=bias, **options)

    def launch(
        a: Tensor, b: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Any:
        if not aligned(a, b, bias, residual):
            return None
        other = None if residual is None else residual.view(p.m, p.n)
        z, y = run(a.view(p.m, p.k), b.t() if p.turned else b, bias, other)
        return (y.view(p.shape), z.view(p.shape)) if p.keep else (y.view(p.shape),)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=DTYPES[p.dtype], device=device)

    b = zeros(128, 64).t() if p.columns else zeros(64, 128)
    warm(
        run,
        zeros(128, 64),
        b,
        zeros(128) if p.bias else None,
        zeros(128, 128) if p.residual else None,
    )
    return launch


def tiles() -> tuple[Config, ...]:
    """QuACK's default tile, and on sm_90 a few others; QuACK's own tuner would time them again."""
    return ({}, *TILES) if _capability() == 9 else ({},)


@lru_cache
def _capability() -> int:
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


def _small(device: torch.device, r: Rows) -> tuple[Tensor]:
    return (torch.zeros(1, r.columns, dtype=DTYPES[r.dtype], device=device),)


def _spec(key: Key, name: str) -> TensorSpec:
    return _present(key.spec(name))


def _present(spec: TensorSpec | None) -> TensorSpec:
    assert spec is not None
    return spec
