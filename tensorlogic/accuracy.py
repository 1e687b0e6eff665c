"""How far a product is off on the caller's own data, and the statistics that a measured error holds for."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROWS = 32  # looked at to either side: rows of the left operand, columns of the right one
BATCHES = 4  # matrices of a batch that are looked at
FLOOR = (
    2.0**-50
)  # of the operands' norms: what lies below is cancellation that float64 itself does not resolve
#: Relative 2-norm of the error of a row of the product that a form brings on normal inputs, sums aside.
UNITS = {
    "f64": 2.0**-52,
    "f32": 2.0**-23,
    "tf32x3": 2.0**-20,
    "bf16x6": 2.0**-21,
    "f16x3": 2.0**-20,
    "bf16x3": 2.0**-15,
    "tf32": 2.0**-10,
    "f16": 2.0**-11,
    "bf16": 2.0**-8,
    "int8x6": 2.0**-19,
    "int8x3": 2.0**-12,
    "int8": 2.0**-6,
    "fp8": 2.0**-4,
}
SMOOTH = {"gelu": "none", "gelu_tanh": "tanh"}


@dataclass(frozen=True)
class Part:
    """One product of a call: left [..., M, K] · right [..., K, N], and what follows it."""

    left: Tensor
    right: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None  # [M, N], rows as the flattened left operand's
    activation: str = "none"


@dataclass(frozen=True)
class Statistics:
    """What the error of a product follows, on samples of its operands and of its result.

    `cancels`: largest norm of a row of left times the norm of right, over the norm of that row of the result (and the same
    for columns); `crest`: largest element over the root mean square of a row; `low`, `high`: binary exponents of the
    smallest and the largest row.
    """

    cancels: float
    crest: float
    low: float
    high: float

    @property
    def usable(self) -> bool:
        """False where values are not finite."""
        return all(map(math.isfinite, (self.cancels, self.crest, self.low, self.high)))

    def like(self, other: Statistics) -> bool:
        """Whether an error measured under `other` may be taken for this."""
        return (
            self.usable
            and other.usable
            and 0.25 * other.cancels <= self.cancels <= 1.1 * other.cancels
            and self.crest <= 1.1 * other.crest
            and self.low >= other.low - 4
            and self.high <= other.high + 4
        )


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
        lead = torch.broadcast_shapes(part.left.shape[:-2], part.right.shape[:-2])
        left = part.left.expand(*lead, *part.left.shape[-2:])
        right = part.right.expand(*lead, *part.right.shape[-2:])
        count = math.prod(lead)
        for i in range(0, count, max(1, -(-count // BATCHES))):
            at = tuple(int(x) for x in torch.unravel_index(torch.tensor(i), lead)) if lead else ()
            yield (
                Part(left[at], right[at], None, None, part.activation),
                out.reshape(*lead, m, n)[at],
            )


def _norms(t: Tensor, dim: int) -> Tensor:
    """2-norms in float64, whatever the range of the dtype."""
    wide = t.to(torch.complex128 if t.is_complex() else torch.float64)
    return torch.linalg.vector_norm(wide, dim=dim)


def statistics(parts: Iterable[Part | None], outs: Iterable[Tensor | None]) -> Statistics:
    """The largest of the statistics of every part, from samples of a few dozen rows and columns."""
    found: list[Tensor] = []
    for part, out in _pairs(parts, outs):
        if out.numel() == 0 or part.left.numel() == 0:
            continue
        m, n = out.shape
        if out.is_cuda:
            found.append(_looked(part, out))
        else:
            found.append(_statistics(part, out, max(1, m // ROWS), max(1, n // ROWS)))
    if not found:
        return Statistics(0.0, 0.0, 0.0, 0.0)
    cancels, crest, low, high = torch.stack(found).amax(0).tolist()
    return Statistics(cancels, crest, -low, high)


def _looked(part: Part, out: Tensor) -> Tensor:
    """The same on a GPU, in one launch and one wait; infinite where a kernel has met a value that did not fit."""
    from .ops.common import triton_split  # needs Triton

    if out.is_complex() or part.left.is_complex() or part.right.is_complex():
        m, n = out.shape
        found = _statistics(part, out, max(1, m // ROWS), max(1, n // ROWS)).cpu()
        return found + math.inf if triton_split.noted(out.device) else found
    samples, rows, spoilt = triton_split.look(part.left, part.right, out, ROWS)
    if spoilt or not np.isfinite(samples).all():
        return torch.full((4,), math.inf, dtype=torch.float64)
    return torch.tensor(_of_samples(samples, rows, part, out), dtype=torch.float64)


def _of_samples(samples: Any, rows: int, part: Part, out: Tensor) -> list[float]:
    """(cancels, crest, -low, high) of a table of (norm², peak, norm² of the result), in NumPy: a fifth of PyTorch's time."""
    squares, peaks, results = samples.T
    left = math.sqrt(squares[:rows].mean() * out.shape[0])
    right = math.sqrt(squares[rows:].mean() * out.shape[1])
    norms, whole = np.sqrt(squares), np.sqrt(results)
    bound = norms * right
    bound[rows:] = norms[rows:] * left
    silent = (whole == 0) & ((bound == 0) | (part.activation == "relu"))
    share = np.where(silent, 0.0, bound / np.maximum(whole, sys.float_info.min))
    there = norms > 0
    if not there.any():
        return [float(share.max()), 0.0, 0.0, 0.0]
    crest = (peaks[there] / norms[there]).max() * math.sqrt(max(part.left.shape[1], 1))
    low, high = math.log2(peaks[there].min()), math.log2(peaks[there].max())
    return [float(share.max()), float(crest), -low, max(high, 0.0 if not there.all() else high)]


