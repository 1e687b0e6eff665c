"""How element-wise kernels see their operands: one [rows, columns] view and a mode for each operand, strides where they need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from ...core.candidate import Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key, TensorSpec
from ...kernels import register
from ..common import layouts as common_layouts
from ..common.layouts import Dim, Laid, iterated

APART = "operands are strided or broadcast in several ways"
MOST = 4  # dimensions that kernels take apart
Steps = tuple[int, int, int, int]  # strides along [outer, middle, rows, columns]
MODES = {(True, True): "full", (False, True): "row", (True, False): "column"}


@dataclass(frozen=True)
class Shape:
    """One launch: the kernel's op, dtype, the [rows, columns] it sees, how each operand meets them, and the output.

    Where `steps` is not empty it has the strides of every operand and of the output along [*outer, rows, columns];
    elsewhere operands are contiguous where they are not repeated. `kept`: a backward pass reads some of it again.
    """

    kind: str
    dtype: str
    rows: int
    columns: int
    modes: tuple[str, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...]
    align: int
    outer: tuple[int, int] = (1, 1)
    steps: tuple[Steps, ...] = ()
    kept: bool = False


def laid(t: TensorSpec) -> Laid:
    """Shape and strides."""
    return t.shape, t.stride


def _plain(dims: list[Dim]) -> tuple[int, int, tuple[str, ...]] | None:
    """Rows, columns and modes where every operand is contiguous or repeated, or None."""
    if len(dims) > 2:
        return None
    rows, down = dims[0] if len(dims) == 2 else (1, None)
    columns, along = dims[-1]
    if down is None:
        down = tuple(columns * c for c in along)
    known = {(columns, 1): "full", (0, 1): "row", (1, 0): "column", (0, 0): "one"}
    modes = [known.get(pair, "") for pair in zip(down, along, strict=True)]
    return (rows, columns, tuple(modes)) if all(modes) else None


def _tiled(dims: list[Dim]) -> tuple[tuple[int, ...], tuple[Steps, ...], tuple[str, ...]]:
    """Sizes [outer, middle, rows, columns], the strides along them, and modes: rows are what an operand is read along that
    does not go along columns, else what the output goes along next."""
    sizes = [n for n, _ in dims]
    y = register.contiguous(sizes)
    moved = [*zip(*(s for _, s in dims), strict=True), y]
    places = [*range(len(dims))]
    turned = [d for d in places[:-1] if any(s[d] == 1 and s[-1] > 1 for s in moved)]
    if turned:
        places.remove(turned[-1])
        places.insert(-1, turned[-1])
    missing = MOST - len(dims)
    found = tuple((*[0] * missing, *(s[d] for d in places)) for s in moved)
    sizes = [1] * missing + [sizes[d] for d in places]
    modes = (MODES.get((sizes[2] > 1 and s[2] != 0, s[3] != 0), "one") for s in found[:-1])
    return tuple(sizes), found, tuple(modes)


def shape_of(
    kind: str, key: Key, operands: tuple[TensorSpec, ...], output: Laid | None = None
) -> Shape | str:
    """How the kernel sees these operands, or why it cannot; `output` where it does not lie as PyTorch's iterator would lay it."""
    reason = register.one_dtype(key)
    if reason is not None:
        return reason
    given = [laid(t) for t in operands]
    out, stride = output or iterated(*given)
    if 0 in out:
        return "empty"
    dims = common_layouts.collapsed((out, stride), [common_layouts.steps(o, out) for o in given])
    if len(dims) > MOST:
        return f"operands are strided in more than {MOST} ways"
    dtype, align = operands[0].dtype, register.weakest(key)
    plain = _plain(dims)
    if plain is not None:
        return Shape(kind, dtype, *plain, out, stride, align)
    (o, p, rows, columns), moved, modes = _tiled(dims)
    return Shape(kind, dtype, rows, columns, modes, out, stride, align, (o, p), moved)


def kind_of(key: Key) -> str:
    """The kernels' name of a forward op."""
    return "gelu_tanh" if key.op == "gelu" and key.flag("approximate") == "tanh" else key.op


def forward_shape(key: Key) -> Shape | str:
    """The launch behind a forward key."""
    operands = tuple(t for t in key.tensors if t is not None)
    output = None
    if key.op == "affine":
        x, scale, bias = map(laid, operands)
        output = iterated(iterated(x, scale), bias)
    found = shape_of(kind_of(key), key, operands, output)
    return found if isinstance(found, str) else replace(found, kept=bool(key.flag("save")))


