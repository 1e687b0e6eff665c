"""Op and Candidate: what an operation means, who can run it, and how the two are registered."""

from __future__ import annotations

import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import saved_tensors, weight_cache
from .candidate import EAGER, Candidate, Config, Launcher, Outputs
from .dtypes import NAMES
from .key import Key, TensorSpec


@dataclass(frozen=True)
class Param:
    """One parameter of an op: a tensor, an optional tensor, a flag (part of the key) or a scalar (passed at run time)."""

    name: str
    kind: str  # "tensor" | "optional" | "flag" | "scalar"
    annotation: Any

    @property
    def is_tensor(self) -> bool:
        return self.kind in ("tensor", "optional")

    @property
    def is_dynamic(self) -> bool:
        return self.kind != "flag"


# what a gradient's functions are given, and what is kept
Needs = tuple[bool, ...]
Args = tuple[Any, ...]
Kept = tuple[saved_tensors.Saved, ...]


@dataclass(frozen=True)
class Gradient:
    """How an op's gradients are had: what forward keeps, and the backward formula on it (which calls backward ops).

    save(flags, which tensors need a gradient, arguments, outputs) names what to keep, nothing of which the values are not
    read for those gradients; backward(flags, which, what was kept, scalars, dy) gives a gradient or None for each tensor.
    """

    save: Callable[[SimpleNamespace, Needs, Args, Outputs], Kept]
    backward: Callable[[SimpleNamespace, Needs, Args, Args, Tensor], Outputs]
    # which of what is kept serves one backward pass only; later ones find None there
    once: int | None = None
    # dy is read more than once, or by whole rows: it gets memory of its own where elements share it
    again: bool = False
    # eager keeps and computes what PyTorch's own does: our backward costs nothing behind it
    light: bool = False


_BITS = {
    needs: "".join("01"[n] for n in needs)
    for count in range(9)
    for needs in itertools.product((False, True), repeat=count)
}


def bits(needs: tuple[bool, ...]) -> str:
    """Which gradients are asked for, as the flag of a backward op: "10" of (True, False)."""
    return _BITS[needs]


_WRITTEN = {"Tensor": Tensor, "Tensor | None": Tensor | None} | {
    t.__name__: t for t in (str, bool, int, float)
}


def _names(fn: Callable[..., Any]) -> list[str]:
    """Parameters of a function; for a plain one at a tenth of what inspect.signature takes."""
    code = getattr(fn, "__code__", None)
    if code is None or hasattr(fn, "__wrapped__") or code.co_kwonlyargcount or code.co_flags & 0xC:
        return list(inspect.signature(fn).parameters)
    return list(code.co_varnames[: code.co_argcount])


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    """Parameters and their types; what is written in the usual words is not evaluated, for the import's sake."""
    written, names = fn.__annotations__, _names(fn)
    if all(written.get(n) in _WRITTEN for n in names):
        return {n: _WRITTEN[written[n]] for n in names}
    hints = typing.get_type_hints(fn)
    return {n: hints[n] for n in names}


