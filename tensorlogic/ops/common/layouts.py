"""Where PyTorch's element-wise ops put their outputs, and the fewest dimensions in which all operands move evenly."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.argument_checks import broadcast
from ...kernels import register

Laid = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides
Dim = tuple[int, tuple[int, ...]]  # size, the step of each operand along it


def dense(laid: Laid) -> bool:
    """True where the elements fill their memory without gaps, in whatever order of dimensions."""
    step = 1
    for s, n in sorted((s, n) for n, s in zip(*laid, strict=True) if n != 1):
        if s != step:
            return False
        step *= n
    return True


def contiguous(laid: Laid) -> bool:
    """True where the strides are a contiguous tensor's, dimensions of size 1 aside."""
    shape, stride = laid
    expected = register.contiguous(shape)
    return all(n == 1 or s == c for n, s, c in zip(shape, stride, expected, strict=True))


def steps(laid: Laid, out: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of an operand along the dimensions of `out`, 0 where it is repeated."""
    shape, stride = laid
    missing = len(out) - len(shape)
    found = [
        0 if n == 1 and m != 1 else s for n, s, m in zip(shape, stride, out[missing:], strict=True)
    ]
    return (*[0] * missing, *found)


def iterated(*operands: Laid) -> Laid:
    """The output of PyTorch's TensorIterator: dense, its dimensions in the order of the operands' strides, the first one's first."""
    out = broadcast(*(shape for shape, _ in operands))
    strides = {stride for _, stride in operands}
    if all(shape == out for shape, _ in operands):
        if all(contiguous(o) for o in operands):
            return out, register.contiguous(out)
        if len(strides) == 1 and dense(operands[0]):
            return operands[0]
    order = _order(out, [steps(o, out) for o in operands])
    found, step = [0] * len(out), 1
    for d in order:
        found[d] = step
        step *= out[d]
    return out, tuple(found)


def _order(out: tuple[int, ...], moved: Sequence[tuple[int, ...]]) -> list[int]:
    """Dimensions, the fastest first, as TensorIterator::reorder_dimensions sorts them: by insertion, ambiguous ones staying."""
    order = list(reversed(range(len(out))))
    for i in range(1, len(order)):
        at = i
        for other in range(i - 1, -1, -1):
            turn = _compared(order[other], order[at], out, moved)
            if turn > 0:
                order[other], order[at] = order[at], order[other]
                at = other
            elif turn < 0:
                break
    return order


def _compared(d: int, e: int, out: tuple[int, ...], moved: Sequence[tuple[int, ...]]) -> int:
    """1 where dimension d is to lie outside e, -1 where inside, 0 where no operand says."""
    for s in moved:
        if s[d] and s[e]:
            if s[d] != s[e]:
                return 1 if s[d] > s[e] else -1
            if out[d] > out[e]:
                return 1
    return 0


def collapsed(laid: Laid, moved: Sequence[tuple[int, ...]]) -> list[Dim]:
    """The dimensions of a dense output in the order of its memory, merged where every operand goes on evenly."""
    out, stride = laid
    merged: list[Dim] = []
    for d in sorted((d for d, n in enumerate(out) if n != 1), key=lambda d: -stride[d]):
        size, step = out[d], tuple(s[d] for s in moved)
        if merged and all(a == b * size for a, b in zip(merged[-1][1], step, strict=True)):
            size *= merged.pop()[0]
        merged.append((size, step))
    return merged or [(1, (1,) * len(moved))]
