"""Whether a machine has cores and memory to spare for compilers beside what it does."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from . import settings

# for two processes that compile, each with helpers of its own
CORES = 8.0
MEMORY = 16 << 30  # bytes of the machine
DEVICE_MEMORY = 2 << 30  # bytes of the GPU, on which each process opens a context
LIMIT, USED = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
FREE = Path("/proc/meminfo")


def spare(device: torch.device) -> bool:
    """True where compilers take nothing from a model: it runs on a GPU, and most cores idle. What cannot be told counts as taken."""
    if device.type != "cuda" or idle_cores() < CORES or free_memory() < MEMORY:
        return False
    try:
        return torch.cuda.mem_get_info(device)[0] >= DEVICE_MEMORY
    except RuntimeError:
        return False


def fits(device: torch.device, nbytes: int) -> bool:
    """Whether a GPU has so many bytes that nobody uses; elsewhere the machine's memory is not asked."""
    if device.type != "cuda":
        return True
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held >= nbytes


def idle_cores() -> float:
    """Cores that this process might use and nobody does, by the load of the last minute."""
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):  # Windows has none
        return 0.0
    usable = min(settings.usable_cores(), settings.cpu_share())
    return min((os.cpu_count() or 1) - load, usable - 1)


def free_memory() -> float:
    """Bytes that the machine, or the container, has left."""
    free = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = dict(line.split(":") for line in FREE.read_text().splitlines())
        free = int(words.get("MemAvailable", "0").split()[0]) * 1024.0
    with contextlib.suppress(OSError, ValueError):
        free = min(free, int(LIMIT.read_text()) - int(USED.read_text()))
    return free