@dataclass
class Op:
    """An operation: schema and reference (one function), costs, sample inputs, cases, gradient, candidates.

    The schema is the reference's signature: `Tensor` and `Tensor | None` parameters are tensors, `float` ones are run-time
    scalars, everything else (and what `keyed` names) is a flag that belongs to the key. Where `gradient` is given, a last
    flag `save` says that what backward needs must be among the outputs.
    """

    reference: Callable[..., Any]
    flops: Callable[[Key], float]
    traffic: Callable[[Key], float]  # least bytes to move
    sample: Callable[[Key, str, TensorSpec, torch.device, torch.Generator], Tensor | None] = (
        lambda *_: None
    )
    # example values of the run-time scalars
    scalars: Callable[[Key], Mapping[str, Any]] = lambda key: {}
    cases: Callable[[], Iterable[tuple[Any, ...]]] = lambda: ()
    gradient: Gradient | None = None
    keyed: tuple[str, ...] = ()
    runtime: tuple[str, ...] = ()
    # "lower" (products), "float32" (losses), "promote", or "composition"
    autocast: str = "promote"
    # tensors that autocast leaves alone where the others are lowered
    uncast: tuple[str, ...] = ()
    # same-dtype arithmetic of the reference where torch.eager draws its own numbers
    baseline: Callable[..., Any] | None = None
    # makes normal inputs overflow careless arithmetic; says what float32 sums of them lose
    stress: Callable[[Key, dict[str, Any]], float | None] | None = None
    # the key of the same work in the fewest dimensions, by which measured neighbours are looked up
    normal: Callable[[Key], Key] = lambda key: key
    elementwise: bool = False
    # turns them into round numbers, where the tables of native kernels begin and end
    landmarks: Callable[[Key, dict[str, Any]], None] | None = None
    # makes sample inputs agree with each other
    prepare: Callable[[Key, dict[str, Any]], None] | None = None
    # other keys, of this or another op, that calls of this one turn into; measured with it
    twins: Callable[[Key], Iterable[tuple[Op, Key]]] = lambda key: ()
    mutates: tuple[str, ...] = ()  # tensors a candidate may update in place
    # candidates on a GPU may take numbers from its default generator
    draws: bool = False
    # arguments that leave those tensors out ...
    functional: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
    # ... and the update from all outputs, for the registered op
    update: Callable[[tuple[Any, ...], Outputs], None] | None = None
    # PyTorch's own, where a number stands for a tensor and nothing is to be fused
    numbers: Callable[..., Tensor] | None = None
    # the one function of PyTorch's that torch.eager calls, dynamic arguments to output, if so
    direct: Callable[[Key], Callable[..., Tensor] | None] = lambda key: None
    outputs: int = 1
    internal: bool = False  # called by other ops only, which take all its outputs
    candidates: dict[str, Candidate] = field(default_factory=dict)
    # forward and backward as one op, by whose measured times recorded calls may be served as one
    joined: Callable[[Key], tuple[Op, Key] | None] = lambda key: None
    # ops in whose places a joined one serves: where one of them is forced, it does not
    stands_for: tuple[str, ...] = ()
    # the same operation under a precision policy, with candidates of its own
    precise: Op | None = None
    # or what an op around a product calls instead, so that the product follows the policy
    composed: Callable[..., Tensor] | None = None
    # of a precise op: how far outputs are off on the caller's own data
    measure: Callable[..., Any] | None = None
    # False for precise ops, which are reached through the op that they stand for
    listed: bool = True

    def __post_init__(self) -> None:
        self.name: str = self.reference.__name__
        self.params: tuple[Param, ...] = tuple(self._params())
        self.dynamic: tuple[Param, ...] = tuple(p for p in self.params if p.is_dynamic)
        self.tensors: tuple[Param, ...] = tuple(p for p in self.params if p.is_tensor)
        self.flags: tuple[Param, ...] = tuple(p for p in self.params if not p.is_dynamic)
        self.closer = self._closer()
        if self.listed:
            OPS[self.name] = self

    def _params(self) -> Iterable[Param]:
        for name, hint in _hints(self.reference).items():
            if hint is Tensor:
                kind = "tensor"
            elif hint == (Tensor | None):
                kind = "optional"
            elif name not in self.keyed and (hint is float or name in self.runtime):
                kind = "scalar"
            else:
                kind = "flag"
            yield Param(name, kind, hint)

    def _closer(self) -> Callable[..., Launcher]:
        """make(fn, *flags) -> a launcher over the dynamic parameters, generated so that a call costs one frame."""
        names = ", ".join(p.name for p in self.params)
        source = (
            f"def make(fn, {', '.join(p.name for p in self.flags)}):\n"
            f"    return lambda {', '.join(p.name for p in self.dynamic)}: fn({names})\n"
        )
        scope: dict[str, Any] = {}
        exec(compile(source, f"<tensorlogic {self.name}>", "exec"), scope)
        return typing.cast(Callable[..., Launcher], scope["make"])

    @property
    def known(self) -> tuple[Candidate, ...]:
        """The candidates of this moment, in the order of registration; other threads may register more meanwhile."""
        return tuple(self.candidates.values())

    # registration -------------------------------------------------------------------------------------------------

    def add(self, candidate: Candidate) -> Candidate:
        """Register a candidate; the order of registration is the order in which ties are broken."""
        if candidate.id.count(".") != 1 or not all(candidate.id.split(".")):
            raise ValueError(
                f"candidate id {candidate.id!r} of op {self.name!r} must read 'provider.strategy'"
            )
        if candidate.id in self.candidates:
            raise ValueError(
                f"op {self.name!r} already has a candidate {candidate.id!r}; choose another id"
            )
        self.candidates[candidate.id] = candidate
        return candidate

    def candidate(
        self, id: str, **about: Any
    ) -> Callable[[Callable[..., Outputs]], Callable[..., Outputs]]:
        """Decorator: register a plain Python function whose parameters are exactly the schema's."""

        def register(fn: Callable[..., Outputs]) -> Callable[..., Outputs]:
            self._check_schema(id, fn)
            about.setdefault("sources", (fn,))
            self.add(Candidate(id, lambda key, *_: self.closer(fn, *key_flags(key)), **about))
            return fn

        return register

    def _check_schema(self, id: str, fn: Callable[..., Any]) -> None:
        have, want = _names(fn), [p.name for p in self.params]
        if have != want:
            raise TypeError(
                f"candidate {id!r} of op {self.name!r} has parameters {have}; the schema is {want}"
            )

    # keys -----------------------------------------------------------------------------------------------------------

    def key(self, args: Sequence[Any], direction: str, precision: str = "default") -> Key:
        """The key of op-level arguments (in schema order)."""
        device = next(a.device.type for a in args if isinstance(a, Tensor))
        pairs = [*zip(self.params, args, strict=True)]
        return Key(
            op=self.name,
            tensors=tuple([spec(a, device) for p, a in pairs if p.is_tensor]),
            names=tuple(p.name for p in self.tensors),
            flags=tuple([(p.name, a) for p, a in pairs if not p.is_dynamic]),
            device=device,
            direction=direction,
            precision=precision,
        )

    def namespace(self, key: Key) -> SimpleNamespace:
        """The key's flags by name."""
        return SimpleNamespace(**dict(key.flags))

    def full(self, key: Key, dynamic: Sequence[Any]) -> list[Any]:
        """All arguments in schema order from the key's flags and the dynamic ones."""
        flags, rest = dict(key.flags), iter(dynamic)
        return [next(rest) if p.is_dynamic else flags[p.name] for p in self.params]

    def plain(self, key: Key, device: torch.device) -> Launcher:
        """The plain composition of a key as a user would run it: what backward needs is left to PyTorch's autograd."""
        if self.gradient is not None:
            key = replace(key, flags=(*key.flags[:-1], ("save", False)))
        return self.candidates[EAGER].bind(key, {}, device)


