"""What the code of a model reads besides its modules' own attributes: globals, class attributes, closures, by their names.

Followed from `forward` through the methods and functions that it names, as far as they are the user's: installed packages
are taken to stay as they are, but for the plain globals that methods of their modules read.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

PLAIN = (int, float, bool, str, list, dict, set, tuple, deque)
MADE = ("__new__", "__init__", "__post_init__", "__setattr__")  # what runs where one is made
STARTS = ("forward", "__call__")
INSTALLED = tuple({sysconfig.get_path(p) for p in ("stdlib", "platstdlib", "purelib", "platlib")})
CONTENT = attrgetter("cell_contents")
MIXINS: list[type] = []  # put before the user's class by `optimize`


class Reach:
    """`scopes`: namespaces with the names read there; `classes`: by the names that they or their bases have; `cells`: variables
    of enclosing functions."""

    def __init__(self, model: nn.Module, kinds: Iterable[type] = ()) -> None:
        """`kinds`: classes of objects that calls are given, whose every method may run."""
        self._names: dict[int, tuple[Mapping[str, Any], dict[str, None]]] = {}
        self._classes: dict[type, dict[str, None]] = {}
        self._cells: dict[int, CellType] = {}
        self._seen: set[tuple[CodeType, tuple[type, ...]]] = set()
        modules = dict.fromkeys(map(type, model.modules()))
        for kind in (*modules, *kinds):
            own = tuple(filter(_own, kind.__mro__))
            for cls in own:
                for value in vars(cls).values():
                    for function in _functions(value):
                        self._globals(function, PLAIN)
            self._attributes(own, STARTS if kind in modules else _every_name(own), own)
        for module in model.modules():
            for value in vars(module).values():
                self._held(value)

    @property
    def scopes(self) -> list[tuple[Mapping[str, Any], list[str]]]:
        """Each namespace with the names in it, sorted."""
        return [(scope, sorted(names)) for scope, names in self._names.values()]

    @property
    def classes(self) -> list[tuple[type, list[str]]]:
        """Each class with the names that are looked up in it, sorted."""
        return [(cls, sorted(names)) for cls, names in self._classes.items()]

    @property
    def cells(self) -> list[CellType]:
        """The variables."""
        return [*self._cells.values()]

    def _watch(self, scope: Mapping[str, Any], name: str) -> None:
        self._names.setdefault(id(scope), (scope, {}))[1][name] = None

    def _globals(self, function: FunctionType, kinds: Any) -> dict[str, Any]:
        """Watch the globals of these kinds that a function names; returns all that it names."""
        scope = function.__globals__
        named = {n: scope[n] for n in _named(function.__code__) if n in scope}
        for name, value in named.items():
            if isinstance(value, kinds) and not name.startswith("__"):
                self._watch(scope, name)
        return named

    def _attributes(
        self, classes: tuple[type, ...], names: tuple[str, ...], own: tuple[type, ...]
    ) -> None:
        """Watch what classes, the first before its bases, hold by these names, and follow the functions among it."""
        for name in names:
            having = [cls for cls in classes if name in vars(cls)]
            for cls in having:
                value = vars(cls)[name]
                functions = _functions(value)
                if isinstance(value, (*PLAIN, Tensor)) or not all(map(_installed, functions)):
                    if cls is having[0]:  # a class between may come to have one
                        self._classes.setdefault(classes[0], {})[name] = None
                    else:
                        self._watch(vars(cls), name)
                for function in functions:
                    self._follow(function, own)

    def _follow(self, function: FunctionType, own: tuple[type, ...] = ()) -> None:
        """Everything that a function of the user's reads."""
        if (function.__code__, own) in self._seen or _installed(function):
            return
        self._seen.add((function.__code__, own))
        names = _named(function.__code__)
        read = self._globals(function, (*PLAIN, Tensor, FunctionType))
        values = [v for n, v in read.items() if not n.startswith("__")]
        for cell in function.__closure__ or ():
            value = _content(cell)
            if isinstance(value, (*PLAIN, Tensor, FunctionType)):
                self._cells[id(cell)] = cell
            values.append(value)
        self._attributes(own, names, own)
        for value in values:
            if isinstance(value, FunctionType):
                self._follow(_bare(value))
            elif isinstance(value, ModuleType):
                self._module(value, names)
            elif not isinstance(value, (*PLAIN, Tensor, nn.Module)):
                self._object(value, names)

    def _held(self, value: Any) -> None:
        """What an attribute of a module brings with it: functions, classes, objects with methods."""
        while isinstance(value, (partial, MethodType)):
            value = value.func if isinstance(value, partial) else value.__func__
        if isinstance(value, FunctionType):
            self._follow(_bare(value))
        elif not isinstance(value, (*PLAIN, Tensor, nn.Module)):
            kind = value if isinstance(value, type) else type(value)
            own = tuple(filter(_own, kind.__mro__))
            self._attributes(own, _every_name(own), own)
            self._defaults(kind)

    def _defaults(self, kind: type) -> None:
        """Watch what a class of the user's holds for objects that do not, as configurations have it."""
        for cls in filter(_own, kind.__mro__):
            if not _is_installed(getattr(sys.modules.get(cls.__module__), "__file__", "")):
                for name, value in vars(cls).items():
                    if isinstance(value, PLAIN) and not name.startswith("__"):
                        self._watch(vars(cls), name)

    def _module(self, module: ModuleType, names: tuple[str, ...]) -> None:
        if not _is_installed(getattr(module, "__file__", None)):
            for name in names:
                value = vars(module).get(name)
                if isinstance(value, (*PLAIN, Tensor, FunctionType)) and not name.startswith("__"):
                    self._watch(vars(module), name)
                    if isinstance(value, FunctionType):
                        self._follow(_bare(value))

    def _object(self, value: Any, names: tuple[str, ...]) -> None:
        """A class of the user's, or an object of one: what it holds by names that the function has."""
        classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
        mine = tuple(filter(_own, classes))
        names = _reached(mine, (*names, *MADE) if isinstance(value, type) else names)
        if mine and not isinstance(value, type):
            held = getattr(value, "__dict__", {})
            for name in names:
                if isinstance(held.get(name), (*PLAIN, Tensor)):
                    self._watch(held, name)
        self._attributes(mine, names, mine)


