"""Notices, at every call, whether the model and its inputs are still those that a program was made for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, compress
from math import copysign
from operator import attrgetter, call, is_, itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..native import call_extension
from . import tensor_guard
from .python_globals import CONTENT, Reach

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
TABLES = ("_parameters", "_buffers", "_modules")
OURS = ("report", "_program")
SKIPPED = (frozenset(vars(nn.Module())) | {*OURS}) - {"training"}
DETERMINED: Callable[[], bool] = torch._C._get_deterministic_algorithms
# items of a container beyond which only their number is watched
LARGE = 64
NUMBERS = (int, float, complex)
DEPTH = 3  # how far objects such as configurations are followed


class Hooks:
    """The hooks of a module tree and those of all modules; the root's only where asked for, as they run as ever elsewhere."""

    def __init__(self, model: nn.Module, root: bool = False) -> None:
        below = [vars(m) for path, m in model.named_modules() if path or root]
        tables = [known[h] for known in below for h in HOOKS if h in known]  # TorchScript has none
        tables += [vars(torch.nn.modules.module)[h] for h in GLOBAL_HOOKS]
        self.empty: list[dict[Any, Any]] = [t for t in tables if not t]
        self.filled: list[dict[Any, Any]] = [t for t in tables if t]
        self.contents = [dict(t) for t in self.filled]

    def holds(self) -> bool:
        """True while none was added or removed."""
        return not any(self.empty) and self.contents == self.filled