def _statistics(part: Part, out: Tensor, step_m: int, step_n: int) -> Tensor:
    rows, columns = part.left[::step_m], part.right[:, ::step_n]
    across, down = _norms(rows, 1), _norms(columns, 0)
    left = across.square().sum().mul(out.shape[0] / across.numel()).sqrt()
    right = down.square().sum().mul(out.shape[1] / down.numel()).sqrt()
    cancels = torch.maximum(
        _share(across * right, _norms(out[::step_m], 1), part).amax(),
        _share(down * left, _norms(out[:, ::step_n], 0), part).amax(),
    )
    peaks = rows.abs().amax(1).to(torch.float64), columns.abs().amax(0).to(torch.float64)
    return _summed(cancels, torch.cat((across, down)), torch.cat(peaks), part.left.shape[1])


def _summed(cancels: Tensor, norms: Tensor, peaks: Tensor, depth: int) -> Tensor:
    """(cancels, crest, -low, high)."""
    there = norms > 0
    crest = torch.where(there, peaks * math.sqrt(max(depth, 1)) / norms, 0).amax()
    exponent = torch.log2(torch.where(there, peaks, 1))
    low, high = -torch.where(there, exponent, torch.inf).amin(), exponent.amax()
    low = torch.where(there.any(), low, 0)
    return torch.stack((cancels, crest, low, high))


def _share(bound: Tensor, norm: Tensor, part: Part) -> Tensor:
    """bound / norm; rows that are zero on both sides, or that a relu has cleared, say nothing."""
    silent = (norm == 0) & ((bound == 0) | (part.activation == "relu"))
    return torch.where(silent, 0, bound / norm.clamp_min(torch.finfo(torch.float64).tiny))


def error(parts: Iterable[Part | None], outs: Iterable[Tensor | None], seed: int = 0) -> float:
    """The largest relative 2-norm of the error of a row or column of any part's result, against float64, on samples.

    Half of the sample is drawn at random, half are the rows and columns that cancel most. The norm is that of the row
    before the activation. A value that is not finite where float64's is, or the reverse, makes the error infinite.
    """
    worst = 0.0
    for part, out in _pairs(parts, outs):
        if out.numel():
            worst = max(worst, *(_error(p, o, seed) for p, o in ((part, out), _turned(part, out))))
    return worst


def _turned(part: Part, out: Tensor) -> tuple[Part, Tensor]:
    """The transposed product, whose rows are the columns; its bias is a column."""
    residual = None if part.residual is None else part.residual.t()
    if part.bias is not None:
        column = part.bias.unsqueeze(1)
        residual = (
            column.expand(out.shape[1], out.shape[0]) if residual is None else residual + column
        )
    return Part(part.right.mT, part.left.mT, None, residual, part.activation), out.t()


def _error(part: Part, out: Tensor, seed: int) -> float:
    bound = _norms(part.left, 1) * _norms(part.right, 1).square().sum().sqrt()
    index = _sample(_share(bound, _norms(out, 1), part), seed)
    z = _wide(part.left[index]) @ _wide(part.right)
    if part.bias is not None:
        z = z + _wide(part.bias)
    if part.residual is not None:
        z = z + _wide(part.residual[index])
    y, got = _activated(z, part.activation), out[index]
    close = torch.where(torch.isfinite(y) & torch.isfinite(got), (_wide(got) - y).abs(), 0)
    spoilt = (torch.isfinite(y) & ~torch.isfinite(got) & ~_same_kind(got, y.to(got.dtype))) | (
        ~torch.isfinite(y) & ~torch.isfinite(got) & ~_same_kind(got, y)
    )
    spoilt |= ~torch.isfinite(y) & torch.isfinite(got)
    norm = torch.linalg.vector_norm(torch.where(torch.isfinite(z), z, 0), dim=1)
    floor = (FLOOR * bound[index]).nan_to_num(0, 0, 0)
    size = torch.maximum(norm, floor).clamp_min(torch.finfo(torch.float64).tiny)
    relative = torch.linalg.vector_norm(close, dim=1) / size
    return math.inf if bool(spoilt.any()) else float(relative.amax())


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _same_kind(a: Tensor, b: Tensor) -> Tensor:
    """Both NaN, or both the same infinity, or both finite."""
    a, b = _wide(a), _wide(b)
    if a.is_complex():
        return torch.isfinite(a) == torch.isfinite(b)
    return (torch.isnan(a) & torch.isnan(b)) | (a == b) | (torch.isfinite(a) & torch.isfinite(b))


def _sample(cancels: Tensor, seed: int) -> Tensor:
    """Indices of at most ROWS rows: the most cancelling ones, and some at random (drawn apart from the user's generators)."""
    count = cancels.numel()
    if count <= ROWS:
        return torch.arange(count, device=cancels.device)
    worst = cancels.nan_to_num(nan=math.inf).topk(ROWS // 2).indices
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(count, generator=generator)[: ROWS // 2].to(cancels.device)
    return torch.cat((worst, drawn))


def _activated(z: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.relu(z)
    if activation == "silu":
        return torch.nn.functional.silu(z)
    if activation in SMOOTH:
        return torch.nn.functional.gelu(z, approximate=SMOOTH[activation])
    return z
