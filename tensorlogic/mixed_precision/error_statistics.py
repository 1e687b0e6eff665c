"""How far a product is off on the caller's own data, and the statistics that a measured error holds for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import tolerance
from ..core.activations import activate
from ..core.argument_checks import broadcast
from ..kernels.mixed_precision.data_statistics import (
    DRIFT,
    FAINT,
    FLOOR,
    RUN,
    SKETCH,
    Statistics,
    step,
)
from ..native import cpu_library

# whose error is measured: rows of the left operand, columns of the right one
ROWS = 32
BATCHES = 4  # matrices of a batch that are looked at
FARTHEST = 2.0**460  # from 1, beyond which sums of squares leave float64's range
# the error of sums, of those in float32 over hundreds of elements
SUMS = {"f64": 0.0, "f32": 3e-7}
OTHER_SUMS = 1.5e-7  # of forms whose units add several products at once
#: Relative 2-norm of the error of a row of the product that a form brings on normal inputs, sums aside.
UNITS = {
    "f64": 2.0**-52, "f32": 2.0**-23, "f16x3": 2.0**-20, "bf16x3": 2.0**-15, "tf32": 2.0**-10, "f16": 2.0**-11, "bf16": 2.0**-8, "i16": 2.0**-10,
}  # fmt: skip
#: What it is there in fact (of i16, with the largest crest it takes), and the bits of a significand that a form holds: data that happen to be exact in it have no error.
TYPICAL = {"f64": 0.0, "f32": 4e-8, "f16x3": 5e-7, "bf16x3": 4e-6, "tf32": 2.9e-4, "f16": 2.9e-4, "bf16": 2.3e-3, "i16": 2.8e-3}  # fmt: skip
SIGNIFICANDS = {"f64": 53, "f32": 24, "f16x3": 22, "bf16x3": 16, "tf32": 11, "f16": 11, "bf16": 8}
DTYPE_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float64: 53, torch.complex128: 53, torch.complex32: 11}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One product of a call: left [..., M, K] · right [..., K, N], and what follows it."""

    left: Tensor
    right: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None  # [M, N], rows as the flattened left operand's
    activation: str = "none"


@dataclass(frozen=True)
class Known:
    """The error of one candidate, as it was measured under these statistics."""

    candidate: str
    source: str
    error: float
    statistics: Statistics

    @property
    def finite(self) -> bool:
        """Whether it can be written down."""
        return math.isfinite(self.error) and self.statistics.usable

    def to_json(self) -> dict[str, Any]:
        """A record of a plan."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Known:
        """The inverse of `to_json`."""
        return cls(**{**record, "statistics": Statistics(**record["statistics"])})


def _pairs(
    parts: Iterable[Part | None], outs: Iterable[Tensor | None]
) -> Iterator[tuple[Part, Tensor]]:
    """Two-dimensional parts with their outputs; of a batch, a few of its matrices."""
    for part, out in zip(parts, outs, strict=False):
        if part is None or out is None:
            continue
        m, n = part.left.shape[-2], part.right.shape[-1]
        if part.left.dim() == 2 and part.right.dim() == 2:
            yield part, out.reshape(m, n)
            continue
        lead = broadcast(part.left.shape[:-2], part.right.shape[:-2])
        left = part.left.expand(*lead, *part.left.shape[-2:])
        right = part.right.expand(*lead, *part.right.shape[-2:])
        count = math.prod(lead)
        for i in range(0, count, max(1, -(-count // BATCHES))):
            at = tuple(i // math.prod(lead[d + 1 :]) % lead[d] for d in range(len(lead)))
            one = Part(left[at], right[at], activation=part.activation)
            yield one, out.reshape(*lead, m, n)[at]


def _norms(t: Tensor, dim: int) -> Tensor:
    """2-norms in float64, whatever the range of the dtype."""
    wide = t.to(torch.complex128 if t.is_complex() else torch.float64)
    if wide.shape[dim] == 0:
        return torch.linalg.vector_norm(wide, dim=dim)
    peak = wide.abs().amax(dim, keepdim=True)  # squares of float64 may leave its range
    scale = torch.where((peak > 0) & torch.isfinite(peak), peak, 1.0)
    return torch.linalg.vector_norm(wide / scale, dim=dim) * scale.squeeze(dim)


def statistics(parts: Iterable[Part | None], outs: Iterable[Tensor | None]) -> Statistics:
    """The largest of the statistics of every part: all rows and columns, by a few dozen elements of each."""
    found: list[list[float]] = []
    for part, out in _pairs(parts, outs):
        if out.numel() and part.left.numel():
            look = looked if out.is_cuda else natively if _native(part, out) else sketched
            found.append(look(part, out))
    if not found:
        return Statistics(0.0, 0.0, 0.0, 0.0)
    cancels, crest, low, high, blank = (max(values) for values in zip(*found, strict=True))
    return Statistics(cancels, crest, -low, high, blank)


def looked(part: Part, out: Tensor) -> list[float]:
    """The same on a GPU, in one launch and one wait; infinite where a kernel has met a value that did not fit."""
    from ..kernels.mixed_precision import split_planes  # needs Triton

    if out.is_complex() or part.left.is_complex() or part.right.is_complex():
        found = sketched(part, out)
        return [math.inf] * 5 if split_planes.noted(out.device) else found
    table, rows, spoilt = split_planes.look(part.left, part.right, out)
    if spoilt:
        return [math.inf] * 5
    return _summed(_gathered(table[:rows]), _gathered(table[rows:]), part, out)


def _gathered(table: Any) -> list[float]:
    """One row of six of those of several blocks."""
    found: list[float] = [
        table[:, 0].sum(), *table[:, 1:3].max(0), table[:, 3].min(), table[:, 4].max(), table[:, 5].sum(),
    ]  # fmt: skip
    return found


def _native(part: Part, out: Tensor) -> bool:
    """Whether the native library takes these tensors."""
    tensors = (out, part.left, part.right)
    return not cpu_library.available() and not any(map(torch.is_complex, tensors))


def natively(part: Part, out: Tensor) -> list[float]:
    """The same on a CPU by the native library: a tenth of PyTorch's time."""
    rows, columns = cpu_library.op("product_look")(part.left, part.right, out).tolist()
    return _summed(rows, columns, part, out)


