"""One call of a public function from a command line: inputs from a size, or from shapes and flags."""

from __future__ import annotations

import ast
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..autotune import tune
from ..core import dtypes, policy
from ..core.op import OPS, Op
from ..dispatch import explain, fast_path
from ..ops.linear import linear_residual_relu
from .cases import RECIPES, Maker
from .terminal import size_text
from .terminal.user_error import Problem

FLOATS = ("f16", "bf16", "f32", "f64")


def public() -> dict[str, Callable[..., Any]]:
    """Our functions that stand for an op, by name."""
    made: dict[str, Callable[..., Any]] = {"linear_residual_relu": linear_residual_relu}
    for prepare, fn in fast_path.FRONTS.items():
        op: Op = fn.fused  # type: ignore[attr-defined]
        # a public function may wrap what was prepared, under the op's name in the same module
        if OPS.get(op.name) is op and not op.internal:
            made[op.name] = getattr(sys.modules[prepare.__module__], op.name)
    return dict(sorted(made.items()))


def call(
    op: str,
    dtype: str,
    device: torch.device,
    *,
    size: int | None = None,
    shapes: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A function, its positional and its keyword arguments: `fn(*args, **kwargs)` is the call.

    Args:
        op: name of a public function. dtype: of its floating tensors.
        size: side of its matrices (elements of its vectors where the benchmark takes those).
        shapes: of its tensors in order, such as "16x768"; "-" leaves an optional tensor out.
        flags: other arguments by name, as Python literals or words.

    Raises:
        Problem: an unknown name, a shape that cannot be read, or an argument that is missing.
    """
    functions = public()
    if op not in functions:
        raise Problem(f"op is {op!r}; one of {', '.join(functions)} is required")
    if dtype not in FLOATS:
        raise Problem(f"dtype is {dtype!r}; one of {', '.join(FLOATS)} is required")
    given = {name: _value(text) for name, text in (flags or {}).items()}
    maker = Maker(dtypes.DTYPES[dtype], device, 1)
    if not shapes and op in RECIPES:
        with _memory(op):
            return partial(RECIPES[op].ours, **given), RECIPES[op].inputs(size or 512, maker), {}
    fn = functions[op]
    parameters = inspect.signature(fn).parameters
    unknown = [name for name in given if name not in parameters]
    if unknown:
        raise Problem(f"{op} has no argument {unknown[0]!r}; it has {', '.join(parameters)}")
    tensors = _tensors(fn)
    square = f"{size or 512}x{size or 512}"
    texts = list(shapes) or [square] * sum(required for _, required in tensors)
    if len(texts) > len(tensors):
        raise Problem(
            f"{len(texts)} shapes were given; {op} takes {len(tensors)} tensors: {', '.join(n for n, _ in tensors)}"
        )
    kwargs: dict[str, Any] = {}
    for (name, required), text in zip(tensors, texts, strict=False):
        if text != "-":
            with _memory(op):
                kwargs[name] = _tensor(name, size_text.shape(text), maker, kwargs)
        elif required:
            raise Problem(f"{op} requires {name}; '-' leaves out optional tensors only")
    kwargs |= given
    needed = [n for n, p in parameters.items() if p.default is p.empty and n not in kwargs]
    for name in needed:
        if name == "scale" and "q" in kwargs:
            kwargs["scale"] = kwargs["q"].shape[-1] ** -0.5
        elif (name, False) in tensors:
            kwargs[name] = None
    missing = [n for n in needed if n not in kwargs]
    if missing:
        raise Problem(
            f"{op} requires {', '.join(missing)}: give a --shape for each tensor ({', '.join(n for n, _ in tensors)}) in order"
        )
    return fn, (), kwargs


@contextmanager
def _memory(op: str) -> Iterator[None]:
    """What making inputs raises where they do not fit into memory, as a problem."""
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        raise Problem(f"the inputs of {op} cannot be made: {problem}") from problem


def _tensors(fn: Callable[..., Any]) -> list[tuple[str, bool]]:
    """Tensor parameters in order, with whether they are required."""
    hints = typing.get_type_hints(fn)
    kinds = {n: typing.get_args(h) or (h,) for n, h in hints.items()}
    names = [n for n in inspect.signature(fn).parameters if Tensor in kinds.get(n, ())]
    return [(n, type(None) not in kinds[n]) for n in names]


def _tensor(name: str, shape: tuple[int, ...], maker: Maker, earlier: Mapping[str, Any]) -> Tensor:
    if name == "target":
        return maker.labels(earlier["logits"].shape[-1], *shape)
    if name == "weight" and len(shape) == 2:
        return maker.weight(*shape)
    return maker.positive(*shape) if name == "running_var" else maker.normal(*shape)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def explained(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], measure: bool
) -> object:
    """What `tensorlogic.explain` says of the call, its keys measured first if `measure`; Problem when arguments do not fit."""
    try:
        with torch.no_grad(), policy.policy(tune="off"):
            if measure:
                with policy.measuring():
                    tune.whole(lambda: fn(*args, **kwargs))
            return explain.explain(fn, *args, **kwargs)
    except (TypeError, ValueError, OSError) as problem:  # of arguments, or of a lockfile
        raise Problem(str(problem)) from problem