class Watch:
    """The state of a module tree: modes, hooks, attributes, configurations, globals, and which tensors are its own.

    Equality of lists and tuples looks at identity first, so comparing thousands of unchanged values takes microseconds.
    """

    def __init__(self, model: nn.Module, kinds: Iterable[type] = (), root: bool = False) -> None:
        """`kinds`: the classes of objects that calls are given, too; `root`: whether hooks of the model itself count."""
        self.spaces: list[dict[str, Any]] = []  # attributes of objects: none may come or go
        self.getters: list[Callable[[Any], Any]] = []
        self.known: list[Any] = []  # what the getters are asked of
        self.names: list[tuple[str, ...]] = []  # that they look up in a dict; none of others
        self.values: list[Any] = []  # what they gave
        self.containers: list[Any] = []
        self.contents: list[Any] = []  # copies of what they held
        self.empty: list[dict[str, Any]] = []  # tables of parameters and the like that are empty
        self.hooks = Hooks(model, root)
        self._entered: set[int] = set()
        for module in model.modules():
            known = vars(module)
            self._space(known, SKIPPED, 0)
            for table in map(known.get, TABLES):
                if table:
                    self._container({k: _exact(v) for k, v in table.items()}, table)
                    self._carried(table)
                else:
                    self.empty.append({} if table is None else table)
        reach = Reach(model, kinds)
        for scope, names in reach.scopes:
            self._attributes(scope, names, 0)
        for kind, names in reach.classes:
            self._value(attrgetter(*names, names[0]), kind)
            for name in names:
                self._inside(getattr(kind, name), 0)
        for cell in reach.cells:
            self._value(CONTENT, cell)
            self._inside(cell.cell_contents, 0)
        self.dtype, self.determined = torch.get_default_dtype(), DETERMINED()
        self.sizes = list(map(len, self.spaces))
        self.modules = [*model.modules()]
        self.kinds = [*map(type, self.modules)]
        self.several = [type(v) is tuple for v in self.values]
        self.flat = [*chain.from_iterable(compress(self.values, self.several))]
        pairs = zip(self.contents, self.containers, strict=True)
        self.counting = [
            (c, now) for c, now in pairs if any(isinstance(v, NUMBERS) for v in _held(c))
        ]
        # at the last look: weights that were replaced would be compared number by number
        self.changed = False

    def check(self) -> Callable[[], bool]:
        """`holds`, in C where calls are compiled."""
        module, hooks = _module(), self.hooks
        if module is None:
            return self.holds
        held, contents = [*self.containers, *hooks.filled], [*self.contents, *hooks.contents]
        try:
            made: Callable[[], bool] = module.Unchanged(
                [*hooks.empty, *self.empty], self.spaces, self.sizes, self.modules, self.kinds, self.known, self.names,
                self.getters, self.values, held, contents,
            )  # fmt: skip
        except TypeError:  # a dict of a kind of its own
            return self.holds
        return made

    def _space(self, known: dict[str, Any], skipped: AbstractSet[str], depth: int) -> None:
        """Watch all attributes of one object."""
        if id(known) not in self._entered:
            self._entered.add(id(known))
            self.spaces.append(known)
            self._attributes(known, [n for n in known if n not in skipped], depth)

    def _carried(self, table: dict[str, Any]) -> None:
        """Watch what parameters and buffers carry by public names, such as the scale of a quantised weight."""
        for tensor in table.values():
            if isinstance(tensor, Tensor) and (held := vars(tensor)):
                self._attributes(held, [n for n in held if not n.startswith("_")], 0)

    def _attributes(self, known: Mapping[str, Any], names: list[str], depth: int) -> None:
        if not names:
            return
        get = itemgetter(*names, names[0])  # one twice, so that it always gives a tuple
        self._value(get, known, tuple(names))
        for value in map(known.__getitem__, names):
            self._inside(value, depth)

    def _value(self, get: Callable[[Any], Any], known: Any, names: tuple[str, ...] = ()) -> None:
        """Watch what `get(known)` gives; `names` where that looks up these in a dict."""
        self.getters.append(get)
        self.known.append(known)
        self.names.append(names if type(known) is dict else ())
        value = get(known)
        self.values.append(tuple(map(_exact, value)) if type(value) is tuple else _exact(value))

    def _inside(self, value: Any, depth: int) -> None:
        """Watch what lies in a container or a plain object."""
        if isinstance(value, (list, dict, set)) and id(value) not in self._entered:
            self._entered.add(id(value))
            if len(value) > LARGE:
                return
            inner = list(value.values()) if isinstance(value, dict) else list(value)
            exact: Any = list(map(_exact, inner))
            if isinstance(value, dict):
                exact = dict(zip(value, exact, strict=True))
            self._container(set(value) if isinstance(value, set) else exact, value)
            for v in inner if depth < DEPTH else ():
                self._inside(v, depth + 1)
        elif depth < DEPTH and plain_object(value):
            self._space(vars(value), frozenset(), depth + 1)

    def _container(self, content: Any, container: Any) -> None:
        self.contents.append(content)
        self.containers.append(container)

    def _same_numbers(self, now: list[Any]) -> bool:
        """Whether what is equal is also of the same types and signs: what is identical is."""
        if not all(map(is_, self.flat, chain.from_iterable(compress(now, self.several)))):
            return _one_number(self.values, now)
        return all(_one_number(*pair) for pair in self.counting)

    def _same_tensors(self) -> bool:
        """Whether tensors that equality would compare by their numbers are the ones that they were."""
        try:
            now = [*map(call, self.getters, self.known)]
        except (KeyError, AttributeError, ValueError):  # deleted
            return False
        pairs = zip([*self.values, *self.contents], [*now, *self.containers], strict=True)
        return all(_same(kept, value) for kept, value in pairs)

    def holds(self) -> bool:
        """True while nothing has changed but the tensors' contents."""
        if self.changed and not self._same_tensors():
            return False
        same = self._holds()
        self.changed = not same
        return same

    def _holds(self) -> bool:
        try:
            return (
                self.hooks.holds()
                and not any(self.empty)
                and self.dtype is torch.get_default_dtype()
                and self.determined is DETERMINED()
                and self.kinds == [*map(type, self.modules)]
                and self.sizes == [*map(len, self.spaces)]
                and self.values == (now := [*map(call, self.getters, self.known)])
                and self.contents == self.containers
                and self._same_numbers(now)
            )
        # deleted, or equality of arrays
        except (KeyError, AttributeError, RuntimeError, ValueError):
            return False


def _same(kept: Any, now: Any) -> bool:
    """False where a tensor is another one than was kept, by itself or in a container; all else is left to equality."""
    if isinstance(kept, Tensor):
        return kept is now
    if type(kept) in (tuple, list) and type(now) is type(kept):
        return all(map(_same, kept, now))
    if type(kept) is dict and isinstance(now, dict):
        return all(_same(v, now.get(k, v)) for k, v in kept.items())
    return True


