"""Every environment variable that TensorLogic reads, what it means, and its value."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TUNE_MODES = ("off", "auto", "full")
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")  # of the native library
MOST_WORKERS = 16
LIGHT = {"--help", "-h", "--version", "--install-completion"}  # commands that read none of them
QUOTA = Path("/sys/fs/cgroup/cpu.max")
TRITON_CACHE, TRITON_PTXAS = "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"
# as the process began: torch.compile sets them to a folder and an assembler of its own later
TRITON = {name: os.environ.get(name) for name in (TRITON_CACHE, TRITON_PTXAS)}


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, what it does, and what holds when it is not set."""

    name: str
    meaning: str
    default: str

    def read(self) -> str | None:
        """The value without surrounding blanks; None when unset or empty."""
        return None if self.name in _IGNORED else os.environ.get(self.name, "").strip() or None


class Wrong(ValueError):
    """An environment variable has a value that it cannot have."""


_IGNORED: dict[str, Wrong] = {}  # variables as if unset, and what is said of them

CACHE_DIR = Variable(
    "TENSORLOGIC_CACHE_DIR",
    "folder of the plan store",
    "the user's cache folder (on Linux ~/.cache/tensorlogic)",
)
TUNE = Variable(
    "TENSORLOGIC_TUNE",
    "how keys are measured outside any tensorlogic.policy: off, auto or full",
    "auto",
)
LOCKFILE = Variable(
    "TENSORLOGIC_LOCKFILE",
    "path of the lockfile that chooses candidates outside any tensorlogic.policy",
    "no lockfile",
)
COMPILE_WORKERS = Variable(
    "TENSORLOGIC_COMPILE_WORKERS",
    "worker processes that compile kernels ahead; 0 compiles in the calling process",
    f"one less than the usable cores, at least 1 and at most {MOST_WORKERS}",
)
NATIVE_LIBRARY = Variable(
    "TENSORLOGIC_NATIVE_LIBRARY",
    "path of a native library to load instead of the packaged one, such as a sanitized build",
    "the packaged library",
)
NATIVE_ISA = Variable(
    "TENSORLOGIC_NATIVE_ISA",
    f"instruction set of the native library, one that the processor has: {', '.join(LEVELS)}; with a cache folder of its own",
    "the best that the processor has",
)
ENABLE = Variable(
    "TENSORLOGIC_ENABLE",
    "1 calls tensorlogic.enable() in every program that imports torch, pool calls enable(pool=True); 0 neither",
    "0",
)
INDUCTOR = Variable(
    "TENSORLOGIC_INDUCTOR",
    "1 lets PyTorch's Inductor compete in optimize where there is time; 0 starts no compiler for it",
    "1",
)
NATIVE = (NATIVE_LIBRARY, NATIVE_ISA)
VARIABLES = (CACHE_DIR, TUNE, LOCKFILE, COMPILE_WORKERS, *NATIVE, ENABLE, INDUCTOR)


def cache_folder() -> Path:
    """The folder of the plan store; it need not exist yet."""
    given = CACHE_DIR.read()
    if given is not None:
        return _path(CACHE_DIR, given).absolute()
    import platformdirs  # likewise only where nothing is given

    return Path(platformdirs.user_cache_dir("tensorlogic", appauthor=False))


def expanded(what: str, given: str | os.PathLike[str]) -> Path:
    """The path with the home directory in place of ~; ValueError where that is nobody's."""
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{what} is {os.fspath(given)!r}; ~ must stand for a home directory that exists: give the whole path"
        ) from None


def _path(variable: Variable, given: str) -> Path:
    try:
        return expanded(variable.name, given)
    except ValueError as problem:
        raise Wrong(str(problem)) from None


def tune_mode() -> str:
    """The tuning mode that holds outside any policy."""
    given = TUNE.read() or "auto"
    if given not in TUNE_MODES:
        raise Wrong(f"{TUNE.name} is {given!r}; it must be one of {', '.join(TUNE_MODES)}")
    return given


def lockfile() -> Path | None:
    """The lockfile that holds outside any policy; whether it exists shows when it is first read."""
    given = LOCKFILE.read()
    return None if given is None else _path(LOCKFILE, given).resolve()


def enable() -> str:
    """ "0", "1" or "pool": what is enabled when tensorlogic is imported."""
    given = ENABLE.read() or "0"
    if given not in ("0", "1", "pool"):
        raise Wrong(f"{ENABLE.name} is {given!r}; it must be 0, 1 or pool")
    return given


def inductor() -> bool:
    """Whether Inductor may compete."""
    given = INDUCTOR.read() or "1"
    if given not in ("0", "1"):
        raise Wrong(f"{INDUCTOR.name} is {given!r}; it must be 0 or 1")
    return given == "1"


def compile_workers() -> int:
    """How many processes compile ahead."""
    given = COMPILE_WORKERS.read()
    if given is None:
        return min(MOST_WORKERS, max(1, usable_cores() - 1))
    if not given.isdecimal():
        raise Wrong(f"{COMPILE_WORKERS.name} is {given!r}; it must be a whole number from 0")
    return int(given)


def native_library() -> Path | None:
    """The native library to load instead of the packaged one."""
    given = NATIVE_LIBRARY.read()
    return None if given is None else Path(given)


READERS: dict[str, Callable[[], object]] = {
    CACHE_DIR.name: cache_folder,
    TUNE.name: tune_mode,
    LOCKFILE.name: lockfile,
    COMPILE_WORKERS.name: compile_workers,
    ENABLE.name: enable,
    INDUCTOR.name: inductor,
}


def wrong() -> dict[str, Wrong]:
    """The variables with values that they cannot have, and what is said of each."""
    found = dict(_IGNORED)
    for name, read in READERS.items():
        try:
            if os.environ.get(name, "").strip():
                read()
        except Wrong as problem:
            found[name] = problem
    return found


def exit_if_wrong() -> None:
    """`python -m tensorlogic` says what variable is wrong and ends, before the package fails by it; the doctor and help come."""
    if sys.argv[:1] != ["-m"] or sys.orig_argv[-len(sys.argv)] != "tensorlogic":
        return
    found, words = wrong(), sys.argv[1:]
    if found and words[:1] not in ([], ["doctor"]) and not LIGHT.intersection(words):
        sys.stderr.write(f"tensorlogic: {next(iter(found.values()))}\n")
        sys.exit(2)  # refused, as by the command line
    _IGNORED.update(found)  # the command line asks again, which knows its words


def usable_cores() -> int:
    """Cores on which this process may run, no more than its container has the time of."""
    own = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        own = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min(own, cpu_share())))


def cpu_share() -> float:
    """How many cores' time the container of this process has; infinite without a limit, or where none is told."""
    try:
        quota, period = QUOTA.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max": no limit
        return math.inf
