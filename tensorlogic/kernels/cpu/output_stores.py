"""Where CPU kernels leave a large output, in the caches or past them, and whether they ask for inputs ahead. Measured a size, with
somebody who reads the output next."""

from __future__ import annotations

from torch import Tensor

from ...core.candidate import Config, Outputs
from ...native import cpu_library

LEAST = 1 << 20  # bytes of an output that may be worth a look
ASKED = 1 << 18  # of one whose inputs may be worth asking for ahead
NEAR, FAR = 4 << 20, 32 << 20  # of one whose inputs a cache has as a rule, or hardly ever
CODES = {"usual": 1, "past_caches": 2, "near": 3}  # the kernels' numbers; 0: by size


def configs(nbytes: int, asks: bool = False) -> list[Config]:
    """The ways of an output of so many bytes, first what the kernels do by size, as a rule; one nameless way where it is small.

    `asks`: the kernel usually asks for inputs a page or two ahead, which pays from memory and costs where a cache has them; "near" does not.
    """
    if nbytes < (ASKED if asks else LEAST) or cpu_library.isa() == "portable":
        return [{}]
    names = ["usual", "past_caches"] if nbytes >= LEAST else ["usual"]
    if cpu_library.op("past_caches")(nbytes):
        names.reverse()
    if asks and nbytes < FAR:
        names.insert(nbytes >= NEAR, "near")
    return [{"stores": name} for name in names]


def code(config: Config, nbytes: int) -> int:
    """The number for the kernel; a small output, as of a neighbour's plan, is stored as its size says."""
    name = config.get("stores", "")
    return CODES.get(name, 0) if nbytes >= (ASKED if name == "near" else LEAST) else 0


def read(outs: Outputs) -> None:
    """What a caller does next, at the least: read what is large, in shares as it was written."""
    total = cpu_library.op("sum")
    for out in outs:
        if isinstance(out, Tensor) and out.numel() * out.element_size() >= LEAST:
            total(out, 0, out.dim())
