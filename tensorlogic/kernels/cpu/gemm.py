"""Products on CPUs with a native epilogue: what the cpu candidates of the linear family share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import weight_cache
from ...core.activations import SMOOTH
from ...core.candidate import Candidate, Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key, TensorSpec
from ...core.op import Op
from ...native import cpu_library
from .. import register
from ..register import rows
from . import cost_model, onednn
from . import register as cpu_register

POOLED = 1 << 20  # bytes from which a fresh product comes from the pool
PACKED_FROM = 1 << 16  # elements of a weight whose tiles are worth a look
# Rows, and elements of a weight, from which tiles kept are expected to win; bytes an element of them.
PACKED_ROWS = {"bf16": 5, "f16": 16, "f32": 32}
PACKED_SIZE = {"bf16": 1 << 18, "f16": 1 << 19, "f32": 1 << 16}
# passes that PyTorch's gradient of an activation, with what it dispatches, is worth
ACTIVATED = 2
PACKED_BYTES = {torch.bfloat16: 2.1, torch.float16: 2.1, torch.float32: 6.1}

Finished = Callable[[Tensor, Tensor, Any, Any], Any]  # (x, weight, bias, residual) -> y


def supports(key: Key, x: str = "x", weight: str = "weight") -> str | None:
    """None for non-empty operands of one kernel dtype, a two-dimensional weight and a contiguous bias."""
    w, left = key.spec(weight), key.spec(x)
    assert w is not None and left is not None
    if len(w.shape) != 2 or 0 in w.shape or 0 in left.shape:
        return "an operand is empty or weight is not two-dimensional"
    return cpu_register.contiguous(key, *_given(key, "bias")) or register.one_dtype(key)


def supports_dense(key: Key) -> str | None:
    """As `supports`, and x is contiguous: a native pass over it precedes the product."""
    return cpu_register.contiguous(key, "x") or supports(key)


def _given(key: Key, *names: str) -> list[str]:
    return [n for n in names if n in key.names and key.spec(n) is not None]


def configs(key: Key, x: str = "x") -> list[Config]:
    """By our own product, in the operands' own types, constant weights as tiles; or in float32 by PyTorch's, or oneDNN's; or, of halves
    behind a pass over x, by PyTorch's linear layer as it is."""
    found: list[Config] = [{"product": "native"}]
    if _packs(key):
        found.insert(0 if _packing_wins(key, x) else 1, {"product": "packed"})
    if cpu_register.contiguous(key, *_given(key, x, "residual")) is None:
        found.append({"product": "torch"})
        weight = _weight_of(key)
        gaps = weight.dtype == "f32" and onednn.onednn_weight(weight)  # of halves a copy is taken
        if not gaps and onednn.onednn_available("cpu") is None:
            found.append({"product": "onednn"})
    if _plain(key, x):
        m, n, k = _mnk(key, x, "weight", True)
        sooner = _plain_us(key, m, n, k) < _own_us(key, m, n, k)
        found.insert(0 if sooner else len(found), {"product": "plain"})
    return found


def _plain(key: Key, x: str) -> bool:
    """Whether a pass over x precedes the product of halves that PyTorch's linear layer multiplies as such."""
    if _before(key) is None:
        return False
    dtype = cpu_register.dtype_of(key, x)
    return dtype != "f32" and not cost_model.half_is_slow(dtype)


def _plain_us(key: Key, m: int, n: int, k: int) -> float:
    return cost_model.torch_us(m, n, k, _weight_of(key).dtype, _along_k(key, "weight", True))


def _own_us(key: Key, m: int, n: int, k: int) -> float:
    """Our product behind a pass that leaves float32."""
    linear = _along_k(key, "weight", True)
    return cost_model.native_us(m, n, k, _weight_of(key).dtype, linear, wide=True)


def prepared(config: Config, x: Tensor) -> Tensor:
    """x as the pass before the product takes it: in float32 where that need not round."""
    return x if config["product"] == "plain" else widened(x)


def _weight_of(key: Key) -> TensorSpec:
    weight = key.spec("weight")
    assert weight is not None
    return weight


def _packs(key: Key) -> bool:
    """True where the weight may be kept as the tiles of this processor, and backward does not need the pre-activation."""
    weight, flags = _weight_of(key), dict(key.flags)
    keeps = flags.get("save") and flags.get("activation") in SMOOTH
    large = prod(weight.shape) >= PACKED_FROM
    return weight.constant and large and not keeps and cpu_library.isa() == "amx"


def _packing_wins(key: Key, x: str) -> bool:
    left, weight = key.spec(x), _weight_of(key)
    assert left is not None
    rows, size = PACKED_ROWS[weight.dtype], PACKED_SIZE[weight.dtype]
    return prod(left.shape[:-1]) >= rows and prod(weight.shape) >= size


def _packed_bytes(weight: Tensor) -> int:
    return int(weight.numel() * PACKED_BYTES[weight.dtype])


