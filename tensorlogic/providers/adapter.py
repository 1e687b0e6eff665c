"""What the adapters share: is the package there, in which version, and how a row of its functions becomes a candidate."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.candidate import Candidate, Config, Launcher
from ..core.dtypes import DTYPES
from ..core.key import Key, TensorSpec
from ..core.op import Op
from ..kernels import register as kernels_register
from ..ops.layer_norm_linear import saves
from ..system.package import installed

MOST_ELEMENTS = 2**31 - 1  # of one tensor; beyond it a package's indices may be 32-bit
Rows = tuple[int, int]  # rows, columns


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
        if installed(self.distribution) is None or importlib.util.find_spec(self.module) is None:
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
        return ", ".join(f"{n} {installed(n)}" for n in (self.distribution, *self.needs))


@dataclass(frozen=True)
class Call:
    """A key that is served: its first matrix, a configuration, the device."""

    key: Key
    rows: int
    columns: int
    config: Config
    device: torch.device

    @property
    def dtype(self) -> str:
        """Of the largest tensor, which is what the package's function is for."""
        present = [t for t in self.key.tensors if t is not None]
        return max(present, key=lambda t: math.prod(t.shape)).dtype

    def zeros(self, *shape: int) -> Tensor:
        """To warm up with."""
        return torch.zeros(shape, dtype=DTYPES[self.dtype], device=self.device)

    def labels(self) -> Tensor:
        """One class index to warm up with."""
        return torch.zeros(1, dtype=torch.int64, device=self.device)


@dataclass(frozen=True)
class Function:
    """A package's function: the op and id it serves as, the (rows, columns) of a key or why not, its launcher."""

    op: str
    id: str
    condition: Callable[[Key], Rows | str]
    call: Callable[[Call], Launcher]
    configs: Callable[[], Sequence[Config]] = lambda: ({},)


def add(package: Package, functions: Iterable[Function], ops: dict[str, Op]) -> None:
    """Register a package's functions where it is installed."""
    for f in functions if package.missing() is None else ():
        ops[f.op].add(_candidate(package, f))


def _candidate(package: Package, f: Function) -> Candidate:
    def supports(key: Key) -> str | None:
        found = f.condition(key)
        return found if isinstance(found, str) else None

    def bind(key: Key, config: Config, device: torch.device) -> Launcher:
        found = f.condition(key)
        if isinstance(found, str):
            raise ValueError(f"{f.id} does not serve {key.text}: {found}")
        return f.call(Call(key, *found, config, device))

    return Candidate(
        f.id,
        bind=bind,
        supports=supports,
        configs=lambda key: f.configs(),
        available=package.available,
        sources=(sys.modules[f.call.__module__], sys.modules[__name__], package.text),
        background=False,  # importing and compiling these takes seconds
    )


def present(key: Key, name: str) -> TensorSpec:
    """A tensor that every key of its op has."""
    spec = key.spec(name)
    assert spec is not None
    return spec


def matrix(t: TensorSpec, vector_bytes: int = 16) -> Rows | str:
    """(rows, columns) of contiguous aligned rows, each a multiple of `vector_bytes` long, or why not."""
    rows = kernels_register.rows_of(t)
    if isinstance(rows, str):
        return rows
    if math.prod(t.shape) > MOST_ELEMENTS:
        return f"more than {MOST_ELEMENTS} elements"
    if rows[1] * DTYPES[t.dtype].itemsize % vector_bytes:
        return f"rows of {rows[1]} {t.dtype} are not a multiple of {vector_bytes} bytes"
    return rows if t.align % vector_bytes == 0 else f"not aligned to {vector_bytes} bytes"


def logits_rows(key: Key, vector_bytes: int = 16) -> Rows | str:
    """Logits of a cross-entropy over rows."""
    found = kernels_register.one_dtype(key, "logits") or matrix(present(key, "logits"), vector_bytes)  # fmt: skip
    if isinstance(found, str) or kernels_register.is_contiguous(present(key, "target")):
        return found
    return "targets are not contiguous"


def norm_rows(key: Key, vector_bytes: int = 16) -> Rows | str:
    """Inputs of a layer norm before a product, which is PyTorch's."""
    found = kernels_register.one_dtype(key) or matrix(present(key, "x"), vector_bytes)
    if not isinstance(found, str) and saves(key):
        return "normalised rows and their statistics are kept for backward"
    return found


def aligned(*tensors: Tensor | None) -> bool:
    """True when every tensor that is present starts at a multiple of 16 bytes."""
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


def warm(run: Callable[..., Any], *small: Any) -> None:
    """Let the package compile and load its kernels now, on small tensors, so that a later capture meets nothing cold."""
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        with torch.no_grad():
            run(*small)


def on_device(device: torch.device, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with `device` current, for packages that launch on the current device."""
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return run

    def switched(*args: Any) -> Any:
        with torch.cuda.device(device):
            return run(*args)

    return switched


def cross_entropy(c: Call, each: Callable[[Tensor, Tensor], Any], vectors: bool) -> Launcher:
    """(loss,), or (loss, log-sum-exp, weight of a row [1]) where that is to be saved, around a package's loss per row.

    `each(logits [rows, columns], target [rows])` returns (loss [rows], log-sum-exp [rows] or None). Kernels that gather
    logits[row, target] must not see a target out of range, and PyTorch's rule for such targets on a GPU is no
    synchronisation: they are clamped, and the loss of such a row is NaN. `vectors`: logits must be aligned.
    """
    ignore_index, reduction = c.key.flag("ignore_index"), c.key.flag("reduction")

    def launch(logits: Tensor, target: Tensor) -> Any:
        if vectors and not aligned(logits):
            return None
        flat = target.reshape(c.rows)
        safe = flat.clamp(0, c.columns - 1)
        loss, lse = each(logits.view(c.rows, c.columns), safe)
        ignored, share = flat == ignore_index, None
        loss = loss.masked_fill(flat != safe, math.nan).masked_fill(ignored, 0.0)
        if reduction == "mean":
            share = (~ignored).sum(dtype=torch.float32).reciprocal()
            loss = loss.sum() * share
        elif reduction == "sum":
            loss = loss.sum()
        loss = loss.to(logits.dtype).view(target.shape if reduction == "none" else ())
        if lse is None:
            return (loss,)
        lse = torch.where(ignored, 0, lse)  # nothing is kept of rows that do not count
        return loss, lse, loss.new_ones(1, dtype=torch.float32) if share is None else share.view(1)

    warm(each, c.zeros(1, c.columns), c.labels())
    return launch
