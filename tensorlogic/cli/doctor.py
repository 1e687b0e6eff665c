"""What this machine has and lacks for TensorLogic, and what each lack costs; works without PyTorch too."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..system.package import FOLDER

if TYPE_CHECKING:
    from ..system.settings import Variable
    from . import doctor_cpu as cli_doctor_cpu

DISTRIBUTION = "tensorlogic-engine"
OLDEST_TORCH = (2, 11)
OPTIONAL = {  # distribution -> module, what it is for
    "quack-kernels": ("quack", "QuACK's kernels as candidates on Hopper and Blackwell GPUs"),
    "liger-kernel": ("liger_kernel", "Liger's kernels as candidates"),
    "nvmath-python": (
        "nvmath",
        "cuBLASLt's epilogues (linear with residual in one call) on NVIDIA GPUs",
    ),
    "rich": ("rich", "coloured tables and progress bars"),
    "cyclopts": ("cyclopts", "this command line"),
    "matplotlib": ("matplotlib", "plots in reports"),
    "jinja2": ("jinja2", "HTML reports"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: "ok", "lacks" (works without, at a cost), "broken" (does not work) or "note"."""

    state: str
    about: str
    found: str
    cost: str = ""


def examine() -> list[Finding]:
    """Look at everything."""
    return [f for part in (_package, _rivals, _torch, _optional, _settings) for f in part()]


def report(findings: Iterable[Finding]) -> str:
    """One line for each, the cost of a lack beneath it."""
    lines = []
    for f in findings:
        lines.append(f"{f.state:<6}  {f.about:<31}  {f.found}")
        lines += [f"{'':<41}-> {f.cost}"] if f.cost else []
    return "\n".join(lines)


def _package() -> Iterator[Finding]:
    version = _version(DISTRIBUTION)
    where = os.path.abspath(FOLDER)
    found = f"{version} at {where}" if version else f"running from {where}, not installed"
    yield Finding(
        "ok" if version else "note",
        "TensorLogic",
        found,
        "" if version else "`pip install .` gives the command `tensorlogic` everywhere",
    )
    yield Finding("ok", "Python", f"{platform.python_version()} on {platform.platform()}")


def _rivals() -> Iterator[Finding]:
    """Other distributions that provide a module of our name: whichever comes first on the path is imported."""
    owners = importlib.metadata.packages_distributions().get("tensorlogic", [])
    for name in sorted(set(owners) - {DISTRIBUTION}):
        yield Finding(
            "broken",
            "another tensorlogic",
            f"the distribution {name} also installs a module named tensorlogic",
            f"keep one of them: `pip uninstall {name}`, then install {DISTRIBUTION} again",
        )


