"""The slow road: from checked arguments to outputs in any context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core import policy as core_policy
from ..core.candidate import EAGER
from ..core.key import Key
from ..core.op import Flags, Op
from ..guards import tensor_guard
from ..system import function_modes
from . import bound_call, fast_path, torch_library
from . import call_cache as dispatch_call_cache
from . import selector as dispatch_selector

from . import autograd_overhead as _autograd_overhead  # noqa: F401  isort: skip  of studies

P = ParamSpec("P")
NUMBERS = (bool, int, float, complex)  # that PyTorch's operators take; NumPy's have their own
# Types of arguments that ask for a device to be chosen, as a policy may, and what serves such a call; `placement` enters itself.
PLACERS: dict[type, Callable[[Op, Callable[..., Any], Sequence[Any], Any], Any]] = {}
LAST_PLACEMENT: list[str] = []  # what `explain` shows: how the last calls were placed


def public(op: Op) -> Callable[[Callable[P, tuple[Any, ...]]], Callable[P, Tensor]]:
    """Decorator for a public function of `op`: see `fast_path.front`."""
    return fast_path.front(op, _miss)


def internal(op: Op) -> Callable[..., Any]:
    """The fast path to an op that only other ops call (a backward op): takes the schema's arguments, returns all outputs."""
    names = ", ".join(p.name for p in op.params)
    scope: dict[str, Any] = {}
    exec(f"def {op.name}({names}):\n    return ({names},)", scope)
    return fast_path.front(op, _miss)(scope[op.name])


def _miss(op: Op, prepare: Callable[..., tuple[Any, ...]], where: Any, *given: Any) -> Any:
    if not torch.compiler.is_dynamo_compiling() and (shown := [*filter(_stands_in, given)]):
        return _shown(op, fast_path.FRONTS[prepare], shown, given)
    if not torch.compiler.is_dynamo_compiling() and _beside_default_device(given):
        with function_modes.aside():
            return fast_path.FRONTS[prepare](*given)
    if not torch.compiler.is_dynamo_compiling() and (placer := _placer(given)) is not None:
        return placer(op, fast_path.FRONTS[prepare], given, where)
    if where is None and op.numbers is not None and _with_number(given):
        return op.numbers(*given)
    args = prepare(*given)
    if not torch.compiler.is_dynamo_compiling() and not _settled(op, where, given, args):
        return fast_path.FRONTS[prepare](*args)
    device = dispatch_call_cache.device_of(args)
    if not torch.compiler.is_dynamo_compiling() and core_policy.current().precision is not None:
        if op.composed is not None:
            return op.composed(*args)
        if op.precise is not None:
            return _precisely(op.precise, args, where, (prepare, given))
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        lowered = _autocast(op, args)
        if lowered is None:
            return composition(op, args)
        with torch.autocast(device.type, enabled=False):
            out = fast_path.FRONTS[prepare](*lowered)
        if where is not None and not transforming() and _special(args) is None:
            _warm_lowered(op, prepare, where, given, args, lowered)
        return out
    if transforming() or any(isinstance(a, Tensor) and a.is_complex() for a in args):
        return composition(op, args)  # PyTorch's own ops transform in every way; ours do not
    if torch.compiler.is_dynamo_compiling():
        return torch_library.traced(op, args)
    road = _special(args)
    if road is not None:
        return road(op, args)
    return call(op, args, where, (prepare, given))


def _stands_in(given: Any) -> bool:
    """Whether this is no tensor, but PyTorch's functions take it as one and show it the call: torch.fx's proxies do."""
    return hasattr(type(given), "__torch_function__") and not isinstance(given, Tensor)


def _shown(op: Op, public: Callable[..., Any], stand_ins: Sequence[Any], given: Any) -> Any:
    """What stand-ins for tensors make of a call, as they would of one of PyTorch's: torch.fx notes it in its graph."""
    if core_policy.current().precision is not None or _placer(given) is not None:
        raise TypeError(
            f"{op.name}: called with {type(stand_ins[0]).__name__} under a precision or placement policy, which a graph of calls "
            f"does not hold: trace outside of it, and run what was traced inside"
        )
    return torch.overrides.handle_torch_function(public, stand_ins, *given)


