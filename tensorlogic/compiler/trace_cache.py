"""Graphs that an earlier process has traced: taken again where one call of the model makes exactly the calls that they hold.

Nothing of `torch.export` runs then. What it has shown once, that a graph holds for all inputs of these shapes, is believed while the
code of the model's classes is as it was and no value of a tensor reaches Python during the call.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..core import policy as core_policy
from ..system import atomic_file, settings
from .trace.exporter import prepare, trace, witness
from .trace.graph_facts import last_uses, mutates
from .trace.model_copies import fresh, live_tensors, sharing
from .trace.serialization import Unpackable, packed, unpacked
from .trace.traced_graph import Trace, counters
from .tune.decision_store import code_version, switches
from .verify import equivalence

LOG = logging.getLogger("tensorlogic")
MOST = 64  # graphs that are kept; the oldest go
DAMAGED = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError)
TELLING = frozenset(("numpy", "tolist", "item", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "data_ptr", "__dlpack__", "__reduce_ex__", "__deepcopy__"))  # fmt: skip


def traced(
    clone: nn.Module,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    theirs: Sequence[Tensor] | None = None,
) -> Trace:
    """The graph of a model by an earlier process, else by `trace`, and then kept. `theirs`: what a call of the model gave.

    Raises:
        Untraceable: PyTorch cannot trace it.
    """
    policy = core_policy.current()
    if policy.reproducible or policy.tune == "full":
        return replace(trace(clone, args, kwargs), theirs=theirs)
    path = place(model, args, kwargs)
    found = _recalled(path, clone, model, args, kwargs)
    if found is None:
        found = trace(clone, args, kwargs)
        found.theirs = theirs
        _keep(path, found)
    found.exported = None
    return found


def place(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Path:
    """Where the graph of a model on such inputs is kept."""
    flat, spec = pytree.tree_flatten((args, dict(kwargs)))
    tensors = (*model.named_parameters(), *model.named_buffers(), *enumerate(flat))
    about = [(str(n), _spec(t)) for n, t in tensors]  # values of other inputs are part of the graph
    modules = [(n, type(m).__qualname__, m.training) for n, m in model.named_modules()]
    classes = {c for m in model.modules() for c in type(m).__mro__}
    code = sorted(line for c in classes for line in _code(c))
    devices = {t.device.type for _, t in tensors if isinstance(t, Tensor)}
    state = [switches(torch.device(d)) for d in sorted(devices)]
    whole = (torch.__version__, code_version(), torch.is_grad_enabled(), str(spec), state)
    digest = hashlib.sha256(repr((whole, about, modules, code)).encode()).hexdigest()[:24]
    return settings.cache_folder() / "graphs" / f"{digest}.json"


def _spec(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)
    strides = value.stride() if value.layout == torch.strided else value.layout
    look = value.dtype, tuple(value.shape), strides, value.device.type
    return (*look, value.requires_grad, value.is_inference(), type(value).__name__)


def _code(cls: type) -> Iterator[str]:
    """The methods of a class as text, PyTorch's own left out: its version stands for them."""
    if cls.__module__.startswith("torch.") or cls.__module__ == "builtins":
        return
    for name, method in vars(cls).items():
        while hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        if isinstance(method, FunctionType):
            yield f"{cls.__module__}.{cls.__qualname__}.{name} {_text(method.__code__)}"


