"""Element-wise ops in Metal: one pass over memory, four elements a thread by one vector access, computed in float32."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...kernels import register
from ...kernels.metal import register as metal_register
from ...kernels.metal.launch import Start, launcher, written
from ...kernels.metal.shader_prelude import TYPES
from ..common import layouts as common_layouts
from . import shapes, stride_free
from .definitions import FAMILY, POINTWISE_BACKWARD
from .shapes import Shape
from .stride_free import backward_shape, forward_shape

THREADS = 256
MODES = {"full": 0, "row": 1, "column": 2, "one": 3}
# kind -> (inputs, what its outputs are of a, b, c)
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "add": (2, ("a + b",)),
    "sub": (2, ("a - b",)),
    "mul": (2, ("a * b",)),
    "div": (2, ("a / b",)),
    "relu": (1, ("activate(a, 1)",)),
    "gelu": (1, ("activate(a, 2)",)),
    "gelu_tanh": (1, ("activate(a, 3)",)),
    "silu": (1, ("activate(a, 4)",)),
    "add_relu": (2, ("activate(a + b, 1)",)),
    "mul_relu": (2, ("activate(a * b, 1)",)),
    "affine": (3, ("a * b + c",)),
    "neg": (1, ("-a",)),
    "relu_bwd": (2, ("activation_gradient(a, b, 1)",)),
    "gelu_bwd": (2, ("activation_gradient(a, b, 2)",)),
    "gelu_tanh_bwd": (2, ("activation_gradient(a, b, 3)",)),
    "silu_bwd": (2, ("activation_gradient(a, b, 4)",)),
    "mul_bwd": (3, ("a * c", "a * b")),
    "div_bwd": (3, ("a / c", "-a * ((b / c) / c)")),
    "mul_relu_bwd": (3, tuple(f"activation_gradient(a, float(T(b * c)), 1) * {v}" for v in "cb")),
}

SOURCE = r"""
typedef vec<T, 4> T4;

// EACH elements of an operand from column `column` of row `row`, `count` of them in the matrix
inline void read(device const T* p, int mode, long row, long column, long columns, long count, thread float* to) {
  if (mode == 0) p += row * columns + column;
  if (mode == 1) p += column;
  if (mode == 2) p += row;
  if (mode >= 2) {
    for (uint i = 0; i < EACH; i++) to[i] = float(*p);
    return;
  }
#if EACH == 4
  if (count >= 4) {
    T4 v = *(device const T4*)p;
    for (uint i = 0; i < 4; i++) to[i] = float(v[i]);
    return;
  }
#endif
  for (uint i = 0; i < EACH; i++) to[i] = i < count ? float(p[i]) : 0.0f;
}

inline void store(device T* p, long count, thread const float* from) {
#if EACH == 4
  if (count >= 4) {
    *(device T4*)p = T4(T(from[0]), T(from[1]), T(from[2]), T(from[3]));
    return;
  }
#endif
  for (uint i = 0; i < EACH && i < count; i++) p[i] = T(from[i]);
}

// y = f(a, b, c) over [rows, columns]; an operand is full, a row, a column or one number
[[max_total_threads_per_threadgroup(THREADS)]] kernel void elementwise(
    device const T* x0 [[buffer(0)]], device const T* x1 [[buffer(1)]], device const T* x2 [[buffer(2)]],
    device T* y0 [[buffer(3)]], device T* y1 [[buffer(4)]], constant long* n [[buffer(5)]],
    uint3 at [[thread_position_in_grid]]) {
  long row = long(at.y) + long(at.z) * n[2], column = long(at.x) * EACH, count = n[1] - column;
  if (row >= n[0] || count <= 0) return;
  float as[EACH], bs[EACH], cs[EACH], first[EACH], second[EACH];
  read(x0, MODE0, row, column, n[1], count, as);
  read(x1, MODE1, row, column, n[1], count, bs);
  read(x2, MODE2, row, column, n[1], count, cs);
  for (uint i = 0; i < EACH; i++) {
    float a = as[i], b = bs[i], c = cs[i];
    first[i] = FIRST;
    second[i] = SECOND;
  }
  store(y0 + row * n[1] + column, count, first);
  if (OUTPUTS == 2) store(y1 + row * n[1] + column, count, second);
}
"""
MOST_ROWS = 1 << 15  # of groups along one axis of the grid


def configs(s: Shape) -> list[dict[str, Any]]:
    """Four elements a thread where vectors are aligned, and one."""
    vectors = s.align >= 4 * DTYPES[s.dtype].itemsize and (s.rows == 1 or s.columns % 4 == 0)
    return [*([{"each": 4}] if vectors else []), {"each": 1}]


def source(s: Shape, each: int) -> str:
    """The shader of a kind, its operands' modes and elements a thread."""
    _, results = KINDS[s.kind]
    # what is absent is one number of x0
    modes = [MODES[m] for m in s.modes] + [3] * (3 - len(s.modes))
    defines = {
        "T": TYPES[s.dtype], "EACH": each, "THREADS": THREADS, "OUTPUTS": len(results),
        "FIRST": results[0], "SECOND": results[-1], **{f"MODE{i}": m for i, m in enumerate(modes)},
    }  # fmt: skip
    return written(defines, SOURCE)


def start_of(s: Shape, config: Config) -> Start:
    """A callable over the operands and the outputs."""
    each = int(config["each"])
    across = math.ceil(s.columns / each)
    wide = min(THREADS, 1 << max(across - 1, 0).bit_length())
    high = THREADS // wide
    groups = math.ceil(s.rows / high)
    deep = math.ceil(groups / MOST_ROWS)
    grid = (math.ceil(across / wide), min(groups, MOST_ROWS), deep)
    start = launcher(source(s, each), "elementwise", grid, (wide, high, 1))
    inputs, sizes = len(s.modes), (s.rows, s.columns, grid[1] * high)

    def run(*t: torch.Tensor) -> bool:
        given = [t[i] if i < inputs else t[0] for i in range(3)]
        return start(*given, t[inputs], t[-1], sizes)

    return run


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher of one output."""
    start, empty, dtype = start_of(s, config), register.empty(device), DTYPES[s.dtype]

    def launch(*given: torch.Tensor) -> Any:
        y = empty(s.out, s.stride, dtype)
        start(*given, y)
        return (y,)

    return launch


def build_backward(described: tuple[str, Shape], config: Config, device: torch.device) -> Launcher:
    """A launcher over (dy, a, b, c, y)."""
    outputs = len(KINDS[described[1].kind][1])
    return shapes.backward_launcher(described, start_of(described[1], config), outputs, device)


_SOURCES = (common_layouts, stride_free, shapes, sys.modules[__name__])
for _op in FAMILY:
    metal_register.described(_op, "metal.vectors", forward_shape, configs, build, _SOURCES)
metal_register.described(
    POINTWISE_BACKWARD, "metal.vectors", backward_shape, lambda d: configs(d[1]), build_backward, _SOURCES
)  # fmt: skip
