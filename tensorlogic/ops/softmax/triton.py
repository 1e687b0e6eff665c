"""softmax and its gradient by Triton: rows that lie together, lines in any strides, and each shared out where they are few and long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.cross_entropy import fused_backward, fused_backward_smem, fused_backward_smem_kernel
from ...kernels.row_access import contiguous as contiguous_rows
from ...kernels.row_access import ragged as ragged_rows
from ...kernels.row_access import shared_memory
from ...kernels.row_access import split as split_rows
from ...kernels.row_access import strided as strided_lines
from ...kernels.row_access.strided import Lines
from ...kernels.softmax import ragged, rows, smem, smem_kernel, split, strided, strided_split
from ...kernels.triton_runtime import device_math, exact_exp
from . import SOFTMAX, SOFTMAX_BACKWARD

Rows = tuple[int, int, str, tuple[int, ...], int]  # rows, columns, dtype, shape, alignment
# how all tensors lie, dtype, shape, alignment
Strided = tuple[Lines, str, tuple[int, ...], int]
# tiles of a row in shared memory at most: kernels of more have no registers left
TILES = 19


def _launcher(
    start: Callable[..., bool], out: tuple[int, ...], dtype: str, device: torch.device, space: int = 0
) -> Launcher:  # fmt: skip
    """x, or (dy, y), to the contiguous output by `start(*given[, float32 scratch], output)`."""
    empty, stride, made = register.empty(device), register.contiguous(out), DTYPES[dtype]

    def launch(*given: Tensor) -> Any:
        y = empty(out, stride, made)
        return (y,) if start(*given, y) else None

    def with_space(*given: Tensor) -> Any:
        y, part = empty(out, stride, made), empty((space,), (1,), torch.float32)
        return (y,) if start(*given, part, y) else None

    return with_space if space else launch


def _rows_launcher(
    start: Callable[..., bool], s: Rows, device: torch.device, backward: bool, *scalars: float
) -> Launcher:
    """The same of kernels whose gradient takes (y, dy, output, *scalars)."""
    _, _, dtype, out, _ = s
    if not backward:
        return _launcher(start, out, dtype, device)
    return _launcher(lambda dy, y, dx: start(y, dy, dx, *scalars), out, dtype, device)


def describe_rows(key: Key) -> Rows | str:
    """Contiguous rows of one dtype."""
    first, reason = key.present(key.names[0]), register.one_dtype(key)
    if reason is not None:
        return reason
    found = register.rows_of(first)
    if isinstance(found, str):
        return found
    if key.flag("dim") != len(first.shape) - 1:
        return "not over the last dimension"
    if any(t is not None and not register.is_contiguous(t) for t in key.tensors):
        return "not contiguous"
    return (*found, first.dtype, first.shape, register.weakest(key))


def build_rows(s: Rows, config: Config, device: torch.device, backward: bool) -> Launcher:
    """A row in registers, or online where rows are longer."""
    count, columns, dtype, _, align = s
    if backward:
        start = rows.softmax_backward_launcher(
            count, columns, (dtype, dtype, dtype), dict(config), device, align
        )
        return _rows_launcher(start, s, device, True, 1.0)
    start = rows.softmax_launcher(count, columns, dtype, dtype, dict(config), device, align)
    return _rows_launcher(start, s, device, False)


def _lines(key: Key) -> Strided | str:
    """Lines of one dtype, rows that lie together among them."""
    first, reason = key.present(key.names[0]), register.one_dtype(key)
    if reason is not None or not first.shape or 0 in first.shape:
        return reason or "empty or zero-dimensional"
    shape, given = first.shape, [t.stride for t in key.tensors if t is not None]
    found = lines(shape, key.flag("dim"), [*given, register.contiguous(shape)])
    return found if isinstance(found, str) else (found, first.dtype, shape, register.weakest(key))


def lines(shape: tuple[int, ...], dim: int, strides: list[tuple[int, ...]]) -> Lines | str:
    """Tensors of one shape and these strides as [outer, shape[dim], inner]; or why they are not that."""
    # (count, step of each tensor) of what lies evenly
    groups: list[tuple[int, tuple[int, ...]]] = []
    for d, n in enumerate(shape):
        step = tuple(s[d] for s in strides)
        if d == dim or n == 1:
            continue
        if groups and all(a == n * b for a, b in zip(groups[-1][1], step, strict=True)):
            groups[-1] = (groups[-1][0] * n, step)
        else:
            groups.append((n, step))
    if len(groups) > 2:
        return "the other dimensions lie in more than two steps"
    none = (1, (0,) * len(strides))
    (outer, far), (inner, near) = [*[none] * (2 - len(groups)), *groups]
    along = [s[dim] if shape[dim] > 1 else 1 for s in strides]
    return Lines(outer, shape[dim], inner, tuple(zip(far, along, near, strict=True)))


def describe_lines(key: Key) -> Strided | str:
    """Lines that do not lie together: another dimension than the last, padded or transposed tensors, steps."""
    found = _lines(key)
    together = all(t is None or register.is_contiguous(t) for t in key.tensors)
    if not isinstance(found, str) and key.flag("dim") == len(found[2]) - 1 and together:
        return "rows that lie together"
    return found


def lines_configs(s: Strided, backward: bool) -> list[dict[str, Any]]:
    """Configurations of lines, best guess first."""
    return strided.lines_configs(s[0], s[1], register.cores())


def build_lines(s: Strided, config: Config, device: torch.device, backward: bool) -> Launcher:
    """Lines in strides of their own, the output contiguous, as PyTorch's."""
    found, dtype, out, align = s
    start = strided.lines_launcher(found, dtype, dict(config), device, align)
    return _launcher(start, out, dtype, device)


