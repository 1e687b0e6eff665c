"""One key bound to the launcher that was chosen for it: run as it is or recorded for autograd, and kept as a warm key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from . import calls, capture_watch, front, kept, policies, selector
from .op import EAGER, Launcher, Op, Outputs
from .plans import Key

Run = Callable[..., Any]
MOST_ENTRIES = 8192  # warm keys of one policy
FOLLOWED = ("cuda",)  # devices whose kernels, not the host, set the time of PyTorch's gradients
HEAVY_BYTES, HEAVY_FLOPS = (
    32e6,
    1e10,
)  # of a forward pass whose kernels take longer than the host does for our node


class Bound:
    """One key of one policy, bound to the launcher that was chosen for it."""

    __slots__ = (
        "cacheable",
        "choice",
        "device",
        "flags",
        "key",
        "launch",
        "op",
        "outside",
        "policy",
        "record",
        "run",
        "scalars",
        "two_ways",
        "unpaired",
    )

    def __init__(
        self,
        op: Op,
        args: Sequence[Any],
        chosen: policies.Policy,
        recording: bool,
        compiled: bool = False,
        paired: bool = True,
    ) -> None:
        self.op, self.policy, self.device = op, chosen, device_of(args)
        saving = recording or (op.gradient is not None and bool(args[-1]))
        self.key: Key = op.key(
            args,
            "forward" if saving else "backward" if op.internal else "inference",
            "default" if op.listed or chosen.precision is None else chosen.precision.mode,
        )
        self.flags: SimpleNamespace = op.namespace(self.key)
        watched = chosen.observer is not None  # who watches must meet the backward ops, too
        self.choice = selector.choose(
            op, self.key, args, chosen, compiled=compiled, whole=watched or not recording
        )
        joint = selector.joint(op, self.key, args, chosen) if recording and paired else None
        light = op.gradient is not None and op.gradient.light
        self.unpaired = Bound(op, args, chosen, True, compiled, False) if joint and light else None
        if joint is not None:
            self.choice, self.flags.settle = joint
        self.launch: Launcher = self.choice.launch
        self.cacheable = self.choice.cacheable
        self.record: Run = _record if all(map(_alive, args)) else Recorded.apply
        self.scalars = tuple(i for i, p in enumerate(op.dynamic) if not p.is_tensor)
        behind = recording and self._followed()  # where eager serves it
        heavy = behind and (op.traffic(self.key) > HEAVY_BYTES or op.flops(self.key) > HEAVY_FLOPS)
        captured = self.choice.captured or (self.choice if behind and not heavy else None)
        self.run: Run = self._runner(self.choice, recording, heavy)
        self.outside: Run = self.run  # of captures
        self.two_ways = captured is not None
        if captured is not None:
            self.run = _two_ways(self.run, self._runner(captured, recording, behind))
        if self.unpaired is not None:
            self.run = _unhooked(self.run, self.unpaired.run)

    def _followed(self) -> bool:
        """Whether our backward pass may stand behind PyTorch's forward, where that was chosen: forward's time alone decides who
        makes it, and often by little, while of gradients PyTorch's own may be the slowest."""
        light = self.op.gradient is not None and self.op.gradient.light
        served = EAGER in (c.candidate.id for c in (self.choice, self.choice.captured) if c)
        forced = self.policy.forced(self.op.name) == EAGER
        return light and served and self.device.type in FOLLOWED and not forced

    @property
    def shortest(self) -> tuple[Run, int]:
        """What a compiled front calls, and how, once the key has been served: the launcher itself where its outputs are all there is to do."""
        two = self.two_ways
        if self.unpaired is not None:
            return self.run, 0
        if isinstance(self.outside, Recording):
            return self.outside.compiled(two) or self.run, 0
        if calls.is_plan(self.launch):
            return self.launch, calls.WHOLE * self.op.internal | calls.OUTSIDE * two
        alone = not self.op.internal and not two
        if alone and self.choice.direct is not None:
            return self.choice.direct, 0
        return (self.launch if alone and calls.is_launcher(self.launch) else self.run), 0

    def _runner(self, choice: selector.Choice, recording: bool, behind: bool) -> Run:
        """From dynamic arguments to what the caller gets; None where the launcher declines. `behind`: eager's forward is recorded by
        our node, too."""
        launch, eager = choice.launch, choice.candidate.id == EAGER
        if recording and eager and behind:
            launch = choice.candidate.bind(self.key, {}, self.device)
        if recording and (not eager or behind or self.policy.observer is not None):
            return Recording(self, launch, self.record)

        def run(*dynamic: Any) -> Any:
            try:
                outs = launch(*dynamic)
            except torch.OutOfMemoryError as problem:
                outs = self.rescue(choice, dynamic, problem)
            return outs if outs is None or whole else outs[0]

        whole = self.op.internal
        return run

    def rescue(
        self, choice: selector.Choice, dynamic: Sequence[Any], problem: torch.OutOfMemoryError
    ) -> Outputs | None:
        """A candidate ran out of memory: eager takes this call; eager's own failure is the caller's."""
        if choice.candidate.id == EAGER:
            raise problem
        selector.say_once(
            self.op,
            choice.candidate.id,
            f"tensorlogic: {choice.candidate.id} ran out of memory on {self.key.text}; torch.eager serves it",
        )
        return self.op.candidates[EAGER].bind(self.key, {}, self.device)(*dynamic)

    def declined(self, dynamic: Sequence[Any]) -> Outputs:
        """A candidate declined the very key it was bound for: eager takes this call."""
        selector.say_once(
            self.op,
            self.choice.candidate.id,
            f"tensorlogic: {self.choice.candidate.id} declined {self.key.text}, which it was bound for; torch.eager serves it",
        )
        outs = self.op.candidates[EAGER].bind(self.key, {}, self.device)(*dynamic)
        assert outs is not None
        return outs


