"""Public functions whose docstrings are alike but for their meaning, source and example."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from torch import Tensor

from ...core.op import Op
from ...dispatch import dispatcher

P = ParamSpec("P")


def public(
    op: Op, *, args: str, returns: str, raises: str
) -> Callable[[Callable[P, tuple[Any, ...]]], Callable[P, Tensor]]:
    """Decorator for a public function of `op`: these three parts are put behind its docstring's first sentence."""
    parts = f"\n\nArgs:\n    {args}\n\nReturns:\n    {returns}\n\nRaises:\n    {raises}\n\n"

    def decorate(prepare: Callable[P, tuple[Any, ...]]) -> Callable[P, Tensor]:
        meaning, _, rest = inspect.cleandoc(prepare.__doc__ or "").partition("\n\n")
        prepare.__doc__ = f"{meaning}{parts}{rest}"
        return dispatcher.public(op)(prepare)

    return decorate