def _beside_default_device(given: Sequence[Any]) -> bool:
    """Whether a default device is set, and nothing among the arguments wants to see the call."""
    tensors = (g for g in given if isinstance(g, Tensor))
    return function_modes.default_device() and all(map(tensor_guard.plain, tensors))


def _with_number(given: Sequence[Any]) -> bool:
    """Whether these are numbers of Python's and at least one tensor."""
    tensors = sum(isinstance(g, Tensor) for g in given)
    return 0 < tensors < len(given) == tensors + sum(type(g) in NUMBERS for g in given)


def _settled(op: Op, where: Any, given: Sequence[Any], args: Sequence[Any]) -> bool:
    """Whether a warm key is found by what the caller gave; if not, it is by what was made of it.

    An expanded residual, a number's tensor, a float of NumPy's, dimensions in a list: made again, they stay the same.
    """
    for p, g, a in zip(op.params, given, args, strict=False):
        if g is a:
            continue
        if p.is_tensor or (p.kind == "scalar" and g.__class__ not in (int, float)):
            return False
        if where is None and (g.__class__ is not a.__class__ or g != a):
            return False
    return True


def _placer(given: Sequence[Any]) -> Callable[..., Any] | None:
    """What serves the call if the policy or an argument asks for a device to be chosen."""
    asked = core_policy.current().placement is not None
    for kind, serve in PLACERS.items():
        if asked or any(isinstance(g, kind) for g in given):
            return serve
    return None


def _precisely(
    op: Op, args: tuple[Any, ...], where: Any, public: tuple[Callable[..., Any], Sequence[Any]]
) -> Any:
    """A product under a precision policy, which autocast does not touch; what transforms are traced through is float64."""
    for p, a in zip(op.params, args, strict=False):
        if isinstance(a, Tensor) and a.layout is not torch.strided:
            raise TypeError(
                f"{op.name}: {p.name} has layout {a.layout}; a precision policy needs strided tensors: "
                f"call .to_dense(), or leave the policy"
            )
        if isinstance(a, Tensor) and a.is_floating_point() and a.element_size() < 2:
            raise TypeError(
                f"{op.name}: {p.name} is {a.dtype}; a precision policy takes float16, bfloat16, float32, float64 and complex "
                f"tensors: convert it with {p.name}.to(torch.bfloat16)"
            )
    if transforming():
        return composition(op, args)
    args = tuple(a.resolve_conj().resolve_neg() if isinstance(a, Tensor) else a for a in args)
    if _special(args) is not None:
        return composition(op, args)
    kind = dispatch_call_cache.device_of(args).type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return call(op, args)
    same = all(g is a for p, g, a in zip(op.params, public[1], args, strict=False) if p.is_tensor)
    return call(op, args, where, public) if same else call(op, args)


