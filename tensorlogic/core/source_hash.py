"""Hash of what a candidate computes: its sources' syntax trees, without what a move or a new layout of the text changes.

Left out: imports, docstrings, comments, `__all__`, blocks for type checkers, and annotations, except those of kernels, which
decide how Triton compiles. A name of this package counts by the name that its definition has, wherever it was imported from.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import hashlib
import inspect
import itertools
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ..system import process, settings

SCHEME = "1"  # another one where the same text hashes to something else
DIGITS = 16  # hashes of whole texts, which this one replaces, had 12
CACHE = "source-hashes"  # file in the cache folder
MOST_BYTES = 1 << 20  # of that file, which then begins anew: some 30,000 hashes
OURS = __name__.partition(".")[0]
Find = Callable[[ast.Module], list[ast.AST]]  # which nodes of a module's tree are hashed

_KNOWN: dict[str, str] = {}  # hashes by text and item
_READ: set[Path] = set()  # cache files that are in _KNOWN


def source_hash(sources: Iterable[Any]) -> str:
    """Hash of what these compute, the same after a move: 16 hexadecimal digits.

    Args:
        sources: modules, classes and functions of any kind, by their syntax; partial functions, by what is called and given;
            texts, such as a package's version, as they are; anything else by its name or its type's.
    """
    return _digest(*map(_item, sources))


def _digest(*parts: str) -> str:
    found = hashlib.sha256()
    for part in parts:
        text = part.encode("utf-8", "surrogatepass")
        found.update(b"%d:%b" % (len(text), text))
    return found.hexdigest()[:DIGITS]


def _item(item: Any) -> str:
    """What stands for one source in the hash."""
    if isinstance(item, str):
        return f"text {item}"
    if item is None or isinstance(item, (bool, int, float, complex, bytes)):
        return repr(item)
    if isinstance(item, (tuple, list)):
        return f"several {_digest(*map(_item, item))}"
    if isinstance(item, functools.partial):
        named = [part for name in sorted(item.keywords) for part in (name, item.keywords[name])]
        return f"partial {_digest(*map(_item, (item.func, *item.args, *named)))}"
    if isinstance(item, MethodType):
        return _item(item.__func__)
    found = inspect.unwrap(item)
    with contextlib.suppress(OSError):  # built in, or its text is not at hand
        if isinstance(found, ModuleType):
            return _module(found)
        if isinstance(found, FunctionType):
            return _function(found)
        if isinstance(found, type):
            return _class(found)
    name = item.__name__ if isinstance(item, ModuleType) else getattr(item, "__qualname__", None)
    return f"name {name or type(item).__qualname__}"


def _module(module: ModuleType) -> str:
    scope = vars(module)
    return _remembered(scope, _text(scope), "", lambda tree: [tree])


def _function(fn: FunctionType) -> str:
    code, scope = fn.__code__, fn.__globals__
    at = f"{code.co_name} {code.co_firstlineno}"
    text = _text(scope, code.co_filename)
    return _remembered(scope, text, at, lambda tree: _definitions(tree, code))


def _class(cls: type) -> str:
    scope, names = vars(sys.modules.get(cls.__module__, builtins)), cls.__qualname__.split(".")
    return _remembered(scope, _text(scope), cls.__qualname__, lambda tree: _named(tree, names))


def _text(scope: dict[str, Any], file: str | None = None) -> str:
    """The text of a module's file, given its globals; OSError where there is none."""
    path = file or scope.get("__file__")
    if path is None:
        raise OSError("built in")
    linecache.checkcache(path)
    lines = linecache.getlines(path, scope)
    if not lines:
        raise OSError(f"{path} cannot be read")
    return "".join(lines)


def _definitions(tree: ast.Module, code: CodeType) -> list[ast.AST]:
    """The nodes that were compiled to this code: of lambdas all that begin in its line."""
    name, line = code.co_name, code.co_firstlineno

    def made(node: ast.AST) -> bool:
        if isinstance(node, ast.Lambda):
            return name == "<lambda>" and node.lineno == line
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        return node.name == name and min(n.lineno for n in (node, *node.decorator_list)) == line

    found: list[ast.AST] = [node for node in tree.body if made(node)]
    return found or [node for node in ast.walk(tree) if made(node)]