def widened(t: Tensor) -> Tensor:
    """t in float32."""
    return (
        t if t.dtype == torch.float32 else cpu_library.op("convert")(t.contiguous(), torch.float32)
    )


def weight32(weight: Tensor) -> Tensor:
    """The weight in float32, kept while it does not change if it is a parameter or declared constant."""
    if weight.dtype == torch.float32:
        return weight
    if weight_cache.is_constant(weight):
        return onednn.wide_weight(weight)
    return (
        widened(weight)
        if weight.is_contiguous()
        else widened(weight.t()).t()
        if weight.t().is_contiguous()
        else weight.float()
    )


def _wide_product(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """product(x [..., K] f32, weight [N, K] f32) -> [rows, N] f32 that nobody else holds."""
    if config["product"] == "onednn":
        return lambda x, w: onednn.onednn(rows(x), w, None, "none")
    empty = cpu_library.op("empty")

    def by_torch(x: Tensor, w: Tensor) -> Tensor:
        flat = rows(x)
        m, n = flat.shape[0], w.shape[0]
        if m * n * 4 < POOLED:
            return torch.mm(flat, w.t())
        return torch.mm(flat, w.t(), out=empty([m, n], torch.float32))

    return by_torch


def finished(
    key: Key, config: Config, shape: tuple[int, ...], x: str = "x", keep: bool = False
) -> Finished:
    """run(x, weight [N, K], bias, residual) -> y of `shape` in the op's dtype, and what the activation saw with `keep`.

    x may be wider than the op's dtype: what precedes the product need not round.
    """
    dtype = DTYPES[cpu_register.dtype_of(key, x)]
    code = cpu_library.ACTIVATIONS[dict(key.flags).get("activation")]
    residual = key.spec("residual") if "residual" in key.names else None
    if config["product"] == "plain":
        return lambda x, w, bias, residual: F.linear(x, w, bias)
    if config["product"] == "packed":
        return _finished_packed(code)
    if config["product"] == "native":
        linear = cpu_library.op("linear_pre" if keep else "linear")
        if residual is not None and not register.is_contiguous(residual):
            return lambda x, w, bias, residual: linear(x, w, bias, residual.contiguous(), code)
        if residual is None and not code:
            return lambda x, w, bias, residual: linear(x, w, bias)
        return lambda x, w, bias, residual: linear(x, w, bias, residual, code)
    return _finished_wide(config, shape, dtype, code, keep)


def _finished_packed(code: int) -> Finished:
    """By the weight's tiles, from the second time that it is met unchanged; as without them where it has none."""
    by_tiles, linear, pack = (cpu_library.op(n) for n in ("linear_packed", "linear", "pack_weight"))

    def run(x: Tensor, weight: Tensor, bias: Any, residual: Any) -> Any:
        tiles = weight_cache.CACHE.settled(weight, "tiles", pack, _packed_bytes)
        r = None if residual is None else residual.contiguous()
        if tiles is None or not tiles.numel():
            return linear(x, weight, bias, r, code)
        return by_tiles(x, weight, tiles, bias, r, code)

    return run


def _finished_wide(
    config: Config, shape: tuple[int, ...], dtype: torch.dtype, code: int, keep: bool
) -> Finished:
    product, n = _wide_product(config), shape[-1]
    in_place, out_of_place, both = (
        cpu_library.op("epilogue_"),
        cpu_library.op("epilogue"),
        cpu_library.op("epilogue_pre"),
    )

    def run(x: Tensor, weight: Tensor, bias: Any, residual: Any) -> Any:
        acc = product(widened(x), weight32(weight))
        flat = None if residual is None else residual.reshape(-1, n)
        if keep:
            y, z = both(acc, bias, flat, code, dtype)
            return y.view(shape), z.view(shape)
        if dtype != torch.float32:
            return out_of_place(acc, bias, flat, code, dtype).view(shape)
        if bias is not None or residual is not None or code:
            in_place(acc, bias, flat, code)
        return acc.view(shape)

    return run


def guess(key: Key, x: str = "x", weight: str = "weight", linear: bool = True) -> float:
    """Our product's time over PyTorch's, with the passes that eager makes, and records, one by one."""
    m, n, k = _mnk(key, x, weight, linear)
    linear = _along_k(key, weight, linear)
    dtype, before = cpu_register.dtype_of(key, x), _before(key)
    eager = cost_model.torch_us(m, n, k, dtype, linear)
    passes = len(_given(key, "residual")) + (dict(key.flags).get("activation", "none") != "none")
    ours = cost_model.native_us(m, n, k, dtype, linear, wide=before is not None)
    if _plain(key, x):
        ours = min(ours, eager)
    if key.direction == "forward":
        ours += cpu_register.RECORDED_US
        eager += passes * cpu_register.RECORDED_US
    eager += passes * cost_model.pass_us(m * n)
    if before is not None:
        theirs, own = cost_model.before_us(before, m, k, dtype)
        eager, ours = eager + theirs, ours + own
    return ours / eager


def _before(key: Key) -> str | None:
    """What precedes the product of this op."""
    if key.op == "gelu_linear":
        return "gelu_tanh" if key.flag("approximate") == "tanh" else "gelu"
    return {"layer_norm_linear": "layer_norm", "dropout_linear": "dropout"}.get(key.op)


def guess_backward(key: Key) -> float:
    """Both products of a linear layer's backward, over PyTorch's with the activation's gradient."""
    (m, n), (_, k) = _rows(key, key.names[0]), _rows(key, key.names[1])
    dtype = cpu_register.dtype_of(key, key.names[0])
    ways = ((m, k, n), (n, k, m))
    ours = sum(cost_model.native_us(*way, dtype, False) for way in ways)
    eager = sum(cost_model.torch_us(*way, dtype, False) for way in ways)
    passes = ACTIVATED * (dict(key.flags).get("activation", "none") != "none")
    return ours / (eager + passes * cost_model.pass_us(m * n))


def _rows(key: Key, name: str) -> tuple[int, int]:
    t = key.spec(name)
    assert t is not None
    return prod(t.shape[:-1]), t.shape[-1]


def supports_backward(key: Key) -> str | None:
    """None for contiguous, non-empty operands of one kernel dtype and a two-dimensional weight."""
    names = [name for name in key.names if name != "weight" and key.spec(name) is not None]
    return cpu_register.contiguous(key, *names) or supports(key)


Gradients = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor | None, ...]]