def call(
    op: Op,
    args: Sequence[Any],
    where: Any = None,
    public: tuple[Callable[..., Any], Sequence[Any]] | None = None,
) -> Any:
    """Serve op-level arguments (no `save`) of plain tensors; make the key warm under `where`. Returns what the public call does.

    `public` is the function and the arguments that the caller gave it: its compiled front may serve such ones later.
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    recording = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if recording and op.gradient is None:  # a gradient's own gradient
        return composition(op, args)
    if op.gradient is not None:
        args = (*args, recording)
    dynamic = [a for p, a in zip(op.params, args, strict=True) if p.is_dynamic]
    policy = core_policy.current()
    key = dispatch_selector.key_of(op, args, policy, recording)
    choose = dispatch_selector.choose_recorded if recording else dispatch_selector.choose
    choice = choose(op, key, args, policy)
    bound = bound_call.Bound(op, key, choice, recording, args, policy)
    out = bound.run(*dynamic)
    if out is None:
        outs = bound.declined(dynamic)
        return outs if op.internal else outs[0]
    if where is not None and bound.cacheable:
        # warm from now on: `front` serves the key without coming here
        guard = tensor_guard.guard(dispatch_call_cache.present(op, args))
        dispatch_call_cache.keep(policy, where, guard, bound.run)
        lasting = policy.observer is None  # one who watches comes with a policy of its own
        if public is not None and bound.device.type in ("cpu", "cuda") and lasting:
            fast_path.keep(*public, policy, *bound.shortest)
    return out


def _warm_lowered(
    op: Op,
    prepare: Callable[..., Any],
    where: Any,
    given: Sequence[Any],
    args: Sequence[Any],
    lowered: Sequence[Any],
) -> None:
    """Later calls under autocast cast as this one did, then take the fast path of a call without autocast."""
    public, kind = fast_path.FRONTS[prepare], dispatch_call_cache.device_of(args).type
    asked, enable = torch.get_autocast_dtype, torch.set_autocast_enabled
    dtype = asked(kind)
    guard = tensor_guard.guard(dispatch_call_cache.present(op, args))
    dtypes = [
        low.dtype if isinstance(low, Tensor) and low.dtype != a.dtype else None
        for low, a in zip(lowered, args, strict=True)
    ]
    params = [p for p in op.params if p.name != "save"]
    casts = [(i, dtypes[i]) for i, p in enumerate(params) if p.is_dynamic]
    flags = [None if p.is_dynamic else g for p, g in zip(params, given, strict=True)]

    def run(*dynamic: Any) -> Any:
        call = flags.copy()
        for (i, to), a in zip(casts, dynamic, strict=True):
            call[i] = a if to is None else a.to(to)
        enable(kind, False)
        try:
            return public(*call)
        finally:
            enable(kind, True)

    def check(*tensors: Tensor) -> bool:  # the guard sees that autocast is on, not to which dtype
        return asked(kind) == dtype and guard(*tensors)

    dispatch_call_cache.keep(core_policy.current(), where, check, run)


def composition(op: Op, args: Sequence[Any]) -> Any:
    """The plain PyTorch composition, differentiable in every way PyTorch's own ops are."""
    full = (*args, False) if op.gradient is not None else tuple(args)
    pairs = [*zip(op.params, full, strict=True)]
    key = Flags(tuple((p.name, a) for p, a in pairs if not p.is_dynamic))
    launch = op.candidates[EAGER].bind(cast(Key, key), {}, dispatch_call_cache.device_of(args))
    outs = launch(*[a for p, a in pairs if p.is_dynamic])
    assert outs is not None
    return outs if op.internal else outs[0]


def _special(args: Sequence[Any]) -> Callable[[Op, Sequence[Any]], Any] | None:
    """The road for tensors or modes that plain launchers cannot serve, or None."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(t).tangent is not None for t in tensors
    ):
        return composition
    if any(t.layout is not torch.strided for t in tensors):  # a subclass's, too
        return composition
    odd = not all(tensor_guard.plain(t) for t in tensors)
    if odd or function_modes.intercepted() or torch._C._len_torch_dispatch_stack():
        return torch_library.traced
    if torch._C._get_tracing_state() is not None or any(t.device.type == "meta" for t in tensors):
        return torch_library.traced
    if any(t.is_conj() or t.is_neg() for t in tensors):
        return composition
    if any(map(torch._C._functorch.is_legacy_batchedtensor, tensors)):
        # gradients of many vectors at once: autograd.grad(..., is_grads_batched=True)
        return composition
    return None


def ordinary(*tensors: Tensor) -> bool:
    """Whether a launcher may take these as they are: no transform, mode, subclass or lazy sign stands between."""
    return not transforming() and _special(tensors) is None


def transforming() -> bool:
    """True inside torch.func's transforms; torch.compile asks once for each graph, which it guards by the transforms."""
    return torch._C._functorch.maybe_current_level() is not None


transforming._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _autocast(op: Op, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Arguments as autocast would hand them to the PyTorch ops that `op` stands for; None where it would treat those apart."""
    if op.autocast == "composition":
        return None
    if op.autocast == "promote" or op.internal:  # the gradient of what ran keeps its dtypes
        return args
    dtype = torch.float32
    if op.autocast != "float32":
        dtype = torch.get_autocast_dtype(dispatch_call_cache.device_of(args).type)

    def eligible(a: Any) -> bool:
        return isinstance(a, Tensor) and a.is_floating_point() and a.dtype != torch.float64

    kept = [a for p, a in zip(op.params, args, strict=False) if p.name in op.uncast]
    if any(eligible(a) and a.dtype != dtype for a in kept):
        return None
    return tuple(a.to(dtype) if eligible(a) else a for a in args)
