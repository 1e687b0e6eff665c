"""The native CPU library: loading it once, its operators, and why it is absent where it is."""

from __future__ import annotations

import functools
import itertools
import runpy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..system import process, settings
from . import call_extension, hook_extension, library_files

NAMES = ("none", "relu", "gelu", "gelu_tanh", "silu")
#: The numbers by which native ops know an activation.
ACTIVATIONS: dict[str | None, int] = {None: 0} | {name: i for i, name in enumerate(NAMES)}
#: And the reduction of a loss.
REDUCTIONS: dict[str, int] = {"none": 0, "mean": 1, "sum": 2}

_lock = threading.Lock()
process.renew_after_fork(globals(), _lock=threading.Lock)
_state: list[str | None] = []  # empty until tried, then what `available` answers


def _load() -> str | None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    path = library_files.library()
    if version < library_files.OLDEST_TORCH:
        return f"PyTorch {torch.__version__} is older than 2.11, which the native library needs: upgrade torch"
    named = "" if settings.native_library() is None else f"{settings.NATIVE_LIBRARY.name}: "
    if named and not path.exists():
        return f"{named}{path} does not exist; name another library, or unset the variable"
    if not path.exists():
        built = library_files.BUILDER.exists()
        remedy = library_files.rebuilding() if built else "install a wheel that has it"
        return f"the native library {path.name} is not built: {remedy}"
    if path.name in library_files.stale():
        return f"the native library {path.name} was built from other sources than these: {library_files.rebuilding()}"
    try:
        if library_files.is_truncated(path):
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
    hook_extension.load()
    call_extension.load()
    return None


def available(device: str = "cpu") -> str | None:
    """None where native kernels can run on this device type, else the reason why not; loads the library at first use."""
    if device != "cpu":
        return f"native kernels run on cpu, not on {device}"
    if not _state:
        with _lock:
            if not _state:
                _state.append(_load())
                if bad_setting() is not None:
                    said = f"{_state[0]}. PyTorch serves the CPU instead of native kernels"
                    warnings.warn(said, stacklevel=2)
    return _state[0]


def calls_available() -> str | None:
    """None where calls are compiled, else why not; loads the native library at first use, and them with it."""
    return available() or call_extension.missing()


def bad_setting() -> settings.Variable | None:
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
    known = getattr(torch.ops.tensorlogic_native, name).default
    usual: Callable[..., Any] = known._op
    compiled = call_extension.module()
    if compiled is None:
        return usual
    given = itertools.dropwhile(lambda a: not a.has_default_value(), known._schema.arguments)
    defaults = tuple(a.default_value for a in given)
    try:
        direct: Callable[..., Any] = compiled.Native(name, usual, defaults)
    except LookupError:  # one that takes more than tensors and numbers
        return usual
    return direct


def launcher(name: str, *fixed: Any) -> Callable[..., tuple[Any]]:
    """launch(*tensors) -> (operator's one output,), its last arguments fixed."""
    run, compiled = op(name), call_extension.module()
    if compiled is not None and isinstance(run, compiled.Native):
        made: Callable[..., tuple[Any]] = compiled.Launcher(run, fixed)
        return made
    return lambda *tensors: (run(*tensors, *fixed),)


def isa() -> str | None:
    """The instruction set that serves: "portable", "avx2", "avx512", "avx512_bf16" or "amx"; None where the library is absent."""
    return None if available() else op("isa")()


def build() -> str | None:
    """Build the library from a source checkout and load it; returns what `available` then answers."""
    if not library_files.BUILDER.exists():
        return "the sources of the native library are not part of an installed package: build from a checkout"
    builder = runpy.run_path(str(library_files.BUILDER))
    try:
        builder["build"]()
    except builder["BuildError"] as error:
        return str(error)
    library_files.stale.cache_clear()
    with _lock:
        if _state and _state[0] is not None:
            _state.clear()
    return available()
