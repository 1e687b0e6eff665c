"""Statistics of a matrix under which a measured error of its product holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# elements of every row that the statistics see, in runs of so many
SKETCH, RUN = 64, 16
# of the operands' norms: what cancels below float64 does not resolve either
FLOOR = 2.0**-50
WIDE = (torch.float32, torch.bfloat16, torch.complex64)
#: Norms of rows of a result that a few steps more may take below its dtype's range, where no error measured before holds.
FAINT = {torch.float16: 2.0**-10, **dict.fromkeys(WIDE, 2.0**-118)}
# binary exponents by which data may move, their errors as measured
DRIFT = 4.0


@dataclass(frozen=True)
class Statistics:
    """What the error of a product follows: every row and column of operands and result, by a sketch of its elements.

    `cancels`: largest norm of a row of left times the norm of right, over the norm of that row of the result (and the same
    for columns); `crest`: largest element over the root mean square of a row; `low`, `high`: binary exponents of the
    smallest and the largest row; `blank`: rows and columns of the result that are 0 although those of the operands are not.
    """

    cancels: float
    crest: float
    low: float
    high: float
    blank: float = 0.0

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
            and self.low >= other.low - DRIFT
            and self.high <= other.high + DRIFT
            and self.blank == other.blank == 0  # which rows these are, nothing tells
        )


def step(n: int) -> int:
    """From run to run; in long rows they begin where lines of memory do."""
    even = RUN if n >= 8 * SKETCH else 1
    return RUN if n <= SKETCH else (n - RUN) // (SKETCH // RUN - 1) // even * even
