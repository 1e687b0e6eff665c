"""optimize: a model traced, rewritten, checked, timed and, where it pays, replaced; otherwise given back as it was."""

from __future__ import annotations

import copy
import functools
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..core import argument_checks, policy, weight_cache
from ..core.numeric_mode import Mode, Precision
from ..core.precision_policy import policy_of
from ..core.precision_policy import precision as Policy
from ..guards.errors import MISS, Unfit, Untraceable, first_line
from ..guards.global_state import CHECKPOINT, KEPT, answered, keeps_parametrized
from ..guards.model_guard import HOOKS
from ..guards.python_globals import MIXINS
from ..guards.tensor_tree import tensors_in, unhooked
from ..system import compile_pool, process, settings
from ..system.heap_trim import give_back
from . import object_models, trace_cache
from .graph_breaks import Pieces, pieces
from .inductor.background_compile import Later, worthwhile
from .object_models import Apart
from .program_search import best
from .reporting.advise import advise, watched
from .reporting.report import Report
from .rewrite.precision_pass import Kept, precisely
from .runtime.program import Program
from .trace.exporter import witness
from .trace.graph_facts import constants
from .trace.model_copies import fresh, sharing, undisturbed, unsearched, unwritten
from .trace.side_effects import probe, takes_itself
from .tune.region_tuner import FAILURES
from .verify import gradients as verify_gradients
from .verify.whole_model import Original

# seconds for measuring where the caller gives no other budget
BUDGET_S = 2.0
TRAINING_BUDGET_S = 5.0  # likewise, with a backward pass behind each region
STEPS = "training: weights change at every step, so calls were timed without packed or widened copies of earlier ones"
LOOKS = 2  # at an unchanged weight until a copy of it is kept


class OptimizedModule(nn.Module):
    """Mixed into the model's own class: forward by the program where it may serve, by the model's own code elsewhere."""

    _program: Program | Pieces | Kept | Apart | Later | None
    report: Report

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What the model's own class has."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Whoever keeps a list of the model's subclasses is not told of ours."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        program = self.__dict__.get("_program")  # none in another object of this class
        if program is None or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        out = program(args, kwargs)
        return super().forward(*args, **kwargs) if out is MISS else out

    forward.stands_in = True  # type: ignore[attr-defined]  # for the model's own, whose signature counts

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is copied or saved is the model; a program belongs to one process and one set of parameters."""
        cls, state = self._plain()
        if _pickles_plainly(cls):
            return nn.Module.__new__, (cls,), state
        return _same, (_made(cls, state),)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        cls, state = self._plain()
        if hasattr(cls, "__deepcopy__") or not _pickles_plainly(cls):
            return copy.deepcopy(_made(cls, state), memo)
        copied: nn.Module = nn.Module.__new__(cls)
        memo[id(self)] = copied  # which what it holds may hold, too
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script compiles: the model's own code, or what that gives for it."""
        plain = _made(*self._plain())
        own: Any = getattr(plain, "__prepare_scriptable__", None)
        return plain if own is None else own()

    def _plain(self) -> tuple[type[nn.Module], dict[str, Any]]:
        """The model's own class, and what it holds without us."""
        held: dict[str, Any] = nn.Module.__getstate__(self)
        state = {k: v for k, v in held.items() if k not in ("_program", "report")}
        return type(self).__mro__[2], state


MIXINS.append(OptimizedModule)


def _pickles_plainly(cls: type[nn.Module]) -> bool:
    """Whether a class is pickled as PyTorch's modules are."""
    names = ("__reduce_ex__", "__reduce__", "__getstate__")
    return all(getattr(cls, name) is getattr(nn.Module, name) for name in names)


