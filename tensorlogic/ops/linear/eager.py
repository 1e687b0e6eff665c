"""Candidates of linear that PyTorch ships: the plain composition, its in-place form, oneDNN.

Not `torch._addmm_activation`: PyTorch lets cuBLASLt round partial sums to a half dtype there. `cublaslt.epilogue` adds them in float32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...core.activations import SMOOTH, activate_
from ...core.key import Key
from ...kernels.cpu import onednn
from ..common import linear_ops
from . import LINEAR, LINEAR_BACKWARD, reference

LINEAR.candidate("torch.eager", trusted=True)(reference.linear)


def _in_place(key: Key) -> str | None:
    if key.flag("save") and key.flag("activation") in SMOOTH:
        return "the pre-activation must be kept"
    if key.spec("residual") is None and key.flag("activation") not in ("relu", "silu"):
        return "nothing to do in place"
    return None


@LINEAR.candidate("torch.inplace", supports=_in_place, trusted=True)
def in_place(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, ...]:
    """Residual and activation into the product's own memory."""
    y = F.linear(x, weight, bias)
    if residual is not None:
        y.add_(residual)
    return (activate_(y, activation),)


def _onednn(key: Key) -> str | None:
    reason = onednn.onednn_f32(key)
    if reason is None and key.flag("save") and key.flag("activation") in SMOOTH:
        return "the pre-activation must be kept"
    return reason


@LINEAR.candidate(
    "onednn.linear", supports=_onednn, available=onednn.onednn_available, trusted=True
)
def onednn_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, ...]:
    """oneDNN's product with its own activation; a residual and what follows it go in place."""
    if residual is None:
        return (onednn.onednn(x, weight, bias, activation),)
    return (activate_(onednn.onednn(x, weight, bias, "none").add_(residual), activation),)


@LINEAR.candidate("torch.widened", supports=onednn.widened, trusted=True)
def widened(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, ...]:
    """A half product in float32, weights widened once and kept; rounded at the end."""
    z = F.linear(x.float(), onednn.wide_weight(weight), None if bias is None else bias.float())
    if residual is not None:
        z.add_(residual)
    kept = z.to(x.dtype) if save and activation in SMOOTH else None
    y = activate_(z, activation).to(x.dtype)
    return (y,) if kept is None else (y, kept)


LINEAR_BACKWARD.candidate("torch.eager", trusted=True)(reference.linear_backward)
linear_ops.add_widened(LINEAR_BACKWARD)
