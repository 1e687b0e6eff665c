"""Every op as a registered PyTorch op, for torch.compile, torch.export, torch.func and tensor subclasses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._library import simple_registry
from torch._library.autograd import Info, make_autograd_impl

from ..core import saved_tensors
from ..core.candidate import EAGER, Outputs
from ..core.op import Op
from ..system import capture_state
from . import autograd, bound_call

# `torch.library.custom_op` does the same in five times the time: 23 of 64 ms of the import (Intel Xeon, 2026-11-21).
LIBRARY = torch.library.Library("tensorlogic", "FRAGMENT")

_AUTOGRAD = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther)
_TYPES: dict[Any, str] = {t: t.__name__ for t in (str, bool, int, float)}
_TYPES |= {t | None: f"{t.__name__}?" for t in (str, int, float)}


def schema(op: Op) -> str:
    """The op's signature in PyTorch's schema language."""

    def kind(p: Any) -> str:
        if p.is_tensor:
            return "Tensor" if p.kind == "tensor" else "Tensor?"
        return _TYPES.get(p.annotation, "int[]?")

    returns = ", ".join(["Tensor"] * op.outputs)
    return f"({', '.join(f'{kind(p)} {p.name}' for p in op.params)}) -> {returns if op.outputs == 1 else f'({returns})'}"


def register(op: Op) -> None:
    """Define `tensorlogic::<op>` with its kernel, fake kernel and autograd formula."""

    def kernel(*args: Any) -> Any:
        given = _flags(op, args)
        outs = bound_call.outputs(op, given, compiled=True)
        if not op.internal and any(o is None for o in outs):
            outs = eager_outputs(op, given)  # graphs rely on all that the fake kernel declares
        return _filled(op, outs, args)

    def fake(*args: Any) -> Any:
        with _above_autograd():
            return _filled(op, eager_outputs(op, _flags(op, args)), args)

    LIBRARY.define(op.name + schema(op), tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(op.name, _disable_dynamo(kernel), "CompositeExplicitAutograd")
    LIBRARY.impl(op.name, _recorded(op), "Autograd", with_keyset=True)
    # What torch.library.register_fake does, less looking up, for every op, from which line it was called.
    entry = simple_registry.singleton.find(f"tensorlogic::{op.name}")
    LIBRARY._registration_handles.append(entry.fake_impl.register(fake, __file__, lib=LIBRARY))


@contextlib.contextmanager
def _above_autograd() -> Iterator[None]:
    """Calls begin above autograd, as a user's do, and record nothing.

    Below it, fake tensors take `torch._refs` for aten.nll_loss (PyTorch 2.13), which reads "none" as "mean".
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.no_grad():
        yield


def _recorded(op: Op) -> Callable[..., Any]:
    """The op's autograd kernel: what `torch.library.register_autograd` makes, made when it is first called."""

    @functools.cache
    def made() -> Callable[..., Any]:
        info = Info(None, None)
        if op.gradient is not None:
            info = Info(functools.partial(_backward, op), functools.partial(_setup, op))
        return make_autograd_impl(getattr(torch.ops.tensorlogic, op.name).default, info)

    return lambda keyset, *args: made()(keyset, *args)


def _flags(op: Op, args: Sequence[Any]) -> tuple[Any, ...]:
    """Lists become tuples again, so that flags can be hashed."""
    return tuple(tuple(a) if isinstance(a, list) else a for a in args)


def eager_outputs(op: Op, args: Sequence[Any]) -> Outputs:
    """What the plain composition gives: shapes, strides and dtypes of all outputs for fake tensors."""
    pairs = [*zip(op.params, args, strict=True)]
    flags = SimpleNamespace(flags=[(p.name, a) for p, a in pairs if not p.is_dynamic])
    device = next(a.device for a in args if isinstance(a, Tensor))
    launch = op.candidates[EAGER].bind(flags, {}, device)  # type: ignore[arg-type]
    outs = launch(*[a for p, a in pairs if p.is_dynamic])
    assert outs is not None
    return outs


def _filled(op: Op, outs: Outputs, args: Sequence[Any]) -> Any:
    """A registered op returns tensors only, with storage of their own: absent outputs are empty ones."""
    first = next(a for a in args if isinstance(a, Tensor))
    taken = {_storage(a) for a in args if isinstance(a, Tensor)}
    filled = []
    for out in (*outs, *[None] * (op.outputs - len(outs))):
        own = first.new_empty(0) if out is None else out.clone() if _storage(out) in taken else out
        taken.add(_storage(own))
        filled.append(own)
    return filled[0] if op.outputs == 1 else tuple(filled)


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def traced(op: Op, args: Sequence[Any]) -> Any:
    """Call the registered op with op-level arguments (without `save`); returns what the public call does."""
    if op.internal:
        return traced_all(op, args)
    given = tuple(args)
    if op.functional is not None:
        args = op.functional(given)
    if op.gradient is not None:
        tensors = [a for a in args if isinstance(a, Tensor)]
        args = (*args, torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    outs = traced_all(op, args)
    if op.update is not None:
        op.update(given, outs)
    return outs[0]


def traced_all(op: Op, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Call the registered op with all its arguments; returns every output."""
    registered = getattr(torch.ops.tensorlogic, op.name)
    if torch.compiler.is_dynamo_compiling():
        out = registered(*args)
    else:
        # its kernel cannot see the modes it was called under
        with capture_state.measuring_disabled():
            out = registered(*args)
    return (out,) if op.outputs == 1 else tuple(out)


def _setup(op: Op, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    assert op.gradient is not None
    dynamic = tuple(a for p, a in zip(op.params, inputs, strict=True) if p.is_dynamic)
    pairs = zip(op.params, _flags(op, inputs), strict=True)
    flags = SimpleNamespace(**{p.name: a for p, a in pairs if not p.is_dynamic})
    outs = (output,) if op.outputs == 1 else tuple(output)
    # called directly and yet recorded: run again what backward needs
    if not flags.save:
        outs = traced_all(op, (*inputs[:-1], True))
        flags.save = True
    ctx.set_materialize_grads(False)  # so that a gradient of what only backward uses shows
    ctx.flags = flags
    ctx.scalars = tuple(a for p, a in zip(op.dynamic, dynamic, strict=True) if not p.is_tensor)
    needs = tuple(n for p, n in zip(op.params, ctx.needs_input_grad, strict=False) if p.is_tensor)
    saved, ctx.looks = saved_tensors.split(op.gradient.save(flags, needs, dynamic, outs))
    ctx.save_for_backward(*saved)


def _backward(op: Op, ctx: Any, dy: Tensor | None, *others: Any) -> tuple[Any, ...]:
    if dy is None or any(g is not None for g in others):
        raise RuntimeError(
            f"{op.name}: double backward is not available through the registered op, whose other outputs have no gradient; "
            f"compute it under tensorlogic.policy(force='torch.eager') with plain tensors"
        )

    needs = [n for p, n in zip(op.params, ctx.needs_input_grad, strict=True) if p.is_dynamic]
    saved = saved_tensors.joined(ctx.saved_tensors, ctx.looks)
    grads = iter(autograd.gradients(op, ctx.flags, needs, saved, ctx.scalars, dy))
    return tuple(next(grads) if p.is_dynamic else None for p in op.params)
