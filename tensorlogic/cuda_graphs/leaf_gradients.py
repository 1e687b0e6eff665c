"""What captured calls do to `.grad` of tensors outside of them: a graph writes where it wrote when it was recorded, and sets no attribute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..guards.global_state import EVERY, STEP, noting
from ..guards.tensor_tree import leaves_of

LEAVES = (
    "it leaves gradients in parameters that are cleared or replaced outside of it: clear them inside, or with "
    "set_to_none=False"
)
EARLY = (
    "its optimizer steps with the gradients that the call before left, and its backward pass leaves others: step after it, or "
    "clear them with set_to_none=False"
)
INPUTS = "it leaves gradients in its inputs, where a graph leaves none"
Look = tuple[Tensor | None, int]  # a gradient and its version


class Leaving:
    """Of one kind of call: which leaves its backward passes reach, and what their `.grad` was around the recording."""

    def __init__(self) -> None:
        self.reached: dict[int, Tensor] = {}
        # those in which the last call that ran as it is left gradients
        self.left: list[Tensor] = []
        self.inside = False  # whether gradients are computed while it is recorded
        self.inputs = False  # whether one of them was an input
        self.names: set[str] = set()  # what was asked or called so far
        # whether an optimizer stepped before the first backward pass
        self.early = False
        self.found: dict[int, Look] = {}  # before a call's first backward pass added to them
        self.expected: list[tuple[Tensor, Tensor | None]] = []  # which a replay adds to
        self.replaced: list[tuple[Tensor, Tensor]] = []  # whatever was there before

    def note(self, given: Mapping[str, Any]) -> None:
        """A backward pass begins, whose engine is given this."""
        args, adds = given.get("args", ()), given.get("kwargs", {}).get("accumulate_grad")
        inputs = args[3] if len(args) > 3 else ()
        self.early = self.early or (not self.reached and STEP in self.names)
        for leaf in inputs or [t for o in given.get("t_outputs", ()) for t in _leaves(o)]:
            if isinstance(leaf, Tensor) and leaf.is_leaf:
                self.reached[id(leaf)] = leaf
                if adds:
                    self.found.setdefault(id(leaf), _look(leaf))

    @contextlib.contextmanager
    def running(self, given: Sequence[Any]) -> Iterator[set[str]]:
        """Around a call that runs as it is with these inputs, whose questions this yields, as `noting` does."""
        self.found.clear()
        with noting(self.note) as names:
            yield names
        seen = [(self.reached[k], look) for k, look in self.found.items()]
        self.left = [t for t, look in seen if t.grad is not None and not _same(_look(t), look)]
        inputs = {id(v) for v in given}
        self.inputs = any(id(t) in inputs for t in self.left)

    @contextlib.contextmanager
    def recording(self, held: Iterable[Tensor]) -> Iterator[None]:
        """Around a recording; where it fails, `.grad` is afterwards what it was.

        Raises:
            RuntimeError: replays would leave other gradients than the call does.
        """
        if self.inputs:
            raise RuntimeError(INPUTS)
        if any(t.grad is None for t in self.left):
            raise RuntimeError(LEAVES)
        known = self.reached | {id(t): t for t in held if t.is_leaf}
        before = {k: (t, _look(t)) for k, t in known.items()}
        self.found.clear()
        self.reached.clear()
        try:
            with noting(self.note) as names:
                self.names = names
                yield
            self.inside = bool(self.reached) or names >= EVERY
            self._judge(before)
        except BaseException:
            for leaf, (grad, _) in before.values():
                if leaf.grad is not grad:
                    leaf.grad = grad
            raise
        finally:
            self.reached.clear()
            self.left.clear()

    def _judge(self, before: Mapping[int, tuple[Tensor, Look]]) -> None:
        for key, (leaf, look) in before.items():
            grad, now, found = look[0], leaf.grad, self.found.get(key)
            if now is grad:
                if found is not None or not _same(_look(leaf), look):
                    self.expected.append((leaf, grad))
            elif grad is None or now is None or (found is not None and found[0] is not None):
                raise RuntimeError(LEAVES)
            elif self.early:
                raise RuntimeError(EARLY)
            else:
                self.replaced.append((leaf, now))

    def check(self, holds: Callable[[], bool] | None) -> Callable[[], bool] | None:
        """`holds`, that every gradient is where a replay writes it, and that nobody changes what is saved for backward."""
        pairs = [*self.expected, *self.replaced]
        if not self.inside and not pairs:
            return holds
        return lambda: (
            not saved_elsewhere()
            and all(t.grad is g for t, g in pairs)
            and (holds is None or holds())
        )

    def ready(self) -> bool:
        """Whether a replay may serve: gradients that it adds to are those that it was recorded with; others it brings."""
        if not all(t.grad is g for t, g in self.expected):
            return False
        for leaf, grad in self.replaced:
            leaf.grad = grad
        return True


def saved_elsewhere() -> bool:
    """True where hooks see what autograd saves, as those of checkpointing do, which a graph would not call."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _look(leaf: Tensor) -> Look:
    grad = leaf.grad
    return grad, -1 if grad is None or grad.is_inference() else grad._version


def _same(one: Look, other: Look) -> bool:
    return one[0] is other[0] and one[1] == other[1]


def _leaves(out: Any) -> list[Tensor]:
    """What a backward pass from a tensor, or from an edge of a graph, reaches."""
    if isinstance(out, Tensor):
        return leaves_of(out) if out.grad_fn is not None else [out]
    return []