def _two_ways(eager: Run, captured: Run) -> Run:
    """Eager calls take one road, calls under graph capture the other."""
    capturing = torch.cuda.is_current_stream_capturing
    return lambda *dynamic: captured(*dynamic) if capturing() else eager(*dynamic)


def _unhooked(paired: Run, apart: Run) -> Run:
    """Calls under hooks on what is saved keep what PyTorch's own would: checkpoints compare it with what another choice keeps, and a hook
    may store floats in fewer bits."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks
    return lambda *dynamic: paired(*dynamic) if hooks(True) is None else apart(*dynamic)


class Recording:
    """A launcher whose calls are recorded: `forward` and `backward` of the Function `Recorded`, for one key."""

    __slots__ = ("apply", "bound", "launch", "looks", "places")

    def __init__(self, bound: Bound, launch: Launcher, apply: Run) -> None:
        self.bound, self.launch, self.apply = bound, launch, apply
        # what is kept of arguments and outputs, None until a call has shown it; and of what the look only, if of any
        self.places: tuple[int, ...] | None = None
        self.looks: list[kept.Look | None] | None = None

    def __call__(self, *dynamic: Any) -> Any:
        return self.apply(self, *dynamic)

    def compiled(self, two_ways: bool) -> Run | None:
        """The same in C, or None."""
        able = calls.is_plan if two_ways else calls.is_launcher
        if self.places is None or not able(self.launch):
            return None
        scalars = self.bound.scalars
        made: Run = calls.module().Recording(
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
            own, outs = False, outputs(bound.op, bound.op.full(bound.key, dynamic))
        assert bound.op.gradient is not None
        assert outs[0] is not None
        if outs[0]._is_view():  # which PyTorch lets nobody write to where a Function returns it
            outs = (outs[0].data, *outs[1:])
        ctx.record = self
        ctx.scalars = tuple([dynamic[i] for i in bound.scalars])
        needs = _of_tensors(bound.op, ctx.needs_input_grad[1:])
        saved, looks = kept.split(bound.op.gradient.save(bound.flags, needs, dynamic, outs))
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
            saved = kept.joined(saved, self.looks)
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
    found = [
        -1 if s is None else next((i for i, k in enumerate(known) if k is s), -2) for s in saved
    ]
    return None if -2 in found else tuple(found)


class Recorded(torch.autograd.Function):
    """An op whose gradients are recorded: forward by the chosen candidate, backward by the op's own backward ops."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, *dynamic: Any) -> Any:
        return recording.forward(ctx, *dynamic)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.record.backward(ctx, dy))


