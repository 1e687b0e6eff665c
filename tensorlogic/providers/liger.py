"""Liger (liger-kernel): cross-entropy and layer norm, for calls without gradients and for forward passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.candidate import Config, Launcher
from ..core.dtypes import DTYPES
from ..core.key import Key
from ..core.op import Op
from ..kernels import register as kernels_register
from ..ops.layer_norm_linear import saves
from . import adapter
from .adapter import Package, adapted, matrix, on_device, warm

PACKAGE = LIGER = Package(
    "liger-kernel", "liger_kernel", extra="liger", capability=8, needs=("triton",)
)
LONGEST_ROW = 65536  # of Liger's layer norm, which holds a row in one block
LONGEST_BLOCK = 32768  # of Liger's cross-entropy
WARPS: tuple[Config, ...] = ({"num_warps": 32}, {"num_warps": 8})  # Liger's own: Hopper, Blackwell


def register(ops: dict[str, Op]) -> None:
    """Entry point: add Liger's candidates where it is installed."""
    if LIGER.missing() is not None:
        return
    loss, norm = ops["softmax_cross_entropy"], ops["layer_norm_linear"]
    adapted(loss, "liger.cross_entropy", LIGER, logits_rows, cross_entropy, lambda: WARPS)
    adapted(norm, "liger.layer_norm", LIGER, norm_rows, layer_norm_linear)


@dataclass(frozen=True)
class Loss:
    """Rows of logits and the flags of the loss."""

    rows: int
    columns: int
    dtype: str
    shape: tuple[int, ...]
    reduction: str
    ignore_index: int
    smoothing: float


def logits_rows(key: Key) -> Loss | str:
    """Logits that Liger's cross-entropy takes."""
    logits, target = key.spec("logits"), key.spec("target")
    assert logits is not None and target is not None
    found = kernels_register.one_dtype(key, "logits") or matrix(logits, vector_bytes=1)
    if isinstance(found, str):
        return found
    if not kernels_register.is_contiguous(target):
        return "targets are not contiguous"
    if key.flag("save"):
        return "Liger keeps no log-sum-exp, which our backward needs: it writes the gradient over the logits"
    return Loss(
        *found,
        logits.dtype,
        logits.shape,
        key.flag("reduction"),
        key.flag("ignore_index"),
        key.flag("label_smoothing"),
    )


def cross_entropy(s: Loss, config: Config, device: torch.device) -> Launcher:
    """(loss,) by Liger's kernel itself: the function around it synchronises in every call, and the kernel sets ignored
    rows of the caller's logits to zero. Given targets in range and told to ignore none, it does neither."""
    from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel as kernel

    block = min(LONGEST_BLOCK, 1 << max(s.columns - 1, 0).bit_length())
    constant = {
        "X_stride": s.columns, "Y_stride": 1, "loss_stride": 1, "n_cols": s.columns, "BLOCK_SIZE": block,
        "n_non_ignore": 1, "sum_non_ignore_weight": 1, "weight_sum": 0.0, "ignore_index": -1,
        "lse_square_scale": 0.0, "label_smoothing": s.smoothing, "reduction": "none", "softcap": None,
        "weight_ptr": None, "z_loss_ptr": None, "token_accuracy_ptr": None, "token_accuracy_stride": 0,
        "predicted_tokens_ptr": None, "predicted_tokens_stride": 0, "RETURN_Z_LOSS": False,
        "RETURN_TOKEN_ACCURACY": False, "RETURN_PREDICTED_TOKENS": False, "HAS_WEIGHT": False,
        "HAS_SOFTCAPPING": False, "HAS_GRADIENTS": False,
    }  # fmt: skip
    unknown = set(kernel.arg_names) - {"X_ptr", "Y_ptr", "loss_ptr"} - constant.keys()
    if unknown:
        raise NotImplementedError(
            f"{LIGER.text}: its kernel also takes {', '.join(sorted(unknown))}"
        )
    constant = {name: value for name, value in constant.items() if name in kernel.arg_names}

    def run(logits: Tensor, target: Tensor) -> Tensor:
        loss = torch.empty(target.shape, dtype=torch.float32, device=target.device)
        kernel[(target.shape[0],)](X_ptr=logits, Y_ptr=target, loss_ptr=loss, **constant, **config)
        return loss

    def launch(logits: Tensor, target: Tensor) -> Any:
        flat = target.reshape(s.rows)
        each = placed(logits.view(s.rows, s.columns), adapter.in_range(flat, s.columns))
        loss, _ = adapter.reduced(each, flat, s.columns, s.ignore_index, s.reduction)
        return (loss.to(logits.dtype).view(s.shape[:-1] if s.reduction == "none" else ()),)

    placed = on_device(device, run)
    small = torch.zeros(1, s.columns, dtype=DTYPES[s.dtype], device=device)
    warm(placed, small, torch.zeros(1, dtype=torch.int64, device=device))
    return launch


@dataclass(frozen=True)
class Norm:
    """Rows to normalise before a product."""

    rows: int
    columns: int
    dtype: str
    eps: float


def norm_rows(key: Key) -> Norm | str:
    """Inputs that Liger's layer norm takes; the product after it is PyTorch's."""
    x = key.spec("x")
    assert x is not None
    found = kernels_register.one_dtype(key) or matrix(x, vector_bytes=1)
    if isinstance(found, str):
        return found
    if saves(key):
        return "normalised rows and their statistics are kept for backward"
    gamma, beta = key.spec("gamma"), key.spec("beta")
    if gamma is None or beta is None:
        return "Liger's layer norm needs gamma and beta"
    if found[1] > LONGEST_ROW:
        return f"rows of {found[1]} are longer than Liger's {LONGEST_ROW}"
    if not kernels_register.is_contiguous(gamma) or not kernels_register.is_contiguous(beta):
        return "gamma or beta is not contiguous"
    return Norm(*found, x.dtype, key.flag("eps"))


def layer_norm_linear(n: Norm, config: Config, device: torch.device) -> Launcher:
    """(y,)."""
    from liger_kernel.ops.layer_norm import layer_norm_forward

    placed = on_device(device, layer_norm_forward)

    def launch(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return (F.linear(placed(x, gamma, beta, n.eps)[0], weight, bias),)

    small = torch.zeros(1, n.columns, dtype=DTYPES[n.dtype], device=device)
    warm(placed, small, small[0], small[0], n.eps)
    return launch
