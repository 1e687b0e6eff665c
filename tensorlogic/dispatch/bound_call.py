"""One key bound to the launcher that was chosen for it: run as it is, or recorded for autograd."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from ..core import policy as policies
from ..core.candidate import EAGER, Launcher, Outputs
from ..core.key import Key
from ..core.op import Op
from ..guards import tensor_guard
from ..native import call_extension
from ..system import capture_state
from . import decision
from . import selector as dispatch_selector
from .autograd import Recording, applied
from .call_cache import Run, device_of, keep, present

FOLLOWED = ("cuda",)  # kernels, not the host, set the time of gradients
# of a forward pass whose kernels take longer than the host does for our node
HEAVY_BYTES, HEAVY_FLOPS = (32e6, 1e10)


class Bound:
    """One key of one policy, bound to the launcher that was chosen for it."""

    __slots__ = (
        "cacheable", "choice", "device", "flags", "has_capture_variant", "key", "launch", "op", "outside", "policy", "record", "run",
        "scalars", "without_joint",
    )  # fmt: skip

    def __init__(
        self,
        op: Op,
        key: Key,
        choice: decision.Choice,
        recording: bool,
        args: Sequence[Any],
        policy: policies.Policy,
    ) -> None:
        self.op, self.key, self.choice, self.policy = op, key, choice, policy
        self.device = device_of(args)
        self.flags: SimpleNamespace = op.namespace(key)
        if choice.settle is not None:
            self.flags.settle = choice.settle
        apart = choice.apart
        self.without_joint = None if apart is None else Bound(op, key, apart, True, args, policy)
        self.launch: Launcher = choice.launch
        self.cacheable = choice.cacheable
        self.record: Run = applied(args)
        self.scalars = tuple(i for i, p in enumerate(op.dynamic) if not p.is_tensor)
        behind = recording and self.backward_follows()  # where eager serves it
        heavy = behind and (op.traffic(key) > HEAVY_BYTES or op.flops(key) > HEAVY_FLOPS)
        captured = choice.captured or (choice if behind and not heavy else None)
        self.run: Run = self._runner(choice, recording, heavy)
        self.outside: Run = self.run  # of captures
        self.has_capture_variant = captured is not None
        if captured is not None:
            self.run = _two_ways(self.run, self._runner(captured, recording, behind))
        if self.without_joint is not None:
            self.run = _unhooked(self.run, self.without_joint.run)

    def backward_follows(self) -> bool:
        """Whether our backward may follow PyTorch's forward, which often wins by little while PyTorch's backward is the slowest."""
        light = self.op.gradient is not None and self.op.gradient.light
        served = EAGER in (c.candidate.id for c in (self.choice, self.choice.captured) if c)
        forced = self.policy.forced(self.op.name) == EAGER
        return light and served and self.device.type in FOLLOWED and not forced

    @property
    def shortest(self) -> tuple[Run, int]:
        """What a compiled front calls, and how, once the key has been served: the launcher itself where its outputs are all there is to do."""
        two = self.has_capture_variant
        if self.without_joint is not None:
            return self.run, 0
        if isinstance(self.outside, Recording):
            return self.outside.compiled(two) or self.run, 0
        if call_extension.is_plan(self.launch):
            how = call_extension.WHOLE * self.op.internal | call_extension.OUTSIDE * two
            return self.launch, how
        alone = not self.op.internal and not two
        if alone and self.choice.direct is not None:
            return self.choice.direct, 0
        return (self.launch if alone and call_extension.is_launcher(self.launch) else self.run), 0

    def _runner(self, choice: decision.Choice, recording: bool, behind: bool) -> Run:
        """From dynamic arguments to what the caller gets, None where the launcher declines; `behind`: our node records eager, too."""
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
        self, choice: decision.Choice, dynamic: Sequence[Any], problem: torch.OutOfMemoryError
    ) -> Outputs | None:
        """A candidate ran out of memory: eager takes this call; eager's own failure is the caller's."""
        if choice.candidate.id == EAGER:
            raise problem
        id = choice.candidate.id
        said = f"tensorlogic: {id} ran out of memory on {self.key.text}; torch.eager serves it"
        decision.say_once(self.op, id, said)
        return self.op.candidates[EAGER].bind(self.key, {}, self.device)(*dynamic)

    def declined(self, dynamic: Sequence[Any]) -> Outputs:
        """A candidate declined the very key it was bound for: eager takes this call."""
        id = self.choice.candidate.id
        said = f"tensorlogic: {id} declined {self.key.text}, which it was bound for; torch.eager serves it"
        decision.say_once(self.op, id, said)
        outs = self.op.candidates[EAGER].bind(self.key, {}, self.device)(*dynamic)
        assert outs is not None
        return outs

    def anew(self, dynamic: Sequence[Any]) -> Outputs:
        """Tensors less aligned than those the launcher was built for: chosen for anew, in this call."""
        return outputs(self.op, self.op.full(self.key, dynamic))


def _two_ways(eager: Run, captured: Run) -> Run:
    """Eager calls take one road, calls under graph capture the other."""
    capturing = torch.cuda.is_current_stream_capturing
    return lambda *dynamic: captured(*dynamic) if capturing() else eager(*dynamic)


def _unhooked(paired: Run, apart: Run) -> Run:
    """Calls under saved-tensor hooks keep what PyTorch's own would: checkpoints compare it, and hooks may store fewer bits."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks
    return lambda *dynamic: paired(*dynamic) if hooks(True) is None else apart(*dynamic)


def bind(op: Op, args: Sequence[Any], policy: policies.Policy, recording: bool) -> Bound:
    """What `dispatch.call` binds for op-level arguments (`save` included), for those who run it themselves."""
    key = dispatch_selector.key_of(op, args, policy, recording)
    choose = dispatch_selector.choose_recorded if recording else dispatch_selector.choose
    return Bound(op, key, choose(op, key, args, policy), recording, args, policy)


def outputs(op: Op, args: Sequence[Any], *, compiled: bool = False) -> Outputs:
    """All outputs of op-level arguments (`save` included), nothing recorded: what the registered op runs."""
    chosen = policies.current()
    dynamic = [a for p, a in zip(op.params, args, strict=True) if p.is_dynamic]
    if chosen.precision is not None and op.precise is not None:
        op = op.precise
    keyed = (a for p, a in zip(op.params, args, strict=True) if p.kind != "scalar")
    where = (op.name, compiled, *(a.shape if isinstance(a, Tensor) else a for a in keyed))
    tensors = present(op, args)
    for check, launch in chosen.entries.get(where, ()):
        if check(*tensors) and (outs := launch(*dynamic)) is not None:
            return cast(Outputs, outs)
    key = dispatch_selector.key_of(op, args, chosen)
    choice = dispatch_selector.choose(op, key, args, chosen, compiled=compiled)
    bound = Bound(op, key, choice, False, args, chosen)

    def launched(*dynamic: Any) -> Outputs | None:
        try:
            return bound.launch(*dynamic)
        except torch.OutOfMemoryError as problem:
            return bound.rescue(bound.choice, dynamic, problem)

    outs = launched(*dynamic)
    if outs is None:
        return bound.declined(dynamic)
    if compiled and not capture_state.any_thread():
        keep(chosen, where, tensor_guard.guard(tensors), launched)
    return outs
