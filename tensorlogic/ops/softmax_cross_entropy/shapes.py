"""How kernels see the loss: contiguous rows of logits with contiguous targets."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.key import Key
from ...kernels import register


@dataclass(frozen=True)
class Shape:
    """Rows and classes, dtypes, and the options that the kernels are compiled for."""

    rows: int
    columns: int
    dtype: str
    dy_dtype: str
    shape: tuple[int, ...]
    reduction: str
    ignore_index: int
    smoothing: float
    save: bool
    align: int


def describe(key: Key) -> Shape | str:
    """Contiguous rows of logits with contiguous targets."""
    logits, target = key.present("logits"), key.present("target")
    reason = register.one_dtype(key, "logits")
    if reason is not None:
        return reason
    rows = register.rows_of(logits)
    if isinstance(rows, str):
        return rows
    if not register.is_contiguous(target):
        return "targets are not contiguous"
    save = bool(key.flag("save")) if key.op == "softmax_cross_entropy" else False
    dloss = key.spec("dloss") if key.op != "softmax_cross_entropy" else None
    if dloss is not None and not register.is_contiguous(dloss):
        return "the incoming gradient is expanded"
    return Shape(
        *rows, logits.dtype, dloss.dtype if dloss else logits.dtype, logits.shape,
        key.flag("reduction"), key.flag("ignore_index"), key.flag("label_smoothing"), save, register.weakest(key),
    )  # fmt: skip
