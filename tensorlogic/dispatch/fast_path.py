"""The fast path: a generated function per op that goes from a public call to a warm launcher in about a microsecond."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ParamSpec, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core import policy as policies
from ..core.op import Op, Param
from ..core.precision_policy import one_call
from ..native import call_extension

P = ParamSpec("P")
_IDS = itertools.count()
# what checks the arguments -> the public function made of it
FRONTS: dict[Callable[..., Any], Callable[..., Any]] = {}
_SCOPES: dict[Callable[..., Any], tuple[str, dict[str, Any]]] = {}

TEMPLATE = """
def {name}({signature}):{per_call}
    if is_dynamo_compiling():
        return miss(None, {names})
    if compiled is not None and (out := compiled({names})) is not None:
        return out
    try:
        where = ({id}, {key}grad_enabled())
        bucket = current_policy().entries.get(where)
    except (AttributeError, TypeError, RuntimeError):  # no tensor, no hash, no one shape
        return miss(None, {names})
    if bucket is not None and not function_mode() and not dispatch_modes() and forward_ad._current_level < 0{scalars}:
        for check, run in bucket:
            if {check}:
                out = run({dynamic})
                if out is not None:
                    return out
    return miss(where, {names})
"""
LETTERS = {"tensor": "t", "optional": "o", "flag": "f", "scalar": "s"}
PER_CALL = """
    if precision is not None:
        return one_call(precision, {name}, {names})"""


def front(
    op: Op, miss: Callable[..., Any]
) -> Callable[[Callable[P, tuple[Any, ...]]], Callable[P, Tensor]]:
    """Decorator for a public function of `op`.

    The decorated function checks the caller's arguments and returns the op's (in schema order, without `save`); it runs on
    the first call of a key only. A keyword `precision` of it holds for one call. `miss(op, where, public arguments, prepare)` then serves the call and makes the key warm.
    """

    def decorate(prepare: Callable[P, tuple[Any, ...]]) -> Callable[P, Tensor]:
        params = [p for p in op.params if p.name != "save"]
        shown = inspect.signature(prepare)
        signature = dict(shown.parameters)
        names = [n for n in signature if n != "precision"]
        if names != [p.name for p in params]:
            raise TypeError(
                f"public function {prepare.__name__} has parameters {names}, op {op.name} has {params}"
            )
        scope = {
            "is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
            "current_policy": policies.current,
            "grad_enabled": torch.is_grad_enabled,
            "function_mode": torch._C._is_torch_function_mode_enabled,
            "dispatch_modes": torch._C._len_torch_dispatch_stack,
            "forward_ad": forward_ad,
            # finite ones; anything else is looked at on the slow road
            "numbers": frozenset((int, float)),
            "one_call": one_call,
            "compiled": None,  # the same as what follows, in C, where it is built
            "miss": functools.partial(miss, op, prepare),
            **{f"default_{n}": v.default for n, v in signature.items()},
        }
        source = _source(prepare.__name__, signature, params)
        exec(compile(source, f"<tensorlogic front {prepare.__name__}>", "exec"), scope)
        made = functools.wraps(prepare)(cast(Callable[P, Tensor], scope[prepare.__name__]))
        if not op.internal:  # help() shows what it returns, not what the checks do
            made.__signature__ = shown.replace(return_annotation="Tensor")  # type: ignore[attr-defined]
            made.__annotations__ = {**prepare.__annotations__, "return": "Tensor"}
        FRONTS[prepare] = made
        _SCOPES[prepare] = ("".join(LETTERS[p.kind] for p in params), scope)
        made.fused = op  # type: ignore[attr-defined]  # whose calls a captured program may bind ahead
        return made

    return decorate


def _compile(module: ModuleType) -> None:
    """Give every front its compiled one."""
    for kinds, scope in _SCOPES.values():
        scope["compiled"] = module.Front(kinds, policies.VARIABLE, vars(forward_ad))


def _forget() -> None:
    for _, scope in _SCOPES.values():
        if scope["compiled"] is not None:
            scope["compiled"].clear()


call_extension.ON_LOAD.append(_compile)
policies.ON_FORGET += (_forget,)


def keep(
    prepare: Callable[..., Any],
    given: Sequence[Any],
    policy: policies.Policy,
    run: Callable[..., Any],
    how: int = 0,
) -> None:
    """Let the compiled front, where there is one, serve calls that look like `given` under `policy`: by a plan as `how` says."""
    compiled = _SCOPES[prepare][1]["compiled"]
    if compiled is not None:
        compiled.keep(policy, run, how, *given)


def _source(name: str, signature: Mapping[str, inspect.Parameter], params: list[Param]) -> str:
    names = ", ".join(n for n in signature if n != "precision")
    none = inspect.Parameter.empty
    shown = [n if p.default is none else f"{n}=default_{n}" for n, p in signature.items()]
    per_call = ""
    if "precision" in signature:
        shown.insert(-1, "*")
        per_call = PER_CALL.format(name=name, names=names)
    # nested tensors refuse `.shape`; their guard would abort
    parts = {"tensor": "{0}.shape, ", "optional": "{0} is None or {0}.shape, ", "flag": "{0}, "}
    finite = " and {0}.__class__ in numbers and {0} - {0} == 0"
    return TEMPLATE.format(
        name=name,
        signature=", ".join(shown),
        per_call=per_call,
        names=names,
        id=next(_IDS),
        key="".join(parts.get(p.kind, "").format(p.name) for p in params),
        scalars="".join(finite.format(p.name) for p in params if p.kind == "scalar"),
        check=_check([p for p in params if p.is_tensor], []),
        dynamic=", ".join(p.name for p in params if p.is_dynamic),
    )


def _check(rest: list[Param], present: list[str]) -> str:
    """`check(...)` over the tensors that are present: one conditional per optional tensor."""
    if not rest:
        return f"check({', '.join(present)})"
    head, tail = rest[0], rest[1:]
    given = _check(tail, [*present, head.name])
    if head.kind == "tensor":
        return given
    return f"({_check(tail, present)} if {head.name} is None else {given})"
