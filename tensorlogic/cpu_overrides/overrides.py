"""Half-precision products of PyTorch on CPUs, served by the candidates that were chosen: what `enable` puts in their place.

A repair takes the arguments of one PyTorch kernel and returns its result, or None where PyTorch's own kernel shall serve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core import policy, weight_cache
from ..core.candidate import EAGER
from ..core.op import Op
from ..dispatch.bound_call import bind
from ..dispatch.call_cache import MOST_ENTRIES
from ..native import hook_extension
from ..ops.linear import LINEAR
from ..ops.matmul import MATMUL

HALVES = frozenset((torch.float16, torch.bfloat16))
GRAIN = 1 << 15  # multiplications below which PyTorch's own kernel serves
Repair = Callable[..., Any]
Route = Callable[..., Any]


# the choice ---------------------------------------------------------------------------------------------------------

_SETTLED = frozenset(("plan", "lockfile", "fixed plan", "forced"))


def _route(find: Callable[..., Route], *tensors: Tensor) -> Route:
    """What serves tensors of these shapes: found once by `find` under each policy, as long as its plans stand."""
    entries = policy.current().entries
    where = (find, *[(t.shape, t.stride(), t.dtype) for t in tensors], _constant(tensors[-1]))
    known = entries.get(where)
    if known is not None:
        return known[0][1]
    route = find(*tensors)
    if len(entries) >= MOST_ENTRIES:
        entries.clear()
    entries[where] = [(None, route)]
    return route


def _constant(b: Tensor) -> bool:
    base = b._base
    return weight_cache.is_constant(b if base is None else base)


def _pytorch(*_: Any) -> None:
    """The route to PyTorch's own kernel, which was measured to be the fastest; the compiled guards remember it."""
    hook_extension.skip_until_invalidated()


def _unfit(*_: Any) -> None:
    """The route to PyTorch's own kernel for what is not ours to judge."""


def _launcher(op: Op, *args: Any) -> tuple[Callable[..., Any] | None, bool]:
    """The chosen launcher, None where PyTorch's own kernel is settled to serve; and whether the choice is PyTorch's."""
    bound = bind(op, (*args, False), policy.current(), False)
    eager = bound.choice.candidate.id == EAGER
    return None if eager and bound.choice.source in _SETTLED else bound.launch, eager


def _fits(a: Tensor, b: Tensor, dim: int) -> bool:
    """A product that is well-formed, not empty, and large enough to be worth a look; the others are PyTorch's to judge."""
    return (
        a.dim() == dim == b.dim()
        and a.dtype == b.dtype
        and a.shape[-1] == b.shape[-2]
        and a.numel() * b.shape[-1] > GRAIN
        and b.is_cpu
    )


def _is_transposed(b: Tensor) -> bool:
    """True where b [K, N] is the transpose of [N, K] rows, as a layer's weight is."""
    return b.stride(0) == 1 and b.stride(1) >= b.shape[0]


def _weight(b: Tensor, shape: torch.Size) -> Tensor:
    """bᵀ, the parameter itself where b is the transpose of one."""
    base = b._base
    if base is not None and base.shape == shape and base.is_contiguous() and base.dtype == b.dtype:
        return base
    return b.t()


# products -----------------------------------------------------------------------------------------------------------


def mm(a: Tensor, b: Tensor) -> Tensor | None:
    """a [M, K] @ b [K, N]."""
    return _route(_find_mm, a, b)(a, b)


def _find_mm(a: Tensor, b: Tensor) -> Route:
    return _find_linear(a, b) if _fits(a, b, 2) and _is_transposed(b) else _find_product(a, b, 2)


def bmm(a: Tensor, b: Tensor) -> Tensor | None:
    """a [B, M, K] @ b [B, K, N]."""
    return _route(_find_bmm, a, b)(a, b)


def _find_bmm(a: Tensor, b: Tensor) -> Route:
    return _find_product(a, b, 3) if a.shape[:1] == b.shape[:1] else _unfit


def _find_product(a: Tensor, b: Tensor, dim: int) -> Route:
    if not _fits(a, b, dim):
        return _unfit
    launch, _ = _launcher(MATMUL, a, b, "none")
    if launch is None:
        return _pytorch

    def route(a: Tensor, b: Tensor) -> Tensor | None:
        outs = launch(a, b)
        return None if outs is None else outs[0]

    return route


