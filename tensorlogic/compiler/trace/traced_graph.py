"""Trace: a graph whose placeholders are a model's parameters, buffers and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

if TYPE_CHECKING:
    from ...guards.global_state import Asked
    from ..reporting.report import Report
    from .object_flattening import Objects


Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Original:
    """The model that a program shall replace: its own call on the example, and what the program must do."""

    model: nn.Module  # the copy that programs watch
    before: Callable[..., Any]
    given: Given  # example arguments
    training: bool
    report: Report
    budget_s: float
    until: float = 0.0  # of `time.perf_counter`, for Inductor; 0 where it does not compete yet

    def call(self) -> Any:
        """The output of the model's own code on the example."""
        return self.before(*self.given[0], **self.given[1])


@dataclass
class Trace:
    """A graph whose placeholders are parameters, buffers and constants by their names in the model, then user inputs."""

    graph: fx.Graph
    owner: nn.Module  # holds the subgraphs of higher-order calls
    state: dict[str, tuple[str, Tensor]]  # placeholder -> (name in the model or "", tensor)
    # placeholders of user inputs, in the order of the flattened arguments
    inputs: list[str]
    in_spec: Any
    out_spec: Any
    example: list[Any] = field(default_factory=list)  # flattened example arguments
    counters: Mapping[str, Tensor] = field(default_factory=dict)  # of batches, by `counters`
    exported: Any = None  # what torch.export gave
    objects: Objects | None = None  # that calls have around the inputs
    # what the model's code asks PyTorch about the state around it
    asked: Asked | None = None
    # what the model itself gave, where nothing was compared yet
    theirs: Sequence[Tensor] | None = None


def counters(
    state: Mapping[str, tuple[str, Tensor]], live: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """placeholder -> the count of batches of the module that it belongs to, among the model's buffers `live`.

    Batch norm in training writes to its statistics without counting a version of them, but it counts its batches.
    """
    found = {n: f"{name.rpartition('.')[0]}.num_batches_tracked" for n, (name, _) in state.items()}
    return {n: live[name.lstrip(".")] for n, name in found.items() if name.lstrip(".") in live}
