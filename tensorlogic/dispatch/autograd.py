"""Calls whose gradients are recorded: our node in PyTorch's autograd graph, and the backward ops that it calls."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core import policy as policies
from ..core import saved_tensors
from ..core.candidate import EAGER, Launcher, Outputs
from ..core.key import Key
from ..core.op import Op
from ..native import call_extension
from . import decision
from .call_cache import Run


class Recordable(Protocol):
    """What is recorded: one key bound to its launcher, see `binding.Bound`."""

    op: Op
    key: Key
    flags: SimpleNamespace
    policy: policies.Policy
    choice: decision.Choice
    scalars: tuple[int, ...]

    def rescue(
        self, choice: decision.Choice, dynamic: Sequence[Any], problem: torch.OutOfMemoryError
    ) -> Outputs | None: ...

    def anew(self, dynamic: Sequence[Any]) -> Outputs: ...


class Recording:
    """A launcher whose calls are recorded: `forward` and `backward` of the Function `Recorded`, for one key."""

    __slots__ = ("apply", "bound", "launch", "looks", "places")

    def __init__(self, bound: Recordable, launch: Launcher, apply: Run) -> None:
        self.bound, self.launch, self.apply = bound, launch, apply
        # what is kept of arguments and outputs, None until a call has shown it; and of what the look only, if of any
        self.places: tuple[int, ...] | None = None
        self.looks: list[saved_tensors.SavedMeta | None] | None = None

    def __call__(self, *dynamic: Any) -> Any:
        return self.apply(self, *dynamic)

    def compiled(self, two_ways: bool) -> Run | None:
        """The same in C, or None."""
        able = call_extension.is_plan if two_ways else call_extension.is_launcher
        if self.places is None or not able(self.launch):
            return None
        scalars = self.bound.scalars
        made: Run = call_extension.module().Recording(
            self, self.apply, self.launch, self.places, scalars, two_ways
        )
        return made

    def forward(self, ctx: Any, *dynamic: Any) -> Any:
        bound, own = self.bound, True
        try:
            outs = self.launch(*dynamic)
        except torch.OutOfMemoryError as problem:
            own, outs = False, bound.rescue(bound.choice, dynamic, problem)
        if outs is None:  # less aligned than the launcher was built for
            own, outs = False, bound.anew(dynamic)
        assert bound.op.gradient is not None
        assert outs[0] is not None
        # which PyTorch lets nobody write to where a Function returns it
        if outs[0]._is_view():
            outs = (outs[0].data, *outs[1:])
        ctx.record = self
        ctx.scalars = tuple([dynamic[i] for i in bound.scalars])
        needs = _of_tensors(bound.op, ctx.needs_input_grad[1:])
        kept = bound.op.gradient.save(bound.flags, needs, dynamic, outs)
        saved, looks = saved_tensors.split(kept)
        ctx.save_for_backward(*saved)
        self.looks = looks if any(looks) else None  # the same in every call of a key
        if own and self.places is None:
            self.places = _places(saved, (*dynamic, *outs))
        return outs[0]

    def backward(self, ctx: Any, dy: Tensor) -> list[Any]:
        bound = self.bound
        assert bound.op.gradient is not None
        inputs_alone = bound.op.gradient.light and bound.choice.candidate.id == EAGER
        if torch.is_grad_enabled() and not inputs_alone:  # what else is kept has no gradient
            raise RuntimeError(
                f"{bound.op.name}: double backward is not available through candidate {bound.choice.candidate.id}; "
                f"compute it under tensorlogic.policy(force='torch.eager')"
            )
        needs, saved = ctx.needs_input_grad[1:], ctx.saved_tensors
        if self.looks is not None:
            saved = saved_tensors.joined(saved, self.looks)
        once = bound.op.gradient.once
        if once is not None and len(saved) > once:
            if getattr(ctx, "spent", False):
                saved = (*saved[:once], None, *saved[once + 1 :])
            ctx.spent = True
        given = (bound.op, bound.flags, needs, saved, ctx.scalars, dy)
        if bound.policy is policies.current():
            return gradients(*given)
        with policies.use(bound.policy):  # backward threads do not inherit the caller's context
            return gradients(*given)


def _places(saved: Sequence[Any], known: Sequence[Any]) -> tuple[int, ...] | None:
    """Where among `known` each of `saved` is, -1 for None; None where one is something else."""
    at = {id(k): i for i, k in reversed([*enumerate(known)])}
    found = [-1 if s is None else at.get(id(s), -2) for s in saved]
    return None if -2 in found else tuple(found)


class Recorded(torch.autograd.Function):
    """An op whose gradients are recorded: forward by the chosen candidate, backward by the op's own backward ops."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, *dynamic: Any) -> Any:
        return recording.forward(ctx, *dynamic)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.record.backward(ctx, dy))


def _compiled(module: Any) -> None:
    Recorded.forward = staticmethod(module.forward)  # type: ignore[method-assign]


# what PyTorch's own does, which looks for a `vjp` first
Recorded._backward_cls.apply = Recorded.backward  # type: ignore[attr-defined]
call_extension.ON_LOAD.append(_compiled)

# What torch.autograd.Function.apply comes to outside of torch.func's transforms, in which no key is bound: 1.5 µs less.
_record: Run = super(torch.autograd.Function, Recorded).apply


def _alive(arg: Any) -> bool:
    """False for what a finished transform of torch.func has left around a tensor; Function.apply unwraps it."""
    return not isinstance(arg, Tensor) or torch._C._functorch.unwrap_if_dead(arg) is arg


def applied(args: Sequence[Any]) -> Run:
    """How a recording is called with such arguments."""
    return _record if all(map(_alive, args)) else Recorded.apply


def _of_tensors(op: Op, needs: Sequence[bool]) -> tuple[bool, ...]:
    """Of one truth for each dynamic parameter those of the tensors."""
    if len(op.tensors) == len(op.dynamic):
        return tuple(needs)
    return tuple([n for p, n in zip(op.dynamic, needs, strict=True) if p.is_tensor])


def gradients(
    op: Op,
    flags: SimpleNamespace,
    needs: Sequence[bool],
    saved: tuple[saved_tensors.Saved, ...],
    scalars: tuple[Any, ...],
    dy: Tensor,
) -> list[Any]:
    """Gradients for every dynamic parameter (None for scalars and for what needs none)."""
    assert op.gradient is not None
    if op.gradient.again and dy.layout is torch.strided and 0 in dy.stride():
        dy = dy.contiguous()  # the gradient of a sum
    if len(op.tensors) == len(op.dynamic):
        return [*op.gradient.backward(flags, tuple(needs), saved, scalars, dy)]
    grads = iter(op.gradient.backward(flags, _of_tensors(op, needs), saved, scalars, dy))
    return [next(grads) if p.is_tensor else None for p in op.dynamic]
