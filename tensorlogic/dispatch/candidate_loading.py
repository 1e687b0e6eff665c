"""When candidates are registered: an op's GPU candidates on its first use on a GPU, third-party ones on first choice."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import pkgutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType

from ..core.op import OPS, Op
from ..native import call_extension
from ..system import capture_state, process
from ..system.compile_workers import PRELOADED
from ..system.hardware import interpreting, triton_missing

LOG = logging.getLogger("tensorlogic")
GROUP = "tensorlogic.candidates"
OWN_PLACE = "; what candidates are written with is in tensorlogic.core: OPS, Op, Candidate, Key"
_LOCK = threading.RLock()
process.renew_after_fork(globals(), _LOCK=threading.RLock)
_READY: set[str] = set()
# Packages of ops, entered by `ops/__init__`. Those of one entry are ready together: they register candidates with one another's ops.
FOLDERS: list[tuple[ModuleType, ...]] = []
# How the files of a package that register candidates for a device begin, in the order in which ties are broken.
FILES = {"cpu": ("cpu",), "cuda": ("triton", "cublaslt"), "mps": ("metal",)}


def files(folder: ModuleType, device: str) -> Sequence[str]:
    """A package's files with candidates for a device: those that its `CANDIDATES` names, else those that begin so."""
    named: Mapping[str, Sequence[str]] = getattr(folder, "CANDIDATES", {})
    if device in named:
        return named[device]
    found = sorted(m.name for m in pkgutil.iter_modules(folder.__path__))
    return [name for start in FILES[device] for name in found if name.startswith(start)]


def load(device: str, kin: str = "") -> None:
    """Register the candidates that packages have for a device: all packages, or those of one kin."""
    for folders in FOLDERS:
        for folder in folders if kin in ("", folders[0].__name__) else ():
            for name in files(folder, device):
                importlib.import_module(f".{name}", folder.__name__)


def _begin() -> None:
    """What the first kernel of a process needs of Triton, half a second, begun in threads while modules are imported here."""
    from ..kernels.triton_runtime import toolchain

    toolchain.begin()
    from ..kernels.triton_runtime.launch import CompileJob

    CompileJob.ahead()


def ready(device: str, op: Op | None = None) -> None:
    """Everything that could serve this device type, or one op on it at least, is registered; cheap after the first time.

    Half of what all of it takes is Triton reading its kernels' sources, and a process that multiplies needs no softmax.
    """
    kin = _kin(op.reference.__module__) if op is not None and device == "cuda" else ""
    if device in _READY or (kin and f"{device} {kin}" in _READY):
        return
    with _LOCK, process.paused():
        if device in _READY or (kin and f"{device} {kin}" in _READY):
            return
        points = _foreign()
        if any(map(_adds, points)):
            kin = ""  # whoever registers candidates finds all of ours
        if device == "cpu":
            load("cpu")
        if (device == "cuda" or (device == "cpu" and interpreting())) and triton_missing() is None:
            capture_state.install()
            if device == "cuda":
                call_extension.load()
                _begin()
            load("cuda", kin)
        if device == "mps":
            load("mps")
        _plugins(points)
        _READY.add(f"{device} {kin}" if kin else device)


@cache
def _kin(module: str) -> str:
    """Which packages the op of a module is ready with: the name of the first of them; "" for no module of ours."""
    first = {folder.__name__: folders[0].__name__ for folders in FOLDERS for folder in folders}
    return first.get(module) or first.get(module.rpartition(".")[0], "")


def _foreign() -> list[importlib.metadata.EntryPoint]:
    """Third-party candidates' entry points: each is a function that takes the registry of ops."""
    return list(importlib.metadata.entry_points(group=GROUP))


def _adds(point: importlib.metadata.EntryPoint) -> bool:
    """Whether an entry point may register candidates here: our own adapters do where what they adapt is installed."""
    if not point.value.startswith("tensorlogic.providers."):
        return True
    return importlib.import_module(point.value.partition(":")[0]).PACKAGE.missing() is None


def _plugins(points: list[importlib.metadata.EntryPoint]) -> None:
    """Load third-party candidates once."""
    if "plugins" in _READY:
        return
    _READY.add("plugins")
    for point in points:
        known = {name: set(op.candidates) for name, op in OPS.items()}
        try:
            register: Callable[[dict[str, Op]], None] = point.load()
            register(OPS)
        except Exception as problem:
            # whatever a third party's package raises must not take ours down; it is said by name
            absent = (isinstance(problem, ModuleNotFoundError) and problem.name) or ""
            whose, why = f"{point.name} ({point.value})", f"{type(problem).__name__}: {problem}"
            why += OWN_PLACE if absent.startswith("tensorlogic.") else ""
            LOG.warning("tensorlogic: candidates of %s were not loaded: %s", whose, why)
        finally:
            _distrust(known)


def _distrust(known: dict[str, set[str]]) -> None:
    """Only what is shipped here may serve a key it was not checked on, whatever a plug-in says of itself."""
    for name, op in OPS.items():
        for id in op.candidates.keys() - known[name]:
            op.candidates[id] = replace(op.candidates[id], trusted=False)


PRELOADED += ["tensorlogic.kernels.gemm.tiled_kernel", "tensorlogic.kernels.triton_runtime.launch"]
