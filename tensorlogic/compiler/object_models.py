"""Models whose arguments or results hold tensors in objects, such as a cache: served by a program of the tensors alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..cuda_graphs.captured_graph import FAILURES
from ..guards.errors import MISS, Untraceable
from ..guards.finite_branches import Foretold
from ..guards.global_state import plain_modes
from . import trace_cache
from .inductor.background_compile import Later
from .program_search import best
from .runtime.call_signature import Form
from .runtime.program import Program
from .trace.exporter import witness
from .trace.graph_facts import mutates, random_call
from .trace.model_copies import fresh, sharing, unwritten
from .trace.object_flattening import Flat, Objects
from .trace.side_effects import Habits
from .trace.traced_graph import Trace
from .verify import equivalence
from .verify.whole_model import Original, expected_inputs


def traced(
    clone: nn.Module,
    model: nn.Module,
    objects: Objects,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Trace:
    """The graph of the tensors, if it gives those that a call of the model itself has left.

    Raises:
        Untraceable: PyTorch cannot trace it, or the traced code does something else.
    """
    found = objects.taken(args, kwargs)
    if found is None:
        raise Untraceable("the arguments are not what a copy of them is")
    tensors = tuple(found[0])
    trace = trace_cache.traced(Flat(clone, objects), Flat(model, objects), tensors, {})
    if any(after != objects.after for after in objects.seen):
        raise Untraceable("while it is traced, the model leaves other objects")
    draws = any(map(random_call, trace.calls))
    if objects.answers and (draws or mutates(trace.graph)):
        raise Untraceable(
            "it asks whether numbers are finite, and no call of the graph could be taken back"
        )
    if not draws:
        ours = _run(trace)
        held = not objects.answers or bool(ours.pop())
        if not held or not equivalence.alike(ours, objects.tensors):
            raise Untraceable("the graph's outputs are not the model's")
    objects.tensors, trace.objects = [], objects
    return trace


def foretell(
    model: nn.Module, habits: Habits, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Note in `habits.objects` what the model's code is told where it branches on whether numbers are finite, if it does."""
    if "finite" not in habits.asked or habits.objects is None:
        return False
    twin, given = sharing(model, buffers=False), fresh(args, kwargs)
    with witness(), unwritten(twin), Foretold() as told:
        twin.forward(*given[0], **given[1])
    habits.objects.answers = told.answers
    return bool(told.answers)


def _run(trace: Trace) -> list[Tensor]:
    """The inputs after a run of the graph, and its outputs."""
    values = expected_inputs(trace)
    with torch.no_grad():
        made = equivalence.run(trace, values)
    return [*(values[n] for n in trace.inputs), *made]


class Apart:
    """Takes a call apart, has its tensors served, and does to its objects what the model does."""

    def __init__(self, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        assert program.trace.objects is not None
        self.program: Program | Later = program
        self.objects, self.model = program.trace.objects, program.model
        self.form, self.pure = Form(self.model, args, kwargs), program.pure

    @classmethod
    def best(cls, traced: Trace, original: Original) -> Apart | None:
        """As `program_search.best`, of a graph that `traced` has made."""
        objects = traced.objects
        assert objects is not None

        def called(*tensors: Tensor) -> Any:
            args, kwargs = objects.around(tensors)[:2]
            return original.before(*args, **kwargs)

        tensors = replace(original, before=called, given=(tuple(traced.example), {}))
        found = best(traced, tensors)
        return None if found is None else cls(found, *original.given)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's output, or `MISS`."""
        if not plain_modes():
            return MISS
        found = self.objects.taken(args, kwargs)
        if found is None and (same := self.form.of(args, kwargs)) is not None:
            found = self.objects.taken(*same)
        if found is None:
            return MISS
        try:
            return self.objects.served(self.program, *found)
        except (*FAILURES, IndexError):
            if not self.pure:
                raise
            # the model's own code gets as far as it does and says what is wrong
            return MISS

    @property
    def nbytes(self) -> int:
        """Bytes held besides the model."""
        return self.program.nbytes
