"""`tensorlogic.precision`: in which form of numbers products are computed, or which error they may have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from . import policy
from .numeric_mode import Mode, Precision, checked

P = ParamSpec("P")
R = TypeVar("R")


class precision:
    """Compute products in one form of numbers, or as fast as an error budget allows, whatever the inputs' dtype.

    Holds for `matmul`, `linear`, the fused ops around them, and their gradients; the result keeps the dtype that the
    inputs promote to. Neither reads nor changes PyTorch's global switches (TF32, reduced precision reductions). Inputs of
    different floating dtypes are allowed.

    Args:
        mode: "f32" computes in IEEE float32 or better; "f16" multiplies in float16 with float32 sums, scaled so that
            nothing overflows; "adaptive" takes the fastest way whose error stays within rtol.
        rtol: for "adaptive" (default 1e-3), the largest allowed 2-norm of the error of a row or column of the result (before
            the activation) over that row's or column's norm, against float64. It is measured on rows and columns of
            the caller's own data, on the first call and whenever the data's range, crest or cancellation has changed.

    Use it as a context manager, as a decorator, or for one call as the argument `precision` of `matmul` and `linear`. The end of
    a `with` block waits until a GPU has judged every product in it, so that what is beyond its budget has been said by
    then; as a decorator or an argument it waits for nothing, and what a GPU has found is said by the next call.

    Raises:
        ValueError: an unknown mode, an rtol outside (0, 1) or NaN, or an rtol for another mode than "adaptive".
        TypeError: rtol is no number.

    Warns:
        PrecisionWarning: no way keeps the budget; the most accurate one serves, and the warning says what it reaches.

    Example:
        >>> import torch, tensorlogic
        >>> a, b = torch.randn(64, 64), torch.randn(64, 64)
        >>> with tensorlogic.precision("adaptive", rtol=1e-2):
        ...     y = tensorlogic.matmul(a, b)
        >>> z = tensorlogic.matmul(a, b, precision=tensorlogic.precision("f16"))
        >>> y.dtype, z.dtype
        (torch.float32, torch.float32)
    """

    def __init__(self, mode: Mode, rtol: float | None = None) -> None:
        self.asked = checked(mode, rtol)

    def __repr__(self) -> str:
        return str(self.asked)

    def __enter__(self) -> precision:
        entered = under(self.asked)
        entered.__enter__()
        _ENTERED.set((*_ENTERED.get(), entered))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not _ENTERED.get():
            raise RuntimeError(
                "precision: left without having been entered; use it in a with statement"
            )
        *rest, entered = _ENTERED.get()
        _ENTERED.set(tuple(rest))
        entered.__exit__(kind, problem, trace)
        if kind is None and self.asked.mode == "adaptive":
            for leave in ON_LEAVE:
                leave()

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """`fn`, run under this policy; coroutine functions stay coroutine functions, generators are refused."""
        if not callable(fn):
            raise TypeError(f"precision: fn is {type(fn).__name__}; a function is required")
        kinds = (fn, type(fn).__call__)  # an object that is called may be either, too
        if any(map(inspect.iscoroutinefunction, kinds)):

            @functools.wraps(fn)
            async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
                with under(self.asked):
                    return await fn(*args, **kwargs)  # type: ignore[misc]  # which it is

            return awaited  # type: ignore[return-value]
        if any(inspect.isgeneratorfunction(k) or inspect.isasyncgenfunction(k) for k in kinds):
            name = getattr(fn, "__name__", type(fn).__name__)
            raise TypeError(
                f"precision: {name} is a generator, which runs after the call has returned; enter the policy with a "
                f"with statement inside of it"
            )

        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with under(self.asked):
                return fn(*args, **kwargs)

        return run


ON_LEAVE: list[Callable[[], None]] = []  # what is to be done where a block within a budget ends
_ENTERED: ContextVar[tuple[AbstractContextManager[Any], ...]] = ContextVar(
    "tensorlogic_precision", default=()
)


@policy.outside_of_graphs
def under(asked: Precision) -> AbstractContextManager[policy.Policy]:
    """The current policy with this precision, as a context manager."""
    return policy.use(policy.with_precision(asked))


def policy_of(asked: Any, where: str = "optimize") -> Precision:
    """What a caller gave as `precision`: a policy, or the name of a mode."""
    if isinstance(asked, str):
        asked = precision(asked)  # type: ignore[arg-type]  # which it checks
    if not isinstance(asked, precision):
        raise TypeError(
            f"{where}: precision is {asked!r}; tensorlogic.precision(mode, rtol=...) or its mode is required"
        )
    return asked.asked


def one_call(asked: Any, fn: Callable[..., R], *args: Any) -> R:
    """`fn(*args)` under what a caller gave as `precision`."""
    with under(policy_of(asked, fn.__name__)):
        return fn(*args)
