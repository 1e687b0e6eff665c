"""How kernels see a reduction: as contiguous [outer, reduce, inner] where the memory is that, in whatever order the
tensor names its dimensions; else by the sizes and strides of what is kept and of what is reduced."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ...core.key import Key, TensorSpec
from ...kernels import register

Dims = tuple[tuple[int, int], ...]  # (size, stride) of each
MOST_KEPT, MOST_REDUCED = 3, 2  # dimensions that the strided kernels take
# elements from one to the next that are read with those between them
MOST_STEP = 4
# elements, or places for them, that kernels count in 32 bits
MOST = 2**31 - 2**20


@dataclass(frozen=True)
class View:
    """A reduction of a tensor that is no [outer, reduce, inner]: kept dimensions in the output's order, those that are
    reduced by stride; none has size 1, and none could be one with the next."""

    kept: Dims
    reduced: Dims

    @property
    def along(self) -> bool:
        """Whether neighbours in memory are reduced, not kept: which dimension has the least stride."""
        reduced, kept = (min((s for _, s in d if s), default=0) for d in (self.reduced, self.kept))
        return not self.kept or (reduced > 0 and (reduced < kept or not kept))


@dataclass(frozen=True)
class Shape:
    """What is reduced: kind, dtype, [outer, reduce, inner], the output's shape, and how it lies where it is not contiguous."""

    kind: str
    dtype: str
    outer: int
    reduce: int
    inner: int
    out: tuple[int, ...]
    align: int
    view: View | None = None


def describe(key: Key) -> Shape | str:
    """The reduction behind a key: contiguous data, neighbouring dimensions."""
    x = key.present("x")
    dims = key.flag("dim")
    reason = _unserved(key, x)
    if reason is not None:
        return reason
    if dims != tuple(range(dims[0], dims[-1] + 1)):
        return "the dimensions are not neighbours"
    if not register.is_contiguous(x):
        return "not contiguous"
    first, last = dims[0], dims[-1] + 1
    sizes = prod(x.shape[:first]), prod(x.shape[first:last]), prod(x.shape[last:])
    return Shape(key.op, x.dtype, *sizes, left(key), register.weakest(key))


def describe_any(key: Key) -> Shape | str:
    """The reduction behind a key: any strides, any dimensions, as contiguous data wherever the memory is that."""
    found = describe(key)
    x = key.present("x")
    if isinstance(found, Shape) or _unserved(key, x) is not None:
        return found
    dims = key.flag("dim")
    every = list(zip(x.shape, x.stride, strict=True))
    kept = joined([pair for d, pair in enumerate(every) if d not in dims])
    reduced = joined(sorted((every[d] for d in dims), key=lambda pair: -pair[1]))
    rest, align = left(key), register.weakest(key)
    dense = _dense(kept, reduced)
    if dense is not None:
        return Shape(key.op, x.dtype, *dense, rest, align)
    if len(kept) > MOST_KEPT or len(reduced) > MOST_REDUCED:
        return "more than two dimensions to reduce, or three to keep, lie apart"
    outer, reduce = prod(n for n, _ in kept), prod(n for n, _ in reduced)
    if max(outer, reduce) * MOST_STEP > MOST:
        return "more elements than the strided kernels count"
    return Shape(key.op, x.dtype, outer, reduce, 1, rest, align, View(kept, reduced))


def joined(dims: list[tuple[int, int]]) -> Dims:
    """Dimensions (size, stride), outermost first, those that lie as one taken together, without those of size 1."""
    found: list[tuple[int, int]] = []
    for n, step in _wide(dims):
        if found and found[-1][1] == n * step:
            found[-1] = (found[-1][0] * n, step)
        else:
            found.append((n, step))
    return tuple(found)


def _dense(kept: Dims, reduced: Dims) -> tuple[int, int, int] | None:
    """[outer, reduce, inner] whose contiguous data this is, the output in that order, too."""
    inner = kept[-1][0] if kept and kept[-1][1] == 1 else 1
    outer, reduce = prod(n for n, _ in kept) // inner, prod(n for n, _ in reduced)
    wanted = _wide([(outer, reduce * inner), (inner, 1)])
    if kept != wanted or reduced != _wide([(reduce, inner)]):
        return None
    return outer, reduce, inner


def _wide(dims: list[tuple[int, int]]) -> Dims:
    """Without those of size 1."""
    return tuple(pair for pair in dims if pair[0] != 1)


def _unserved(key: Key, x: TensorSpec) -> str | None:
    return register.one_dtype(key) or (
        "nothing to reduce" if not key.flag("dim") or 0 in x.shape else None
    )


def left(key: Key) -> tuple[int, ...]:
    """The output's shape."""
    x, dims, keep = key.present("x"), key.flag("dim"), key.flag("keepdim")
    return tuple(1 if d in dims else n for d, n in enumerate(x.shape) if keep or d not in dims)
