"""softmax over the last dimension by the native CPU kernel."""

from __future__ import annotations

from ...core.candidate import Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels.cpu import register as cpu_register
from ...native import cpu_library
from . import SOFTMAX, SOFTMAX_BACKWARD


def supports(key: Key) -> str | None:
    """None for contiguous rows."""
    if key.flag("dim") != len(key.present(key.names[0]).shape) - 1:
        return "not over the last dimension"
    return cpu_register.contiguous(key, *key.names)


def guess(key: Key) -> float:
    """A call with more arguments; halves are widened in registers, and large outputs come from the pool."""
    name = key.names[0]
    size, half = cpu_register.size_of(key, name), cpu_register.dtype_of(key, name) != "f32"
    if cpu_register.bytes_of(key, name) >= cpu_register.FRESH_BYTES:
        return 0.5
    columns = key.tensors[0].shape[-1] if key.tensors[0] and key.tensors[0].shape else 1
    rows = size // max(columns, 1)
    lanes = 8 if cpu_register.narrow() else 16
    brief = columns < 32 if name == "x" else columns < 2 * lanes and columns % lanes
    if brief:  # rows side by side, one a lane
        ours = 2e-3 * rows + 1.3e-3 * size
    else:
        ours = (0.075 if cpu_register.narrow() else 0.022) * rows + 0.25e-3 * size
    ours += 0.3 + cpu_register.call_us(key)
    row = 0.01 + 0.006 * columns if columns < 16 else 0.025 if half and columns < 32 else 0.008
    return ours / (2.4 + row * rows + 0.3e-3 * size)


def build(key: Key) -> Launcher:
    """The forward launcher."""
    dtype = DTYPES[cpu_register.dtype_of(key, "x")]
    return cpu_library.launcher("softmax", None, 1.0, False, dtype)


def build_backward(key: Key) -> Launcher:
    """The backward launcher."""
    return cpu_library.launcher("softmax_backward", 1.0)


cpu_register.add(SOFTMAX, "cpu.fused", build, supports, guess, __name__)
cpu_register.add(SOFTMAX_BACKWARD, "cpu.fused", build_backward, supports, guess, __name__)
