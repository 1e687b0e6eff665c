"""One captured CUDA graph: static inputs, static outputs, and for gradients a second graph of the backward pass."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..guards.tensor_tree import flat_values, unhooked
from .captured_graph import Tape
from .static_buffers import expanded, once, static_like


class Line:
    """Static inputs belong to one caller at a time: threads take turns, streams wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.lock = device, threading.Lock()
        self.stream: Any = None
        self.raw = -1

    def enter(self) -> bool:
        """True where the caller may use the buffers now; `leave` must follow."""
        if not self.lock.acquire(blocking=False):
            return False
        index = self.device.index or 0
        try:
            if self.device.type == "cuda" and torch._C._cuda_getCurrentRawStream(index) != self.raw:
                self.turn()
        except BaseException:
            self.lock.release()
            raise
        return True

    def turn(self) -> None:
        """From here on the current stream uses the buffers, after what the last one still does with them."""
        stream = torch.cuda.current_stream(self.device)
        if self.stream is not None:
            stream.wait_stream(self.stream)
        self.stream = stream
        self.raw = torch._C._cuda_getCurrentRawStream(self.device.index or 0)

    def leave(self) -> None:
        """The next caller may come."""
        self.lock.release()


def pool_of(device: torch.device) -> Any:
    """A new memory pool's handle."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else object()


class Replay:
    """`fn` of flattened arguments as one graph: inputs are copied in, outputs copied out (or handed out as they are).

    Inputs that `fn` writes into are copied back. Replays whose graphs share a pool share a `line`, too: what one leaves in
    memory that it has given back, others overwrite.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        flat: Sequence[Any],
        device: torch.device,
        pool: Any = None,
        unsafe_views: bool = False,
        tape: Callable[[torch.device, Any], Any] = Tape,
        line: Line | None = None,
    ) -> None:
        self.places = [i for i, v in enumerate(flat) if isinstance(v, Tensor)]
        self.static = [static_like(flat[i]) for i in self.places]
        self.expanded = any(map(expanded, self.static))
        self.unsafe_views, self.device = unsafe_views, device
        given = list(flat)
        for i, s in zip(self.places, self.static, strict=True):
            given[i] = s
        before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        self.pool, self.tape, self.line = pool, tape(device, pool), line or Line(device)
        versions = [s._version for s in self.static]
        with torch.no_grad():
            self.out = self.tape.record(lambda: fn(*given))
        pairs = zip(self.places, self.static, versions, strict=True)
        self.written = [(i, s) for i, s, v in pairs if s._version != v]
        after = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        self.nbytes = max(0, after - before)
        self.leaves = flat_values(self.out)
        handed = {t.untyped_storage().data_ptr() for t in self.static if t.numel()}
        for leaf in self.leaves:
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in handed:
                raise RuntimeError("an output is an input or a view of one")
        self.single = self.static[0] if len(self.static) == 1 and not self.expanded else None
        self.place = self.places[0] if self.places else 0

    def launch(self, flat: Sequence[Any]) -> None:
        """Copy the inputs in and start."""
        if self.single is not None:
            self.single.copy_(flat[self.place])
        elif self.expanded:
            for i, s in zip(self.places, self.static, strict=True):
                once(s).copy_(once(flat[i]))
        else:
            for i, s in zip(self.places, self.static, strict=True):
                s.copy_(flat[i])
        self.tape.replay()

    def outputs(self) -> Any:
        """The outputs of the last launch, the caller's own unless views were asked for."""
        return self.out if self.unsafe_views else owned(self.out)

    def _apart(self, flat: Sequence[Any]) -> bool:
        """False where inputs share memory and one is written to, which separate buffers would not show."""
        places = {flat[i].untyped_storage().data_ptr() for i in self.places}
        return len(places) == len(self.places)

    def __call__(self, flat: Sequence[Any]) -> Any:
        """The outputs; None where no replay can serve this call, because another thread is being served, say."""
        if (self.written and not self._apart(flat)) or not self.line.enter():
            return None
        try:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    return self._served(flat)
            return self._served(flat)
        finally:
            self.line.leave()

    def _served(self, flat: Sequence[Any]) -> Any:
        self.launch(flat)
        for i, s in self.written:
            flat[i].copy_(s)
        return self.out if self.unsafe_views else owned(self.out)


def owned(out: Any) -> Any:
    """Copies of all tensors, each copied once; tuples become lists."""
    if isinstance(out, Tensor):
        return out.clone()
    if isinstance(out, (tuple, list)):
        if len(out) == 1:
            return [owned(out[0])]
        seen: dict[int, Tensor] = {}
        for v in out:
            if isinstance(v, Tensor) and id(v) not in seen:
                seen[id(v)] = v.clone()
        return [seen[id(v)] if isinstance(v, Tensor) else owned(v) for v in out]
    return out


class _Token:
    """Lives as long as the autograd graph of one forward replay; `done` once its backward has run."""

    def __init__(self) -> None:
        self.done = False


