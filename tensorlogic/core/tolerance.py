"""Error against float64 and the budgets a candidate must keep before its time counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .dtypes import NAMES

RELATIVE_TO_EAGER = 2.0  # times the error of same-dtype eager PyTorch, at most
# eager's relative error where all of an output has cancelled
NOISE = 0.5
# elements below which chance decides which of two errors is larger
FEW = 64
# errors from which their deviation is taken: a median of millions takes a third of the judging
SAMPLE = 1 << 16
MEDIAN = 0.6745  # of the sizes of normal numbers, over their deviation
# spacings of the dtype at the row's scale that one element may be off
ELEMENT_SLACK = 16.0


def wide(tensor: Tensor) -> Tensor:
    """The same values in float64 (complex128); integers and booleans stay. On the CPU where the device has no float64."""
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def spacing(dtype: torch.dtype) -> float:
    """Relative spacing of the dtype's numbers (0 for integers)."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def relative_error(out: Tensor, ref: Tensor) -> float:
    """‖out − ref‖ / ‖ref‖ in float64 over the positions where both are finite; 0 for empty tensors."""
    if ref.numel() == 0:
        return 0.0
    out, ref = wide(out.detach()), wide(ref.detach())
    value = ((out - ref).norm() / ref.norm().clamp_min(torch.finfo(torch.float64).tiny)).item()
    # everything is finite, as almost always; looking for what is not takes longer
    if value - value == 0:
        return value
    finite = torch.isfinite(ref) & torch.isfinite(out)
    diff, scale = torch.where(finite, out - ref, 0), torch.where(finite, ref, 0)
    value = (diff.norm() / scale.norm().clamp_min(torch.finfo(torch.float64).tiny)).item()
    return value if value == value else float("inf")


def beyond(out: Tensor, largest: float) -> bool:
    """Whether an element has left the dtype's range (float32's for float64); looks at all of them where `largest` is beyond it."""
    computed = torch.float32 if out.dtype == torch.float64 else out.dtype
    near = out.dtype.is_floating_point and largest > torch.finfo(computed).max
    return near and not math.isfinite(float(out.sum(dtype=torch.float64)))


def chance(count: float) -> float:
    """How many times another one an error over `count` elements may be by chance: 20 for a single element (more in 3 cases of
    100), 2.9 for eight (4 of 1,000). Errors that many roundings leave are nearly normal; the logarithm of the ratio of two
    such norms has about the standard deviation 1 / √count, of which this is three."""
    return math.exp(3 / math.sqrt(count)) if 0 < count < FEW else 1.0


def of_all(miss: Tensor) -> float:
    """`chance` over all elements of eager's errors: how far luck goes where they are alike."""
    return chance(miss.numel())


def of_those_that_miss(miss: Tensor) -> float:
    """`chance` over as many elements as make up the norm of eager's errors, (Σ e²)² / Σ e⁴: one of a thousand may be all of it."""
    size = miss.abs()
    square = (size / size.amax().clamp_min(torch.finfo(torch.float64).tiny)).square()
    total, fourth = square.sum().item(), square.square().sum().item()
    return chance(total**2 / fourth if fourth else miss.numel())