def describe_parts(key: Key) -> Strided | str:
    """Few, long lines."""
    found = _lines(key)
    if isinstance(found, str):
        return found
    return strided_split.refusal(found[0], found[1], register.cores()) or found


def parts_configs(s: Strided, backward: bool) -> list[dict[str, Any]]:
    """Configurations of lines that programs share, best guess first."""
    return strided_split.parts_configs(s[0], s[1], register.cores())


def build_parts(s: Strided, config: Config, device: torch.device, backward: bool) -> Launcher:
    """Several programs share a line, in two launches."""
    found, dtype, out, align = s
    start = strided_split.parts_launcher(found, dtype, dict(config), device, align)
    return _launcher(start, out, dtype, device, strided_split.parts_space(found, dict(config)))


def describe_held(key: Key) -> Rows | str:
    """Long rows of tensors at 16-byte addresses, as many as there are programs for."""
    found = describe_rows(key)
    if isinstance(found, str):
        return found
    count, columns, _, _, align = found
    if align < 16:
        return "tensors at 16-byte addresses are required"
    if count < register.cores():
        return "fewer rows than multiprocessors"
    if not held_configs(found, len(key.tensors) > 1):
        return f"no program holds rows of {columns}, or two do"
    return found


def held_configs(s: Rows, backward: bool) -> list[dict[str, Any]]:
    """Configurations of rows in shared memory, best guess first; none on other than Hopper GPUs."""
    columns, dtype, tensors = s[1], s[2], 1 + backward
    found = (
        fused_backward_smem.held_configs(columns, dtype, tensors) if register.bulk_copies() else []
    )
    return [c for c in found if shared_memory.tiles(columns, dtype, c, tensors)[0] <= TILES]


def build_held(s: Rows, config: Config, device: torch.device, backward: bool) -> Launcher:
    """Long rows on Hopper GPUs: read once, held in shared memory and registers."""
    what = (*s[:3], config, device, register.cores())
    start = smem.softmax_held_launcher(*what, backward=backward)
    return _rows_launcher(start, s, device, backward)


def describe_groups(key: Key) -> Rows | str:
    """Contiguous rows of one dtype that are no multiple of 16 bytes, of tensors that begin at one."""
    found = describe_rows(key)
    if isinstance(found, str):
        return found
    _, columns, dtype, _, align = found
    return ragged_rows.refusal(columns, dtype, align) or found


def build_groups(s: Rows, config: Config, device: torch.device, backward: bool) -> Launcher:
    """Rows that begin at odd places: whole aligned groups of 16 bytes, and the ends apart."""
    start = ragged.groups_launcher(*s[:3], dict(config), device, backward)
    return _rows_launcher(start, s, device, backward)


def describe_shares(key: Key) -> Rows | str:
    """Few, long, contiguous rows of one dtype, of tensors that begin at a multiple of 16 bytes."""
    found = describe_rows(key)
    if isinstance(found, str):
        return found
    count, columns, _, _, align = found
    refused = split_rows.refusal(count, columns, align, register.cores())
    if refused or shares_configs(found, len(key.tensors) > 1):
        return refused or found
    return "shares would be longer than sums are exact"


def shares_configs(s: Rows, backward: bool) -> list[dict[str, Any]]:
    """Configurations of rows that programs share, best guess first."""
    return split.shares_configs(*s[:3], register.cores())


def build_shares(s: Rows, config: Config, device: torch.device, backward: bool) -> Launcher:
    """Several programs share a row, which may begin at an odd place, in two launches."""
    count, columns, dtype, out, _ = s
    start = split.shares_launcher(count, columns, dtype, dict(config), device, backward)
    space = split.shares_space(count, columns, dict(config), backward)
    return _launcher(start, out, dtype, device, space)


def _register(
    id: str,
    describe: Callable[[Key], Any],
    configs: Callable[..., Sequence[Config]],
    build: Callable[..., Launcher],
    *kernels: Any,
) -> None:
    """Forward and backward; `configs` and `build` are told which."""
    sources = (*kernels, rows, contiguous_rows, device_math, sys.modules[__name__])
    for op, backward in ((SOFTMAX, False), (SOFTMAX_BACKWARD, True)):
        ways = partial(configs, backward=backward), partial(build, backward=backward)
        register.described(op, id, describe, *ways, sources)


_register(
    "triton.rows",
    describe_rows,
    lambda s, backward: rows.softmax_configs(s[1], s[2], backward),
    build_rows,
)
_register("triton.lines", describe_lines, lines_configs, build_lines, strided, strided_lines)
_register(
    "triton.parts", describe_parts, parts_configs, build_parts, strided_split, strided, strided_lines
)  # fmt: skip
_register(
    "triton.held", describe_held, held_configs, build_held,
    smem_kernel, smem, fused_backward_smem, fused_backward_smem_kernel, fused_backward, exact_exp, shared_memory,
)  # fmt: skip
_register(
    "triton.groups",
    describe_groups,
    lambda s, backward: ragged.groups_configs(s[1], s[2], backward),
    build_groups,
    ragged,
    ragged_rows,
)
_register(
    "triton.shares", describe_shares, shares_configs, build_shares, split, split_rows, ragged_rows
)
