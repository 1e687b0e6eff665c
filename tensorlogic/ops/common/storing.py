"""Where CPU kernels leave a large output: in the caches or past them. Measured a size, with somebody who reads it next."""

from __future__ import annotations

from torch import Tensor

from ... import native
from ...op import Config, Outputs

LEAST = 1 << 20  # bytes of an output that may be worth a look
CODES = {"usual": 1, "past_caches": 2}  # the kernels' numbers; 0: by size


def configs(nbytes: int) -> list[Config]:
    """Both ways of an output of so many bytes, first what the kernels do by size; one nameless way where it is small."""
    if nbytes < LEAST or native.isa() == "portable":
        return [{}]
    past = native.op("past_caches")(nbytes)
    return [{"stores": name} for name in sorted(CODES, reverse=not past)]


def code(config: Config, nbytes: int) -> int:
    """The number for the kernel; a small output, as of a neighbour's plan, is stored as its size says."""
    return CODES.get(config.get("stores", ""), 0) if nbytes >= LEAST else 0


def read(outs: Outputs) -> None:
    """What a caller does next, at the least: read what is large, in shares as it was written."""
    total = native.op("sum")
    for out in outs:
        if isinstance(out, Tensor) and out.numel() * out.element_size() >= LEAST:
            total(out, 0, out.dim())
