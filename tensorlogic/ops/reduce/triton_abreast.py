"""Reductions by Triton over leading dimensions where rows are short or begin at odd places: several are read as one line."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.key import Key
from ..common import triton_groups, triton_reduce, triton_reduce_abreast, wiring
from . import FAMILY, launching, shapes
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Contiguous [rows, columns] whose rows are reduced, columns being few or no multiple of 16 bytes."""
    found = shapes.describe_any(key)
    if isinstance(found, str):
        return found
    if found.view is not None or found.inner == 1 or found.outer > 1:
        return "no leading dimension of contiguous memory"
    refused = triton_reduce_abreast.refusal(found.inner, found.dtype, found.align)
    if refused or (max(found.reduce, found.inner) <= shapes.MOST and configs(found)):
        return refused or found
    return "too few rows, or more than are counted"


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return triton_reduce_abreast.abreast_configs(s.reduce, s.inner, s.dtype, wiring.cores())


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher with its workspace."""
    start = triton_reduce_abreast.abreast_launcher(
        s.kind, s.dtype, s.reduce, s.inner, dict(config), device
    )
    space = triton_reduce_abreast.abreast_workspace(s.inner, dict(config))
    return launching.with_space(s, start, space, device)


_SOURCES = (triton_reduce_abreast, triton_groups, triton_reduce, shapes, sys.modules[__name__])
for _op in FAMILY:
    wiring.described(_op, "triton.abreast", describe, configs, build, _SOURCES)
