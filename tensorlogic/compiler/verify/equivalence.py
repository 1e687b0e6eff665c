"""What a graph computes in higher precision, and whether a replacement may stand for it."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from ...core.tolerance import Errors, Verdict, chance, judge, of_all, spacing
from ...guards.tensor_tree import flat_values
from ..trace.graph_facts import seeds
from ..trace.traced_graph import Trace
from ..trace.widening import FLOATS, _wide, widen

GROWTH = 1.4  # times the original's own error that a whole model may have


def silent(node: fx.Node) -> tuple[Any, ...]:
    """A call's arguments with nothing dropped out, so that two ways of drawing can be compared."""
    if getattr(node.target, "__name__", "") == "dropout_linear":
        return (*node.args[:3], 0.0)
    at = dropping(node.target)
    if at is None or at >= len(node.args):
        return node.args
    return (*node.args[:at], 0.0, *node.args[at + 1 :])


DRAWS = frozenset(("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli", "normal", "multinomial"))  # fmt: skip


def draws(node: fx.Node) -> bool:
    """True for calls that only draw numbers, which another run can be given."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet is not None and packet.__name__ in DRAWS


@functools.cache
def dropping(target: Any) -> int | None:
    """Where among a call's arguments the probability stands with which it drops values; None where it drops none."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    word = "p" if "dropout" in schema.name else ""
    names = [a.name for a in schema.arguments]
    return next((i for i, n in enumerate(names) if n in ("dropout_p", "dropout", word)), None)


def evaluate(
    nodes: Sequence[fx.Node],
    env: dict[str, Any],
    owner: torch.nn.Module | None,
    dtype: torch.dtype | None = None,
    last: Mapping[str, Sequence[str]] | None = None,
    drawn: dict[str, Tensor] | None = None,
    dropping: bool = False,
) -> None:
    """Run calls in order into `env`; with `dtype`, everything floating in it. Values in `last` go after their last use.

    Random numbers are kept in `drawn`, and those that are there already are taken from it. Nothing is dropped out unless
    `dropping`.
    """
    with _unwarned() if dtype is not None else contextlib.nullcontext():
        for node in nodes:
            if node.op == "get_attr":
                held = operator.attrgetter(str(node.target))(owner)
                if dtype is not None and isinstance(held, fx.GraphModule):
                    held = _block(held, dtype)
                env[node.name] = held
                continue
            if drawn is not None and node.name in drawn:
                value = drawn[node.name]
                env[node.name] = value.clone() if dtype is None else widen(value, dtype)
                continue
            given = node.args if dropping else silent(node)
            args = fx.map_arg(given, lambda n: env[n.name])
            kwargs = fx.map_arg(node.kwargs, lambda n: env[n.name])
            if dtype is not None:
                args = tuple(a if isinstance(a, Tensor) else _dtypes(a, dtype) for a in args)
                kwargs = {k: _dtypes(v, dtype) for k, v in kwargs.items()}
            env[node.name] = cast(Callable[..., Any], node.target)(*args, **kwargs)
            if drawn is not None and draws(node):
                drawn[node.name] = env[node.name].detach().clone()
            for done in (last or {}).get(node.name, ()):
                env.pop(done, None)


def run(traced: Trace, env: dict[str, Any], *how: Any, **words: Any) -> Any:
    """A traced graph's outputs for the placeholders' values in `env`, which it fills; the rest as `evaluate` takes it."""
    evaluate(traced.calls, env, traced.owner, *how, **words)
    return fx.map_arg(traced.outputs, lambda n: env[n.name])


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Autocast regions say that they do not know a dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _block(block: fx.GraphModule, dtype: torch.dtype) -> fx.GraphModule:
    """A copy of a graph within another's, whose calls ask for `dtype` where they ask for another floating one."""
    wide = copy.deepcopy(block)
    for each in wide.modules():
        if isinstance(each, fx.GraphModule):
            for node in each.graph.nodes:
                node.args = map_aggregate(node.args, lambda a: _dtypes(a, dtype))
                node.kwargs = map_aggregate(node.kwargs, lambda a: _dtypes(a, dtype))
            each.recompile()
    return wide


def _dtypes(value: Any, dtype: torch.dtype) -> Any:
    return dtype if isinstance(value, torch.dtype) and value in FLOATS else value


def compare(outs: Any, plain: Any, wide: Any) -> Verdict:
    """Judge nested outputs, tensors by error and everything else by equality."""
    flat = [flat_values(v) for v in (outs, plain, wide)]
    if len({len(f) for f in flat}) != 1:
        return Verdict(f"wrong: {len(flat[0])} outputs, {len(flat[1])} expected", float("inf"))
    found: list[list[Any]] = [[], [], []]
    for out, ours, ref in zip(*flat, strict=True):
        if isinstance(ours, Tensor):
            for kept, value in zip(found, (out, ours, ref), strict=True):
                kept.append(value.detach() if isinstance(value, Tensor) else value)
        elif out != ours:
            return Verdict(f"wrong: {out!r} instead of {ours!r}", float("inf"))
    if not found[1]:
        return Verdict(None, 0.0)
    errors: list[Errors] = []
    verdict = judge(found[0], found[1], found[2], errors=errors, luck=of_all)
    return Verdict(verdict.reason, growth(errors)) if verdict else verdict


def growth(errors: Sequence[Errors]) -> float:
    """Root mean square of the outputs' errors over that of the original's, where the dtype's rounding leaves one. Those of an
    output with few elements count as alike as far as chance makes them differ."""
    ours = eager = 0.0
    for e in errors:
        base = max(e.eager, 0.1 * spacing(e.dtype))
        ours += max(min(e.ours, base), e.ours / chance(e.count)) ** 2
        eager += base**2
    return (ours / eager) ** 0.5 if eager else 0.0


def gradients(outs: Sequence[Tensor], wrt: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of outputs, each weighted by a wave of its own, with respect to what they reach."""
    found = torch.autograd.grad(outs, wrt, seeds(outs), allow_unused=True)
    return [g for g in found if g is not None]


def close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Each within rounding, of its own size or a small part of the largest: some gradients are zero but for rounding."""
    if len(ours) != len(theirs):
        return False
    pairs = list(_wide(ours, theirs))
    most = max((float(b.square().mean()) ** 0.5 for _, b, _ in pairs if b.numel()), default=0.0)
    for a, b, far in pairs:
        if a.shape != b.shape:
            return False
        room = float(b.norm()) + 0.1 * most * b.numel() ** 0.5
        if float((a - b).norm()) > far * room:
            return False
    return True


def alike(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether tensors are the same but for rounding."""
    looks = [[(t.shape, t.dtype, t.device) for t in each] for each in (ours, theirs)]
    if looks[0] != looks[1]:
        return False
    pairs = [*zip(ours, theirs, strict=True)]
    rounded = [(a, b) for a, b in pairs if a.is_floating_point()]
    exact = all(torch.equal(a, b) for a, b in pairs if not a.is_floating_point())
    return exact and close([a for a, _ in rounded], [b for _, b in rounded])
