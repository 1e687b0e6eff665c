"""Copies that leave what they were made from untouched: of module trees with the same parameters, of inputs, of random state."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...guards.tensor_tree import tensors_in
from .widening import widen


def sharing(model: nn.Module, buffers: bool = True) -> nn.Module:
    """A copy of the module tree with the same parameters and, if asked, the same buffers and other tensors."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    if buffers:
        memo |= {id(b): b for b in model.buffers()}
        for module in model.modules():
            memo |= {id(v): v for v in vars(module).values() if isinstance(v, Tensor)}
    return copy.deepcopy(model, memo)


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **dict(model.named_buffers(remove_duplicate=False))}


def undisturbed() -> Any:
    """The default generators of the CPU and the current GPU are as before afterwards."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])


def fresh(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs that a call may change: objects copied, tensors with memory of their own, floating ones as `dtype` if given."""
    memo: dict[int, Any] = {}
    for t in tensors_in((args, kwargs)):
        like = t.detach().clone() if dtype is None else widen(t, dtype)
        memo[id(t)] = like.requires_grad_(t.requires_grad)
    return copy.deepcopy(args, memo), copy.deepcopy(dict(kwargs), memo)


@contextlib.contextmanager
def unsearched() -> Iterator[None]:
    """What exists already is not searched for garbage meanwhile, as far as nobody else has a say in that."""
    own = gc.get_freeze_count() == 0
    if own:
        gc.freeze()
    try:
        yield
    finally:
        if own:
            gc.unfreeze()


@contextlib.contextmanager
def unwritten(model: nn.Module) -> Iterator[list[Tensor]]:
    """Parameters and buffers are and hold what they were and held before; yields those written to, once that is known."""
    kept = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    tables: list[tuple[dict[str, Any], dict[str, Any]]]
    tables = [(t, dict(t)) for m in model.modules() for t in (m._parameters, m._buffers)]
    written: list[Tensor] = []
    try:
        yield written
    finally:
        for table, held in tables:
            table.update({n: t for n, t in held.items() if t is not None})
        with torch.no_grad():
            for tensor, before in kept:
                if not torch.equal(tensor, before):
                    written.append(tensor)
                    tensor.detach().copy_(before)
