"""Everything about the machine that a reader of a result file needs."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import subprocess
import time
from typing import Any

import torch

from ..native import cpu_library
from ..plans.environment import environment
from ..system import hardware, settings
from ..system.package import installed, version
from .result_file import Results

PACKAGES = ("numpy", "triton", "quack-kernels", "liger-kernel", "nvmath-python")
FOLDER = re.compile(r"(?<==)/[^\s,]*/")  # of the compiler PyTorch was built with
PATHS = (settings.CACHE_DIR, settings.LOCKFILE, settings.NATIVE_LIBRARY)
SMI = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,utilization.gpu"
# Of other libraries and ours: a CPU that has less than this one.
LIMITS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", settings.NATIVE_ISA.name)  # fmt: skip


def limits() -> dict[str, str]:
    """What this process's CPU was limited to, by variable."""
    return {name: os.environ[name] for name in LIMITS if name in os.environ}


def describe(device: torch.device) -> dict[str, Any]:
    """What does not change during a run."""
    known = environment(device)
    return {
        "id": known.id,
        "environment": known.to_json(),
        "tensorlogic": version(),
        "native": cpu_library.isa() or cpu_library.available(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": environment(torch.device("cpu")).device,
        "cores": os.cpu_count(),
        "usable_cores": settings.usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory(),
        "gpu": _gpu(device),
        "packages": {name: found for name in PACKAGES if (found := installed(name))},
        "torch_build": FOLDER.sub("", torch.__config__.show()).splitlines(),
        "settings": {v.name: v.read() for v in settings.VARIABLES if v.read() and v not in PATHS},
        "tf32": torch.get_float32_matmul_precision(),
    }


def state(device: torch.device) -> dict[str, Any]:
    """What does: time, load, and on an NVIDIA GPU clocks, power and temperature."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    load = [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None
    return {"time": now, "load": load, "gpu": _smi(device)}


class Others:
    """How much of the machine's processors other programs take while this one measures."""

    def __init__(self) -> None:
        self.begin = (time.monotonic(), _busy_s(), _own_s())

    def share(self, cores: int | None) -> float | None:
        """Since it was made, of all cores; None where the system does not say."""
        start, busy, own = self.begin
        now = _busy_s()
        seconds = (time.monotonic() - start) * (cores or 0)
        if busy is None or now is None or seconds <= 0:
            return None
        return round(min(1.0, max(0.0, (now - busy - (_own_s() - own)) / seconds)), 3)


def _busy_s() -> float | None:
    """Seconds that all processors have worked, stolen ones included."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, irq, soft, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):  # not Linux
        return None
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def throttled(after: dict[str, Any]) -> str | None:
    """A warning when a GPU that works is far below its highest clock."""
    gpu = after.get("gpu") or {}
    try:
        now, most = (float(gpu[f"clocks.{n}"].split()[0]) for n in ("sm", "max.sm"))
        used = float(gpu["utilization.gpu"].split()[0])
    except (KeyError, ValueError):
        return None
    if used < 50 or now > 0.9 * most:
        return None
    return f"the GPU ran at {now:.0f} of {most:.0f} MHz at the end: its power or temperature limit holds it back"


def busy(before: dict[str, Any], cores: int | None) -> str | None:
    """A warning when other work was running as the run began."""
    load = before["load"]
    if load is None or not cores or load[0] <= 0.6 * cores:
        return None
    return f"the machine was busy when the run began (load {load[0]:g} on {cores} cores): times are those of a shared machine"


def _gpu(device: torch.device) -> dict[str, Any] | None:
    if device.type == "mps":
        most = torch.mps.recommended_max_memory()
        return {"name": hardware.apple_gpu(), "memory_gib": round(most / 2**30, 1)}
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
        "l2_mib": round(found.L2_cache_size / 2**20, 1),
        "cuda": torch.version.cuda or torch.version.hip,
    }


def _smi(device: torch.device) -> dict[str, str] | None:
    tool = shutil.which("nvidia-smi")
    if device.type != "cuda" or tool is None:
        return None
    command = [tool, f"--query-gpu={SMI}", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # the report goes without
        return None
    return dict(zip(SMI.split(","), (v.strip() for v in out.strip().split(",")), strict=False))


def _memory() -> float | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def clocks(results: Results) -> tuple[str, ...]:
    """Whose time the rows hold."""
    return ("device", "host") if results.kind == "cuda" else ("device",)
