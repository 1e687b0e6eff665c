"""Element-wise ops by the native CPU kernels: one vectorised pass, output from the pool."""

from __future__ import annotations

from typing import Any

import torch

from ...core.candidate import Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.cpu import register as cpu_register
from ...kernels.cpu.register import FRESH_BYTES
from ...native import cpu_library
from .definitions import FAMILY, POINTWISE_BACKWARD
from .shapes import BACKWARD, Shape, wiring
from .stride_free import backward_shape, forward_shape

# exponentials that PyTorch's half-precision code computes a few at a time
COSTLY = ("gelu", "silu")
FUSED = ("add_relu", "mul_relu", "affine")
# Microseconds a call of PyTorch's, nanoseconds an element in float32 and in halves, and ours, on a Sapphire Rapids.
SPEEDS = {
    "plain": (1.6, 0.13, 0.2, 0.12, 0.13),
    "add_relu": (3.1, 0.3, 0.42, 0.16, 0.15),
    "mul_relu": (3.1, 0.3, 0.42, 0.16, 0.15),
    "affine": (3.4, 0.25, 0.4, 0.16, 0.15),
    "gelu": (8.0, 0.2, 0.2, 0.2, 0.15),
    "gelu_tanh": (1.6, 1.8, 1.8, 0.2, 0.3),
    "silu": (1.6, 0.5, 0.5, 0.2, 0.3),
}
# float32 where tables are not looked up in registers
WITHOUT_AVX512 = {"gelu": 0.4, "gelu_tanh": 0.8, "silu": 0.55}
# Microseconds a row where an operand is repeated along rows of fewer elements; and without masks.
SHORT_ROW, SHORT = (5e-3, 20e-3), (32, 128)
SMALL = 4096  # elements below which a call costs more than its arithmetic


def supports(key: Key) -> str | None:
    """None where the kernel sees the operands as rows and columns in memory order."""
    return _ordered(forward_shape(key))


def _ordered(found: Shape | str) -> str | None:
    if isinstance(found, str) or found.stride == register.contiguous(found.out):
        return found if isinstance(found, str) else None
    return "the operands are laid out in another order"


def guess(key: Key) -> float:
    """Expected time over eager's: passes over memory saved, fresh pages not touched, vectorised exponentials."""
    shape = forward_shape(key)
    assert isinstance(shape, Shape)
    count, size = shape.rows * shape.columns, 2 if shape.dtype != "f32" else 4
    narrow = cpu_register.narrow()
    slow = size == 4 and narrow
    if count * size >= FRESH_BYTES and not (slow and key.op in COSTLY):
        return 0.3
    tanh = key.op == "gelu" and key.flag("approximate") == "tanh"
    kind = "gelu_tanh" if tanh else key.op if key.op in (*COSTLY, *FUSED) else "plain"
    call, f32, half, own_f32, own_half = SPEEDS[kind]
    theirs, ours = (f32, own_f32) if size == 4 else (half, own_half)
    if slow:
        ours = WITHOUT_AVX512.get(kind, ours)
    own = cpu_register.call_us(key) + ours * 1e-3 * count
    if shape.rows > 1 and shape.columns < SHORT[narrow]:
        own += SHORT_ROW[narrow] * shape.rows
    return own / (call + theirs * 1e-3 * count)


def output(key: Key) -> int:
    """Bytes of the output."""
    shape = forward_shape(key)
    assert isinstance(shape, Shape)
    return shape.rows * shape.columns * DTYPES[shape.dtype].itemsize


def build(key: Key, stores: int) -> Launcher:
    """The launcher of one output."""
    if key.op == "gelu":
        return cpu_library.launcher("gelu", key.flag("approximate") == "tanh", stores)
    return cpu_library.launcher(key.op, stores)


def supports_backward(key: Key) -> str | None:
    """None where all operands have one shape and lie in memory order."""
    found = backward_shape(key)
    return found if isinstance(found, str) else _ordered(found[1])


def guess_backward(key: Key) -> float:
    """As forward."""
    count = cpu_register.size_of(key, "dy")
    if count <= SMALL and cpu_register.call_us() > 1.0:
        return 1.0
    large = cpu_register.bytes_of(key, "dy") >= FRESH_BYTES
    return 0.4 if large or key.flag("kind").startswith(COSTLY) else 1.0


def output_backward(key: Key) -> int:
    """Bytes of the gradient, where it is one tensor; two are always stored as usual."""
    return cpu_register.bytes_of(key, "dy") if _one(key.flag("kind")) else 0


def _one(kind: str) -> bool:
    return 1 not in BACKWARD[kind][2]


def build_backward(key: Key, stores: int) -> Launcher:
    """The launcher over (dy, a, b, c, y)."""
    kind = key.flag("kind")
    kernel = BACKWARD[kind][0]
    own = kernel.endswith("_bwd")  # not so that of a difference, which is a forward kernel
    name = kernel.removesuffix("_bwd").removesuffix("_tanh") + "_backward" * own
    run: Any = cpu_library.op(name)
    extra: tuple[Any, ...] = (kind == "gelu_tanh",) if kind.startswith("gelu") else ()
    extra += (stores,) if _one(kind) else ()
    places, grads = wiring(kind)

    def launch(*dynamic: Any) -> Any:
        out = run(*(dynamic[i] for i in places), *extra)
        return grads(dynamic[0], (out,) if isinstance(out, torch.Tensor) else out)

    return launch


for _op in FAMILY:
    cpu_register.add_stored(_op, "cpu.fused", build, supports, guess, __name__, output, asks=True)
cpu_register.add_stored(
    POINTWISE_BACKWARD, "cpu.fused", build_backward, supports_backward, guess_backward, __name__, output_backward, asks=True
)  # fmt: skip
