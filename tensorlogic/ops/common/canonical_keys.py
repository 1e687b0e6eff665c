"""Keys of the same work in fewer dimensions, by which what was measured on one shape serves others on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from ...core.key import Key, TensorSpec
from ...kernels import register

Normal = Callable[[Key], Key]
APART = 16  # a stride that stands for memory with gaps
TURNED = 8  # and one for memory that lies the other way
ALIKE = {"gelu": "gelu_tanh", "silu": "gelu_tanh"}  # activations that cost alike behind a product


def flat_rows(*names: str) -> Normal:
    """The named tensors [..., columns] as [rows, columns] where they are contiguous, activations that cost alike as one, and what a
    product makes."""

    def normal(key: Key) -> Key:
        if key.device != "cuda":
            return key
        tensors = tuple(
            _rows(t) if name in names and t is not None else t
            for name, t in zip(key.names, key.tensors, strict=True)
        )
        flags = tuple(
            (n, ALIKE.get(v, v) if n == "activation" and isinstance(v, str) else v)
            for n, v in key.flags
        )
        return replace(key, tensors=tensors, flags=flags, made=_made(key.names, tensors))

    return normal


def _made(names: tuple[str, ...], tensors: tuple[TensorSpec | None, ...]) -> TensorSpec | None:
    """The output of a product; None of a gradient's, which has it among its tensors."""
    known = dict(zip(names, tensors, strict=True))
    left, right = known.get("x") or known.get("a"), known.get("weight") or known.get("b")
    if "dy" in names or left is None or right is None or min(len(left.shape), len(right.shape)) < 2:
        return None
    columns = right.shape[0] if "weight" in names else right.shape[-1]
    return _flat(left, (*left.shape[:-1], columns))


def one_line(key: Key) -> Key:
    """Operands of one shape as one dimension, beside numbers and vectors that are broadcast."""
    if key.device != "cuda":
        return key
    most = max((len(t.shape) for t in key.tensors if t is not None), default=0)
    whole = [t for t in key.tensors if t is not None and len(t.shape) == most]
    others = [t for t in key.tensors if t is not None and len(t.shape) != most]
    if not whole or any(t.shape != whole[0].shape for t in whole):
        return key
    if any(len(t.shape) > 1 for t in others):
        return key
    line = (prod(whole[0].shape),)
    tensors = tuple(
        t and _shaped(t, line if len(t.shape) == most else t.shape) for t in key.tensors
    )
    return replace(key, tensors=tensors)


def one_line_of_work(key: Key) -> Key:
    """Likewise for an op that does what its flags say with the tensors that are there: a gradient that PyTorch hands on for nothing
    says little of one that takes three passes."""
    found = one_line(key)
    if key.device != "cuda":
        return found
    return replace(found, work=(*found.flags, *(t is None for t in found.tensors)))


def one_dimension(key: Key) -> Key:
    """Tensors of one shape as [outer, dim, inner]."""
    first, dim = key.tensors[0], key.flag("dim")
    if key.device != "cuda" or first is None or not first.shape:
        return key
    if any(t and t.shape != first.shape for t in key.tensors):
        return key
    shape = _around(first.shape, dim, dim + 1)
    flags = tuple((n, 1 if n == "dim" else v) for n, v in key.flags)
    return replace(key, tensors=tuple(t and _shaped(t, shape) for t in key.tensors), flags=flags)


def heads(*names: str) -> Normal:
    """The named tensors [..., rows, columns] as [heads, rows, columns] where all have the same leading dimensions, and a mask as if
    it were as large as the scores."""

    def normal(key: Key) -> Key:
        known = [t for n, t in zip(key.names, key.tensors, strict=True) if n in names and t]
        if key.device != "cuda" or any(len(t.shape) < 2 for t in known):
            return key
        if len({t.shape[:-2] for t in known}) != 1:
            return key
        q, k, mask = key.present("q"), key.present("k"), key.spec("mask")
        lead = prod(q.shape[:-2])
        whole = mask and _flat(mask, (lead, q.shape[-2], k.shape[-2]))
        tensors = tuple(
            whole if n == "mask" else _shaped(t, (lead, *t.shape[-2:])) if n in names and t else t
            for n, t in zip(key.names, key.tensors, strict=True)
        )
        return replace(key, tensors=tensors)

    return normal


def reduced(key: Key) -> Key:
    """A tensor of which neighbouring dimensions are reduced as [outer, reduced, inner], beside others of what is left."""
    x, dims = key.spec("x"), key.flag("dim")
    if key.device != "cuda" or x is None or not dims or dims != tuple(range(dims[0], dims[-1] + 1)):
        return key
    now = {"dim": (1,), "keepdim": False}
    outer, length, inner = _around(x.shape, dims[0], dims[-1] + 1)
    shapes = ((outer, length, inner) if name == "x" else (outer, inner) for name in key.names)
    return replace(
        key,
        tensors=tuple(t and _shaped(t, s) for t, s in zip(key.tensors, shapes, strict=True)),
        flags=tuple((n, now.get(n, v)) for n, v in key.flags),
    )


def _rows(t: TensorSpec) -> TensorSpec:
    if len(t.shape) < 3 or not register.is_contiguous(t):
        return t
    return _flat(t, (prod(t.shape[:-1]), t.shape[-1]))


def _around(shape: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
    return prod(shape[:first]), prod(shape[first:last]), prod(shape[last:])


def _shaped(t: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """The tensor in another shape: contiguous if it is, else in a layout that stands for its kind: elements that share memory, a
    last dimension that is not the one read along, or gaps."""
    if register.is_contiguous(t):
        return _flat(t, shape)
    dims = [(s, n) for s, n in zip(t.stride, t.shape, strict=True) if n != 1]
    turned = dims[-1][0] != min(s for s, _ in dims) or (len(dims) == 1 and dims[0][0] == TURNED)
    if any(s == 0 for s, _ in dims):
        strides: tuple[int, ...] = (0,) * len(shape)
    elif len(shape) == 1:
        strides = (TURNED if turned else APART,)
    else:
        order = register.contiguous(shape[::-1])[::-1] if turned else register.contiguous(shape)
        strides = tuple(APART * s for s in order)
    return replace(t, shape=shape, stride=strides)


def _flat(t: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    return replace(t, shape=shape, stride=register.contiguous(shape))


def flat_left(*names: str) -> Normal:
    """As `flat_rows`, where the right operand is one matrix for all batches."""
    rows = flat_rows(*names)

    def normal(key: Key) -> Key:
        b = key.spec("b")
        if key.device != "cuda" or (b is not None and len(b.shape) == 2):
            return rows(key)
        return replace(key, made=_made(key.names, key.tensors))

    return normal