def unstrided(found: Shape | str) -> Shape | str:
    """The same for kernels that take no strides."""
    return APART if isinstance(found, Shape) and found.steps else found


# kind of op -> (kernel, operands it reads, which gradients its outputs are; "dy": the incoming one is the gradient)
BACKWARD: dict[str, tuple[str, tuple[str, ...], tuple[str | int, ...]]] = {
    "sub": ("neg", ("dy",), ("dy", 0)),
    "relu": ("relu_bwd", ("dy", "y"), (0,)),
    "add_relu": ("relu_bwd", ("dy", "y"), (0, 0)),
    "gelu": ("gelu_bwd", ("dy", "a"), (0,)),
    "gelu_tanh": ("gelu_tanh_bwd", ("dy", "a"), (0,)),
    "silu": ("silu_bwd", ("dy", "a"), (0,)),
    "mul": ("mul_bwd", ("dy", "a", "b"), (0, 1)),
    "div": ("div_bwd", ("dy", "a", "b"), (0, 1)),
    "mul_relu": ("mul_relu_bwd", ("dy", "a", "b"), (0, 1)),
    "affine": ("mul_bwd", ("dy", "a", "b"), (0, 1, "dy")),
}


def wiring(kind: str) -> tuple[tuple[int, ...], Callable[[Any, Sequence[Any]], tuple[Any, ...]]]:
    """Places of what the kernel reads among (dy, a, b, c, y), and from (dy, its outputs) to the three gradients."""
    _, reads, gives = BACKWARD[kind]
    given = [0 if g == "dy" else int(g) + 1 for g in gives] + [-1] * (3 - len(gives))
    three = itemgetter(*given)
    places = tuple(("dy", "a", "b", "c", "y").index(name) for name in reads)
    return places, lambda dy, made: three((dy, *made, None))


def backward_launcher(
    described: tuple[str, Shape], start: Callable[..., bool], outputs: int, device: torch.device
) -> Launcher:
    """The launcher over (dy, a, b, c, y) of `start(*what the kernel reads, *its outputs)`."""
    kind, s = described
    places, grads = wiring(kind)
    empty, dtype = register.empty(device), DTYPES[s.dtype]

    def launch(*dynamic: Any) -> Any:
        made = [empty(s.out, s.stride, dtype) for _ in range(outputs)]
        started = start(*(dynamic[i] for i in places), *made)
        return grads(dynamic[0], made) if started else None

    return launch


def _through_relu(dy: Laid, y: Laid | None) -> Laid:
    return dy if y is None else iterated(y, dy)


# kernel -> where PyTorch's gradients lie: of dy, a, b, y
LIES: dict[str, Callable[..., tuple[Laid, ...]]] = {
    "neg": lambda dy, a, b, y: (iterated(dy),),
    "relu_bwd": lambda dy, a, b, y: (_through_relu(dy, y),),
    **dict.fromkeys(
        ("gelu_bwd", "gelu_tanh_bwd", "silu_bwd"), lambda dy, a, b, y: (iterated(dy, a),)
    ),
    "mul_bwd": lambda dy, a, b, y: (iterated(dy, b), iterated(dy, a)),
    "div_bwd": lambda dy, a, b, y: (
        iterated(dy, b),
        iterated(iterated(dy), iterated(iterated(a, b), b)),
    ),
    "mul_relu_bwd": lambda dy, a, b, y: (
        iterated(_through_relu(dy, y), b),
        iterated(_through_relu(dy, y), a),
    ),
}


def backward_shape(key: Key) -> tuple[str, Shape] | str:
    """(kind of op, launch) behind a backward key: all operands of one shape."""
    if key.flag("kind") not in BACKWARD or (
        key.flag("kind") == "sub" and key.flag("needs")[1] == "0"
    ):
        return "its gradient is the incoming one"
    kernel, reads, _ = BACKWARD[key.flag("kind")]
    operands = [key.spec(name) for name in reads]
    dy = key.present("dy")
    if any(t is None for t in operands) or any(
        t is not None and t.shape != dy.shape for t in key.tensors
    ):
        return "an operand is broadcast"
    named = [t and laid(t) for t in map(key.spec, ("dy", "a", "b", "y"))]
    lies = LIES[kernel](*named)
    if any(a != b for o in lies for n, a, b in zip(*lies[0], o[1], strict=True) if n > 1):
        return "its gradients do not lie alike in PyTorch"
    found = shape_of(kernel, key, tuple(t for t in operands if t is not None), lies[0])
    return found if isinstance(found, str) else (key.flag("kind"), found)
