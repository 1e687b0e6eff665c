"""What the adapters share: is the package there, in which version, and how its functions become a candidate."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.candidate import Candidate, Config, Launcher
from ..core.dtypes import DTYPES
from ..core.key import Key, TensorSpec
from ..core.op import Op
from ..kernels import register

T = TypeVar("T")
MOST_ELEMENTS = 2**31 - 1  # of one tensor; beyond it a package's indices may be 32-bit


@dataclass(frozen=True)
class Package:
    """A distribution that brings GPU kernels; asking about it imports nothing of it."""

    distribution: str
    module: str
    extra: str  # of ours, which installs it
    capability: int  # least major compute capability its kernels are for
    needs: tuple[str, ...] = ()  # distributions that compile its kernels

    def missing(self) -> str | None:
        """None where it is installed, else the reason and the remedy."""
        if _version(self.distribution) is None or importlib.util.find_spec(self.module) is None:
            return f"{self.distribution} is not installed: pip install 'tensorlogic-engine[{self.extra}]'"
        return None

    def available(self, device: str) -> str | None:
        """None where its kernels run on this type of device."""
        reason = self.missing()
        if reason is not None:
            return reason
        if device != "cuda":
            return f"{self.distribution} runs on CUDA devices"
        major, minor = torch.cuda.get_device_capability()
        if major < self.capability:
            return f"{self.distribution} is for sm_{self.capability}0 and newer, this is sm_{major}{minor}"
        return None

    @property
    def text(self) -> str:
        """Name and version of it and of what compiles it: a new version makes old evidence void."""
        return ", ".join(f"{n} {_version(n)}" for n in (self.distribution, *self.needs))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def adapted(
    op: Op,
    id: str,
    package: Package,
    describe: Callable[[Key], T | str],
    build: Callable[[T, Config, torch.device], Launcher],
    configs: Callable[[], Sequence[Config]] = lambda: ({},),
) -> None:
    """Register a package's function. `describe(key)` returns what `build` needs, or why the package does not serve the key."""

    def supports(key: Key) -> str | None:
        found = describe(key)
        return found if isinstance(found, str) else None

    def bind(key: Key, config: Config, device: torch.device) -> Launcher:
        found = describe(key)
        if isinstance(found, str):
            raise ValueError(f"{id} does not serve {key.text}: {found}")
        return build(found, config, device)

    op.add(
        Candidate(
            id,
            bind=bind,
            supports=supports,
            configs=lambda key: configs(),
            available=package.available,
            sources=(sys.modules[build.__module__], sys.modules[__name__], package.text),
            background=False,  # importing and compiling these takes seconds
        )
    )


def matrix(t: TensorSpec, vector_bytes: int = 16) -> tuple[int, int] | str:
    """(rows, columns) of contiguous aligned rows, each a multiple of `vector_bytes` long, or why not."""
    rows = register.rows_of(t)
    if isinstance(rows, str):
        return rows
    if math.prod(t.shape) > MOST_ELEMENTS:
        return f"more than {MOST_ELEMENTS} elements"
    if rows[1] * DTYPES[t.dtype].itemsize % vector_bytes:
        return f"rows of {rows[1]} {t.dtype} are not a multiple of {vector_bytes} bytes"
    return rows if t.align % vector_bytes == 0 else f"not aligned to {vector_bytes} bytes"


def aligned(*tensors: Tensor | None) -> bool:
    """True when every tensor that is present starts at a multiple of 16 bytes."""
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


def warm(run: Callable[..., Any], *small: Any) -> None:
    """Let the package compile and load its kernels now, on small tensors, so that a later capture meets nothing cold."""
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        with torch.no_grad():
            run(*small)


def on_device(device: torch.device, run: Callable[..., T]) -> Callable[..., T]:
    """`run` with `device` current, for packages that launch on the current device."""
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return run

    def switched(*args: Any) -> T:
        with torch.cuda.device(device):
            return run(*args)

    return switched


# Cross-entropy around a package's loss per row: kernels that gather logits[row, target] must not see a target out of
# range, and PyTorch's rule for such targets on a GPU is no synchronisation. Here the loss of such a row is NaN.


def in_range(target: Tensor, columns: int) -> Tensor:
    """Targets that can be gathered without reading beyond the row."""
    return target.clamp(0, columns - 1)


def reduced(
    loss: Tensor, target: Tensor, columns: int, ignore_index: int, reduction: str
) -> tuple[Tensor, Tensor | None]:
    """The reduced loss and, for "mean", the weight of a row [1]; loss [rows] was computed for `in_range(target)`."""
    ignored = target == ignore_index
    strange = target != in_range(target, columns)
    loss = loss.masked_fill(strange, math.nan).masked_fill(ignored, 0.0)
    if reduction == "none":
        return loss, None
    if reduction == "sum":
        return loss.sum(), None
    share = (~ignored).sum(dtype=torch.float32).reciprocal()
    return loss.sum() * share, share.view(1)
