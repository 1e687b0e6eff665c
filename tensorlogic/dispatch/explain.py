"""candidates and explain: what could run, what was measured, what was chosen and why not the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, overload

import torch
from torch import Tensor

from ..core import argument_checks, policy
from ..core.candidate import EAGER
from ..core.key import Key
from ..core.op import OPS, Op
from ..plans import open_stores
from ..plans.plan import Evidence
from . import candidate_loading, dispatcher
from . import selector as dispatch_selector
from .decision import Decision

P = ParamSpec("P")
Row = tuple[str, str, str, str, str, str]
HEAD: Row = ("candidate", "device us", "host us", "error", "chosen", "why")


def _op(op: Any) -> Op:
    name = op if isinstance(op, str) else getattr(op, "__name__", "")
    ours = isinstance(op, str) or op is getattr(sys.modules["tensorlogic"], name, None)
    if name == "linear_residual_relu":
        name = "linear"
    if name not in OPS or not ours:
        known = ", ".join(n for n, o in sorted(OPS.items()) if not o.internal)
        given = f"{op!r}" if isinstance(op, str) else argument_checks.describe(op)
        raise ValueError(
            f"candidates: op is {given}; one of our ops or its name is required: {known}"
        )
    return OPS[name]


def _met(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Op, Key, torch.device]]:
    """The keys one call meets, by making it."""
    met: list[tuple[Op, Key, torch.device]] = []
    observe: Any = lambda *seen: met.append(seen)  # noqa: E731
    with policy.use(replace(policy.current(), tune="off", observer=observe, entries={})):
        fn(*args, **kwargs)
    return met


@overload
def candidates(op: str, *args: object, **kwargs: object) -> dict[str, str | None]: ...
@overload
def candidates(op: Callable[..., Tensor]) -> dict[str, str | None]: ...
@overload
def candidates(
    op: Callable[P, Tensor], *args: P.args, **kwargs: P.kwargs
) -> dict[str, str | None]: ...
def candidates(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> dict[str, str | None]:
    """What could run an op: candidate id -> None, or why it cannot.

    Args:
        op: one of our public functions, or its name (then no arguments are looked at).
        args, kwargs: arguments of a call; the call is made once.

    Returns:
        A dict in the order in which ties are broken; "torch.eager" is always first.

    Raises:
        ValueError: not one of our ops.

    Example:
        >>> import torch, tensorlogic
        >>> "torch.eager" in tensorlogic.candidates(tensorlogic.relu, torch.ones(3))
        True
    """
    found = _op(op)
    if isinstance(op, str) or not (args or kwargs):
        candidate_loading.ready("cpu")
        return {id: c.available("cpu") for id, c in found.candidates.items()}
    met = _met(op, args, kwargs)
    key = next((key for its, key, _ in met if its.name == found.name), None)
    if key is None:
        by = met[0][0].name if met else "PyTorch's own operations"
        reason = f"such arguments, tensors or modes are served by {by}"
        return {id: None if id == EAGER else reason for id in found.candidates}
    return {id: c.unfit(key) for id, c in found.candidates.items()}


@dataclass
class Explanation:
    """Every candidate of one key with times, error and reason; prints as a table, in a notebook as HTML."""

    key: Key
    source: str
    eager: str
    captured: str
    rows: list[Row]

    @property
    def title(self) -> str:
        """The key, where the decision came from, and the choices."""
        graph = "" if self.captured == self.eager else f", captured: {self.captured}"
        return f"{self.key.text}\nchosen: {self.eager}{graph} (from: {self.source})"

    def __str__(self) -> str:
        widths = [max(len(r[i]) for r in (HEAD, *self.rows)) for i in range(len(HEAD))]
        padded = [[c.ljust(w) for c, w in zip(r, widths, strict=True)] for r in (HEAD, *self.rows)]
        return "\n".join([self.title, *("  ".join(cells).rstrip() for cells in padded)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import html  # for notebooks only

        head = "".join(f"<th>{c}</th>" for c in HEAD)
        rows = ["".join(f"<td>{html.escape(c)}</td>" for c in r) for r in self.rows]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<p>{html.escape(self.title)}</p><table><tr>{head}</tr>{body}</table>"


@dataclass
class Explanations:
    """One explanation for each key that a call meets."""

    keys: list[Explanation]
    # under `placement`: what each side is expected to take, and why one was chosen
    placed: tuple[str, ...] = ()

    def __str__(self) -> str:
        blocks = ["\n".join(self.placed)] if self.placed else []
        return "\n\n".join([*blocks, *map(str, self.keys)]) or "the call meets none of our ops"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(k._repr_html_() for k in self.keys)

    def __iter__(self) -> Iterator[Explanation]:
        return iter(self.keys)


def explain(fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Explanations:
    """Show, for every key that `fn(*args, **kwargs)` meets, all candidates with times, error, and chosen or why not.

    Args:
        fn: one of our functions, or any function or module that calls them; it is run once.

    Returns:
        An object that prints as a table and shows as HTML in a notebook; iterate over it for each key.

    Raises:
        TypeError: fn is not callable.

    Example:
        >>> import torch, tensorlogic
        >>> print(tensorlogic.explain(tensorlogic.relu, torch.ones(3)))  # doctest: +ELLIPSIS
        relu inference x=f32[3]...
    """
    if not callable(fn):
        raise TypeError(
            f"explain: fn is {type(fn).__name__}; a function or a torch.nn.Module is required, then its arguments"
        )
    seen: dict[str, Explanation] = {}
    dispatcher.LAST_PLACEMENT.clear()
    met = _met(fn, args, kwargs)
    placed = tuple(dispatcher.LAST_PLACEMENT)
    for op, key, device in met:
        if key.text not in seen:
            seen[key.text] = explain_key(op, key, device)
    return Explanations(list(seen.values()), placed)


def explain_key(op: Op, key: Key, device: torch.device) -> Explanation:
    """The same for one key."""
    decision = dispatch_selector.decide(op, key, device, policy.current())
    plan = open_stores.current(device).get(key)
    evidence = {e.candidate: e for e in plan.evidence} if plan else {}
    rows = [_row(op, id, key, evidence.get(id), decision) for id in op.candidates]
    return Explanation(key, decision.source, decision.eager[0], decision.captured[0], rows)


def _row(op: Op, id: str, key: Key, e: Evidence | None, decision: Decision) -> Row:
    picks = (("eager", decision.eager), ("captured", decision.captured))
    chosen = "+".join(way for way, pick in picks if pick[0] == id)
    candidate = op.candidates[id]
    if e is None or e.source != candidate.source:
        reason = candidate.unfit(key)
        text = reason or ("its source has changed since it was measured" if e else "not measured")
        return (id, "-", "-", "-", chosen, "" if chosen and not reason else text)
    if e.status == "refused":
        return (id, "-", "-", "-", chosen, f"refused: {e.reason}")
    why = e.reason if chosen or e.reason != "chosen" else "the best when it was measured"
    why = " ".join([why, *(f"{k}={v}" for k, v in e.config.items())]).strip()
    times = f"{e.device_us:.2f} ±{100 * e.spread:.0f}%", f"{e.host_us:.2f}"
    return id, *times, f"{e.error:.2f}x eager's", chosen, why