def _find_linear(
    a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Route:
    """a · b + bias for b [K, N] as linear with the weight bᵀ."""
    shape = torch.Size((b.shape[1], b.shape[0]))
    launch, _ = _launcher(LINEAR, a, _weight(b, shape), bias, None, activation)
    if launch is None:
        return _pytorch

    def route(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor | None:
        outs = launch(a, _weight(b, shape), bias, None)
        return None if outs is None else outs[0]

    return route


def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor | None:
    """beta · c + alpha · (a [M, K] @ b [K, N])."""
    if beta == 1 and alpha == 1:
        return _route(_find_addmm, c, a, b)(c, a, b)
    if beta == 0 and alpha == 1 and c.dtype == a.dtype and c.shape == (len(a), b.shape[-1]):
        return mm(a, b)
    return _combined(torch.addmm, 2, c, a, b, beta, alpha)


def addmm_activation(
    c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> Tensor | None:
    """relu or gelu of addmm."""
    if beta == 1 and alpha == 1:
        return _route(_find_addmm_gelu if use_gelu else _find_addmm_relu, c, a, b)(c, a, b)
    return None


def _find_addmm(c: Tensor, a: Tensor, b: Tensor, activation: str = "none") -> Route:
    if not _fits(a, b, 2) or c.dtype != a.dtype:
        return _unfit
    if c.shape == b.shape[1:]:
        linear = _find_linear(a, b, c, activation)
        return linear if linear is _pytorch else lambda c, a, b: linear(a, b, c)
    if activation != "none":
        return _unfit
    return lambda c, a, b: _combined(torch.addmm, 2, c, a, b, 1, 1)


_find_addmm_relu = functools.partial(_find_addmm, activation="relu")
_find_addmm_gelu = functools.partial(_find_addmm, activation="gelu")


def baddbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor | None:
    """beta · c + alpha · (a [B, M, K] @ b [B, K, N])."""
    return _combined(torch.baddbmm, 3, c, a, b, beta, alpha)


def addmv(c: Tensor, a: Tensor, x: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor | None:
    """beta · c + alpha · (a [N, K] @ x [K]); PyTorch's mv comes here with beta = 0."""
    if c.dtype != a.dtype:
        return None
    if beta == 0 and alpha == 1:
        return _route(_find_mv, x, a)(x, a)
    if beta == 1 and alpha == 1 and c.shape == a.shape[:1]:
        return _route(_find_addmv, c, x, a)(c, x, a)
    return _combined(torch.addmv, 2, c, a, x, beta, alpha)


def _find_mv(x: Tensor, a: Tensor) -> Route:
    if not _fits_vector(a, x):
        return _unfit
    if _is_transposed(a):
        product = _find_product(x.unsqueeze(0), a.t(), 2)
        return product if product is _pytorch else lambda x, a: _row(product(x[None], a.t()))
    return _find_addmv(None, x, a)


def _find_addmv(c: Tensor | None, x: Tensor, a: Tensor) -> Route:
    """One row x against the weight a."""
    if not _fits_vector(a, x):
        return _unfit
    launch, _ = _launcher(LINEAR, x.unsqueeze(0), a, c, None, "none")
    if launch is None:
        return _pytorch
    if c is None:
        return lambda x, a: _row((launch(x[None], a, None, None) or (None,))[0])
    return lambda c, x, a: _row((launch(x[None], a, c, None) or (None,))[0])


def _row(y: Tensor | None) -> Tensor | None:
    return None if y is None else y[0]


def _fits_vector(a: Tensor, x: Tensor) -> bool:
    return x.dim() == 1 and _fits(a, x.unsqueeze(-1), 2)


def _combined(
    fn: Repair, dim: int, c: Tensor, a: Tensor, b: Tensor, beta: Any, alpha: Any
) -> Tensor | None:
    """beta · c + alpha · a · b in float32, rounded once; PyTorch's where the plain product is."""
    columns = b.unsqueeze(-1) if fn is torch.addmv else b
    if c.dtype != a.dtype or _route(_find_whether_dim[dim], a, columns)(a, columns) is None:
        return None
    return _in_f32(fn, (c, a, b), beta=beta, alpha=alpha)


def _find_whether(dim: int) -> Callable[..., Route]:
    """Finds a route that says whether the plain product is ours: True, or None."""

    def find(a: Tensor, b: Tensor) -> Route:
        if not _fits(a, b, dim) or a.shape[:-2] != b.shape[:-2]:
            return _unfit
        launch, eager = _launcher(MATMUL, a, b, "none")
        return _pytorch if launch is None else _unfit if eager else lambda a, b: True

    return find


_find_whether_dim = {dim: _find_whether(dim) for dim in (2, 3)}


# float32 throughout -------------------------------------------------------------------------------------------------


def _in_f32(fn: Callable[..., Any], tensors: Sequence[Any], *rest: Any, **named: Any) -> Any:
    """`fn` on widened halves; what was asked for in halves is rounded once."""
    dtype = next(t.dtype for t in tensors if isinstance(t, Tensor))
    y = fn(*[_wide(t) for t in tensors], *rest, **named)
    return y.to(dtype) if isinstance(y, Tensor) else tuple(t if t is None else t.to(dtype) for t in y)  # fmt: skip


def _wide(t: Any) -> Any:
    """Halves in float32, laid out likewise; of overlapping windows PyTorch makes columns, which its attention kernel never expects."""
    if not (isinstance(t, Tensor) and t.dtype in HALVES):
        return t
    wide = t.float()
    rows = t.dim() and t.stride(-1) == 1 and wide.stride(-1) != 1
    return wide.contiguous() if rows else wide


@lru_cache
def no_float16() -> bool:
    """True where PyTorch has no hardware for float16 products on this CPU."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return supported is None or not supported()


def _slow(*tensors: Any) -> bool:
    """True for float16 where PyTorch has no hardware for it; its bfloat16 attention and convolutions are as fast as float32."""
    halves = all(t is None or t.dtype == torch.float16 or t.dtype == torch.bool for t in tensors)
    return halves and no_float16()


def attention(
    q: Tensor, k: Tensor, v: Tensor, *flags: Any, attn_mask: Tensor | None = None, **more: Any
) -> tuple[Tensor, Tensor] | None:
    """PyTorch's fused attention, forward: y in the dtype of q and the log-sum-exp in float32."""
    if not _serves_attention(q, k, v, attn_mask):
        return None
    fn = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    y, lse = fn(*map(_wide, (q, k, v)), *flags, attn_mask=_wide(attn_mask), **more)
    return y.to(q.dtype), lse


def attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, *rest: Any, attn_mask: Tensor | None = None, **more: Any
) -> Any:  # fmt: skip
    """PyTorch's fused attention, backward: dq, dk, dv. `rest`: the log-sum-exp, the dropout and whether it is causal."""
    if not _serves_attention(q, k, dy, v, y, attn_mask):
        return None
    fn = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    lse, *flags = rest
    return _in_f32(fn, (dy, q, k, v, y, lse), *flags, attn_mask=_wide(attn_mask), **more)


def _serves_attention(q: Tensor, k: Tensor, *others: Tensor | None) -> bool:
    """Whether float32 serves; of other dtypes than float16 that is remembered, whatever the mask is."""
    if _slow(q, k, *others) and q.numel() * k.shape[-2] > GRAIN:
        return True
    if q.dtype != torch.float16:
        hook_extension.skip_until_invalidated()
    return False


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor | None:
    """A convolution of any kind and dimension; what is empty, or would be, PyTorch's float32 kernels take otherwise than its others.

    `rest`: stride, padding, dilation, whether it is transposed, output padding, groups.
    """
    if not _slow(x, weight, bias) or 0 in x.shape or 0 in weight.shape:
        return None
    *sizes, transposed, output_padding, _ = rest
    if transposed and _shortest(x.shape[2:], weight.shape[2:], *sizes, output_padding) < 1:
        return None
    return _in_f32(torch.ops.aten.convolution, (x, weight, bias), *rest)


def _shortest(sizes: Sequence[int], kernel: Sequence[int], *about: Sequence[int]) -> int:
    """The least length of a transposed convolution's output, by stride, padding, dilation and output padding of each dimension."""
    each = (tuple(v) * len(kernel) if len(v) == 1 else v for v in about)
    return min(
        ((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, d, more in zip(sizes, kernel, *each, strict=False)),
        default=1,
    )  # fmt: skip


def convolution_backward(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    """Its gradients of x, weight and bias, as far as they are asked for."""
    if not _slow(dy, x, weight) or any(0 in t.shape for t in (dy, x, weight)):
        return None
    return _in_f32(torch.ops.aten.convolution_backward, (dy, x, weight), *rest)


WIDENED: dict[str, Repair] = {
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
}
