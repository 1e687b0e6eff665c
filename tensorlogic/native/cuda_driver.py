"""The CUDA driver's and PyTorch's functions that compiled launchers call, by their addresses."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from tensorlogic.native import call_extension

STREAM = "aoti_torch_get_current_cuda_stream"
# at::detail::empty_strided_cuda(ArrayRef<long>, ArrayRef<long>, ScalarType, optional<Device>)
EMPTY = "_ZN2at6detail18empty_strided_cudaEN3c108ArrayRefIlEES3_NS1_10ScalarTypeESt8optionalINS1_6DeviceEE"


def driver(device: torch.device) -> Any:
    """What starts kernels and graphs, copies and allocates on `device`, or None where that is left to Python."""
    return _cuda() if device.type == "cuda" else None


@functools.cache
def _cuda() -> Any:
    call_extension.load()
    module = call_extension.module()
    if module is None:
        return None
    folder = Path(torch.__file__).parent / "lib"
    try:
        cuda, ours = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(str(folder / "libtorch_cuda.so"))
        found = (
            cuda.cuLaunchKernelEx, ours[STREAM], cuda.cuStreamIsCapturing, ours[EMPTY], cuda.cuMemcpyDtoDAsync_v2,
            cuda.cuGraphLaunch,
        )  # fmt: skip
    except (OSError, AttributeError):  # no CUDA, or another PyTorch's
        return None
    return module.Driver(*(ctypes.cast(f, ctypes.c_void_p).value for f in found))