def gradients(needs: str) -> Gradients:
    """run(dz [..., N], x [..., K], weight [N, K]) -> dx [..., K], dweight [N, K], dbias [N], those that `needs` ("110") asks for."""
    matmul, total = cpu_library.op("matmul"), cpu_library.op("sum")

    def run(dz: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor | None, ...]:
        flat, dw = rows(dz), None
        if x is not None and needs[1] == "1":
            dw = matmul(flat.t(), rows(x))
        return (
            matmul(dz, weight) if needs[0] == "1" else None,
            dw,
            total(flat, 0, 1) if needs[2] == "1" else None,
        )

    return run


def add_backward(
    op: Op,
    build: Callable[[Key], Launcher],
    module: str,
    supports: Callable[[Key], str | None] = supports_backward,
) -> None:
    """Register a backward of two native products."""
    cpu_register.add(
        op, "cpu.products", build, supports, guess_backward, module, cpu_register.PRODUCTS
    )


def activation_gradient(activation: str) -> Callable[[Any, Any], Any]:
    """run(dy, kept) -> dz, contiguous operands; kept is the output for relu and the pre-activation for the smooth ones."""
    if activation == "none":
        return lambda dy, kept: dy
    if activation.startswith("gelu"):
        gelu = cpu_library.op("gelu_backward")
        return lambda dy, kept: gelu(dy, kept, activation == "gelu_tanh")
    run: Callable[[Any, Any], Any] = cpu_library.op(f"{activation}_backward")
    return run


def _mnk(key: Key, x: str, weight: str, linear: bool) -> tuple[int, int, int]:
    a, w = key.spec(x), key.spec(weight)
    assert a is not None and w is not None
    n = w.shape[-2 if linear else -1] if len(w.shape) > 1 else 1
    m = prod(a.shape[:-1])
    if len(w.shape) > 2:  # a batch of products
        m = max(m, prod(w.shape[:-2]) * (a.shape[-2] if len(a.shape) > 1 else 1))
    return m, n, a.shape[-1]


def _along_k(key: Key, weight: str, linear: bool) -> bool:
    """Whether neighbours along the inner dimension lie side by side in the right operand."""
    w = key.spec(weight)
    assert w is not None
    if len(w.shape) < 2:
        return True
    inner, outer = (w.stride[-1], w.stride[-2]) if linear else (w.stride[-2], w.stride[-1])
    return inner == 1 and (linear or outer != 1)


def linear_shape(key: Key) -> tuple[int, ...]:
    """[..., N] of x [..., K] and weight [N, K]."""
    x, weight = key.spec("x"), key.spec("weight")
    assert x is not None and weight is not None
    return (*x.shape[:-1], weight.shape[0])


def add(
    op: Op,
    id: str,
    build: Callable[[Key, Config], Launcher],
    module: str,
    supports: Callable[[Key], str | None] = supports,
    configs: Callable[[Key], list[Config]] = configs,
    guess: Callable[[Key], float] = guess,
) -> None:
    """Register a candidate around a product, by our own kernel, PyTorch's or oneDNN's."""
    op.add(
        Candidate(
            id,
            bind=lambda key, config, device: build(key, config),
            supports=supports,
            configs=configs,
            available=cpu_register.cpu_only,
            sources=(sys.modules[module], sys.modules[__name__], cost_model, cpu_register.LIBRARY),
            guess=guess,
            trusted=True,
            vouched=True,
            clock=cpu_register.PRODUCTS,
        )
    )
