"""Reductions by Triton: over [outer, reduce, inner] or any strides, and over rows that are one value, ragged, few or short."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.reduce import contiguous, one_wave, packed_rows, ragged, split
from ...kernels.reduce import strided as reduce_strided
from ...kernels.row_access import contiguous as contiguous_rows
from ...kernels.row_access import ragged as ragged_rows
from ...kernels.row_access import split as split_rows
from ...kernels.softmax import rows as softmax_rows
from ...kernels.triton_runtime import device_math, scratch
from ...system.compile_pool import CompileFailure
from . import FAMILY, shapes
from .shapes import Shape, describe_any

WHOLE = 16384  # halves of a row that one program reads at once
MOST_POLLED = 2**30  # elements that polling programs count


class Started(NamedTuple):
    """`start(x, y, partial, counter)`, how many float32 partial results and counters it takes, and what counters it takes."""

    start: Callable[..., bool]
    space: tuple[int, int] = (0, 0)
    counted: torch.dtype = torch.int32
    use: str = "zero"


def build(
    started: Callable[[Shape, dict[str, Any], torch.device], Started],
    s: Shape,
    config: Config,
    device: torch.device,
) -> Launcher:
    """A launcher with its workspace; where nothing is asked for, `start` gets y instead."""
    start, (partials, count), counted, use = started(s, dict(config), device)
    empty, counters, stride = register.empty(device), scratch.counters, register.contiguous(s.out)
    dtype = DTYPES[s.dtype]

    def launch(x: torch.Tensor) -> Any:
        y = empty(s.out, stride, dtype)
        partial = empty((partials,), (1,), torch.float32) if partials else y
        counter = counters(device, count, counted, use) if count else y
        return (y,) if start(x, y, partial, counter) else None

    return launch


def blocks_configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations of [outer, reduce, inner] or any strides, best guess first."""
    if s.view is not None:
        return reduce_strided.strided_configs(_lay(s), s.dtype, register.cores())
    known = contiguous.reduce_configs(s.outer, s.reduce, s.inner, s.dtype, register.cores())
    if s.inner == 1:
        own = _rows(s, register.cores()) if s.outer > 1 else []
        # rows a program, beyond which most of the device idles
        most = 4 * s.outer // register.cores()
        if own:
            known = [c for c in known if c.get("BLOCK_R", 1) <= max(1, most)]
        return (own + [c for c in known if c not in own])[:9]
    tiles = reduce_strided.column_tiles(s.outer, s.reduce, s.inner, s.dtype, register.cores())
    own = [{"strategy": "columns", "last": tile["parts"] > 1, **tile} for tile in tiles[:7]]
    twice = [{**c, "last": False} for c in own[:1] if c["last"]] + _twice(s, register.cores())
    found = [*own, *twice, *known[:1]]
    return [c for i, c in enumerate(found) if c not in found[:i]]