def _text(code: CodeType) -> str:
    inner = [_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {inner}"


# Keeping ------------------------------------------------------------------------------------------


def _keep(path: Path, found: Trace) -> None:
    """Write what `trace` has found, in one step; trouble with the disk means that the next process traces again."""
    program = found.exported
    specs = program.graph_signature.input_specs
    kinds = [s.kind.name for s in specs]
    if mutates(found.graph) or not {*kinds} <= {"USER_INPUT", "PARAMETER", "BUFFER"}:
        return
    if any(not name for name, _ in found.state.values()):
        return
    try:
        places = ["" if s.kind.name == "USER_INPUT" else s.target for s in specs]
        text = json.dumps({"places": places, "calls": packed(program.graph)})
        atomic_file.replace(path, text, sync=False)
        known = sorted(path.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)
        for old in known[: max(0, len(known) - MOST)]:
            old.unlink(missing_ok=True)
    except (Unpackable, TypeError, OSError) as problem:
        LOG.info("tensorlogic: a graph is not kept: %s", problem)


# Taking again -------------------------------------------------------------------------------------


def _recalled(
    path: Path, clone: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Trace | None:
    """The kept graph if it makes the calls of the model; None where there is none, or it does not."""
    try:
        if not path.is_file():
            return None
        record = json.loads(path.read_text())
        graph = unpacked(record["calls"])
        nodes = [n for n in graph.nodes if n.op == "placeholder"]
        names = dict(zip((n.name for n in nodes), record["places"], strict=True))
        inputs = [n for n, name in names.items() if not name]
        out_spec = _same(graph, names, inputs, model, args, kwargs)
        if out_spec is None:
            return None
        live = live_tensors(clone)
        state = {n: (t, live[t]) for n, t in names.items() if n not in inputs}
    except DAMAGED as problem:
        LOG.info("tensorlogic: a kept graph is of no use: %s", problem)
        return None
    flat, in_spec = pytree.tree_flatten((args, dict(kwargs)))
    counted = counters(state, live)
    prepare(graph, state, counted)
    return Trace(graph, nn.Module(), state, inputs, in_spec, out_spec, flat, counted)


def _same(
    graph: fx.Graph,
    names: Mapping[str, str],
    inputs: list[str],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """How the model's output is nested, if its call and a run of the graph make the same calls; else None."""
    twin = sharing(model, buffers=False)
    given = fresh(args, kwargs)
    flat = pytree.tree_flatten(given)[0]
    known = live_tensors(twin)
    steady = {n: known[t] for n, t in names.items() if n not in inputs}
    known_tensors = [*known.values(), *(v for v in flat if isinstance(v, Tensor))]
    with witness():
        theirs, told = Calls(known_tensors), Told()
        with told, theirs:
            out = twin(*given[0], **given[1])
    leaves, out_spec = pytree.tree_flatten(out)
    if told.values or theirs.values:
        return None
    ours = Calls(known_tensors)
    env = {**steady, **dict(zip(inputs, flat, strict=True))}
    calls = [n for n in graph.nodes if n.op == "call_function"]
    outputs = graph.output_node().args[0]
    with ours:
        equivalence.evaluate(calls, env, None, last=last_uses(calls, outputs))
        mine = pytree.tree_leaves(fx.map_arg(outputs, lambda n: env[n.name]))
    same = ours.lines == theirs.lines and list(map(ours.of, mine)) == list(map(theirs.of, leaves))
    return out_spec if same else None


class Calls(TorchDispatchMode):
    """Writes down every call that reaches PyTorch's kernels: op, arguments, results; tensors by numbers of their first meeting."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.numbers = WeakIdKeyDictionary()
        self.count, self.lines, self.values = 0, list[Any](), False
        for t in known:
            self.of(t)

    def of(self, value: Any) -> Any:
        """A value that can be compared between runs."""
        if not isinstance(value, Tensor):
            return type(value), value
        number = self.numbers.get(value)
        if number is None:
            number = self.numbers[value] = self.count
            self.count += 1
        return number, value.shape, value.stride(), value.dtype, value.device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        words = kwargs or {}
        given = [self.of(v) for v in pytree.tree_leaves((args, words))]
        out = func(*args, **words)
        self.values |= out is not None and not isinstance(out, (Tensor, tuple, list))
        self.lines.append((func, given, [self.of(v) for v in pytree.tree_leaves(out)]))
        return out


class Told(TorchFunctionMode):
    """Notices where a value of a tensor is handed to Python, which a graph would not show."""

    values = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.values |= getattr(func, "__name__", "") in TELLING
        return func(*args, **(kwargs or {}))