class Flags:
    """As much of a key as the plain composition reads; a class that torch.compile can trace."""

    def __init__(self, flags: tuple[tuple[str, Any], ...]) -> None:
        self.flags = flags


@dataclass(frozen=True)
class DataChooser:
    """How a key whose error budget depends on the data is served; each is called with (op, key, device, rtol)."""

    # the candidate that would serve data like the last ones, if that is known
    expected: Callable[[Op, Key, torch.device, float], tuple[Candidate, Config] | None]
    # what looks at the data of each call, and the same from arguments to the one output, if there is that
    launcher: Callable[..., tuple[Launcher, Callable[..., Tensor] | None]]


OPS: dict[str, Op] = {}
DATA_CHOOSERS: dict[str, DataChooser] = {}  # by precision mode


def key_flags(key: Key) -> tuple[Any, ...]:
    """Values of the key's flags in schema order."""
    return tuple(value for _, value in key.flags)


def spec(tensor: Tensor | None, device: str) -> TensorSpec | None:
    """What the choice may depend on of one tensor."""
    if tensor is None:
        return None
    pointer = tensor.data_ptr() & 15
    align, dtype = pointer & -pointer or 16, NAMES.get(tensor.dtype) or str(tensor.dtype)
    constant = device == "cpu" and weight_cache.is_constant(tensor)
    return TensorSpec(dtype, tuple(tensor.shape), tuple(tensor.stride()), align, constant)
