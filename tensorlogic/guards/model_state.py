"""What a model holds besides tensors, and what its code reads, as values that tell whether a call has changed any of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core.rewrite_rule import example
from .model_guard import DEPTH, plain_object
from .python_globals import Reach
from .tensor_tree import storage

VALUES = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


def state(model: nn.Module, kinds: Iterable[type]) -> dict[str, Any]:
    """Attributes, globals and variables that a call might change."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _MACHINERY:
                found[f"its own attribute {path}.{name}".replace(" .", " ")] = known(value)
    reach = Reach(model, kinds)
    for scope, names in reach.scopes:
        found |= {f"global {name}": known(scope.get(name)) for name in names}
    for kind, names in reach.classes:
        found |= {f"global {kind.__name__}.{n}": known(getattr(kind, n)) for n in names}
    for i, cell in enumerate(reach.cells):
        found[f"global variable {i} of a function's"] = known(cell.cell_contents)
    return found


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The name of the first that has changed."""
    return next((name for name, value in after.items() if before.get(name) != value), None)


def known(value: Any, depth: int = 0) -> Any:
    """What can be compared: numbers and texts; containers and attributes of objects as far as `DEPTH`; of anything else the type."""
    if isinstance(value, VALUES):
        return value
    if isinstance(value, Tensor):
        return _Held(value)
    kind = type(value).__name__
    if isinstance(value, (tuple, list, deque)):
        return kind, tuple(known(v, depth + 1) for v in value) if depth <= DEPTH else len(value)
    if isinstance(value, dict):
        held = tuple((str(k), known(v, depth + 1)) for k, v in value.items() if depth <= DEPTH)
        return kind, held or len(value)
    if isinstance(value, (set, frozenset)):
        return kind, len(value)
    if not plain_object(value):
        return kind
    attributes = vars(value).items() if depth < DEPTH else ()
    return _Same(value), tuple((n, known(v, depth + 1)) for n, v in attributes)


class _Same:
    """Equal to one object only, whatever its own equality says; keeps it, so that no other takes its place."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


class _Held:
    """A tensor as it is now: equal to the same one while nothing writes to it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = 0 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Held):
            return False
        return self.tensor is other.tensor and self.version == other.version


_MACHINERY = frozenset(vars(nn.Module())) - {"training"}


def identities(graph: fx.Graph) -> None:
    """Calls that hand their argument through, such as dropout in evaluation, are left out, and checks of what guards know."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
            continue
        if node.target in (aten.dropout.default, aten.feature_dropout.default):
            through = node.args[1] == 0.0 or not node.args[2]
        elif node.target in (aten.to.dtype, aten.to.dtype_layout, aten.to.device):
            base, out = example(node.args[0]), example(node)
            through = (
                base is not None and out is not None and storage(node) == storage(node.args[0])
            )
            through = through and base.dtype == out.dtype  # type: ignore[union-attr]
        else:
            continue
        if through:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
