"""Measuring within a caller's call: what the caller may notice stays as it was."""

from __future__ import annotations

import contextlib

import torch

from ..core.op import Op
from ..native import hook_ops
from ..system import function_modes


class preserved:
    """Keep what the caller may notice: default device, autocast and inference mode, current device and stream.

    Inside, PyTorch is what it is without `enable`. A default generator is put back only for an op that draws from it, as candidates
    on a CPU never do: another thread may draw meanwhile, and would be given the same numbers again.
    """

    def __init__(self, device: torch.device, op: Op | None = None) -> None:
        self.device = device
        self.draws = op is not None and op.draws

    def __enter__(self) -> None:
        kind = self.device.type if self.draws else "cpu"
        self.cuda = torch.cuda.get_rng_state(self.device) if kind == "cuda" else None
        self.mps = torch.mps.get_rng_state() if kind == "mps" else None
        self.modes = contextlib.ExitStack()
        self.modes.enter_context(torch.inference_mode(mode=False))
        self.modes.enter_context(torch.autocast(self.device.type, enabled=False))
        self.modes.enter_context(hook_ops.suspended())
        self.modes.enter_context(function_modes.aside())

    def __exit__(self, *problem: object) -> None:
        self.modes.close()
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)
