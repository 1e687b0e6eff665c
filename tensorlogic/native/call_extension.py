"""Compiled calls: a Python module built per version of PyTorch and of Python, which everything works without, only slower.

What it has: `Native`, an operator of the native library past PyTorch's dispatcher where that would do nothing; `Launcher`, one
with its last arguments fixed; `Front`, the warm way of a public function in one call of C; `Start`, a GPU kernel, and `Plan`, a launcher
of several (tensorlogic/kernels/triton_runtime/launch_plan.py); `Guarded`, a product and its guard (tensorlogic/mixed_precision/adaptive.py); `Way`, a call that replays a CUDA graph (tensorlogic/cuda_graphs/fast_replay.py).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..system import process
from . import library_files

# how a front serves a call by a plan: all outputs; not while its stream is captured
WHOLE, OUTSIDE = (1, 2)
# of what this package and the module expect of each other: csrc/calls/calls.h has the same
REVISION = 8
ON_LOAD: list[Callable[[ModuleType], None]] = []  # called once with the module, when it is there
_lock = threading.Lock()
process.renew_after_fork(globals(), _lock=threading.Lock)
_state: list[ModuleType | str] = []  # empty until tried, then the module or what is missing


def library() -> Path:
    """Where the module for the running PyTorch and Python is expected: beside the native library."""
    version = torch.__version__.partition("+")[0]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return library_files.library().with_name(f"tensorlogic_calls-{version}{suffix}")


def _load() -> ModuleType | str:
    path = library()
    if not path.exists():
        return f"{path.name} is not built: it belongs to one version of PyTorch and of Python"
    if path.name in library_files.stale():
        return f"the compiled calls {path.name} were built from other sources than these: {library_files.rebuilding()}"
    loader = importlib.machinery.ExtensionFileLoader("tensorlogic_calls", str(path))
    spec = importlib.util.spec_from_loader("tensorlogic_calls", loader)
    assert spec is not None
    try:
        if library_files.is_truncated(path):
            return f"the compiled calls {path} are cut short, as by an interrupted copy: build them again"
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError) as error:
        return f"the compiled calls {path} do not load: {error}"
    if getattr(module, "REVISION", 1) != REVISION:
        return f"the compiled calls {path} were built from other sources: run `python tools/build_native.py`"
    return module


def load() -> None:
    """Load the module where it is built, once: when the native library has been loaded, or at the first use of a GPU."""
    with _lock:
        if not _state:
            _state.append(_load())
            if isinstance(_state[0], ModuleType):
                for use in ON_LOAD:
                    use(_state[0])


def missing() -> str | None:
    """Why calls are not compiled, or None: they are, or were not tried yet."""
    return next((s for s in _state if isinstance(s, str)), None)


def module() -> Any:
    """The module, or None; loads nothing."""
    return next((s for s in _state if isinstance(s, ModuleType)), None)


def is_launcher(launch: Any) -> bool:
    """Whether a launcher is a compiled one, which can count its calls itself."""
    compiled = module()
    return compiled is not None and isinstance(launch, (compiled.Launcher, compiled.Plan))


def is_plan(launch: Any) -> bool:
    """Whether a launcher is a compiled one that allocates and starts GPU kernels."""
    compiled = module()
    return compiled is not None and isinstance(launch, compiled.Plan)
