"""The native CPU library: where it is, loading it once, and why it is absent where it is."""

from __future__ import annotations

import functools
import itertools
import runpy
import struct
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import settings, starting

OLDEST_TORCH = (2, 11)  # the stable ABI that the library targets

#: The numbers by which native ops know an activation.
ACTIVATIONS: dict[str | None, int] = {
    None: 0,
    "none": 0,
    "relu": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "silu": 4,
}
#: And the reduction of a loss.
REDUCTIONS: dict[str, int] = {"none": 0, "mean": 1, "sum": 2}

_PACKAGE = Path(__file__).resolve().parent
_BUILDER = _PACKAGE.parent / "tools" / "build_native.py"
_lock = threading.Lock()
starting.new_in_children(globals(), _lock=threading.Lock)
_state: list[str | None] = []  # empty until tried, then what `available` answers


def library() -> Path:
    """Where the library is expected."""
    named = settings.native_library()
    return named if named is not None else _PACKAGE / "_native" / "libtensorlogic_native.so"


@functools.cache
def stale() -> frozenset[str]:
    """In a checkout: libraries in it that were built from other sources, and so may lack what is called here."""
    if settings.native_library() is not None or not _BUILDER.exists():
        return frozenset()
    return frozenset(runpy.run_path(str(_BUILDER))["stale"]())


def rebuilding() -> str:
    return f"run `python {_BUILDER.relative_to(_PACKAGE.parent)}`"


def cut_short(path: Path) -> bool:
    """Whether an ELF file ends before its last part, the section headers, does: as an interrupted copy. Loading it would end the process."""
    with path.open("rb") as file:
        head = file.read(64)
    if not head.startswith(b"\x7fELF"):
        return not head
    if len(head) < 64:
        return True
    (begin,), (size, count) = (
        struct.unpack_from("<Q", head, 0x28),
        struct.unpack_from("<HH", head, 0x3A),
    )
    return path.stat().st_size < begin + size * count


def _load() -> str | None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    path = library()
    if version < OLDEST_TORCH:
        return f"PyTorch {torch.__version__} is older than 2.11, which the native library needs: upgrade torch"
    named = "" if settings.native_library() is None else f"{settings.NATIVE_LIBRARY.name}: "
    if named and not path.exists():
        return f"{named}{path} does not exist; name another library, or unset the variable"
    if not path.exists():
        remedy = rebuilding() if _BUILDER.exists() else "install a wheel that has it"
        return f"the native library {path.name} is not built: {remedy}"
    if path.name in stale():
        return f"the native library {path.name} was built from other sources than these: {rebuilding()}"
    try:
        if cut_short(path):
            return f"{named}the native library {path} is cut short, as by an interrupted copy: build or install it again"
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{named}the native library {path} does not load: {error}"
    if (wanted := settings.NATIVE_ISA.read()) is not None:
        try:
            torch.ops.tensorlogic_native.set_isa(wanted)
        except RuntimeError:
            has = torch.ops.tensorlogic_native.features().split(",")
            levels = ", ".join(level for level in settings.LEVELS if level in has)
            return f"{settings.NATIVE_ISA.name} is {wanted!r}; one of {levels} is required, which this processor has"
    from . import calls, hooks

    hooks.load()
    calls.load()
    return None


def available(device: str = "cpu") -> str | None:
    """None where native kernels can run on this device type, else the reason why not; loads the library at first use."""
    if device != "cpu":
        return f"native kernels run on cpu, not on {device}"
    if not _state:
        with _lock:
            if not _state:
                _state.append(_load())
                if misled() is not None:
                    warnings.warn(
                        f"{_state[0]}. PyTorch serves the CPU instead of native kernels",
                        stacklevel=2,
                    )
    return _state[0]


def misled() -> settings.Variable | None:
    """The environment variable that keeps the library from being used, if one does."""
    reason = available() or ""
    return next((v for v in settings.NATIVE if reason.startswith(v.name)), None)


def op(name: str) -> Callable[..., Any]:
    """The operator `tensorlogic_native::name`, without the Python layers of torch.ops; raises RuntimeError where absent."""
    if reason := available():
        raise RuntimeError(reason)
    return _op(name)


@functools.cache
def _op(name: str) -> Callable[..., Any]:
    from . import calls

    known = getattr(torch.ops.tensorlogic_native, name).default
    usual: Callable[..., Any] = known._op
    compiled = calls.module()
    if compiled is None:
        return usual
    given = itertools.dropwhile(lambda a: not a.has_default_value(), known._schema.arguments)
    try:
        direct: Callable[..., Any] = compiled.Native(
            name, usual, tuple(a.default_value for a in given)
        )
    except LookupError:  # one that takes more than tensors and numbers
        return usual
    return direct


def launcher(name: str, *fixed: Any) -> Callable[..., tuple[Any]]:
    """launch(*tensors) -> (operator's one output,), its last arguments fixed."""
    from . import calls

    run, compiled = op(name), calls.module()
    if compiled is not None and isinstance(run, compiled.Native):
        made: Callable[..., tuple[Any]] = compiled.Launcher(run, fixed)
        return made
    return lambda *tensors: (run(*tensors, *fixed),)


def isa() -> str | None:
    """The instruction set that serves: "portable", "avx2", "avx512", "avx512_bf16" or "amx"; None where the library is absent."""
    return None if available() else op("isa")()


def build() -> str | None:
    """Build the library from a source checkout and load it; returns what `available` then answers."""
    if not _BUILDER.exists():
        return "the sources of the native library are not part of an installed package: build from a checkout"
    builder = runpy.run_path(str(_BUILDER))
    try:
        builder["build"]()
    except builder["BuildError"] as error:
        return str(error)
    stale.cache_clear()
    with _lock:
        if _state and _state[0] is not None:
            _state.clear()
    return available()
