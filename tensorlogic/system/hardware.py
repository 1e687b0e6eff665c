"""What processors and GPUs call themselves, their drivers' versions, and whether Triton can use them."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

# GPU models that differ in their memory alone: the chip, its multiprocessors
_GH100 = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB")
CHIPS = dict.fromkeys(_GH100, ("GH100", 132))


def cpu() -> str:
    """The processor's name."""
    try:
        found = re.search(r"(?m)^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text())
    except OSError:  # not Linux
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def apple_gpu() -> str:
    """The chip and the cores of its GPU: chips of one name are sold with several numbers of them."""
    core: Any = torch._C  # built for Macs only
    try:
        return f"{core._mps_get_name()}, {core._mps_get_core_count()} GPU cores"
    except AttributeError:  # a PyTorch that does not tell
        return f"{platform.processor() or platform.machine()} mps"


def gpu_driver() -> str:
    """The version of NVIDIA's or AMD's driver."""
    try:
        found = re.search(r"\s(\d+\.[\d.]+)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:  # another system, or a container that hides it
        found = None
    if found is not None:
        return found.group(1)
    core: Any = torch._C  # its CUDA part has no types
    return str(torch.version.hip or core._cuda_getDriverVersion())


def title(environment: Mapping[str, Any]) -> str:
    """A result file's device in words, a CPU with the threads that it was given."""
    if environment["kind"] != "cpu":
        return str(environment["device"])
    count = environment["threads"]
    return f"{environment['device']}, {count} thread{'s' * (count != 1)}"


def interpreting() -> bool:
    """True when Triton's interpreter is asked for, so that GPU kernels may run on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache
def triton_missing() -> str | None:
    """None where Triton can be imported, else the reason."""
    return None if importlib.util.find_spec("triton") else "Triton is not installed"