def _own(cls: type) -> bool:
    """Whether a class is neither Python's, nor PyTorch's, nor one that `optimize` has put before the user's."""
    ours = any(base is mixin for base in cls.__bases__ for mixin in MIXINS)
    name = cls.__module__
    return not (ours or name.startswith(("torch.", "tensorlogic.")) or name in _PYTHON)


def _reached(classes: tuple[type, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, and those that the user's methods of these names have, and so on."""
    found: dict[str, None] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = None
            functions = [f for c in classes for f in _functions(vars(c).get(name))]
            waiting += [n for f in functions if not _installed(f) for n in _named(f.__code__)]
    return tuple(found)


def _every_name(classes: tuple[type, ...]) -> tuple[str, ...]:
    """Of methods, and of what else is no business of Python's."""
    named = ((n, v) for cls in classes for n, v in vars(cls).items())
    return tuple(dict.fromkeys(n for n, v in named if not n.startswith("__") or _functions(v)))


_PYTHON = ("builtins", "typing", "abc", "enum", "collections", "torch", "types", "functools")


def _functions(value: Any) -> list[FunctionType]:
    """The functions behind a method, a property, a static method, or what wraps it."""
    if isinstance(value, property):
        found = [_bare(f) for f in (value.fget, value.fset, value.fdel)]
    else:
        method = callable(value) or isinstance(value, (staticmethod, classmethod))
        found = [_bare(value) if method else None]
    return [f for f in found if f is not None]


def _bare(value: Any) -> Any:
    for _ in range(16):  # decorators upon each other
        if not hasattr(value, "__wrapped__"):
            break
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None


def _installed(function: FunctionType | None) -> bool:
    return function is None or _is_installed(function.__code__.co_filename)


def _is_installed(file: str | None) -> bool:
    return file is None or file.startswith(INSTALLED)


def _named(code: CodeType) -> tuple[str, ...]:
    """The names that code has, and that the functions inside it have."""
    return tuple(dict.fromkeys(_every(code)))


def _every(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _every(inner)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