def _named(tree: ast.Module, names: list[str]) -> list[ast.AST]:
    """The class of that qualified name."""
    inside: list[ast.AST] = [tree]
    for name in names:
        bodies = [n for node in inside for n in getattr(node, "body", ())]
        inside = [n for n in bodies if isinstance(n, ast.ClassDef) and n.name == name]
    return inside


def _remembered(scope: Mapping[str, Any], text: str, at: str, find: Find) -> str:
    """Hash of what `find` finds in a module's tree, computed once for each text, in all processes of this user."""
    key = _digest(SCHEME, str(scope.get("__name__")), at, text)
    if key not in _KNOWN:
        path = _cache_file()
        if key not in _KNOWN:
            _KNOWN[key] = _computed(scope, text, find)
            _append(path, f"{key} {_KNOWN[key]}\n")
    return _KNOWN[key]


def _computed(scope: Mapping[str, Any], text: str, find: Find) -> str:
    try:
        with process.paused():
            tree = ast.parse(text)
            nodes = find(tree)
            if not nodes:  # the file is no longer what was loaded
                raise OSError("not found")
            writer = _Writer(tree, scope)
            for node in nodes:
                writer.write(node)
    except (SyntaxError, ValueError):  # nothing that Python can parse
        return _digest(text)
    return _digest(*writer.out)


def _cache_file() -> Path | None:
    """Where hashes are kept; read when it is first asked for."""
    try:
        path = settings.cache_folder() / CACHE
    except ValueError:  # a wrong setting, of which others complain
        return None
    if path not in _READ:
        _READ.add(path)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = path.read_text()
            if len(text) > MOST_BYTES:
                path.unlink()
            for line in text.splitlines():
                key, _, found = line.partition(" ")
                if len(key) == len(found) == DIGITS:
                    _KNOWN.setdefault(key, found)
    return path


def _append(path: Path | None, line: str) -> None:
    """One line at a time, so that processes do not mix theirs; what cannot be written is computed again."""
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(line)


# what a tree means --------------------------------------------------------------------------------------------------

