"""softmax_cross_entropy by the native CPU kernel: one pass over each row, nothing of the logits' size allocated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.candidate import Launcher
from ...core.key import Key
from ...kernels import register
from ...kernels.cpu import register as cpu_register
from ...native import cpu_library
from . import SOFTMAX_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY_BACKWARD


def supports(key: Key) -> str | None:
    """None for contiguous rows of logits with contiguous targets and gradients."""
    for name in ("target", "dloss", "lse"):
        t = key.spec(name) if name in key.names else None
        if t is not None and not register.is_contiguous(t):
            return f"{name} is not contiguous"
    return cpu_register.contiguous(key, "logits")


def guess(key: Key) -> float:
    """Eager writes the log-probabilities of every class to memory and reads them again."""
    size, call = cpu_register.size_of(key, "logits"), cpu_register.call_us(key)
    logits = key.present("logits")
    classes = logits.shape[-1]
    rows = size // classes
    row = 0.012 if classes >= 16 else 0.02 + 0.006 * classes
    if classes <= 2:
        row = 0.009 + 0.0045 * classes
    if logits.dtype != "f32" and 8 <= classes < 32:
        row = 0.1
    ours = 0.8 + call + (0.09 if cpu_register.narrow() else 0.022) * rows + 0.2e-3 * size
    return ours / (4.0 + row * rows + 0.35e-3 * size)


def build(key: Key) -> Launcher:
    """The forward launcher: (loss,), or (loss, log-sum-exp, share of a row)."""
    kernel, reduction = cpu_library.op("softmax_cross_entropy"), key.flag("reduction")

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        try:
            return kernel(*args)
        except RuntimeError as problem:
            if "out of bounds" in str(problem):  # the stable ABI raises RuntimeError only
                text = str(problem).splitlines()[0]
                raise IndexError(text) from None
            raise

    ignore, smoothing = key.flag("ignore_index"), key.flag("label_smoothing")
    number = cpu_library.REDUCTIONS[reduction]
    if not key.flag("save"):
        return lambda logits, target: (run(logits, target, ignore, smoothing, number)[0],)

    def launch(logits: Tensor, target: Tensor) -> Any:
        loss, lse = run(logits, target, ignore, smoothing, number)
        if reduction != "mean":
            return loss, lse, torch.ones(1, dtype=torch.float32, device="cpu")
        count = int((target != ignore).sum())
        share = 1.0 / count if count else float("nan")
        return loss, lse, torch.full((1,), share, dtype=torch.float32, device="cpu")

    return launch


def output_backward(key: Key) -> int:
    """Bytes of the gradient of the logits."""
    return cpu_register.bytes_of(key, "logits")


def build_backward(key: Key, stores: int) -> Launcher:
    """The backward launcher; the kernel counts the rows that matter again."""
    run = cpu_library.op("softmax_cross_entropy_backward")
    number = cpu_library.REDUCTIONS[key.flag("reduction")]
    ignore, smoothing = key.flag("ignore_index"), key.flag("label_smoothing")
    return lambda dloss, logits, target, lse, share: (
        run(dloss, logits, target, lse, ignore, smoothing, number, stores),
    )


cpu_register.add(SOFTMAX_CROSS_ENTROPY, "cpu.fused", build, supports, guess, __name__)
cpu_register.add_stored(
    SOFTMAX_CROSS_ENTROPY_BACKWARD, "cpu.fused", build_backward, supports, guess, __name__, output_backward
)  # fmt: skip