def sketched(part: Part, out: Tensor) -> list[float]:
    """(cancels, crest, -low, high, blank), by PyTorch."""
    k, ms, ns = spans(part.left.shape[1]), spans(out.shape[0]), spans(out.shape[1])
    tables = []
    for operand, result in (
        (torch.cat([part.left[:, s] for s in k], 1), torch.cat([out[:, s] for s in ns], 1)),
        (torch.cat([part.right[s] for s in k]).mT, torch.cat([out[s] for s in ms]).mT),
    ):
        squares = _norms(operand, 1).square()
        peaks = operand.abs().amax(1).to(torch.float64)
        results = _norms(result, 1).square()
        there, told = squares > 0, results > 0
        seen = (
            squares.sum(),
            torch.where(told, squares / results, 0).amax(),
            torch.where(there, peaks.square() / squares, 0).amax(),
            torch.where(peaks > 0, peaks, math.inf).amin(),
            peaks.amax(),
            (there & ~told).sum(),
        )
        tables.append(torch.stack(seen))
    rows, columns = torch.stack(tables).tolist()
    return _summed(rows, columns, part, out)


def spans(n: int) -> list[slice]:
    """Which elements of a row stand for it: all up to 64, else four runs of 16."""
    if n <= SKETCH:
        return [slice(0, n)]
    return [slice(i * step(n), i * step(n) + RUN) for i in range(SKETCH // RUN)]


def _summed(rows: list[float], columns: list[float], part: Part, out: Tensor) -> list[float]:
    """Of (sum of norms², largest norm² over result², largest peak² over norm², least and largest peak, how many have a result
    of 0) of rows and columns."""
    if not all(math.isfinite(v) for table in (rows, columns) for v in (*table[:3], table[4])):
        return [math.inf] * 5
    (m, n), k = out.shape, max(part.left.shape[1], 1)
    seen = min(k, SKETCH)
    share = k / seen
    across = rows[1] * share * columns[0] * share / (n / min(n, SKETCH))
    down = columns[1] * share * rows[0] * share / (m / min(m, SKETCH))
    low, high = min(rows[3], columns[3]), max(rows[4], columns[4])
    cancels = math.sqrt(max(across, down))
    least = min(rows[3] * math.sqrt(columns[0] * share), columns[3] * math.sqrt(rows[0] * share))
    faint = FAINT.get(out.dtype, 0.0) * max(cancels, 1.0)
    # that an element may be, if those looked at are like the others
    largest = 4 * k * rows[4] * columns[4]
    if high > FARTHEST or low < 1 / FARTHEST or least < faint or tolerance.beyond(out, largest):
        return [math.inf] * 5
    return [
        cancels,
        math.sqrt(max(rows[2], columns[2]) * seen),
        -math.log2(low) if 0 < low < math.inf else 0.0,
        math.log2(high) if high > 0 else 0.0,
        0.0 if part.activation == "relu" else rows[5] + columns[5],  # it makes them by itself
    ]


def drift(outs: Iterable[Tensor | None]) -> float:
    """How many binary exponents smaller float16 results may become before they lose digits; those of other dtypes: `FAINT`."""
    least = math.inf
    for out in outs:
        if out is not None and out.dtype == torch.float16 and out.dim() > 1 and out.numel():
            for dim in (-1, -2):
                sizes = _norms(out, dim) / math.sqrt(out.shape[dim])
                least = float(torch.where(sizes > 0, sizes, math.inf).amin().clamp_max(least))
    return min(DRIFT, max(0.0, math.log2(least / torch.finfo(torch.float16).tiny)))


def error(
    parts: Iterable[Part | None], outs: Iterable[Tensor | None], seed: int = 0
) -> tuple[float, float]:
    """(the largest relative 2-norm of the error of a row or column of any part's result, against float64, on samples;
    the cancellation of `Statistics`, by all elements).

    Half of the sample is drawn at random, half are the rows and columns that cancel most. The norm is that of the row
    before the activation. A value that is not finite where float64's is, or the reverse, makes the error infinite.
    """
    worst = cancels = 0.0
    for part, out in _pairs(parts, outs):
        if out.numel():
            for p, o in ((part, out), _turned(part, out)):
                found, share = _error(p, o, seed)
                worst, cancels = max(worst, found), max(cancels, share)
    return worst, cancels


def likely(
    form: str, parts: Iterable[Part | None], outs: Iterable[Tensor | None], cancels: float
) -> float:
    """The error that a form brings on ordinary data that cancel so much: what was measured may be luck.

    Data that are exact in a form, such as small integers, show no error, and no statistics tell them from those that are
    not; a form that holds every digit of the operands' dtype has the error of its sums, and the result that of its dtype.
    """
    found = 0.0
    for part, out in zip(parts, outs, strict=False):
        if part is None or out is None:
            continue
        bits = max(DTYPE_BITS.get(t.dtype, 24) for t in (part.left, part.right))
        rounded = TYPICAL[form] if bits > SIGNIFICANDS.get(form, 0) else 0.0
        sums = SUMS.get(form, OTHER_SUMS)
        depth = max(part.left.shape[-1], 1)
        inside = max(rounded, sums) * cancels / math.sqrt(depth)
        found = max(found, inside, 0.4 * 2.0 ** -DTYPE_BITS.get(out.dtype, 24))
    return found


def _turned(part: Part, out: Tensor) -> tuple[Part, Tensor]:
    """The transposed product, whose rows are the columns; its bias is a column."""
    residual = None if part.residual is None else part.residual.t()
    if part.bias is not None:
        column = part.bias.unsqueeze(1)
        residual = column.expand(out.mT.shape) if residual is None else residual + column
    return Part(part.right.mT, part.left.mT, None, residual, part.activation), out.t()


def _error(part: Part, out: Tensor, seed: int) -> tuple[float, float]:
    bound = _norms(part.left, 1) * _norms(_norms(part.right, 1), 0)
    result = _norms(out, 1).nan_to_num(0.0, 0.0)  # rows that are not finite come first
    share = bound / result.clamp_min(torch.finfo(torch.float64).tiny)
    share = torch.where(bound > 0, share, 0)
    faint = torch.where(result > 0, -result, -math.inf) if out.dtype == torch.float16 else None
    index = _sample(share, seed, faint)
    left, right = tolerance.wide(part.left[index]), tolerance.wide(part.right)
    dtype = torch.promote_types(left.dtype, right.dtype)
    z = left.to(dtype) @ right.to(dtype)
    if part.bias is not None:
        z = z + tolerance.wide(part.bias)
    if part.residual is not None:
        z = z + tolerance.wide(part.residual[index])
    y, got = activate(z, part.activation), out[index]
    close = torch.where(torch.isfinite(y) & torch.isfinite(got), (tolerance.wide(got) - y).abs(), 0)
    spoilt = torch.isfinite(y) != torch.isfinite(got)  # what leaves the result's range is no result
    spoilt |= ~torch.isfinite(y) & ~_same_kind(got, y)
    norm = _norms(torch.where(torch.isfinite(z), z, 0), 1)
    floor = (FLOOR * bound[index]).nan_to_num(0, 0, 0)
    size = torch.maximum(norm, floor).clamp_min(torch.finfo(torch.float64).tiny)
    relative = _norms(close, 1) / size
    worst = math.inf if bool(spoilt.any()) else float(relative.amax())
    seen = share[torch.isfinite(share) & (result > 0)]
    return worst, float(seen.amax()) if seen.numel() else 0.0


def _same_kind(a: Tensor, b: Tensor) -> Tensor:
    """Both NaN, or both the same infinity, or both finite."""
    a, b = tolerance.wide(a), tolerance.wide(b)
    if a.is_complex():
        return torch.isfinite(a) == torch.isfinite(b)
    return (torch.isnan(a) & torch.isnan(b)) | (a == b) | (torch.isfinite(a) & torch.isfinite(b))


def _sample(cancels: Tensor, seed: int, faint: Tensor | None = None) -> Tensor:
    """Indices of at most ROWS rows: the most cancelling ones, and some at random (drawn apart from the user's generators); the
    faintest, too, where they have few digits for that alone."""
    count = cancels.numel()
    if count <= ROWS:
        return torch.arange(count, device=cancels.device)
    worst = cancels.nan_to_num(nan=math.inf).topk(ROWS // 2).indices
    if faint is not None:
        worst = torch.cat((worst[: ROWS // 4], faint.topk(ROWS // 4).indices))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(count, generator=generator)[: ROWS // 2].to(cancels.device)
    return torch.cat((worst, drawn))