def _twice(s: Shape, cores: int) -> list[dict[str, Any]]:
    """Columns in few parts, which a second launch combines soonest: narrow ones, two programs a multiprocessor, and as many as few rows
    fill; and lines of 256 bytes where one part of them has a program for every multiprocessor."""
    found, line = [], 64 if s.dtype == "f32" else 128
    for narrow, rows, few in ((32, 64, 2 * cores), (16, min(64, 1 << (s.reduce - 1).bit_length()), 4 * cores), (line, 64, 4 * cores)):  # fmt: skip
        block_c = min(narrow, 1 << (s.inner - 1).bit_length())
        tiles = s.outer * -(-s.inner // block_c)
        if narrow == line and tiles < cores:
            continue
        parts = min(-(-s.reduce // rows), few // tiles, 128)
        config = {"parts": parts, "last": False, "BLOCK_R": rows, "BLOCK_C": block_c}
        small = parts == 1 and reduce_strided.FEW < s.reduce <= rows and narrow < 32
        if (parts > 1 and s.reduce <= reduce_strided.CHAIN * rows * parts) or small:
            found.append({"strategy": "columns", **config, "num_warps": 4})
    return found


def _rows(s: Shape, cores: int) -> list[dict[str, Any]]:
    """Rows that occupy the whole device: few are read at once, short ones by small programs, not many long ones by large."""
    wide, block = (2 if s.dtype == "f32" else 1), 1 << (s.reduce - 1).bit_length()
    if s.outer < cores:
        whole = 1024 < block <= WHOLE // wide
        shapes = [(1, block, block // each) for each in (1024, 512)] if whole else []
    elif s.reduce > 4096 // wide:
        shapes = [(1, 8192 // wide, 8)] if s.outer < 4 * cores else []
    else:
        each = 1 << (s.outer // cores).bit_length() - 1
        few = [r for r in (each, 4 * each) if r * block < 2048 // wide]
        shapes = [(r, block, max(1, r * block // 256)) for r in few]
    rows = {"strategy": "rows", "parts": 1, "last": False}
    return [
        {**rows, "BLOCK_R": r, "BLOCK_C": c, "num_warps": warps}
        for r, c, warps in shapes
        if warps <= 16
    ]


def _lay(s: Shape) -> reduce_strided.Lay:
    assert s.view is not None
    return reduce_strided.lay(s.view.kept, s.view.reduced, s.view.along, s.dtype, s.align)


def blocks(s: Shape, config: dict[str, Any], device: torch.device) -> Started:
    """One launch, whose last block finishes in fixed order, or two."""
    if s.view is not None:
        form = _lay(s)
        return Started(
            reduce_strided.strided_launcher(
                s.kind, s.dtype, s.dtype, form, config, device, s.align
            ),
            reduce_strided.strided_workspace(form, config),
        )
    strategy, few = config["strategy"], s.reduce <= MOST_POLLED
    if strategy in ("along", "across"):
        raise CompileFailure(f"a configuration {strategy!r} of strided data; this is contiguous")
    if strategy != "columns" and s.inner > 1:
        raise CompileFailure(f"{strategy!r} reduces the last dimension; here columns are kept")
    if strategy == "polled" and not (s.outer == 1 and few):
        raise CompileFailure(f"'polled' leaves one value of up to {MOST_POLLED} elements")
    sizes = s.outer, s.reduce, s.inner
    start = contiguous.reduce_launcher(s.kind, s.dtype, s.dtype, *sizes, config, device, s.align)
    space = contiguous.reduce_workspace(*sizes, config)
    polled = (torch.int64, "launches") if strategy == "polled" else ()
    return Started(start, space, *polled)


def describe_whole(key: Key) -> Shape | str:
    """A dense tensor that is reduced to one value, neither tiny nor far beyond the cache."""
    found = describe_any(key)
    if isinstance(found, str):
        return found
    if found.outer * found.inner != 1:
        return "more than one value is left"
    if found.view is not None:
        return "not dense"
    if not one_wave.spun_configs(found.reduce, found.dtype):
        return f"from {one_wave.LEAST} elements to 32 MB are required"
    return found


def whole(s: Shape, config: dict[str, Any], device: torch.device) -> Started:
    """One wave of programs, the last of which waits for the others."""
    if one_wave.spun_parts(s.reduce, config) > one_wave.MOST_PARTS:
        config = one_wave.spun_configs(s.reduce, s.dtype)[0]  # a smaller neighbour's
    start = one_wave.spun_launcher(s.kind, s.dtype, s.dtype, s.reduce, config, device, s.align)
    count = one_wave.spun_parts(s.reduce, config)
    return Started(lambda x, y, _, counter: start(x, y, counter), (0, count), torch.int64, "spins")


def _described_rows(key: Key) -> Shape | str:
    found = describe_any(key)
    if isinstance(found, str) or (found.view is None and found.inner == 1):
        return found
    return "no rows of contiguous memory"


def describe_ragged(key: Key) -> Shape | str:
    """Rows of contiguous memory that are no multiple of 16 bytes, of a tensor that begins at one, and as many as there are programs for."""
    found = _described_rows(key)
    if isinstance(found, str):
        return found
    if found.outer < register.cores():
        return "fewer rows than multiprocessors"
    return ragged_rows.refusal(found.reduce, found.dtype, found.align) or found


def in_groups(s: Shape, config: dict[str, Any], device: torch.device) -> Started:
    """Whole aligned groups of 16 bytes, and the ends apart."""
    start = ragged.groups_launcher(s.kind, s.dtype, s.outer, s.reduce, config, device)
    return Started(lambda x, y, *_: start(x, y))


def shares_configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations of rows that several programs share, best guess first."""
    return split.shares_configs(s.outer, s.reduce, s.dtype, register.cores())


def describe_split(key: Key) -> Shape | str:
    """Few, long rows of contiguous memory that are no multiple of 16 bytes, of a tensor that begins at one."""
    found = _described_rows(key)
    if isinstance(found, str):
        return found
    refused = ragged_rows.refusal(found.reduce, found.dtype, found.align)
    refused = refused or split_rows.refusal(
        found.outer, found.reduce, found.align, register.cores()
    )
    if refused or shares_configs(found):
        return refused or found
    return "shares would be longer than sums are exact"


def in_shares(s: Shape, config: dict[str, Any], device: torch.device) -> Started:
    """Several programs a row, in one launch."""
    start = split.shares_launcher(s.kind, s.dtype, s.outer, s.reduce, config, device)
    return Started(start, split.shares_workspace(s.outer, s.reduce, config))


def abreast_configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations of rows that are read as one line, best guess first."""
    return packed_rows.abreast_configs(s.reduce, s.inner, s.dtype, register.cores())


def describe_packed(key: Key) -> Shape | str:
    """Contiguous [rows, columns] whose rows are reduced, columns being few or no multiple of 16 bytes."""
    found = describe_any(key)
    if isinstance(found, str):
        return found
    if found.view is not None or found.inner == 1 or found.outer > 1:
        return "no leading dimension of contiguous memory"
    refused = packed_rows.refusal(found.inner, found.dtype, found.align)
    fit = max(found.reduce, found.inner) <= shapes.MOST
    if refused or (fit and abreast_configs(found)):
        return refused or found
    return "too few rows, or more than are counted"


def abreast(s: Shape, config: dict[str, Any], device: torch.device) -> Started:
    """Several rows as one line, where rows are short or begin at odd places."""
    start = packed_rows.abreast_launcher(s.kind, s.dtype, s.reduce, s.inner, config, device)
    return Started(start, packed_rows.abreast_workspace(s.inner, config))


def _register(
    id: str,
    describe: Callable[[Key], Shape | str],
    configs: Callable[[Shape], Sequence[Config]],
    started: Callable[[Shape, dict[str, Any], torch.device], Started],
    *kernels: Any,
) -> None:
    sources = (*kernels, contiguous, shapes, sys.modules[__name__])
    for op in FAMILY:
        register.described(op, id, describe, configs, partial(build, started), sources)


_ROWS = (ragged_rows, softmax_rows, contiguous_rows, device_math)
_register("triton.blocks", describe_any, blocks_configs, blocks, reduce_strided)
_register(
    "triton.spins",
    describe_whole,
    lambda s: one_wave.spun_configs(s.reduce, s.dtype),
    whole,
    one_wave,
)
_register(
    "triton.groups",
    describe_ragged,
    lambda s: ragged.groups_configs(s.reduce, s.dtype),
    in_groups,
    ragged,
    *_ROWS,
)
_register("triton.shares", describe_split, shares_configs, in_shares, split, split_rows, *_ROWS)
_register("triton.abreast", describe_packed, abreast_configs, abreast, packed_rows, ragged_rows)
