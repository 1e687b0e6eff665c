"""From Metal source to a launcher: compiled once by torch.mps.compile_shader, started with a grid of threadgroups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ...system.compile_pool import CompileFailure
from . import shader_prelude

LOG = logging.getLogger("tensorlogic")
Size = tuple[int, int, int]
Start = Callable[..., bool]
MOST_BYTES = 32768  # of threadgroup memory, on every Apple GPU


def available(device: str) -> str | None:
    """None on an Apple GPU whose PyTorch compiles shaders, else the reason."""
    if device != "mps":
        return "Metal shaders run on Apple GPUs"
    return missing()


@lru_cache
def missing() -> str | None:
    """Why this PyTorch cannot compile a shader, said once; None where it can."""
    reason = None
    if not hasattr(torch.mps, "compile_shader"):
        reason = f"PyTorch {torch.__version__} has no torch.mps.compile_shader"
    else:
        try:
            library("kernel void probe(device float* y [[buffer(0)]]) { y[0] = 1; }")
        except CompileFailure as problem:
            reason = f"Metal shaders do not compile here: {problem}"
    if reason is not None:
        LOG.warning("tensorlogic: %s; PyTorch's own kernels serve the Apple GPU", reason)
    return reason


def written(defines: Mapping[str, Any], *texts: str) -> str:
    """One shader source: options as definitions, then the common functions, then these texts."""
    options = "".join(f"#define {name} {_value(value)}\n" for name, value in defines.items())
    return shader_prelude.INCLUDES + options + "".join((shader_prelude.SOURCE, *texts))


def _value(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


@lru_cache(maxsize=1024)
def library(source: str) -> Any:
    """The compiled shaders of a source; raises CompileFailure with the compiler's message."""
    try:
        return torch.mps.compile_shader(source)
    except (RuntimeError, SyntaxError) as problem:
        raise CompileFailure(str(problem)) from problem


def launcher(source: str, name: str, groups: Sequence[int], size: Sequence[int]) -> Start:
    """start(*buffers): the kernel `name` over `groups` threadgroups of `size` threads each.

    Buffers are tensors, numbers, and tuples of ints (`constant long*`) or floats (`constant float*`), in the order of
    the kernel's. Raises CompileFailure where the source does not compile or a group of that size does not fit.
    """
    try:
        kernel = getattr(library(source), name)
        most, lanes = kernel.max_threads_per_threadgroup, kernel.thread_execution_width
    except (RuntimeError, SyntaxError) as problem:
        raise CompileFailure(str(problem)) from problem
    wanted = size[0] * size[1] * size[2]
    if most < wanted:
        raise CompileFailure(f"{name} needs {wanted} threads in a group; this GPU gives it {most}")
    if lanes != shader_prelude.LANES:
        raise CompileFailure(
            f"{name} is written for simdgroups of {shader_prelude.LANES} threads, not {lanes}"
        )
    threads = tuple(g * s for g, s in zip(groups, size, strict=True))
    shape = tuple(size)

    def start(*buffers: Any) -> bool:
        kernel(*buffers, threads=threads, group_size=shape)
        return True

    return start