def _made(cls: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    plain: nn.Module = nn.Module.__new__(cls)
    plain.__dict__.update(state)
    return plain


def _same(model: nn.Module) -> nn.Module:
    return model


def optimize(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    training: bool = False,
    budget_s: float | None = None,
    dynamic: bool = False,
    precision: Policy | Mode | None = None,
) -> OptimizedModule:
    """The same model, faster where that can be had: rewritten into fused calls, checked, timed and captured; never slower.

    Args:
        model: a torch.nn.Module, in the mode (train or eval) in which it will be called. It is not changed; a copy of it is
            called a few times. No other thread may train it meanwhile (its steps, drawn numbers and parameters' hooks would count
            as the model's own, and be undone).
        example_inputs: a tuple of its positional arguments, a mapping of keyword ones, or a single tensor; of the
            shapes, dtypes and devices that matter. Other inputs are served by the model's own code (see `dynamic`).
        training: keep gradients. Without it, calls that record gradients are served by the model's own code. Gradients of gradients
            (`create_graph=True`) are the own code's, too: call the model under `tensorlogic.policy(force="torch.eager")`
            for them, elsewhere they raise. A model that checkpoints activations is given back as it is: a graph would keep them.
        budget_s: seconds that measuring may take beside tracing (2 by default, 5 for training). What was found is kept in
            the user's cache folder: a later process with the same model, inputs, machine and versions checks it and times
            nothing, unless it asks for a larger budget, or under policy(tune="full"). Of a budget that is given, half is
            for PyTorch's Inductor: what it makes of the whole model by then, in a process of its own,
            is checked, timed beside what was found, and serves where it is faster (`TENSORLOGIC_INDUCTOR=0`
            keeps it out). It takes 5 to 60 s. Without `budget_s` nothing waits for it: it is compiled in the background once the calls have taken
            20 s (2 s on a GPU whose machine has cores and memory to spare), and compared during one call, within 5 % of the time
            that calls have taken by then. Where no call may ever take longer, give a `budget_s`.
        dynamic: sizes vary from call to call, such as batches or a decoder's cache that grows. Dynamo then traces with
            symbolic sizes, and what it made serves every size; each op of ours chooses its implementation for the size
            that it meets. Nothing is captured, so for sizes that recur it is the slower choice.
        precision: `tensorlogic.precision(...)` for every product of the model, convolutions and gradients included; the
            policy around this call if None. Such a model is not compared with the original's time, keeps its policy
            whatever is around later calls, and serves inputs like the example only: others raise a RuntimeError.

    Returns:
        A module of the model's own class with the same parameters, buffers and `state_dict`, and a `report` of what was
        replaced, timed, refused and why. What is written or loaded into a parameter of one shows in the other; a parameter that
        is replaced by another tensor is replaced where it was assigned alone. Where nothing pays, or where the model cannot be traced, `model` itself, with
        its `report`.

    Raises:
        TypeError: model is no module, or a flag neither True nor False. RuntimeError: training under torch.inference_mode, or during a CUDA graph capture.
        ValueError: budget_s is negative; or the model itself fails on the example inputs, the cause is its own error. Under a precision policy also:
            the model is not one graph.

    Example:
        >>> import torch, tensorlogic
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
        >>> fast = tensorlogic.optimize(model, torch.randn(4, 8))
        >>> fast.report.outcome in ("original", "rewritten", "captured", "compiled")
        True
    """
    argument_checks.flag("optimize", "training", training)
    argument_checks.flag("optimize", "dynamic", dynamic)
    args, kwargs = _arguments(model, example_inputs, training)
    if budget_s is not None and not (isinstance(budget_s, (int, float)) and budget_s >= 0):
        raise ValueError(
            f"optimize: budget_s is {budget_s!r}; a number of seconds from 0 is required"
        )
    asked = policy.current().precision if precision is None else policy_of(precision)
    begin = time.perf_counter()
    report = Report()
    budget = (BUDGET_S, TRAINING_BUDGET_S)[training] if budget_s is None else float(budget_s)
    until = begin + budget if budget_s is not None and settings.inductor() else 0.0
    copies = weight_cache.CACHE.names()
    try:
        with process.no_full_gc(), unsearched(), unhooked(model.parameters()):
            given = args, kwargs
            original = Original(model, model, given, training, report, budget, until)
            served = _program(original, dynamic, asked)
    except (Untraceable, NotImplementedError) as problem:  # such as sparse tensors bring about
        if asked is not None:
            raise ValueError(
                f"optimize: the model is not one graph ({problem}), so nothing could hold it to {asked}; call "
                f"tensorlogic.linear and matmul in it under that policy, or optimise it without one"
            ) from problem
        known = isinstance(problem, Untraceable)
        report.reason, served = str(problem) if known else first_line(problem), None
    weight_cache.end_pretending()
    weight_cache.CACHE.only(copies)  # of what serves, its own are made again
    if training and (report.rows or served is not None):
        report.notes.append(STEPS)
    if served is not None:
        report.bytes = served.nbytes + _copies(served, args, kwargs)
    give_back()
    report.watch = None
    advise(report)
    report.seconds = time.perf_counter() - begin
    if served is None:
        if isinstance(model, OptimizedModule):  # whose report says what serves it
            model.report.notes.append(report.reason)
        else:
            model.__dict__["report"] = report
        return cast(OptimizedModule, model)  # which has a report, too
    fast = served.model
    fast.__dict__["_program"], fast.__dict__["report"] = served, report
    if budget_s is None and isinstance(served, Pieces):
        served.compete_later(report)
    elif budget_s is None and isinstance(served, Apart):
        _compete_later(served, "program")
    elif budget_s is None:
        _compete_later(fast, "_program")
    return cast(OptimizedModule, fast)


def _compete_later(holder: Any, name: str) -> None:
    """Inductor may compete in the background with the program that an object holds by this name."""
    program, known = holder.__dict__.get(name), weakref.ref(holder)

    def decided(later: Later, program: Program) -> None:
        held = known()
        if held is not None and held.__dict__.get(name) is later:
            held.__dict__[name] = program

    if isinstance(program, Program) and worthwhile(program.contest):
        holder.__dict__[name] = Later(program, program.contest, decided)


def _arguments(model: Any, given: Any, training: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize: model is {type(model).__name__}; a torch.nn.Module is required")
    if training and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "optimize: training=True under torch.inference_mode(), which records no gradients; leave that block first"
        )
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "optimize: a CUDA graph is being captured; call optimize before the capture"
        )
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(given), {}
    raise TypeError(
        f"optimize: example_inputs is {type(given).__name__}; a tuple of the model's arguments, a mapping of keyword "
        f"arguments or a tensor is required"
    )