def _torch() -> Iterator[Finding]:
    version = _version("torch")
    if version is None or importlib.util.find_spec("torch") is None:
        yield Finding("broken", "PyTorch", "not installed", "nothing runs: `pip install torch`")
        return
    if tuple(int(p) for p in version.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
        yield Finding(
            "broken", "PyTorch", version, "2.11 or newer is required: `pip install --upgrade torch`"
        )
        return
    yield Finding("ok", "PyTorch", version)
    if _wrong():  # without which nothing of ours can be imported
        return
    yield from _devices()
    yield from _triton()
    yield from _native()
    yield from _slow()
    yield from _store()


def _devices() -> Iterator[Finding]:
    import torch

    from ..kernels.cpu import onednn
    from ..plans.environment import environment

    cpu = environment(torch.device("cpu"))
    yield Finding("ok", "CPU", f"{cpu.device}, {cpu.driver}, {cpu.threads} threads")
    if reason := onednn.onednn_available("cpu"):
        yield Finding(
            "lacks", "oneDNN", reason, "float32 linear layers on this CPU are about half as fast"
        )
    for index in range(torch.cuda.device_count()):
        gpu = environment(torch.device("cuda", index))
        major, minor = torch.cuda.get_device_capability(index)
        yield Finding("ok", f"GPU {index}", f"{gpu.device}, sm_{major}{minor}, driver {gpu.driver}")
    if torch.backends.mps.is_available():
        yield from _apple()
    elif not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = (
            f"PyTorch is built for {built}, but sees no device: is a driver installed?"
            if built
            else "this build of PyTorch is for CPUs"
        )
        yield Finding("lacks", "GPU", why, "everything runs on the CPU")


def _apple() -> Iterator[Finding]:
    """The Apple GPU, and whether it takes our shaders."""
    import torch

    from ..kernels.metal import launch as metal_launch
    from ..plans.environment import environment

    gpu = environment(torch.device("mps"))
    memory = torch.mps.recommended_max_memory() / 2**30
    yield Finding("ok", "GPU", f"{gpu.device}, {gpu.driver}, {memory:.0f} GiB for it at most")
    reason = metal_launch.missing()
    yield Finding(
        "lacks" if reason else "ok",
        "Metal shaders",
        reason or "compile here; each is checked on every key before it is timed",
        "GPU ops are PyTorch's own: no fused kernel of ours runs" if reason else "",
    )


def _triton() -> Iterator[Finding]:
    import torch

    from ..system.hardware import triton_missing

    wanted = _wanted_triton()
    reason, version = triton_missing(), _version("triton")
    if reason is not None:
        cost = (
            "GPU ops are PyTorch's own: no fused kernel of ours runs"
            if torch.cuda.is_available()
            else "no cost without an NVIDIA or AMD GPU"
        )
        yield Finding("lacks" if torch.cuda.is_available() else "note", "Triton", reason, cost)
    elif (
        wanted
        and version
        and not wanted.startswith(f"=={version}")
        and f"=={version}" not in wanted
    ):
        yield Finding(
            "note",
            "Triton",
            f"{version}; this PyTorch asks for {wanted}",
            "kernels may fail to compile; a candidate that fails is refused and PyTorch serves",
        )
    else:
        yield Finding("ok", "Triton", version or "installed")


def _wanted_triton() -> str | None:
    """The requirement that PyTorch states, if any ("==3.7.1")."""
    for line in importlib.metadata.requires("torch") or ():
        name = line.partition(";")[0]
        if name.strip().startswith("triton"):
            return name.strip().removeprefix("triton").strip(" ()")
    return None


def _native() -> Iterator[Finding]:
    from ..native import cpu_library

    compiler = os.environ.get("CXX") or next(
        (c for c in ("g++", "clang++", "c++") if shutil.which(c)), None
    )
    if compiler and shutil.which(compiler):
        yield Finding("ok", "C++ compiler", str(shutil.which(compiler)))
    else:
        yield Finding(
            "note",
            "C++ compiler",
            "none found",
            "the native CPU library cannot be built here; a wheel brings it built",
        )
    reason = cpu_library.available()
    if reason is None:
        yield Finding("ok", "native CPU library", f"instruction set {cpu_library.isa()}")
    else:
        yield Finding(
            "lacks",
            "native CPU library",
            reason,
            "no fused CPU kernels of ours: half precision and element-wise work on the CPU are several times slower",
        )


def _slow() -> Iterator[Finding]:
    """What this CPU has, and what PyTorch alone does badly on it."""
    from ..cpu_overrides import enable
    from ..native import cpu_library, hook_ops
    from . import doctor_cpu as cli_doctor_cpu

    yield Finding("ok", "CPU arithmetic", cli_doctor_cpu.features())
    reason = hook_ops.available()
    yield Finding(
        "note" if reason else "ok",
        "hooks",
        reason or "built for this PyTorch",
        "enable(pool=True) is refused, guards of enable() are Python functions, pooled outputs cannot grow by resize_"
        if reason
        else "",
    )
    if missing := cpu_library.calls_available():
        yield Finding("note", "compiled calls", missing, "a call costs a microsecond more")
    on = enable.enabled()
    for c in cli_doctor_cpu.compared():
        yield _work(c, on)


def _work(c: cli_doctor_cpu.Compared, on: bool) -> Finding:
    """One kind of work: what PyTorch alone does badly, and what is worse when enabled."""
    if c.state == "worse":
        return Finding("note", c.work, c.text, c.cure)
    bad = c.state == "slow" and not on
    return Finding("note" if bad else "ok", c.work, c.text, c.remedy if bad else "")


def _store() -> Iterator[Finding]:
    import torch

    from ..plans import open_stores
    from ..system import settings

    folder = settings.cache_folder()
    why = _unwritable(next((p for p in (folder, *folder.parents) if p.exists()), folder))
    if why is not None:
        yield Finding(
            "lacks",
            "plan store",
            f"{folder} cannot be written: {why}",
            f"measurements are lost at exit: set {settings.CACHE_DIR.name} to a folder that can be",
        )
        return
    kind = "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device("cuda" if torch.cuda.is_available() else kind)
    store = open_stores.current(device)
    count = sum(1 for _ in store.plans())
    yield Finding("ok", "plan store", f"{count} plans for this {device.type} in {store.path}")


def _unwritable(folder: Path) -> str | None:
    """Why no file can be made in a folder; None where one was."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as problem:
        return problem.strerror or str(problem)
    return None


def _optional() -> Iterator[Finding]:
    for name, (module, purpose) in OPTIONAL.items():
        version = _version(name)
        if version is None or importlib.util.find_spec(module) is None:
            yield Finding("note", name, "not installed", f"optional: {purpose}")
        else:
            yield Finding("ok", name, version)


def _settings() -> Iterator[Finding]:
    if importlib.util.find_spec("platformdirs") is None:
        return
    from ..system import settings

    wrong = _wrong()
    whole = not wrong and _version("torch") is not None
    for variable in settings.VARIABLES:
        value = variable.read()
        if variable.name in wrong:
            cost = f"no command runs, and devices were not looked at: unset {variable.name}"
            yield Finding("broken", variable.name, wrong[variable.name], cost)
        elif whole and value is not None and variable is settings.LOCKFILE:
            yield _lockfile(variable.name, value)
        elif whole and value is not None and variable in settings.NATIVE:
            yield _chosen(variable, value)
        elif value is not None:
            yield Finding("note", variable.name, value)


def _chosen(variable: Variable, value: str) -> Finding:
    """Of the variables that say which native library serves, and by which instructions."""
    from ..native import cpu_library

    if cpu_library.misled() is not variable:
        return Finding("note", variable.name, value)
    cost = f"no fused CPU kernels of ours: unset {variable.name}"
    return Finding("broken", variable.name, str(cpu_library.available()), cost)


def _wrong() -> dict[str, str]:
    """Variables with values that they cannot have, and what is said of them."""
    from ..system import settings

    return {name: str(problem) for name, problem in settings.wrong().items()}


def _lockfile(name: str, value: str) -> Finding:
    from ..plans import lockfile
    from ..system import settings

    path = settings.lockfile()
    assert path is not None
    try:
        count = sum(1 for _ in lockfile.load_lockfile(path).plans())
    except (OSError, ValueError) as problem:
        return Finding("broken", name, str(problem), f"no operation of ours runs: unset {name}")
    return Finding("note", name, f"{value}: {count} plans; other keys use torch.eager")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    """Print the report; 1 when something is broken."""
    findings = examine()
    sys.stdout.write(report(findings) + "\n")
    return int(any(f.state == "broken" for f in findings))
