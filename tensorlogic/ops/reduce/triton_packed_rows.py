"""Reductions by Triton over leading dimensions where rows are short or begin at odd places: several are read as one line."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.key import Key
from ...kernels import register
from ...kernels.reduce import contiguous, packed_rows
from ...kernels.row_access import ragged as ragged_rows
from . import FAMILY, shapes, triton_launcher
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Contiguous [rows, columns] whose rows are reduced, columns being few or no multiple of 16 bytes."""
    found = shapes.describe_any(key)
    if isinstance(found, str):
        return found
    if found.view is not None or found.inner == 1 or found.outer > 1:
        return "no leading dimension of contiguous memory"
    refused = packed_rows.refusal(found.inner, found.dtype, found.align)
    if refused or (max(found.reduce, found.inner) <= shapes.MOST and configs(found)):
        return refused or found
    return "too few rows, or more than are counted"


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return packed_rows.abreast_configs(s.reduce, s.inner, s.dtype, register.cores())


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher with its workspace."""
    start = packed_rows.abreast_launcher(s.kind, s.dtype, s.reduce, s.inner, dict(config), device)
    space = packed_rows.abreast_workspace(s.inner, dict(config))
    return triton_launcher.with_space(s, start, space, device)


_SOURCES = (packed_rows, ragged_rows, contiguous, shapes, sys.modules[__name__])
for _op in FAMILY:
    register.described(_op, "triton.abreast", describe, configs, build, _SOURCES)
