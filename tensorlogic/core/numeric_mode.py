"""The value of a precision policy: a form of numbers, or an error budget."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from . import argument_checks

Mode = Literal["f32", "f16", "adaptive"]
MODES: tuple[Mode, ...] = get_args(Mode)
DEFAULT_RTOL = 1e-3


class PrecisionWarning(UserWarning):
    """No way to compute a product keeps the error that was asked for; says by how much the best one misses it.

    Example:
        >>> import torch, tensorlogic, warnings
        >>> with warnings.catch_warnings(record=True) as said, tensorlogic.precision("adaptive", rtol=1e-12):
        ...     warnings.simplefilter("always")
        ...     y = tensorlogic.matmul(torch.randn(64, 64), torch.randn(64, 64))
        >>> said[0].category is tensorlogic.PrecisionWarning
        True
    """


@dataclass(frozen=True)
class Precision:
    """What a precision policy asks of products: a form of numbers, or for "adaptive" the largest relative error."""

    mode: str
    rtol: float | None = None

    def __str__(self) -> str:
        return (
            f"precision({self.mode!r}"
            + ("" if self.rtol is None else f", rtol={self.rtol:g}")
            + ")"
        )


def checked(mode: Any, rtol: Any = None) -> Precision:
    """The policy of these arguments; raises what `precision` does."""
    argument_checks.one_of("precision", "mode", mode, MODES)
    if mode != "adaptive":
        if rtol is not None:
            raise ValueError(
                f"precision: rtol is {rtol!r}, but {mode!r} computes in one form of numbers; "
                f"an error budget belongs to 'adaptive'"
            )
        return Precision(mode)
    if rtol is None:
        return Precision(mode, DEFAULT_RTOL)
    if isinstance(rtol, bool) or not isinstance(rtol, Real):
        raise TypeError(f"precision: rtol is {rtol!r}; a number above 0 and below 1 is required")
    if not 0 < rtol < 1:  # type: ignore[operator]  # of any kind of number; NaN is neither
        raise ValueError(f"precision: rtol is {rtol!r}; a number above 0 and below 1 is required")
    return Precision(mode, float(rtol))
