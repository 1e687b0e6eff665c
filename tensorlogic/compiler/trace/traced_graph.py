"""Trace: a graph whose placeholders are a model's parameters, buffers and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

if TYPE_CHECKING:
    from ...guards.global_state import Asked
    from .object_flattening import Objects


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

    @property
    def calls(self) -> list[fx.Node]:
        """What a run evaluates, in its order."""
        return [n for n in self.graph.nodes if n.op in ("call_function", "get_attr")]

    @property
    def outputs(self) -> Any:
        """The nodes that a run gives, nested as the model's output."""
        return self.graph.output_node().args[0]


def counters(
    state: Mapping[str, tuple[str, Tensor]], live: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """placeholder -> the count of batches of the module that it belongs to, among the model's buffers `live`.

    Batch norm in training writes to its statistics without counting a version of them, but it counts its batches.
    """
    found = {n: f"{name.rpartition('.')[0]}.num_batches_tracked" for n, (name, _) in state.items()}
    return {n: live[name.lstrip(".")] for n, name in found.items() if name.lstrip(".") in live}