def _copies(served: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of what calls derive from the parameters and keep, such as packed weights; made now where a call does no more."""
    if isinstance(served, Apart) and (found := served.objects.taken(args, kwargs)) is not None:
        return _copies(served.program, tuple(found[0]), {})
    if isinstance(served, Program) and served.pure and not served.training:
        with torch.inference_mode(False), torch.no_grad():
            for _ in range(LOOKS if served.device.type == "cpu" else 0):
                served(args, kwargs)
    tensors = (*served.model.parameters(), *served.model.buffers())
    return weight_cache.CACHE.nbytes_of(tensors)


def _unfit(model: nn.Module) -> str | None:
    """Why a model is not even traced."""
    if isinstance(model, OptimizedModule):
        return "the model is optimised already"
    if isinstance(model, torch.jit.ScriptModule):
        return "TorchScript has an executor of its own"
    if hasattr(model, "_orig_mod"):
        return "the model is compiled by torch.compile already"
    if nn.modules.module._has_any_global_hook():
        return "hooks of all modules would not run in a graph"
    if type(model).__call__ is not nn.Module.__call__:
        return "its __call__ is its own: a graph of it would be called inside it once more"
    if keeps_parametrized() and any(map(parametrize.is_parametrized, model.modules())):
        return f"its weights are {KEPT}: optimize it outside of that block"
    if "forward" in vars(model):
        return "its forward was replaced on the object, where no program is reached: put it into a class"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            return f"{name} is on the meta device and has no values: materialise it before"
        if not torch.nn.parameter.is_lazy(tensor) and (
            tensor.layout != torch.strided or tensor.is_nested
        ):
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            return f"{name} is {kind}, which no graph is made for"
    for path, module in model.named_modules():
        hooked = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
        if path and any(hooked):
            return f"hooks on {path} would not run in a graph"
        if any(torch.nn.parameter.is_lazy(p) for p in module._parameters.values()):
            return f"{path or 'the model'} is lazy: call it once before"
    return None


def _program(
    original: Original, dynamic: bool, asked: Precision | None
) -> Program | Pieces | Kept | Apart | None:
    """What serves the model from now on: one program, or one for each graph that Dynamo cuts; None for itself."""
    model, (args, kwargs) = original.model, original.given
    training, report = original.training, original.report
    reason = _unfit(model)
    if any(t.is_nested for t in tensors_in((args, kwargs))):
        reason = reason or "an input is a nested tensor, whose sizes no graph can be made for"
    if reason:
        raise Unfit(reason)
    if torch.cuda.is_initialized():
        compile_pool.prepare()
    with undisturbed(), torch.inference_mode(False), torch.set_grad_enabled(training):
        _copied(model)
        try:
            habits = probe(model, args, kwargs)
        except Unfit:
            raise
        except Exception as problem:  # the model's own code may raise anything
            if takes_itself(model, args, kwargs):
                raise Unfit(
                    f"the model takes its inputs, but no copies of them ({first_line(problem)})"
                ) from problem
            raise ValueError(
                f"optimize: the model fails on the example inputs ({first_line(problem)}); give inputs of the shapes, "
                f"dtypes and device that it takes"
            ) from problem

        if training and CHECKPOINT in habits.asked:
            raise Unfit(
                "the model checkpoints activations: a graph would keep them, and with them the memory that is to be spared"
            )
        if not (habits.prints or habits.sets_up or dynamic):
            report.watch = functools.partial(_watched, model, args, kwargs, report)

        def made() -> nn.Module:
            copied = _copied(model)
            if habits.sets_up:
                with witness(), unwritten(copied):
                    given = fresh(args, kwargs)
                    copied(*given[0], **given[1])
            return copied

        clone = made()
        try:
            if dynamic:
                raise Untraceable("sizes vary")
            if habits.prints:
                raise Untraceable("the model prints when it is called")
            fits = not training and asked is None
            foretold = fits and object_models.foretell(model, habits, args, kwargs)
            if not (habits.unlike or foretold):
                hooked = any(vars(model).get(name) for name in HOOKS)  # which run around a graph
                theirs = None if training or hooked else habits.outs
                traced = trace_cache.traced(clone, model, args, kwargs, theirs)
            elif not fits or habits.objects is None:
                raise Untraceable(habits.unlike)
            else:
                traced = object_models.traced(clone, model, habits.objects, args, kwargs)
            if training:
                verify_gradients.same(traced, model, args, kwargs)
            traced.asked = answered(habits.asked, clone, traced.example)
        except Untraceable as problem:
            if asked is not None:
                raise
            report.notes.append(f"not one graph: {problem}")
            report.look()
            # the first may have been left half traced
            return pieces(replace(original, model=_extended(made())), dynamic)
        _extended(clone)
        if training:
            constants(traced.graph, set())
        original = replace(original, model=clone, before=sharing(model, buffers=False))
        try:
            if asked is not None:
                report.look()
                return precisely(traced, original, asked)
            return (best if traced.objects is None else Apart.best)(traced, original)
        except FAILURES as problem:  # what PyTorch raises where a graph cannot run
            raise Untraceable(f"the graph does not run: {first_line(problem)}") from problem


def _watched(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], report: Report
) -> dict[str, Any] | None:
    try:
        return watched(model, args, kwargs)
    except FAILURES as problem:  # what cannot run while it is watched
        report.notes.append(f"not watched: {first_line(problem)}")
        return None


def _copied(model: nn.Module) -> nn.Module:
    try:
        return sharing(model)
    except Exception as problem:  # a module may hold what cannot be copied
        raise Unfit(f"the module cannot be copied: {first_line(problem)}") from problem


def _shown_as(theirs: Any) -> Any:
    """Our forward with the signature and the words of the model's, which trainers and exporters read."""
    own: Any = OptimizedModule.forward
    made: Any = FunctionType(own.__code__, own.__globals__, "forward", None, own.__closure__)
    made.__wrapped__, made.__doc__ = theirs, theirs.__doc__
    made.stands_in = True
    return made


def _extended(clone: nn.Module) -> nn.Module:
    """The copy with a class of its own: the model's, with our forward before it."""
    cls = type(clone)
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "forward": _shown_as(cls.forward),
    }
    try:
        # of the same name, by which libraries keep what they know of a class
        clone.__class__ = type(cls.__name__, (OptimizedModule, cls), names)
    except Exception as problem:  # a metaclass of the user's may raise anything
        raise Unfit(f"{cls.__name__} cannot be extended: {first_line(problem)}") from problem
    clone.__dict__.update({"_program": None, "report": None})
    return clone