class GradientReplay:
    """Forward and backward as two graphs; the leaves are the inputs and parameters that need gradients.

    `standins` are what `fn` reads in the place of `parameters`: leaves of the same memory whose autograd nodes were never
    on another stream, which a capture may not wait for. Each graph has a pool of its own: until backward has run, and run
    again, what it needs lies there, whatever is replayed meanwhile. PyTorch's nodes are let go of: parameters whose nodes
    lived on would have their gradients added on the stream of the recording.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        flat: Sequence[Any],
        parameters: Sequence[Tensor],
        device: torch.device,
        tape: Callable[[torch.device, Any], Any] = Tape,
        standins: Sequence[Tensor] | None = None,
    ) -> None:
        self.device = device
        self.places = [i for i, v in enumerate(flat) if isinstance(v, Tensor)]
        self.static = [
            static_like(flat[i]).requires_grad_(flat[i].requires_grad) for i in self.places
        ]
        self.expanded = any(map(expanded, self.static))
        given = list(flat)
        for i, s in zip(self.places, self.static, strict=True):
            given[i] = s
        before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        self.forward, self.backward = tape(device, None), tape(device, None)
        versions = [s._version for s in self.static]
        with torch.enable_grad():
            leaves = flat_values(self.forward.record(lambda: fn(*given)))
        if [s._version for s in self.static] != versions:
            raise RuntimeError("an input is written to")
        tensors = [v for v in leaves if isinstance(v, Tensor)]
        self.wanted = [v.requires_grad for v in tensors]
        roots = [v for v in tensors if v.requires_grad]
        self.wrt = [*self.static, *(parameters if standins is None else standins)]
        self.needs = [i for i, t in enumerate(self.wrt) if t.requires_grad]
        self.seeds = [torch.zeros_like(v) for v in roots]
        if not self.seeds or not self.needs:
            raise RuntimeError("no output needs a gradient")

        def back() -> Any:
            with unhooked(self.wrt):  # who asks for the gradients hears of them
                wrt = [self.wrt[i] for i in self.needs]
                return torch.autograd.grad(roots, wrt, self.seeds, True, allow_unused=True)

        self.grads = self.backward.record(back)
        self.leaves = [v.detach() if isinstance(v, Tensor) else v for v in leaves]
        after = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        self.nbytes = max(0, after - before)
        self.pending: weakref.ref[_Token] | None = None
        self.parameters = list(parameters)
        self.line = Line(device)
        self.serial = 0

    def _waiting(self) -> bool:
        """True while the activations of an earlier forward may still be needed."""
        token = self.pending() if self.pending is not None else None
        return token is not None and not token.done

    def __call__(self, flat: Sequence[Any]) -> Any:
        """Outputs in the order of the flattened ones, with gradients; None where an earlier call still needs its values."""
        if not self.line.enter():
            return None
        try:
            if self._waiting():
                return None
            outs = _Replayed.apply(self, *[flat[i] for i in self.places], *self.parameters)
        finally:
            self.line.leave()
        tensors = iter(outs)
        return [next(tensors) if isinstance(v, Tensor) else v for v in self.leaves]


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replay: GradientReplay, *given: Tensor) -> Any:
        token = _Token()
        replay.pending, replay.serial = weakref.ref(token), replay.serial + 1
        for s, x in zip(replay.static, given, strict=False):
            to = s.detach()
            if replay.expanded:
                to, x = once(to), once(x)
            to.copy_(x)
        replay.forward.replay()
        ctx.replay, ctx.token, ctx.serial = replay, token, replay.serial
        outs = tuple(v.clone() for v in replay.leaves if isinstance(v, Tensor))
        ctx.mark_non_differentiable(
            *[o for o, wanted in zip(outs, replay.wanted, strict=True) if not wanted]
        )
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # a graph's gradients are numbers
            raise RuntimeError(
                "captured backward: double backward (create_graph=True) is not available through a graph; call the function "
                "itself, or an optimised model under tensorlogic.policy(force='torch.eager')"
            )
        return _Replayed._once(ctx, *grads)

    @staticmethod
    @once_differentiable
    def _once(ctx: Any, *grads: Tensor | None) -> Any:
        replay: GradientReplay = ctx.replay
        # no forward begins before the first backward is done; before another one it may
        with replay.line.lock if ctx.token.done else contextlib.nullcontext():
            if ctx.serial != replay.serial:
                raise RuntimeError(
                    "captured backward: the same capture has run forward again since, over the values that this backward "
                    "needs; run backward first, or call the function itself"
                )
            used = [g for g, wanted in zip(grads, replay.wanted, strict=True) if wanted]
            for seed, grad in zip(replay.seeds, used, strict=True):
                seed.zero_() if grad is None else seed.copy_(grad)
            replay.backward.replay()
            fresh = copies(replay.grads)
            ctx.token.done = True
        found: list[Tensor | None] = [None] * len(replay.wrt)
        for i, g in zip(replay.needs, fresh, strict=True):
            found[i] = g
        return (None, *found)


def copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Own memory for each, so that what a caller accumulates is not overwritten by the next replay."""
    present = [t for t in tensors if t is not None]
    fresh = [torch.empty_like(t) for t in present]
    if fresh:
        torch._foreach_copy_(fresh, present)
    found = iter(fresh)
    return [None if t is None else next(found) for t in tensors]
