"""Reductions by Triton: [outer, reduce, inner], or any strides, in one launch (the last block finishes in fixed order) or in two."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...kernels import register
from ...kernels.reduce import contiguous
from ...kernels.reduce import strided as reduce_strided
from ...system.compile_pool import CompileFailure
from . import FAMILY, shapes, triton_launcher
from .shapes import Shape, describe_any

Started = tuple[Callable[..., bool], tuple[int, int]]
WHOLE = 16384  # halves of a row that one program reads at once
MOST_POLLED = 2**30  # elements that polling programs count


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
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


def _contiguous(s: Shape, config: dict[str, Any], device: torch.device) -> Started:
    """Start and workspace of contiguous [outer, reduce, inner]."""
    strategy, few = config["strategy"], s.reduce <= MOST_POLLED
    if strategy in ("along", "across"):
        raise CompileFailure(f"a configuration {strategy!r} of strided data; this is contiguous")
    if strategy != "columns" and s.inner > 1:
        raise CompileFailure(f"{strategy!r} reduces the last dimension; here columns are kept")
    if strategy == "polled" and not (s.outer == 1 and few):
        raise CompileFailure(f"'polled' leaves one value of up to {MOST_POLLED} elements")
    start = contiguous.reduce_launcher(
        s.kind, s.dtype, s.dtype, s.outer, s.reduce, s.inner, config, device, s.align
    )
    return start, contiguous.reduce_workspace(s.outer, s.reduce, s.inner, config)


def _strided(s: Shape, config: dict[str, Any], device: torch.device) -> Started:
    """Start and workspace of what lies apart."""
    form = _lay(s)
    start = reduce_strided.strided_launcher(s.kind, s.dtype, s.dtype, form, config, device, s.align)
    return start, reduce_strided.strided_workspace(form, config)


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher with its workspace."""
    chosen = dict(config)
    started = _contiguous if s.view is None else _strided
    start, space = started(s, chosen, device)
    polled = chosen["strategy"] == "polled"
    counted, use = (torch.int64, "launches") if polled else (torch.int32, "zero")
    return triton_launcher.with_space(s, start, space, device, counted, use)


for _op in FAMILY:
    register.described(
        _op,
        "triton.blocks",
        describe_any,
        configs,
        build,
        (contiguous, reduce_strided, shapes, sys.modules[__name__]),
    )
