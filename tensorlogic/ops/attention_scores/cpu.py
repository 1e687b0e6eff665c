"""attention_scores on CPUs: a float32 product, then scale, mask, softmax and rounding in one pass over the scores."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ...core.candidate import Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.cpu import cost_model
from ...kernels.cpu import register as cpu_register
from ...native import cpu_library
from . import ATTENTION_SCORES, ATTENTION_SCORES_BACKWARD, unseen_zeroed

CALL = 2.0  # microseconds that the second native call takes


def supports(key: Key) -> str | None:
    """None for q and k with equal leading dimensions, and no mask or one of the scores' shape."""
    q, k, mask = key.present("q"), key.present("k"), key.spec("mask")
    if q.shape[:-2] != k.shape[:-2]:
        return "leading dimensions of q and k differ"
    if mask is not None and (
        not mask.shape or mask.shape[-1] != k.shape[-2] or not register.is_contiguous(mask)
    ):
        return "the mask is strided or broadcast along its last dimension"
    return register.one_dtype(key, "q", "k") if 0 not in (*q.shape, *k.shape) else "empty"


def guess(key: Key) -> float:
    """Eager makes three or more passes over the scores; its half-precision product may have no hardware."""
    q, k = key.present("q"), key.present("k")
    rows, columns, depth = prod(q.shape[:-1]), k.shape[-2], q.shape[-1]
    masked = key.flag("is_causal") or key.spec("mask") is not None
    eager = cost_model.torch_us(rows, columns, depth, q.dtype, False)
    eager += (3 + masked) * cost_model.pass_us(rows * columns)
    ours = cost_model.native_us(rows, columns, depth, q.dtype, True)
    return (ours + CALL + 2 * cost_model.pass_us(rows * columns)) / eager


def build(key: Key) -> Launcher:
    """The launcher over (q, k, scale, mask)."""
    causal, dtype = key.flag("is_causal"), DTYPES[cpu_register.dtype_of(key, "q")]
    in_place, out_of_place = cpu_library.op("softmax_"), cpu_library.op("softmax")
    product = cpu_library.op("matmul_f32")

    def launch(q: Any, k: Any, scale: float, mask: Any) -> Any:
        scores = product(q, k, True)
        if dtype == torch.float32:
            in_place(scores, mask, scale, causal)
            return (scores,)
        return (out_of_place(scores, mask, scale, causal, dtype),)

    return launch


def supports_backward(key: Key) -> str | None:
    """None for q and k with equal leading dimensions, contiguous scores, and a mask that needs no gradient."""
    q, k = key.present("q"), key.present("k")
    if key.flag("needs")[2] == "1":
        return "the mask needs a gradient"
    if q.shape[:-2] != k.shape[:-2] or 0 in (*q.shape, *k.shape):
        return "leading dimensions of q and k differ, or an operand is empty"
    return cpu_register.contiguous(key, "dy", "y") or register.one_dtype(key, "dy", "q", "k", "y")


def guess_backward(key: Key) -> float:
    """One pass over the scores and two products, as eager has them."""
    q, k = key.present("q"), key.present("k")
    rows, columns, depth = prod(q.shape[:-1]), k.shape[-2], q.shape[-1]
    ways, dtype = ((rows, depth, columns), (columns, depth, rows)), q.dtype
    ours = sum(cost_model.native_us(*way, dtype, False) for way in ways)
    theirs = sum(cost_model.torch_us(*way, dtype, False) for way in ways)
    between = cost_model.pass_us(rows * columns)
    return (ours + CALL + between) / (theirs + 2 * between)


def build_backward(key: Key) -> Launcher:
    """The launcher over (dy, q, k, y, scale, mask)."""
    gradient, product = cpu_library.op("softmax_backward"), cpu_library.op("matmul")
    causal, needs = key.flag("is_causal"), key.flag("needs")

    def launch(dy: Any, q: Any, k: Any, y: Any, scale: float, mask: Any) -> Any:
        ds = unseen_zeroed(gradient(dy, y), mask, causal)
        dq = product(ds, k).mul_(scale) if needs[0] == "1" else None
        dk = product(ds.mT, q).mul_(scale) if needs[1] == "1" else None
        return dq, dk, None

    return launch


cpu_register.add(
    ATTENTION_SCORES_BACKWARD, "cpu.products", build_backward, supports_backward, guess_backward, __name__
)  # fmt: skip
cpu_register.add(
    ATTENTION_SCORES, "cpu.fused", build, supports, guess, __name__, cpu_register.PRODUCTS
)
