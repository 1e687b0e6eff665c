"""Notices, at every call, whether the model and its inputs are still those that a program was made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from .trace import plain_value

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ALWAYS = ("training", *HOOKS)
SKIPPED = {"_parameters", "_buffers", "_modules", "report"}


class Watch:
    """The state of a module tree: modes, hooks, plain attributes, and which tensors are its parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.attributes: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        self.values: list[Any] = []
        self.tables: list[tuple[dict[str, Any], list[int]]] = []
        self.held: list[Any] = []
        for path, module in model.named_modules():
            known = vars(module)
            names = list(ALWAYS[: 1 if path == "" else None])  # the root's own hooks run as ever
            names += [n for n, v in known.items() if n not in ALWAYS and _comparable(n, v)]
            getter = itemgetter(*names, "training")  # twice, so that it always gives a tuple
            self.attributes.append((getter, known))
            self.values.append(
                tuple(
                    dict(v) if n in HOOKS else v for n, v in zip(names, getter(known), strict=False)
                )
            )
            self.values[-1] += (known["training"],)
            for table in (known["_parameters"], known["_buffers"], known["_modules"]):
                if table:
                    self.tables.append((table, list(map(id, table.values()))))
                    self.held += table.values()  # so that no other object can have their ids

    def holds(self) -> bool:
        """True while nothing has changed but the tensors' contents."""
        try:
            if [get(known) for get, known in self.attributes] != self.values:
                return False
            return all([*map(id, table.values())] == ids for table, ids in self.tables)
        except KeyError:  # deleted
            return False


def _comparable(name: str, value: Any) -> bool:
    if name.startswith("_") and name not in ("_hook_state",):
        return False
    return (
        name not in SKIPPED
        and isinstance(value, (int, float, bool, str, tuple, type(None)))
        and (
            not isinstance(value, tuple)
            or (
                plain_value(value)[0] == "tuple"
                and all(isinstance(v, (int, float, str)) for v in value)
            )
        )
    )


class Guard:
    """What the flattened inputs of one program must be: shapes, strides, dtypes, devices of tensors; equality of the rest."""

    def __init__(self, example: Sequence[Any], gradients: bool) -> None:
        self.tensors = [i for i, v in enumerate(example) if isinstance(v, Tensor)]
        self.rest = [(i, v) for i, v in enumerate(example) if not isinstance(v, Tensor)]
        self.specs = [
            (v.dtype, v.shape, v.stride(), v.device) for v in example if isinstance(v, Tensor)
        ]
        self.gradients = gradients

    def holds(self, given: Sequence[Any]) -> bool:
        """True where a program made for the example may serve `given`."""
        for i, (dtype, shape, stride, device) in zip(self.tensors, self.specs, strict=True):
            x = given[i]
            if (
                (type(x) is not Tensor and type(x) is not nn.Parameter)
                or x.dtype is not dtype
                or x.shape != shape
                or x.stride() != stride
                or x.device != device
            ):
                return False
            if x.requires_grad and not self.gradients and torch.is_grad_enabled():
                return False
        for i, value in self.rest:
            if type(given[i]) is not type(value) or given[i] != value:
                return False
        return True