@dataclass(frozen=True)
class Verdict:
    """Whether an output may stand for the reference, and the reason if not."""

    reason: str | None
    error: float  # relative error over max(eager's, the dtype's floor)

    def __bool__(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class Errors:
    """Relative errors of one output: the candidate's and eager's."""

    ours: float
    eager: float
    dtype: torch.dtype
    count: int  # elements


def judge(
    outs: Sequence[Tensor | None],
    eager: Sequence[Tensor | None],
    refs: Sequence[Tensor | None],
    slack: float = 1.0,
    coarse: float = 0.0,
    errors: list[Errors] | None = None,
    luck: Callable[[Tensor], float] | None = None,
    lost: float = 0.0,
) -> Verdict:
    """Compare a candidate's outputs with same-dtype eager PyTorch and the float64 reference, every element.

    `slack` widens the budget where the order of summation alone makes eager's error a matter of luck, `coarse`
    is the relative error that a candidate's form of numbers brings. `errors` is given those of each floating output.
    `luck` says of eager's errors how many times as large others may be by chance (`of_all`, `of_those_that_miss`).
    `lost` is the error (root mean square, absolute) that float32 sums of such inputs have in one order or another: what
    eager's order spares it is no yardstick below that.
    """
    worst = 0.0
    errors = [] if errors is None else errors
    if len(outs) != len(eager):
        return Verdict(f"wrong: {len(outs)} outputs, {len(eager)} expected", float("inf"))
    for index, (out, plain, ref) in enumerate(zip(outs, eager, refs, strict=True)):
        if plain is None or ref is None:
            continue
        reason, error = _judge_one(out, plain, ref, slack, coarse, errors, luck, lost)
        if reason:
            return Verdict(f"wrong: output {index} {reason}", error)
        worst = max(worst, error)
    return Verdict(None, worst)


def _judge_one(
    out: Tensor | None,
    plain: Tensor,
    ref: Tensor,
    slack: float,
    coarse: float,
    errors: list[Errors],
    luck: Callable[[Tensor], float] | None,
    lost: float,
) -> tuple[str | None, float]:
    bad = float("inf")
    if not isinstance(out, Tensor):
        return f"is {type(out).__name__}, not a tensor", bad
    if out.shape != plain.shape or out.dtype != plain.dtype or out.device != plain.device:
        return f"is {_describe(out)}, expected {_describe(plain)}", bad
    if out.numel() == 0:
        return None, 0.0
    out, plain = out.to(ref.device), plain.to(ref.device)
    if not (out.dtype.is_floating_point or out.dtype.is_complex):
        return (None, 0.0) if torch.equal(out, plain) else ("differs from eager PyTorch", bad)
    made, given, exact = wide(out), wide(plain), wide(ref)
    miss, eager_miss = _less(made, exact, out), _less(given, exact, plain)
    norms = torch.stack([t.norm() for t in (miss, eager_miss, exact)]).tolist()
    steady = all(n - n == 0 for n in norms)  # true where every element is finite
    if steady:
        scale = max(norms[2], torch.finfo(torch.float64).tiny)
        error, eager_error = norms[0] / scale, norms[1] / scale
    else:
        if reason := _not_finite(out, plain, ref):
            return reason, bad
        error, eager_error = relative_error(out, ref), relative_error(plain, ref)
    errors.append(Errors(error, eager_error, out.dtype, out.numel()))
    base = max(eager_error, floor(out.dtype), coarse)
    ratio = error / base
    most = RELATIVE_TO_EAGER
    if luck is not None:  # what eager's errors say of luck says nothing of a floor
        most = max(most, (luck if base == eager_error else of_all)(eager_miss))
    as_sums = error * norms[2] <= RELATIVE_TO_EAGER * lost * out.numel() ** 0.5
    if ratio > most * slack and not as_sums:
        reason = f"has relative error {ratio * base:.2e}, {ratio:.3g} times eager's {base:.2e} (at most {most:.3g})"
        return reason, ratio
    if steady and eager_error > NOISE:
        return None, ratio
    eps = max(spacing(plain.dtype), coarse)
    excess = _largest_excess(miss, eager_miss, exact, eps, steady, slack, lost)
    if excess > slack:
        reason = f"has an element {excess:.3g} times further from the reference than its row allows"
        return reason, ratio
    return None, ratio


def _less(t: Tensor, exact: Tensor, source: Tensor) -> Tensor:
    """t − exact, in the memory of `t` where that is a copy of `source`: fresh pages cost more than the subtraction."""
    return t - exact if t is source or t.dtype != exact.dtype else t.sub_(exact)


def _not_finite(out: Tensor, plain: Tensor, ref: Tensor) -> str | None:
    """What is wrong about NaN and infinities: each must be eager's or the reference's, except at the very end of the dtype's range."""
    rounded = ref.to(out.dtype)
    out_nan, plain_nan = torch.isnan(out), torch.isnan(plain)
    if bool(((out_nan != plain_nan) & (out_nan != torch.isnan(rounded))).any()):
        return f"has {int(out_nan.sum())} NaN where eager has {int(plain_nan.sum())}"
    signs = _infinities(out)
    other = (signs != _infinities(plain)) & (signs != _infinities(rounded))
    if bool(other.any()) and bool((other & ~_at_the_end(out, ref)).any()):
        return "has infinities where neither eager nor the reference has them, or the reverse"
    return None


def _at_the_end(out: Tensor, ref: Tensor) -> Tensor:
    """Where both are as large as the dtype's largest number but for the spacings that an element may be off, and of one sign."""
    if out.dtype.is_complex:
        return torch.zeros_like(out, dtype=torch.bool)
    largest, off = torch.finfo(out.dtype).max, ELEMENT_SLACK * spacing(out.dtype)
    exact, made = ref.double(), out.double()
    near = (exact.abs() >= largest * (1 - off)) & (exact.abs() / (1 + off) <= largest)
    return near & (made.sign() == exact.sign()) & (made.abs() >= largest * (1 - off))


def floor(dtype: torch.dtype) -> float:
    """Half a spacing, root-mean-square over a binade, is what rounding alone costs; f32 sums in another order differ more."""
    return spacing(dtype) * (0.25 if dtype in (torch.float16, torch.bfloat16) else 4.0)


def _infinities(t: Tensor) -> Tensor:
    signs = torch.sign(t.real if t.is_complex() else t).nan_to_num(0).to(torch.int8)
    return torch.isinf(t).to(torch.int8) * signs


def _largest_excess(
    miss: Tensor, eagers: Tensor, ref: Tensor, eps: float, steady: bool, slack: float, lost: float
) -> float:
    """Largest |out − ref| over what is allowed there: some spacings of the row's scale, or four times eager's worst in that row and its
    usual worst, which what sums lose is not less than.

    `steady` says that all elements are finite; others are left out. Where each row's worst keeps the budget of an element
    that is 0, `slack` times, that bound is the answer: no element has to be looked at alone.
    """
    last = ref.shape[-1] if ref.dim() else 1
    miss, eagers, size = (t.reshape(-1, last) for t in (miss, eagers, ref))
    if not steady:
        finite = torch.isfinite(miss) & torch.isfinite(eagers)
        miss, eagers, size = (torch.where(finite, t, 0) for t in (miss, eagers, size))
    eager_worst = eagers.abs().amax(-1, keepdim=True)
    row = torch.linalg.vector_norm(size, 2, -1, keepdim=True) * last**-0.5
    whole = row.square().mean().sqrt()
    least = torch.finfo(torch.float64).tiny
    usual = eager_worst.mean().clamp_min(lost)
    # the worst of a few is hardly a worst: as far off as the worst of so many normal errors is
    if last < FEW:
        some = eagers.reshape(-1)[:: eagers.numel() // SAMPLE | 1]  # odd: of every column
        deviation = some.abs().median() / MEDIAN  # which a few that are far off leave alone
        usual = torch.maximum(usual, deviation * (2 * math.log(eagers.numel())) ** 0.5)
    rest = ELEMENT_SLACK * eps * (row + 0.1 * whole) + 4 * (eager_worst + usual)
    miss = miss.abs()
    largest: float = (miss.amax(-1, keepdim=True) / rest.clamp_min(least)).amax().item()
    if largest > slack:
        allowed = ELEMENT_SLACK * eps * size.abs() + rest
        largest = (miss / allowed.clamp_min(least)).amax().item()
    return largest


def _describe(t: Tensor) -> str:
    return f"{NAMES.get(t.dtype, str(t.dtype))}{list(t.shape)} on {t.device}"
