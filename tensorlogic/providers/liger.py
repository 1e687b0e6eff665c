"""Liger (liger-kernel): cross-entropy and layer norm, for calls without gradients and for forward passes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.candidate import Config, Launcher
from ..core.key import Key
from ..core.op import Op
from ..kernels import register as kernels_register
from . import adapter
from .adapter import Call, Function, Package, Rows, on_device, present, warm

PACKAGE = LIGER = Package(
    "liger-kernel", "liger_kernel", extra="liger", capability=8, needs=("triton",)
)
LONGEST_ROW = 65536  # of Liger's layer norm, which holds a row in one block
LONGEST_BLOCK = 32768  # of Liger's cross-entropy
WARPS: tuple[Config, ...] = ({"num_warps": 32}, {"num_warps": 8})  # Liger's own: Hopper, Blackwell


def register(ops: dict[str, Op]) -> None:
    """Entry point: add Liger's candidates where it is installed."""
    adapter.add(LIGER, FUNCTIONS, ops)


def logits_rows(key: Key) -> Rows | str:
    """Logits that Liger's cross-entropy takes."""
    found = adapter.logits_rows(key, vector_bytes=1)
    if not isinstance(found, str) and key.flag("save"):
        return "Liger keeps no log-sum-exp, which our backward needs: it writes the gradient over the logits"
    return found


def cross_entropy(c: Call) -> Launcher:
    """(loss,) by Liger's kernel itself: the function around it synchronises in every call, and the kernel sets ignored
    rows of the caller's logits to zero. Given targets in range and told to ignore none, it does neither."""
    from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel as kernel

    block = min(LONGEST_BLOCK, 1 << max(c.columns - 1, 0).bit_length())
    constant = {
        "X_stride": c.columns, "Y_stride": 1, "loss_stride": 1, "n_cols": c.columns, "BLOCK_SIZE": block,
        "n_non_ignore": 1, "sum_non_ignore_weight": 1, "weight_sum": 0.0, "ignore_index": -1,
        "lse_square_scale": 0.0, "label_smoothing": c.key.flag("label_smoothing"), "reduction": "none", "softcap": None,
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

    def each(logits: Tensor, target: Tensor) -> Any:
        loss = torch.empty(target.shape, dtype=torch.float32, device=target.device)
        kernel[(logits.shape[0],)](
            X_ptr=logits, Y_ptr=target, loss_ptr=loss, **constant, **c.config
        )
        return loss, None

    return adapter.cross_entropy(c, on_device(c.device, each), vectors=False)


def norm_rows(key: Key) -> Rows | str:
    """Inputs that Liger's layer norm takes."""
    found = adapter.norm_rows(key, vector_bytes=1)
    if isinstance(found, str):
        return found
    if key.spec("gamma") is None or key.spec("beta") is None:
        return "Liger's layer norm needs gamma and beta"
    if found[1] > LONGEST_ROW:
        return f"rows of {found[1]} are longer than Liger's {LONGEST_ROW}"
    if not all(kernels_register.is_contiguous(present(key, name)) for name in ("gamma", "beta")):
        return "gamma or beta is not contiguous"
    return found


def layer_norm_linear(c: Call) -> Launcher:
    """(y,)."""
    from liger_kernel.ops.layer_norm import layer_norm_forward

    placed, eps = on_device(c.device, layer_norm_forward), c.key.flag("eps")

    def launch(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return (F.linear(placed(x, gamma, beta, eps)[0], weight, bias),)

    small = c.zeros(1, c.columns)
    warm(placed, small, small[0], small[0], eps)
    return launch


FUNCTIONS = (
    Function("softmax_cross_entropy", "liger.cross_entropy", logits_rows, cross_entropy, lambda: WARPS),
    Function("layer_norm_linear", "liger.layer_norm", norm_rows, layer_norm_linear),
)  # fmt: skip
