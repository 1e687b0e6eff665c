"""How a kernel family becomes a candidate: one description of the key serves support, configurations and binding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..core.candidate import Candidate, Config, Launcher
from ..core.key import Key, TensorSpec
from ..core.op import Op
from ..system.compile_pool import CompileFailure
from ..system.hardware import interpreting, triton_missing
from .triton_runtime import launch_plan

T = TypeVar("T")
KERNEL_DTYPES = ("f16", "bf16", "f32")


def described(
    op: Op,
    id: str,
    describe: Callable[[Key], T | str],
    configs: Callable[[T], Sequence[Config]],
    build: Callable[[T, Config, torch.device], Launcher],
    sources: tuple[Any, ...],
    needs: Callable[[str], str | None] | None = None,
    trusted: bool = True,
    parts: Callable[[Key, Config, torch.device], tuple[Launcher, Callable[..., Tensor]]]
    | None = None,
    coarse: Callable[[Key], float] = lambda key: 0.0,
) -> None:
    """Register a GPU candidate, whose launchers are replayed in C where they only allocate and start kernels. `describe(key)` returns what `configs` and `build` need, or why the key is not served;
    `needs(device type)` is what it requires of the machine, Triton's kernels unless said; one that is not `trusted`
    serves only keys that it was checked on, on this machine. `parts` and `coarse`: as `Candidate`'s."""

    def known(key: Key) -> T:
        found = describe(key)
        if isinstance(found, str):
            raise ValueError(f"{id} does not serve {key.text}: {found}")
        return found

    def supports(key: Key) -> str | None:
        found = describe(key)
        return found if isinstance(found, str) else None

    def jobs(key: Key, config: Config, device: torch.device) -> Sequence[Any]:
        if device.type != "cuda":
            return ()
        from .triton_runtime.launch import collect

        try:
            return collect(lambda: build(known(key), config, device), device)
        except CompileFailure:  # binding meets it again, and its reason is kept
            return ()

    def bind(key: Key, config: Config, device: torch.device) -> Launcher:
        return launch_plan.plan(op, key, device, build(known(key), config, device))

    op.add(
        Candidate(
            id,
            bind=bind,
            supports=supports,
            configs=lambda key: configs(known(key)),
            available=needs or available,
            sources=sources,
            jobs=jobs,
            trusted=trusted,
            parts=parts,
            coarse=coarse,
        )
    )


def available(device: str) -> str | None:
    """None on a GPU, or where Triton's interpreter was asked for."""
    if triton_missing():
        return triton_missing()
    if device == "cuda" or (device == "cpu" and interpreting()):
        return None
    return "Triton kernels run on CUDA devices"


@lru_cache
def cores() -> int:
    """Multiprocessors of the current GPU (an H200's without one)."""
    if not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


@lru_cache
def bulk_copies() -> bool:
    """Whether the current GPU is a Hopper, whose bulk copies and warpgroups the specialised product is written for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def weakest(key: Key) -> int:
    """The alignment that all tensors of the key share, in bytes."""
    return min((t.align for t in key.tensors if t is not None), default=16)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def is_contiguous(t: TensorSpec) -> bool:
    """True where the strides are a contiguous tensor's, dimensions of size 1 aside."""
    return all(
        s == c for n, s, c in zip(t.shape, t.stride, contiguous(t.shape), strict=True) if n != 1
    )


def one_dtype(key: Key, *names: str) -> str | None:
    """None when all named (or all) tensors that are present share one dtype the kernels take, else the reason."""
    found = {
        t.dtype
        for n, t in zip(key.names, key.tensors, strict=True)
        if t is not None and (not names or n in names)
    }
    if len(found) != 1:
        return f"dtypes {', '.join(sorted(found))} are mixed"
    (dtype,) = found
    return (
        None
        if dtype in KERNEL_DTYPES
        else f"the kernels take {', '.join(KERNEL_DTYPES)}, not {dtype}"
    )


def rows_of(t: TensorSpec) -> tuple[int, int] | str:
    """(rows, columns) of a contiguous [..., columns] tensor that is not empty, or why not."""
    if not t.shape or 0 in t.shape:
        return "empty or zero-dimensional"
    return (prod(t.shape[:-1]), t.shape[-1]) if is_contiguous(t) else "not contiguous"


Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def empty(device: torch.device) -> Allocate:
    """An allocator (shape, strides, dtype) -> tensor: ours in C, or the one Inductor's code uses where it exists (0.7 against 2.7 µs)."""
    if (ours := launch_plan.empty(device)) is not None:
        return cast(Allocate, ours)
    made = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if device.type == "cuda" and made is not None and torch.cuda.device_count() == 1:
        return cast(Allocate, made)
    return lambda shape, stride, dtype: torch.empty_strided(
        shape, stride, dtype=dtype, device=device
    )


def rows(t: Tensor) -> Tensor:
    """t [..., N] as [rows, N], of t's memory where it can be; also where N is 0, which `reshape(-1, N)` refuses."""
    if t.dim() == 2:
        return t
    if t.dim() < 2:
        return t.unsqueeze(0)
    # PyTorch has no rule for gradients of many vectors at once through `flatten`
    return t.reshape(-1, t.shape[-1]) if t.shape[-1] else t.flatten(0, -2)
