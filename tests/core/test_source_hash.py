"""Hashes of sources: the same after a move or a new layout of the text, another one when what is computed changes."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tensorlogic.core import source_hash as core_source_hash
from tensorlogic.core.op import OPS
from tensorlogic.core.source_hash import DIGITS, source_hash
from tensorlogic.dispatch import candidate_loading

KERNEL = '''
"""A kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from . import shapes
from .base import LIMIT, Key
from .device import activate

if TYPE_CHECKING:
    from .base import Spec

SIZE = 16
__all__ = ["SIZE", "rows"]


@triton.jit
def kernel(x, n, BLOCK: tl.constexpr = 8):
    """y = exp(x)"""
    at = tl.arange(0, BLOCK)  # columns
    value = tl.exp(tl.load(x + at, mask=at < n, other=0.0))
    tl.store(x + at, activate(value, "relu"))


def rows(key: Key, most: int = 4, *, even: bool = True) -> int:
    from .base import ceil

    if key.size > LIMIT and even:
        raise ValueError(f"{key.size} rows {'are'} more than {LIMIT}")
    return min(shapes.rows(key), most * math.floor(1.5), -ceil(SIZE / 3))
'''
OTHER = {"base.py": "", "shapes.py": "", "device.py": "", "__init__.py": ""}


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Nothing is known that is not in the cache folder; called, once more."""

    def forget() -> None:
        monkeypatch.setattr(core_source_hash, "_KNOWN", {})
        monkeypatch.setattr(core_source_hash, "_READ", set())

    forget()
    return forget


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Writes a package's files, and gives the module of the first one, which is not run."""
    known, made = set(sys.modules), []

    def write(files: dict[str, str]) -> ModuleType:
        top = f"moved_{len(made)}"
        made.append(top)
        for name, text in {**files, "__init__.py": files.get("__init__.py", "")}.items():
            path = tmp_path / top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        importlib.import_module(top)
        first = next(iter(files))
        module = ModuleType(f"{top}.{first.removesuffix('.py').replace('/', '.')}")
        module.__file__ = str(tmp_path / top / first)
        return module

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in set(sys.modules) - known:
        if name.startswith("moved_"):
            del sys.modules[name]


def of(package: Callable[..., ModuleType], text: str) -> str:
    return source_hash([package({"kernel.py": text, **OTHER})])


MOVES = {
    "into another folder": [
        ("from . import shapes", "from ..ops import shapes"),
        ("from .base import LIMIT, Key", "from ..ops.core.base import LIMIT\nfrom ..ops.key import Key"),
        ("from .base import ceil", "from ..ops.core.base import ceil"),
        ("from .device import activate", "from ..ops.device_math import activate"),
    ],
    "of what it uses, under other names": [
        ("from . import shapes", "from . import base as sizes"),
        ("shapes.rows(key)", "sizes.rows(key)"),
        ("from .device import activate", "from .device import activate as act"),
        ('activate(value, "relu")', 'act(value, "relu")'),
    ],
    "from a module to the names in it": [
        ("from . import shapes", "from .shapes import rows as lines"),
        ("shapes.rows(key)", "lines(key)"),
        ("from .base import LIMIT, Key", "from . import base\nfrom .base import Key"),
        ("> LIMIT and", "> base.LIMIT and"),
        ("{LIMIT}", "{base.LIMIT}"),
    ],
    "to absolute paths": [
        ("from . import shapes", "import moved_1.shapes"),
        ("shapes.rows(key)", "moved_1.shapes.rows(key)"),
        ("from .device import activate", "from moved_1.device import activate"),
    ],
    "of what others import by other names": [
        ("import triton.language as tl", "from triton import language"),
        ("tl.", "language."),
        ("import math", "from math import floor"),
        ("math.floor", "floor"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("moved", MOVES)
def test_a_move_keeps_the_hash(moved: str, package: Callable[..., ModuleType]) -> None:
    before, text = of(package, KERNEL), KERNEL
    for old, new in MOVES[moved]:
        assert old in text
        text = text.replace(old, new)
    place = "kernels/rows.py" if moved == "into another folder" else "rows.py"
    others = {f"ops/{name}": "" for name in OTHER} | OTHER
    assert source_hash([package({place: text, **others})]) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A kernel."""', '"""Something else."""'),
        ('    """y = exp(x)"""\n', ""),
        ("  # columns", "  # columns of x"),
        ("mask=at < n, other=0.0)", "\n        mask=(at < n),\n        other=0.0,\n    )"),
        ('"relu"', "'relu'"),
        ("key: Key, most: int = 4", "key, most: float = 4"),
        ("-> int", "-> float"),
        ("    from .base import Spec\n", "    from .base import Spec, Kind\n"),
        ('__all__ = ["SIZE", "rows"]\n', ""),
        ("import math\nfrom typing", "from typing"),
        ("SIZE = 16\n", "import math\n\nSIZE = 0x10\n"),
        ("\n    from .base import ceil\n", ""),
        ("most * math.floor(1.5)", "(most * math.floor(1.50))"),
    ],
)
def test_text_that_means_the_same_keeps_the_hash(
    old: str, new: str, package: Callable[..., ModuleType]
) -> None:
    assert old in KERNEL
    text = KERNEL.replace(old, new)
    if "import math" not in text:
        text = text.replace("import triton\n", "import math\nimport triton\n")
    assert of(package, text) == of(package, KERNEL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SIZE = 16", "SIZE = 17"),
        ("SIZE = 16", "SIZE = 16.0"),
        ("SIZE = 16", "SIZE = True"),
        ("SIZE = 16", "SIZE: int = 16"),
        ("key.size > LIMIT", "key.size >= LIMIT"),
        ("x + at, mask", "x - at, mask"),
        ("most: int = 4", "most: int = 5"),
        ("even: bool = True", "even: bool = False"),
        (", *, even", ", even"),
        ("BLOCK: tl.constexpr", "BLOCK"),
        ("kernel(x, n,", 'kernel(x: "*fp16", n,'),
        ("tl.exp(", "tl.exp2("),
        ('"relu"', '"relu2"'),
        ("shapes.rows(key)", "shapes.lines(key)"),
        ("from .device import activate", "from .device import gelu as activate"),
        ("import triton.language as tl", "import triton.other as tl"),
        ("import math", "import cmath as math"),
        ("@triton.jit\n", ""),
        ("other=0.0", "other=1.0"),
        ("mask=", "mask2="),
        (" rows {'are'}", " rows! {'are'}"),
        ("{'are'}", "{'is'}"),
        ("and even", "or even"),
        ("-ceil", "+ceil"),
        ("    tl.store", "    value = value\n    tl.store"),
    ],
)
def test_another_meaning_changes_the_hash(
    old: str, new: str, package: Callable[..., ModuleType]
) -> None:
    assert old in KERNEL
    assert of(package, KERNEL.replace(old, new)) != of(package, KERNEL)


class _Absolute(ast.NodeTransformer):
    """Imports by the whole path."""

    def __init__(self, package: str) -> None:
        self.package = package

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.level:
            above = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
            node.module = ".".join([*above, *([node.module] if node.module else [])])
            node.level = 0
        return node


def test_our_modules_keep_their_hashes_when_they_are_copied_elsewhere(
    package: Callable[..., ModuleType],
) -> None:
    """Without comments, in another layout, imports by the whole path, in a package of another name."""
    candidate_loading.ready("cpu")
    given = [c.sources for name in ("linear", "softmax") for c in OPS[name].known]
    modules = {m.__name__: m for sources in given for m in sources if isinstance(m, ModuleType)}
    assert len(modules) >= 2
    for name, module in modules.items():
        text = Path(str(module.__file__)).read_text()
        tree = _Absolute(name.rpartition(".")[0]).visit(ast.parse(text))
        copy = package({"deep/copy.py": ast.unparse(tree)})
        assert source_hash([copy]) == source_hash([module]), name


# what may be a source -----------------------------------------------------------------------------------------------

FUNCTIONS = """
import functools
from . import shapes
from .base import doubled

def made(factor):
    def inner(x):
        return factor * x
    return inner

@functools.lru_cache
def stored(x):
    return doubled(x)

def plain(x: int) -> int:
    # what it does
    return x + 1

class Op:
    def launch(self, x):
        return x

TABLE = {"a": lambda x: x + 1,
         "b": (lambda x:
    x - 1)}
square, cube = lambda x: x**2, lambda x: x**3
inner = made(2)
launch = Op().launch
part = functools.partial(plain, 3)
"""


def functions(package: Callable[..., ModuleType], text: str = FUNCTIONS) -> ModuleType:
    """The module, which is run."""
    base = "def doubled(x):\n    return 2 * x\n"
    made = package({"a.py": text, "base.py": base, "shapes.py": ""})
    return importlib.import_module(made.__name__)


ITEMS: dict[str, Callable[[ModuleType], Any]] = {
    "function": lambda m: m.plain,
    "nested": lambda m: m.inner,
    "wrapped": lambda m: m.stored,
    "class": lambda m: m.Op,
    "method": lambda m: m.launch,
    "partial": lambda m: m.part,
    "lambda": lambda m: m.TABLE["a"],
    "lambda of two lines": lambda m: m.TABLE["b"],
    "two lambdas in a line": lambda m: m.square,
}
CHANGES = {
    "function": ("return x + 1\n", "return x + 2\n"),
    "nested": ("factor * x", "factor / x"),
    "wrapped": ("doubled(x)", "doubled(-x)"),
    "class": ("return x\n", "return -x\n"),
    "method": ("return x\n", "return -x\n"),
    "partial": ("plain, 3)", "plain, 4)"),
    "lambda": ('"a": lambda x: x + 1', '"a": lambda x: x + 2'),
    "lambda of two lines": ("    x - 1", "    x - 2"),
    "two lambdas in a line": ("x**3", "x**4"),
}


@pytest.mark.parametrize("kind", ITEMS)
def test_every_kind_of_source_is_hashed_by_its_own_text(
    kind: str, package: Callable[..., ModuleType]
) -> None:
    get = ITEMS[kind]
    found = source_hash([get(functions(package))])
    assert len(found) == DIGITS
    assert int(found, 16)
    moved = FUNCTIONS.replace("\ndef plain", "\nOTHER = 1  # another line before\n\ndef plain")
    assert source_hash([get(functions(package, moved))]) == found
    old, new = CHANGES[kind]
    assert FUNCTIONS.count(old) == 1
    assert source_hash([get(functions(package, FUNCTIONS.replace(old, new)))]) != found
    others = {source_hash([other(functions(package))]) for k, other in ITEMS.items() if k != kind}
    assert found not in others


def test_what_has_no_text_is_hashed_by_its_name_or_value() -> None:
    scope: dict[str, Any] = {"__name__": "nowhere"}
    exec("def made(x):\n    return x", scope)
    found = [len, sum, os, sys, "text", "texts", b"text", 1, 1.0, True, None, scope["made"], object(), (1, 2), functools.partial(len)]  # fmt: skip
    hashes = [source_hash([item]) for item in found]
    assert len(set(hashes)) == len(hashes)
    assert source_hash([scope["made"]]) == source_hash([scope["made"]])
    assert source_hash(["ab", "c"]) != source_hash(["a", "bc"])
    assert source_hash([object()]) == source_hash([object()])


def test_a_text_that_is_no_python_is_hashed_as_it_is(package: Callable[..., ModuleType]) -> None:
    first, second = (source_hash([package({"a.py": text})]) for text in ("a b c", "a b  c"))
    assert first != second


def test_the_stack_of_the_caller_does_not_matter(package: Callable[..., ModuleType]) -> None:
    deep = f"x = {'-' * 60}1\n" + "".join(
        f"{'el' * (i > 0)}if x == {i}:\n    y = {i}\n" for i in range(60)
    )

    def below(levels: int, module: ModuleType) -> str:
        return below(levels - 1, module) if levels else source_hash([module])

    first, second = (package({"a.py": deep}) for _ in range(2))
    assert below(600, first) == source_hash([second])


# what was computed once ---------------------------------------------------------------------------------------------


def test_hashes_are_computed_once_for_all_processes(
    package: Callable[..., ModuleType],
    fresh_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = package({"kernel.py": KERNEL, **OTHER})
    found = source_hash([module])
    fresh_process()
    monkeypatch.setattr(core_source_hash, "_computed", lambda *_: pytest.fail("parsed again"))
    assert source_hash([module]) == found


def test_a_changed_file_is_hashed_anew(package: Callable[..., ModuleType]) -> None:
    module = package({"kernel.py": KERNEL, **OTHER})
    found = source_hash([module])
    path = Path(str(module.__file__))
    path.write_text(KERNEL.replace("SIZE = 16", "SIZE = 160"))
    assert source_hash([module]) != found


@pytest.mark.parametrize("damage", ["folder", "binary", "lines"])
def test_a_damaged_cache_is_ignored(
    damage: str,
    package: Callable[..., ModuleType],
    fresh_process: Callable[[], None],
    tmp_path: Path,
) -> None:
    module = package({"kernel.py": KERNEL, **OTHER})
    found = source_hash([module])
    path = tmp_path / "cache" / core_source_hash.CACHE
    if damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "binary":
        path.write_bytes(b"\xff\xfe\x00" * 9)
    else:
        path.write_text("\n".join(line[:-1] for line in path.read_text().splitlines()))
    fresh_process()
    assert source_hash([module]) == found


def test_the_file_begins_anew_when_it_is_large(
    package: Callable[..., ModuleType], tmp_path: Path
) -> None:
    path = tmp_path / "cache" / core_source_hash.CACHE
    path.parent.mkdir(exist_ok=True)
    path.write_text("0123456789abcdef 0123456789abcdef\n" * 40_000)
    source_hash([package({"kernel.py": KERNEL, **OTHER})])
    assert len(path.read_text().splitlines()) == 1