def _held(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _one_number(kept: Any, now: Any) -> bool:
    """Whether equal numbers are one number: 2 and 2.0 are not, nor 0.0 and -0.0; of what two equal containers hold."""
    if kept is now:
        return True
    if type(kept) is type(now) and type(kept) in (tuple, list, dict):
        other = map(now.__getitem__, kept) if type(kept) is dict else now
        return all(map(_one_number, _held(kept), other))
    return not isinstance(kept, NUMBERS) or (type(kept) is type(now) and repr(kept) == repr(now))


class _Same:
    """Equal to one tensor or module only, whatever its own equality says."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return other is self.value


def _exact(value: Any) -> Any:
    """What to compare a value with: itself where equality is identity, or fails, as it does between several elements."""
    if not isinstance(value, Tensor):
        return value
    several = type(value) in (Tensor, nn.Parameter) and value.numel() > 1
    return value if several else _Same(value)


def plain_object(value: Any) -> bool:
    """True for configurations and the like: objects that carry attributes and are neither code nor PyTorch's."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType))
        and not kind.__module__.startswith(("torch.", "builtins", "logging"))
        and kind.__module__ != "torch"
    )


class Kept:
    """Whether parameters and buffers are still of the dtype, shape, strides and device for which a program was made.

    `p.data = p.data.t()` is another tensor at the same place, with no version more. PyTorch's compiled guard sees it; it
    knows inference mode as a state of its own, so that there is one for each, and asks for `requires_grad`, which may change.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list({id(t): t for t in tensors if t.layout == torch.strided}.values())
        self.specs = self._specs()
        self._compile()

    def _specs(self) -> list[Any]:
        return [(t.dtype, t.shape, t.stride(), t.device) for t in self.tensors]

    def _compile(self) -> None:
        checks = []
        for inference in (False, True):
            with torch.inference_mode(inference):
                checks.append(tensor_guard.guard(self.tensors) if self.tensors else _always)
        self.checks = checks  # whole, as other threads ask meanwhile

    def holds(self) -> bool:
        """True while they are."""
        if self.checks[torch.is_inference_mode_enabled()](*self.tensors):
            return True
        if self._specs() != self.specs:
            return False
        self._compile()
        return True


def _always(*_: Any) -> bool:
    return True


def _module() -> Any:
    call_extension.load()
    return call_extension.module()


def still(
    tensors: Sequence[Tensor],
    state: Sequence[Any],
    watched: Sequence[Tensor] = (),
    versions: Sequence[int] = (),
) -> Callable[[], bool] | None:
    """What asks, in C, whether tensors look as they do now and lie at the addresses of `state`, whose second half, if there is
    one, says which want gradients, and whether `watched` have these versions; None where that is left to Python."""
    module = _module()
    if module is None:
        return None
    try:
        made: Callable[[], bool] = module.Still(tuple(tensors), state, tuple(watched), versions)
    except TypeError:  # a subclass, or no plain memory
        return None
    return made


class Guard:
    """What the flattened inputs of one program must be: shapes, strides, dtypes, devices of tensors; equality of the rest."""

    def __init__(self, example: Sequence[Any], gradients: bool) -> None:
        self.tensors = [i for i, v in enumerate(example) if isinstance(v, Tensor)]
        self.rest = [(i, v) for i, v in enumerate(example) if not isinstance(v, Tensor)]
        self.specs = [
            (v.dtype, v.layout, v.shape, strides_of(v), v.device)
            for v in example
            if isinstance(v, Tensor)
        ]
        self.gradients = gradients

    def holds(self, given: Sequence[Any]) -> bool:
        """True where a program made for the example may serve `given`."""
        for i, (dtype, layout, shape, stride, device) in zip(self.tensors, self.specs, strict=True):
            x = given[i]
            if (
                (type(x) is not Tensor and type(x) is not nn.Parameter)
                or x.is_nested
                or x.shape != shape  # what differs most often first
                or (x.__dict__ and attributes(x))
                or x.dtype is not dtype
                or x.layout is not layout
                or strides_of(x) != stride
                or x.device != device
            ):
                return False
            if x.requires_grad and not self.gradients and torch.is_grad_enabled():
                return False
        for i, value in self.rest:
            if type(given[i]) is not type(value) or given[i] != value:
                return False
            if type(value) is float and copysign(1.0, given[i]) != copysign(1.0, value):
                return False  # 0.0 is no -0.0
        return True


def attributes(tensor: Tensor) -> bool:
    """Whether a tensor carries attributes, which a graph would not read, other than advice to a compiler."""
    return not all(name.startswith("_dynamo") for name in vars(tensor))


def strides_of(value: Any) -> Any:
    """None where a layout has none, or where there is no tensor."""
    strided = isinstance(value, Tensor) and value.layout is torch.strided
    return value.stride() if strided else None
