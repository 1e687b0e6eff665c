"""Half-precision products of PyTorch on CPUs, served by the candidates that were chosen: what `enable` puts in their place.

A repair takes the arguments of one PyTorch kernel and returns its result, or None where PyTorch's own kernel shall serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import derived, policies
from .dispatch import MOST_ENTRIES, Bound
from .op import EAGER, Op
from .ops.common import native_wiring
from .ops.linear import LINEAR
from .ops.matmul import MATMUL

HALVES = frozenset((torch.float16, torch.bfloat16))
GRAIN = (
    1 << 13
)  # multiplications below which PyTorch's own kernel ends before a choice is looked up
Repair = Callable[..., Any]


# the choice ---------------------------------------------------------------------------------------------------------


_SETTLED = frozenset(("plan", "lockfile", "fixed plan", "forced"))


def _chosen(op: Op, *args: Any) -> tuple[Callable[..., Any] | None, bool]:
    """The launcher for op-level arguments, None where PyTorch's own kernel is settled to serve; and whether it is PyTorch's."""
    policy = policies.current()
    where: Any = (op.name, *(_mark(a) for a in args))
    bucket = policy.entries.get(where)
    if bucket is None:
        bound = Bound(op, (*args, False), policy, False)
        eager = bound.choice.candidate.id == EAGER
        settled = eager and bound.choice.source in _SETTLED
        bucket = [(None if settled else bound.launch, eager)]
        if bound.cacheable:
            if len(policy.entries) >= MOST_ENTRIES:
                policy.entries.clear()
            policy.entries[where] = bucket
    return bucket[0]


def _mark(a: Any) -> Any:
    if isinstance(a, Tensor):
        return (a.shape, a.stride(), a.dtype, derived.is_constant(a))
    return a


def _served(op: Op, *args: Any) -> Tensor | None:
    launch, _ = _chosen(op, *args)
    if launch is None:
        return None
    outs = launch(*[a for p, a in zip(op.params, args, strict=False) if p.is_dynamic])
    return None if outs is None else outs[0]


def _weight(b: Tensor) -> Tensor | None:
    """The [N, K] tensor that b [K, N] is the transpose of, the parameter itself where it is one; None for other layouts."""
    if b.stride(0) != 1 or b.stride(1) < b.shape[0]:
        return None
    base = b._base
    if (
        type(base) is Parameter
        and base.dim() == 2
        and base.data_ptr() == b.data_ptr()
        and base.stride() == (b.stride(1), 1)
        and base.shape == (b.shape[1], b.shape[0])
    ):
        return base
    return b.t()


# products -----------------------------------------------------------------------------------------------------------


def mm(a: Tensor, b: Tensor) -> Tensor | None:
    """a [M, K] @ b [K, N]."""
    if not _fits(a, b, 2):
        return None
    weight = _weight(b)
    if weight is not None:
        return _served(LINEAR, a, weight, None, None, "none")
    return _served(MATMUL, a, b, "none")


def bmm(a: Tensor, b: Tensor) -> Tensor | None:
    """a [B, M, K] @ b [B, K, N]."""
    if not _fits(a, b, 3) or a.shape[0] != b.shape[0]:
        return None
    return _served(MATMUL, a, b, "none")


def mv(a: Tensor, x: Tensor) -> Tensor | None:
    """a [N, K] @ x [K]: one row x against the weight a."""
    if not _fits(a, x.unsqueeze(-1), 2):
        return None
    if a.stride(0) == 1 and a.stride(1) >= a.shape[0]:
        y = _served(MATMUL, x.unsqueeze(0), a.t(), "none")
    else:
        y = _served(LINEAR, x.unsqueeze(0), a, None, None, "none")
    return None if y is None else y.squeeze(0)


def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor | None:
    """beta · c + alpha · (a [M, K] @ b [K, N])."""
    return _added_rows(c, a, b, beta, alpha, "none")


def addmm_activation(
    c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> Tensor | None:
    """relu or gelu of addmm."""
    return _added_rows(c, a, b, beta, alpha, "gelu" if use_gelu else "relu")


def _added_rows(
    c: Tensor, a: Tensor, b: Tensor, beta: Any, alpha: Any, activation: str
) -> Tensor | None:
    if not _fits(a, b, 2) or c.dtype != a.dtype:
        return None
    if beta == 1 and alpha == 1 and c.shape == (b.shape[1],):
        weight = _weight(b)
        return _served(LINEAR, a, b.t() if weight is None else weight, c, None, activation)
    if activation != "none" or _left_to_pytorch(a, b):
        return None
    return _in_f32(torch.addmm, (c, a, b), beta=beta, alpha=alpha)


def baddbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor | None:
    """beta · c + alpha · (a [B, M, K] @ b [B, K, N])."""
    if not _fits(a, b, 3) or c.dtype != a.dtype or a.shape[0] != b.shape[0]:
        return None
    if _left_to_pytorch(a, b):
        return None
    return _in_f32(torch.baddbmm, (c, a, b), beta=beta, alpha=alpha)


def addmv(c: Tensor, a: Tensor, x: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor | None:
    """beta · c + alpha · (a [N, K] @ x [K])."""
    if c.dtype != a.dtype:
        return None
    if beta == 0 and alpha == 1:
        return mv(a, x)
    if not _fits(a, x.unsqueeze(-1), 2):
        return None
    if beta == 1 and alpha == 1 and c.shape == (a.shape[0],):
        y = _served(LINEAR, x.unsqueeze(0), a, c, None, "none")
        return None if y is None else y.squeeze(0)
    if _left_to_pytorch(a, x.unsqueeze(-1)):
        return None
    return _in_f32(torch.addmv, (c, a, x), beta=beta, alpha=alpha)


def _left_to_pytorch(a: Tensor, b: Tensor) -> bool:
    """True where PyTorch's own kernel serves the plain product, and so what is built on it."""
    return _chosen(MATMUL, a, b, "none")[1]


