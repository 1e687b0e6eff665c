"""Calls that say the same in another form: arguments by position that the example gave by name, names where it gave none."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

Given = tuple[tuple[Any, ...], dict[str, Any]]
PLAIN = (bool, int, float, str, type(None))


class Form:
    """How the example was given: so many arguments by position, the others by these names."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.count, self.names = len(args), list(kwargs)
        self.signature = _signature(model)

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given | None:
        """The same call as the example gave it; None where it says something else. What merely repeats a default is left out."""
        if self.signature is None:
            return None
        try:
            bound = self.signature.bind(None, *args, **kwargs).arguments
        except TypeError:  # which the model's own code shall say
            return None
        given: dict[str, Any] = {}
        for i, (name, parameter) in enumerate(self.signature.parameters.items()):
            if i == 0 or name not in bound:
                continue
            if parameter.kind is parameter.VAR_POSITIONAL:
                return None
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= bound[name]
            else:
                given[name] = bound[name]
        order = [*list(self.signature.parameters)[1 : 1 + self.count], *self.names]
        rest = {n: v for n, v in given.items() if n not in order}
        if any(n not in given for n in order) or not all(map(self._default, rest, rest.values())):
            return None
        return tuple(given[n] for n in order[: self.count]), {n: given[n] for n in self.names}

    def _default(self, name: str, value: Any) -> bool:
        """Whether an argument is what the model takes where it is not given."""
        assert self.signature is not None
        parameter = self.signature.parameters.get(name)
        same = parameter is not None and type(parameter.default) is type(value)
        return same and isinstance(value, PLAIN) and bool(parameter.default == value)  # type: ignore[union-attr]


def _signature(model: nn.Module) -> inspect.Signature | None:
    """Of the forward of the model's own class, `self` included."""
    own = (vars(c)["forward"] for c in type(model).__mro__ if "forward" in vars(c))
    forward = next((f for f in own if not getattr(f, "stands_in", False)), None)
    try:
        return None if forward is None else inspect.signature(forward)
    except (TypeError, ValueError):  # a callable that says nothing of its arguments
        return None
