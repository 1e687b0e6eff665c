"""`tensorlogic.pool`: what memory large outputs take, how much of it is used again, and its limits.

A pooled tensor is like any other. Without the hooks (`tensorlogic doctor` says) its storage cannot grow: `resize_` beyond
it raises and, in PyTorch as on NumPy's memory, leaves the tensor with a shape it has no memory for: do not use it further.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tensorlogic.core import argument_checks, weight_cache
from tensorlogic.native import cpu_library


@dataclass(frozen=True)
class SizeClass:
    """Blocks of one size: how many tensors hold one, how many lie free, how often one was asked for and reused."""

    in_use: int
    held: int
    allocation_count: int
    reuse_count: int


@dataclass(frozen=True)
class PoolStats:
    """A moment's figures. Bytes are those taken from the system.

    `fragmentation` is the share of bytes_in_use nobody asked for; `derived_bytes` is what widened or packed copies of
    constant weights take on this type of device, wherever their memory comes from.
    """

    allocation_count: int
    reuse_count: int
    reuse_rate: float
    bytes_in_use: int
    bytes_held: int
    high_water_bytes: int
    fragmentation: float
    size_classes: dict[int | str, SizeClass]
    derived_bytes: int = 0


Classes = dict[int | str, SizeClass]


def _stats(device: str, figures: Sequence[int], classes: Classes) -> PoolStats:
    allocations, reuses, in_use, requested, held, high = figures
    reused = reuses / allocations if allocations else 0.0
    unasked = 1.0 - requested / in_use if in_use else 0.0
    derived = weight_cache.CACHE.nbytes_on(device)
    return PoolStats(allocations, reuses, reused, in_use, held, high, unasked, classes, derived)


def _cpu_stats() -> PoolStats:
    if cpu_library.available() is not None:
        return _stats("cpu", (0, 0, 0, 0, 0, 0), {})
    figures, rows = cpu_library.op("pool_stats")()[:6], cpu_library.op("pool_classes")()
    classes = {rows[i]: SizeClass(*rows[i + 1 : i + 5]) for i in range(0, len(rows), 5)}
    return _stats("cpu", figures, classes)


def _cuda_stats(device: torch.device) -> PoolStats:
    """PyTorch's caching allocator under the same names: a segment taken from the driver is an allocation not reused."""
    figures = torch.cuda.memory_stats(device)

    def of(name: str, pool: str = "all", what: str = "current") -> int:
        return int(figures.get(f"{name}.{pool}.{what}", 0))

    def size_class(pool: str) -> SizeClass:
        return SizeClass(of("allocation", pool), of("inactive_split", pool), *counts(pool))

    def counts(pool: str) -> tuple[int, int]:
        asked = of("allocation", pool, "allocated")
        return asked, max(asked - of("segment", pool, "allocated"), 0)

    in_use, peak = of("allocated_bytes"), of("reserved_bytes", what="peak")
    held = of("reserved_bytes") - in_use
    memory = in_use, of("requested_bytes") or in_use, held, peak
    classes: Classes = {pool: size_class(pool) for pool in ("small_pool", "large_pool")}
    return _stats("cuda", (*counts("all"), *memory), classes)


# bytes that PyTorch held for the Apple GPU when it was asked; it keeps no peak itself
_MOST_SEEN = [0]


def _mps_stats() -> PoolStats:
    """PyTorch's allocator for Apple GPUs, which tells bytes and counts nothing; the peak is that of the looks at it."""
    in_use, held = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    _MOST_SEEN[0] = max(_MOST_SEEN[0], held)
    return _stats("mps", (0, 0, in_use, in_use, held - in_use, _MOST_SEEN[0]), {})


def stats(device: torch.device | str = "cpu") -> PoolStats:
    """The pool's figures for a device: ours on "cpu", PyTorch's caching allocator on "cuda", its allocator on "mps".

    Raises ValueError for a device that is not here, or whose allocator shows no figures.

    >>> stats("cpu").bytes_held >= 0
    True
    """
    device = argument_checks.device("pool.stats", device)
    if device.type == "cpu":
        return _cpu_stats()
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        return _cuda_stats(device)
    if device.type == "mps" and torch.backends.mps.is_available():
        return _mps_stats()
    raise ValueError(
        f"pool.stats: device must be a cpu, cuda or mps device that is here, got {device}"
    )


def configure(
    *,
    max_bytes: int | None = None,
    max_buffers_per_size: int | None = None,
    max_derived_bytes: int | None = None,
) -> None:
    """Limit what is kept for reuse; what exceeds the new limits is given back at once.

    max_bytes: bytes of free CPU blocks (default: an eighth of the memory this process may use); 0 keeps nothing.
    max_buffers_per_size: free blocks of one size class (default: 32).
    max_derived_bytes: widened or packed copies of constant weights (default: 1 GiB); 0 switches them off.
    Raises TypeError for a limit that is no whole number, ValueError for a negative one.

    >>> configure(max_buffers_per_size=32)
    """
    _check("configure", "max_bytes", max_bytes)
    _check("configure", "max_buffers_per_size", max_buffers_per_size)
    _check("configure", "max_derived_bytes", max_derived_bytes)
    if max_derived_bytes is not None:
        weight_cache.CACHE.configure(max_derived_bytes)
    if cpu_library.available() is None:
        given = [-1 if n is None else n for n in (max_bytes, max_buffers_per_size)]
        cpu_library.op("pool_configure")(*given)


def _check(function: str, name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"pool.{function}: {name} must be a whole number, got {value!r}")
    if value < 0:
        raise ValueError(f"pool.{function}: {name} must not be negative, got {value}")
    if value >= 1 << 63:
        raise ValueError(f"pool.{function}: {name} must be below 2**63, got {value}")


def limits() -> tuple[int, int]:
    """(max_bytes, max_buffers_per_size) as they stand; zeros without the native library."""
    if cpu_library.available() is not None:
        return 0, 0
    *_, max_bytes, max_buffers = cpu_library.op("pool_stats")()
    return max_bytes, max_buffers


def shrink_to_fit(max_bytes: int = 0) -> int:
    """Give free CPU blocks back to the system, oldest first, until at most `max_bytes` are held; returns the bytes given back.

    Raises TypeError where max_bytes is no whole number, ValueError where it is negative.

    >>> shrink_to_fit() >= 0
    True
    """
    if max_bytes is None:
        raise TypeError("pool.shrink_to_fit: max_bytes must be a whole number, got None")
    _check("shrink_to_fit", "max_bytes", max_bytes)
    return cpu_library.op("pool_shrink")(max_bytes) if cpu_library.available() is None else 0


def clear() -> None:
    """Give all free CPU blocks back and start counting anew; blocks in use stay with their tensors."""
    if cpu_library.available() is None:
        cpu_library.op("pool_shrink")(0)
        cpu_library.op("pool_reset_counters")()


@contextmanager
def disabled() -> Iterator[None]:
    """Inside, in the whole process, new outputs come from PyTorch's allocator and freed blocks go back to the system."""
    if cpu_library.available() is not None:
        yield
        return
    switch = cpu_library.op("pool_disable")
    switch(1)
    try:
        yield
    finally:
        switch(-1)