_SKIPPED = {"ctx", "kind", "type_comment", "type_ignores", "simple", "annotation", "returns"}
_ANNOTATED = (ast.arg, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_KERNEL_ENDS = object()
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
OWN, MODULE, FOREIGN = "own", "module", "foreign"
Meaning = tuple[str, str]  # OWN and a name, MODULE or FOREIGN and a path


class _Writer:
    """Writes a module's syntax tree as words that are the same under every Python and wherever the module lies."""

    def __init__(self, tree: ast.Module, scope: Mapping[str, Any]) -> None:
        self.out: list[str] = []
        self.kernels = 0  # functions that Triton compiles around what is written
        self.module = str(scope.get("__name__", ""))
        self.package = self.module if "__path__" in scope else self.module.rpartition(".")[0]
        self.ours = {OURS, self.module.partition(".")[0]}
        self.names: dict[str, Meaning] = {}  # of imported names
        for node in _imports(tree):
            self._learn(node)

    # names

    def _learn(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                path = alias.name if alias.asname else name
                self.names[name] = MODULE if self._is_ours(path) else FOREIGN, path
            return
        base = node.module or ""
        if node.level:
            above = self.package.split(".")
            above = above[: len(above) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        within = self._inside if node.level or self._is_ours(base) else _outside
        for alias in node.names:
            self.names[alias.asname or alias.name] = within(base, alias.name)

    def _is_ours(self, path: str) -> bool:
        return path.partition(".")[0] in self.ours

    def _inside(self, path: str, name: str) -> Meaning:
        """What a module of ours calls so: a module, or a definition, which keeps its name wherever it stands."""
        inner = f"{path}.{name}"
        return (MODULE, inner) if _is_module(inner) else (OWN, name)

    def _meaning(self, node: ast.AST) -> Meaning | None:
        """What an imported name or an attribute of an imported module is; None of all else."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._meaning(node.value)
            if owner is not None and owner[0] != OWN:
                within = self._inside if owner[0] == MODULE else _outside
                return within(owner[1], node.attr)
        return None

    # words

    def write(self, node: ast.AST) -> None:
        """Append what this node means. The callers' stack may be nearly full: no recursion here."""
        waiting: list[Any] = [node]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                self.out.append(item)
            elif item is _KERNEL_ENDS:
                self.kernels -= 1
            elif (word := self._word(item)) is not None:
                self.out.append(word)
            else:
                if isinstance(item, _FUNCTIONS) and _is_kernel(item):
                    self.kernels += 1
                    waiting.append(_KERNEL_ENDS)
                waiting.extend(reversed(self._parts(item)))

    def _word(self, node: ast.AST) -> str | None:
        """What a node is that has no parts, None of others."""
        if isinstance(node, ast.Constant):
            return _constant(node.value)
        if isinstance(node, (ast.Name, ast.Attribute)):
            meaning = self._meaning(node)
            if meaning is not None:
                return "module" if meaning[0] == MODULE else f"Name {meaning[1]}"
            if isinstance(node, ast.Name):
                return f"Name {node.id}"
        return None

    def _parts(self, node: ast.AST) -> list[ast.AST | str]:
        """Nodes and words that a node is made of."""
        parts: list[ast.AST | str] = [f"{node.__class__.__name__}("]
        for name in node._fields:
            value = getattr(node, name, None)
            if name in _SKIPPED or value is None or value == []:
                continue
            parts.append(f"{name}=")
            if not isinstance(value, list):
                parts.append(_part(value))
                continue
            if isinstance(node, ast.JoinedStr):
                value = _pieces(value)
            elif name in _BLOCKS:
                value = _statements(value)
            parts += ["[", *map(_part, value), "]"]
        if isinstance(node, _ANNOTATED):
            annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
            if annotation is not None and (self.kernels or _is_constexpr(annotation)):
                parts += ["annotation=", annotation]
        return [*parts, ")"]


def _part(value: Any) -> ast.AST | str:
    """A node, or the word for a name or a number; in a dict, a key that is None stands before `**`."""
    return value if isinstance(value, ast.AST) else f"{type(value).__name__} {value}"


def _pieces(values: list[ast.expr]) -> Iterator[ast.expr]:
    """Those of an f-string, whose text Pythons cut differently."""
    for kind, pieces in itertools.groupby(values, type):
        if kind is ast.Constant:
            yield ast.Constant("".join(str(p.value) for p in pieces if isinstance(p, ast.Constant)))
        else:
            yield from pieces


def _outside(path: str, name: str) -> Meaning:
    return FOREIGN, f"{path}.{name}"


def _imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """All import statements, those in functions too."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
            continue
        inner = [one for name in _BLOCKS for one in getattr(node, name, ())]
        waiting.extend(reversed(inner))


def _statements(body: list[Any]) -> Iterator[Any]:
    """Those of a block that do something."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass)):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            continue
        if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
            yield from _statements(node.orelse)
            continue
        yield node


def _last_name(node: ast.AST) -> str:
    """`jit` of `triton.jit` and of `jit(...)`; "" of all but names."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles it, to which its annotations are types."""
    return any(_last_name(decorator) == "jit" for decorator in node.decorator_list)


def _is_constexpr(node: ast.AST) -> bool:
    text = node.value if isinstance(node, ast.Constant) else _last_name(node)
    return str(text).endswith("constexpr")


def _constant(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"int {value:#x}"
    return f"str {value}" if isinstance(value, str) else f"{type(value).__name__} {value!r}"


@functools.cache
def _is_module(path: str) -> bool:
    """Whether a path in a loaded package is a module, by the files that there are: nothing is imported."""
    top, _, rest = path.partition(".")
    package = sys.modules.get(top)
    for folder in getattr(package, "__path__", ()):
        place = os.path.join(folder, *rest.split(".")) if rest else folder
        if os.path.isfile(f"{place}.py") or os.path.isfile(os.path.join(place, "__init__.py")):
            return True
    return False
