"""How kernels see the scores: at most two leading dimensions, rows of q and k with unit stride, a mask that broadcasts."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.argument_checks import broadcast
from ...core.key import Key, TensorSpec
from ...kernels import register

Strides = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """(B, H, S, T, D), the output's shape, dtypes and strides as the kernel takes them."""

    sizes: tuple[int, int, int, int, int]
    out: tuple[int, ...]
    dtype: str
    q: Strides
    k: Strides
    mask: str
    mask_dtype: str
    mask_strides: Strides
    causal: bool
    align: int


def _four(t: TensorSpec, lead: tuple[int, int], tail: int) -> Strides | None:
    """Strides over (B, H, ...), 0 where a leading dimension broadcasts; `tail` trailing dimensions keep theirs."""
    shape, stride = t.shape[: len(t.shape) - tail], t.stride[: len(t.shape) - tail]
    padded = [(1, 0)] * (2 - len(shape)) + list(zip(shape, stride, strict=True))
    if len(padded) != 2 or any(
        n not in (1, want) for (n, _), want in zip(padded, lead, strict=True)
    ):
        return None
    ends = [0 if n == 1 else s for n, s in zip(t.shape[-tail:], t.stride[-tail:], strict=True)]
    return (*(0 if n == 1 else s for n, s in padded), *ends)


def describe(key: Key) -> Shape | str:
    """At most two leading dimensions, rows of q and k with unit stride."""
    q, k, mask = key.present("q"), key.present("k"), key.spec("mask")
    reason = register.one_dtype(key, "q", "k")
    if reason is not None:
        return reason
    if 0 in (*q.shape, *k.shape) or len(q.shape) > 4 or len(k.shape) > 4:
        return "empty, or more than two leading dimensions"
    if q.stride[-1] != 1 or k.stride[-1] != 1 or q.shape[-1] > 256:
        return "rows of q and k must be contiguous and at most 256 long"
    lead = broadcast(q.shape[:-2], k.shape[:-2])
    b, h = (1, 1, *lead)[-2:]
    s, t, d = q.shape[-2], k.shape[-2], q.shape[-1]
    left, right = _four(q, (b, h), 2), _four(k, (b, h), 2)
    if left is None or right is None:
        return "leading dimensions do not line up"
    left, right = (*left[:2], q.stride[-2]), (*right[:2], k.stride[-2])
    found = mask_of(mask, (b, h), q.dtype)
    if isinstance(found, str):
        return found
    return Shape(
        (b, h, s, t, d), (*lead, s, t), q.dtype, left, right, *found, key.flag("is_causal"), register.weakest(key),
    )  # fmt: skip


def mask_of(
    mask: TensorSpec | None, lead: tuple[int, int], dtype: str
) -> tuple[str, str, Strides] | str:
    """Its kind ("none", "bool" or "float"), its dtype (`dtype` without one) and its strides over (B, H, S, T), 0 where it broadcasts."""
    if mask is None:
        return "none", dtype, (0, 0, 0, 0)
    missing = 2 - len(mask.shape)
    padded = TensorSpec(mask.dtype, (1,) * missing + mask.shape, (0,) * missing + mask.stride)
    strides = _four(padded, lead, 2)
    if strides is None:
        return "the mask's leading dimensions do not line up"
    return "bool" if mask.dtype == "bool" else "float", mask.dtype, strides
