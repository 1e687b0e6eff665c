"""Reductions by the native CPU kernels: wide accumulation, the same result for a given number of threads."""

from __future__ import annotations

from math import prod

from ...core.candidate import Launcher
from ...core.key import Key
from ...kernels.cpu import register as cpu_register
from ...native import cpu_library
from . import FAMILY

SMALL = 4096  # elements below which a call costs more than its arithmetic
# elements side by side that vectors without masks take one by one
SHORT = 8
# rows of as few float32 elements, so many in all, PyTorch sums as fast
BRIEF, SUMMED = 32, 1 << 14
LARGE = 1 << 20  # float32 elements beyond the caches


def supports(key: Key) -> str | None:
    """None for neighbouring dimensions of a contiguous tensor."""
    dims = key.flag("dim")
    if not dims or dims != tuple(range(dims[0], dims[-1] + 1)):
        return "the dimensions are not neighbours"
    return cpu_register.contiguous(key, "x")


def guess(key: Key) -> float:
    """PyTorch reduces halves element by element; in float32 it is at the memory's speed already."""
    x, dims = key.present("x"), key.flag("dim")
    size = cpu_register.size_of(key, "x")
    if prod(x.shape[d] for d in dims) == 1:  # a copy
        return 1.0
    if size <= SMALL:
        return 0.5 if cpu_register.call_us(key) < 1.0 else 1.0
    if cpu_register.narrow():
        inner, length = prod(x.shape[dims[-1] + 1 :]), prod(x.shape[d] for d in dims)
        sums = key.op in ("sum", "mean") and x.dtype == "f32"
        if 1 < inner < SHORT or (inner == 1 and sums and length <= BRIEF and size > SUMMED):
            return 1.0
    return 0.5 if size < LARGE or x.dtype != "f32" else 1.0


def build(key: Key) -> Launcher:
    """The launcher of one output."""
    dims = key.flag("dim")
    return cpu_library.launcher(key.op, dims[0], dims[-1] + 1, key.flag("keepdim"))


for _op in FAMILY:
    cpu_register.add(_op, "cpu.fused", build, supports, guess, __name__)
