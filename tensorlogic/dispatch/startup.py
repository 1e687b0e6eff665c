"""What happens once, when the package is imported: every op is registered with PyTorch."""

from __future__ import annotations

import importlib.metadata
import warnings

from ..core.op import OPS
from . import torch_library

_REGISTERED: set[str] = set()


def activate() -> None:
    """Register every op with PyTorch, once: an import that failed behind this, at `TENSORLOGIC_ENABLE` say, may be made again."""
    for op in OPS.values():
        if op.name not in _REGISTERED:
            _REGISTERED.add(op.name)
            torch_library.register(op)


def warn_of_namesakes() -> None:
    """Say it when the other distribution that installs a module `tensorlogic` is there too: files of both may be mixed."""
    try:
        other = importlib.metadata.distribution("tensorlogic")
    except importlib.metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"the distribution 'tensorlogic' {other.version} also installs a module named tensorlogic, "
        f"and so may have overwritten files of 'tensorlogic-engine': "
        f"pip uninstall tensorlogic tensorlogic-engine, then pip install tensorlogic-engine",
        stacklevel=3,
    )