def _fits(a: Tensor, b: Tensor, dim: int) -> bool:
    """A product that is well-formed, not empty, and large enough to be worth a look; the others are PyTorch's to judge."""
    return (
        a.dim() == dim == b.dim()
        and a.dtype == b.dtype
        and a.shape[-1] == b.shape[-2]
        and a.numel() * b.shape[-1] > GRAIN
        and b.is_cpu
    )


# float32 throughout -------------------------------------------------------------------------------------------------


def _in_f32(fn: Callable[..., Any], tensors: Sequence[Any], *rest: Any, **named: Any) -> Any:
    """`fn` on widened halves; what was asked for in halves is rounded once."""
    dtype = next(t.dtype for t in tensors if isinstance(t, Tensor))
    y = fn(*[_wide(t) for t in tensors], *rest, **named)
    return (
        y.to(dtype) if isinstance(y, Tensor) else tuple(t if t is None else t.to(dtype) for t in y)
    )


def _wide(t: Any) -> Any:
    return t.float() if isinstance(t, Tensor) and t.dtype in HALVES else t


def _slow(*tensors: Any) -> bool:
    """True for float16 where PyTorch has no hardware for it; its bfloat16 attention and convolutions are as fast as float32."""
    halves = all(t is None or t.dtype == torch.float16 or t.dtype == torch.bool for t in tensors)
    return halves and native_wiring.half_is_slow()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor] | None:
    """PyTorch's fused attention, forward: y in the dtype of q and the log-sum-exp in float32."""
    if not _slow(q, k, v, attn_mask) or q.numel() * k.shape[-2] <= GRAIN:
        return None
    y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(t.float() for t in (q, k, v)),
        dropout_p,
        is_causal,
        attn_mask=_wide(attn_mask),
        scale=scale,
    )
    return y.to(q.dtype), lse


def attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """PyTorch's fused attention, backward: dq, dk, dv."""
    if not _slow(dy, q, k, v, y, attn_mask) or q.numel() * k.shape[-2] <= GRAIN:
        return None
    fn = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    named = {"attn_mask": _wide(attn_mask), "scale": scale}
    return _in_f32(fn, (dy, q, k, v, y, lse), dropout_p, is_causal, **named)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor | None:
    """A convolution of any kind and dimension."""
    if not _slow(x, weight, bias) or 0 in x.shape:
        return None
    return _in_f32(torch.ops.aten.convolution, (x, weight, bias), *rest)


def convolution_backward(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    """Its gradients of x, weight and bias, as far as they are asked for."""
    if not _slow(dy, x, weight) or 0 in x.shape:
        return None
    return _in_f32(torch.ops.aten.convolution_backward, (dy, x, weight), *rest)


WIDENED: dict[str, Repair] = {
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
}
