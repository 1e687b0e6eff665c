"""What this machine has and lacks for TensorLogic, and what each lack costs; works without PyTorch too."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse
from urllib.request import url2pathname

from ..system.package import FOLDER, installed

if TYPE_CHECKING:
    from ..system.settings import Variable
    from .doctor_cpu import Compared

DISTRIBUTION = "tensorlogic-engine"
OLDEST_TORCH = (2, 11)
OPTIONAL = {  # distribution -> module, what it is for
    "quack-kernels": ("quack", "QuACK's kernels as candidates on Hopper and Blackwell GPUs"),
    "liger-kernel": ("liger_kernel", "Liger's kernels as candidates"),
    "nvmath-python": ("nvmath", "cuBLASLt's epilogues (linear with residual in one call) on NVIDIA GPUs"),
    "rich": ("rich", "coloured tables and progress bars"),
    "cyclopts": ("cyclopts", "this command line"),
    "matplotlib": ("matplotlib", "plots in reports"),
    "jinja2": ("jinja2", "HTML reports"),
}  # fmt: skip
NO_KERNEL = "GPU ops are PyTorch's own: no fused kernel of ours runs"
NO_CPU_KERNEL = "no fused CPU kernels of ours"
# what an older version left in the package's folder: its folders, and what lies beside them or the libraries of ours
GONE = ("program", "shipped", "trying")
OURS = (
    "__init__.py",
    "__main__.py",
    "libtensorlogic_native.",
    "libtensorlogic_hooks-",
    "tensorlogic_calls-",
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: "ok", "lacks" (works without, at a cost), "broken" (does not work) or "note"."""

    state: str
    about: str
    found: str
    cost: str = ""


def check(about: str, missing: str | None, good: str, cost: str, lack: str = "lacks") -> Finding:
    """What was found, or where something is missing why, and the cost or the remedy."""
    return Finding(lack, about, missing, cost) if missing else Finding("ok", about, good)


def examine() -> list[Finding]:
    """Look at everything."""
    return [f for part in (_package, _torch, _optional, _settings) for f in part()]


def report(findings: Iterable[Finding]) -> str:
    """One line for each, the cost of a lack beneath it."""
    lines = []
    for f in findings:
        lines.append(f"{f.state:<6}  {f.about:<31}  {f.found}")
        lines += [f"{'':<41}-> {f.cost}"] if f.cost else []
    return "\n".join(lines)


def _package() -> Iterator[Finding]:
    version, where = installed(DISTRIBUTION), os.path.abspath(FOLDER)
    missing = None if version else f"running from {where}, not installed"
    remedy = "`pip install .` gives the command `tensorlogic` everywhere"
    yield check("TensorLogic", missing, f"{version} at {where}", remedy, "note")
    if version and (other := _installed()).resolve() != FOLDER.resolve():
        found = f"the installed one is {other}, the imported one {where}"
        yield Finding("note", "two folders", found, "`pip install -e .` where the imported one lies, or start elsewhere")  # fmt: skip
    for path in _left_over():
        found = f"{path} is none of this version's: it was left by an older one"
        yield Finding("note", "a file left over", found, f"delete it: `rm -r {path}`")
    yield Finding("ok", "Python", f"{platform.python_version()} on {platform.platform()}")
    # whichever distribution comes first on the path is imported
    owners = importlib.metadata.packages_distributions().get("tensorlogic", [])
    for name in sorted(set(owners) - {DISTRIBUTION}):
        found = f"the distribution {name} also installs a module named tensorlogic"
        remedy = f"keep one of them: `pip uninstall {name}`, then install {DISTRIBUTION} again"
        yield Finding("broken", "another tensorlogic", found, remedy)


