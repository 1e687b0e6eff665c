"""Few programs on many multiprocessors: shared memory asked for so that none of these takes more of them than its part.

Kernels that wait for those before them themselves (`PDL`) are placed while those before them still run, on whatever multiprocessor is free
first, as many as fit. Two products of 128 tiles, of which two fit, so took 15.6 us after each other, and 12.2 where each tile asked for more
than half of the shared memory and found a place of its own (H200). Among PyTorch's kernels, which end before others begin, nothing changes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import replace

import torch

from tensorlogic.kernels.triton_runtime.kernel_start import Binary

# shared bytes of programs that multiply tiles: two on one multiprocessor take twice as long
HEAVY = 48 << 10
# others that may share one in any case: with room beside them the next kernel begins before they
# end
LIGHT = 2
# shared bytes that the system has of each program (compute capability 8 and later)
RESERVED = 1024
STEP = 128  # shared bytes are given out by
LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

_setting = threading.Lock()


def spread(binary: Binary, blocks: int, device: torch.device) -> Binary:
    """`binary`, asking for as much shared memory as spreads `blocks` programs over all multiprocessors of `device`.

    Itself where it does not start before others end, runs in clusters or cooperatively, or where no more fit than should.
    """
    cooperative, dependent = binary.flags
    warps, cluster, shared = binary.metadata
    if not dependent or cooperative or cluster != 1 or blocks == 0:
        return binary
    about, cuda = torch.cuda.get_device_properties(device), _driver()
    if cuda is None:
        return binary
    fit, function = ctypes.c_int(), ctypes.c_void_p(binary.function)
    with torch.cuda.device(device):
        failed = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(fit), function, 32 * warps, ctypes.c_size_t(shared)
        )
        part = least(blocks, about.multi_processor_count, shared)
        if failed or fit.value <= part:
            return binary
        wanted = asked(part, about.shared_memory_per_multiprocessor)
        if wanted <= shared or not _allowed(cuda, function, wanted):
            return binary
    return replace(binary, metadata=(warps, cluster, wanted))


def least(blocks: int, cores: int, shared: int) -> int:
    """Programs a multiprocessor has to take at least, or may in any case."""
    return max(-(-blocks // cores), 1 if shared >= HEAVY else LIGHT)


def asked(programs: int, total: int) -> int:
    """The fewest shared bytes a program can ask for so that a multiprocessor with `total` takes `programs` and no more; 0: none can."""
    found = ((total // (programs + 1) - RESERVED) // STEP + 1) * STEP
    return found if programs * (found + RESERVED) <= total else 0


def _allowed(cuda: ctypes.CDLL, function: ctypes.c_void_p, shared: int) -> bool:
    """Whether programs of `function`, which other grids may use, too, may have so much shared memory now."""
    most = ctypes.c_int()
    with _setting:
        if cuda.cuFuncGetAttribute(ctypes.byref(most), LIMIT, function):
            return False
        return most.value >= shared or not cuda.cuFuncSetAttribute(function, LIMIT, shared)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