def _backward(node: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return (None, *node.record.backward(node, dy))


def _compiled(module: Any) -> None:
    Recorded.forward = staticmethod(module.forward)  # type: ignore[method-assign]


# what PyTorch's own does, which looks for a `vjp` first
Recorded._backward_cls.apply = _backward  # type: ignore[attr-defined]
calls.ON_LOAD.append(_compiled)

# What torch.autograd.Function.apply comes to outside of torch.func's transforms, in which no key is bound: 1.5 µs less.
_record: Run = super(torch.autograd.Function, Recorded).apply


def _alive(arg: Any) -> bool:
    """False for what a finished transform of torch.func has left around a tensor; Function.apply unwraps it."""
    return not isinstance(arg, Tensor) or torch._C._functorch.unwrap_if_dead(arg) is arg


def _of_tensors(op: Op, needs: Sequence[bool]) -> tuple[bool, ...]:
    """Of one truth for each dynamic parameter those of the tensors."""
    if len(op.tensors) == len(op.dynamic):
        return tuple(needs)
    return tuple([n for p, n in zip(op.dynamic, needs, strict=True) if p.is_tensor])


def gradients(
    op: Op,
    flags: SimpleNamespace,
    needs: Sequence[bool],
    saved: tuple[kept.Kept, ...],
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


def outputs(op: Op, args: Sequence[Any], *, compiled: bool = False) -> Outputs:
    """All outputs of op-level arguments (`save` included), nothing recorded: what the registered op runs."""
    chosen, dynamic = (
        policies.current(),
        [a for p, a in zip(op.params, args, strict=True) if p.is_dynamic],
    )
    if chosen.precision is not None and op.precise is not None:
        op = op.precise
    where = (
        op.name,
        compiled,
        *(
            a.shape if isinstance(a, Tensor) else a
            for p, a in zip(op.params, args, strict=True)
            if p.is_tensor or not p.is_dynamic
        ),
    )
    tensors = present(op, args)
    for check, launch in chosen.entries.get(where, ()):
        if check(*tensors) and (outs := launch(*dynamic)) is not None:
            return cast(Outputs, outs)
    bound = Bound(op, args, chosen, False, compiled=compiled)

    def launched(*dynamic: Any) -> Outputs | None:
        try:
            return bound.launch(*dynamic)
        except torch.OutOfMemoryError as problem:
            return bound.rescue(bound.choice, dynamic, problem)

    outs = launched(*dynamic)
    if outs is None:
        return bound.declined(dynamic)
    if compiled and not capture_watch.any_thread():
        keep(chosen, where, front.guard(tensors), launched)
    return outs


def keep(chosen: policies.Policy, where: Any, check: Callable[..., bool], run: Run) -> None:
    """Make `run` serve the calls under `where` that pass `check`."""
    entries = chosen.entries
    if len(entries) >= MOST_ENTRIES:  # shapes without end: start again rather than grow
        entries.clear()
    entries.setdefault(where, []).append((check, run))


def present(op: Op, args: Sequence[Any]) -> list[Tensor]:
    return [a for p, a in zip(op.params, args, strict=False) if p.is_tensor and a is not None]


def device_of(args: Sequence[Any]) -> torch.device:
    return next(a.device for a in args if isinstance(a, Tensor))