def _installed() -> Path:
    """The package's folder as it was installed: the source folder where that is editable."""
    known = importlib.metadata.distribution(DISTRIBUTION)
    origin = json.loads(known.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return Path(url2pathname(urlparse(origin["url"]).path)) / "tensorlogic"
    return Path(str(known.locate_file("tensorlogic")))


def _left_over() -> list[Path]:
    """Sources and libraries that a move or an update has left; compiled files alone (`__pycache__`) do no harm."""
    known = [p for end in ("*.py", "*.so", "_native/*.so") for p in FOLDER.glob(end)]
    files = [p for p in known if not p.name.startswith(OURS)]
    folders = [FOLDER / name for name in GONE if any((FOLDER / name).rglob("*.py"))]
    return sorted([*files, *folders])


def _torch() -> Iterator[Finding]:
    version = installed("torch")
    if version is None or importlib.util.find_spec("torch") is None:
        yield Finding("broken", "PyTorch", "not installed", "nothing runs: `pip install torch`")
        return
    if tuple(int(p) for p in version.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
        yield Finding(
            "broken", "PyTorch", version, "2.11 or newer is required: `pip install --upgrade torch`"
        )
        return
    yield Finding("ok", "PyTorch", version)
    if not _wrong():  # otherwise nothing of ours can be imported
        for part in (_devices, _triton, _native, _slow, _store):
            yield from part()


def _devices() -> Iterator[Finding]:
    import torch

    from ..kernels.cpu import onednn
    from ..plans.environment import environment

    cpu = environment(torch.device("cpu"))
    yield Finding("ok", "CPU", f"{cpu.device}, {cpu.driver}, {cpu.threads} threads")
    if reason := onednn.onednn_available("cpu"):
        cost = "float32 linear layers on this CPU are about half as fast"
        yield Finding("lacks", "oneDNN", reason, cost)
    for index in range(torch.cuda.device_count()):
        gpu = environment(torch.device("cuda", index))
        major, minor = torch.cuda.get_device_capability(index)
        yield Finding("ok", f"GPU {index}", f"{gpu.device}, sm_{major}{minor}, driver {gpu.driver}")
    if torch.backends.mps.is_available():
        yield from _apple()
    elif not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = f"PyTorch is built for {built}, but sees no device: is a driver installed?"
        why = why if built else "this build of PyTorch is for CPUs"
        yield Finding("lacks", "GPU", why, "everything runs on the CPU")


def _apple() -> Iterator[Finding]:
    """The Apple GPU, and whether it takes our shaders."""
    import torch

    from ..kernels.metal import launch as metal_launch
    from ..plans.environment import environment

    gpu = environment(torch.device("mps"))
    memory = torch.mps.recommended_max_memory() / 2**30
    yield Finding("ok", "GPU", f"{gpu.device}, {gpu.driver}, {memory:.0f} GiB for it at most")
    good = "compile here; each is checked on every key before it is timed"
    yield check("Metal shaders", metal_launch.missing(), good, NO_KERNEL)


def _triton() -> Iterator[Finding]:
    import torch

    from ..system.hardware import triton_missing

    gpu, version, wanted = torch.cuda.is_available(), installed("triton"), _wanted_triton()
    other = bool(wanted and version) and f"=={version}" not in str(wanted)
    if reason := triton_missing():
        cost = NO_KERNEL if gpu else "no cost without an NVIDIA or AMD GPU"
        yield Finding("lacks" if gpu else "note", "Triton", reason, cost)
        return
    missing = f"{version}; this PyTorch asks for {wanted}" if other else None
    cost = "kernels may fail to compile; a candidate that fails is refused and PyTorch serves"
    yield check("Triton", missing, version or "installed", cost, "note")


def _wanted_triton() -> str | None:
    """The requirement that PyTorch states, if any ("==3.7.1")."""
    lines = [line.partition(";")[0].strip() for line in importlib.metadata.requires("torch") or ()]
    wanted = (w.removeprefix("triton").strip(" ()") for w in lines if w.startswith("triton"))
    return next(wanted, None)


def _native() -> Iterator[Finding]:
    from ..native import cpu_library

    names = [os.environ.get("CXX")] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    compiler = next((path for c in names if c and (path := shutil.which(c))), None)
    cost = "the native CPU library cannot be built here; a wheel brings it built"
    yield check("C++ compiler", None if compiler else "none found", str(compiler), cost, "note")
    cost = (
        f"{NO_CPU_KERNEL}: half precision and element-wise work on the CPU are several times slower"
    )
    good = f"instruction set {cpu_library.isa()}"
    yield check("native CPU library", cpu_library.available(), good, cost)


def _slow() -> Iterator[Finding]:
    """What this CPU has, and what PyTorch alone does badly on it."""
    from ..cpu_overrides import enable
    from ..native import cpu_library, hook_ops
    from . import doctor_cpu as cli_doctor_cpu

    yield Finding("ok", "CPU arithmetic", cli_doctor_cpu.features())
    cost = "enable(pool=True) is refused, guards of enable() are Python functions, pooled outputs cannot grow by resize_"
    yield check("hooks", hook_ops.available(), "built for this PyTorch", cost, "note")
    if missing := cpu_library.calls_available():
        yield Finding("note", "compiled calls", missing, "a call costs a microsecond more")
    on = enable.enabled()
    for c in cli_doctor_cpu.compared():
        yield _work(c, on)


def _work(c: Compared, on: bool) -> Finding:
    """One kind of work: what PyTorch alone does badly, and what is worse when enabled."""
    bad = c.state == "worse" or (c.state == "slow" and not on)
    return check(c.work, c.text if bad else None, c.text, c.cure, "note")


def _store() -> Iterator[Finding]:
    import torch

    from ..plans import open_stores
    from ..system import settings

    folder = settings.cache_folder()
    why = _unwritable(next((p for p in (folder, *folder.parents) if p.exists()), folder))
    if why is not None:
        cost = (
            f"measurements are lost at exit: set {settings.CACHE_DIR.name} to a folder that can be"
        )
        yield Finding("lacks", "plan store", f"{folder} cannot be written: {why}", cost)
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
        version = installed(name)
        absent = version is None or importlib.util.find_spec(module) is None
        missing = "not installed" if absent else None
        yield check(name, missing, str(version), f"optional: {purpose}", "note")


def _settings() -> Iterator[Finding]:
    if importlib.util.find_spec("platformdirs") is None:
        return
    from ..system import settings

    wrong = _wrong()
    whole = not wrong and installed("torch") is not None
    for variable in settings.VARIABLES:
        name, value = variable.name, variable.read()
        if name in wrong:
            cost = f"no command runs, and devices were not looked at: unset {name}"
            yield Finding("broken", name, wrong[name], cost)
        elif value is not None:
            reason, words = _unusable(variable) if whole else (None, "")
            cost = f"{words}: unset {name}"
            yield Finding("broken", name, reason, cost) if reason else Finding("note", name, value + words)  # fmt: skip


def _wrong() -> dict[str, str]:
    """Variables with values that they cannot have, and what is said of them."""
    from ..system import settings

    return {name: str(problem) for name, problem in settings.wrong().items()}


def _unusable(variable: Variable) -> tuple[str | None, str]:
    """Why what a variable names cannot be used, and what that costs; or None, and what is in it."""
    from ..native import cpu_library
    from ..plans import lockfile
    from ..system import settings

    if variable in settings.NATIVE and cpu_library.bad_setting() is variable:
        return cpu_library.available(), NO_CPU_KERNEL
    path = settings.lockfile() if variable is settings.LOCKFILE else None
    if path is None:
        return None, ""
    try:
        count = sum(1 for _ in lockfile.load_lockfile(path).plans())
    except (OSError, ValueError) as problem:
        return str(problem), "no operation of ours runs"
    return None, f": {count} plans; other keys use torch.eager"


def main() -> int:
    """Print the report; 1 when something is broken."""
    findings = examine()
    sys.stdout.write(report(findings) + "\n")
    return int(any(f.state == "broken" for f in findings))
