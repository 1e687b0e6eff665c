"""The layout: what may import what, how many files a folder has, and that the folders of tests are the package's."""

from __future__ import annotations

import ast
import contextlib
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 15  # files of a folder
NO_MIRRORS = ("support", "repository")
NAMED = re.compile(r"(tensorlogic|\.+\w+)(\.\w+)+")  # a module, in a string


def file_of(root: Path, name: str) -> Path | None:
    """The file of a module of ours, or of what is in one."""
    if name.partition(".")[0] not in ("tensorlogic", "tests"):
        return None
    place = root / name.replace(".", "/")
    found = [p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()]
    return found[0] if found else file_of(root, name.rpartition(".")[0])


def imported(root: Path, path: Path) -> set[Path]:
    """Files of ours that a file imports: at its top, in functions, for types only, or by a module's name in a string."""
    package = ".".join(path.parent.relative_to(root).parts)
    names, strings = set[str](), set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and NAMED.fullmatch(str(node.value)):
            with contextlib.suppress(ImportError):  # above the top: no module's name
                strings.add(resolve_name(str(node.value), package))
    public = {root / "tensorlogic" / "__init__.py"}  # public names, in strings
    found = {file_of(root, n) for n in names} | ({file_of(root, n) for n in strings} - public)
    return {other for other in found if other not in (None, path)}


def mistakes(root: Path) -> list[str]:
    """What is wrong with a checkout; the order of the folders is that of the tree in docs/architecture.md, the highest first."""
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    order = re.findall(r"^  (\w+)/ ", page, re.MULTILINE)
    package = root / "tensorlogic"
    found: list[str] = []
    files: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        name, above = str(path.relative_to(package)), path.relative_to(package).parts
        if len(above) == 1:
            found += [f"file: {name}"] * (name not in ("__init__.py", "__main__.py"))
            continue
        found += [f"no folder of the tree: {name}"] * (above[0] not in order)
        for other in imported(root, path):
            below = other.relative_to(package).parts if package in other.parents else ("?",)
            if below[0] not in order or order.index(below[0]) < order.index(above[0]):
                found.append(f"climb: {name} imports {'/'.join(below)}")
            files.setdefault(name, set()).add("/".join(below))
            if other.parent != path.parent:
                folders.setdefault("/".join(above[:-1]), set()).add("/".join(below[:-1]))
    for arrows in (files, folders):
        try:
            TopologicalSorter(arrows).prepare()
        except CycleError as error:
            found.append(f"circle: {' imports '.join(reversed(error.args[1]))}")
    sources = [p for part in ("tensorlogic", "tests", "csrc") for p in (root / part).rglob("*.*")]
    many = Counter(p.parent.relative_to(root) for p in sources if p.suffix in (".py", ".cpp", ".h"))
    found += [f"full: {folder} has {n} files" for folder, n in many.items() if n > MOST]
    for path in (root / "tests").rglob("test_*.py"):
        place = path.relative_to(root / "tests")
        mirrored = len(place.parts) > 1 and (package / place.parent).is_dir()
        found += [f"mirrors nothing: {place}"] * (not mirrored and place.parts[0] not in NO_MIRRORS)
        lent = [other for other in imported(root, path) if other.name.startswith("test_")]
        found += [f"test imports test: {place}"] * bool(lent)
    return sorted(set(found))


@pytest.fixture(scope="module")
def found() -> list[str]:
    return mistakes(ROOT)


def test_everything_is_in_its_place(found: list[str]) -> None:
    assert not found


@pytest.mark.parametrize(
    ("mistake", "path", "text"),
    [
        ("climb", "tensorlogic/low/a.py", "def f(): from ..high import b"),
        ("climb", "tensorlogic/low/a.py", "if TYPE_CHECKING: import tensorlogic.high.b"),
        ("climb", "tensorlogic/low/a.py", "load('tensorlogic.high.b')"),
        ("climb", "tensorlogic/low/a.py", "load('..high.b', __package__)"),
        ("climb", "tensorlogic/low/a.py", "import tensorlogic"),
        ("circle", "tensorlogic/low/a.py", "from .c import d"),
        ("circle", "tensorlogic/low/more/e.py", "from .. import a"),
        ("full", "csrc/f14.h", ""),
        ("file", "tensorlogic/f.py", ""),
        ("no folder of the tree", "tensorlogic/other/f.py", ""),
        ("test imports test", "tests/low/test_f.py", "from .test_a import g"),
        ("mirrors nothing", "tests/other/test_f.py", ""),
        ("mirrors nothing", "tests/test_f.py", ""),
    ],
)  # fmt: skip
def test_what_is_out_of_place_is_found(tmp_path: Path, mistake: str, path: str, text: str) -> None:
    house = {
        "docs/architecture.md": "  high/ it\n  low/ it\n", "tensorlogic/__init__.py": "from .high import b",
        "tensorlogic/high/b.py": "import tensorlogic.low.a", "tensorlogic/low/a.py": "", "tests/low/test_a.py": "",
        "tensorlogic/low/c.py": "from .a import d\nfrom .more import e", "tensorlogic/low/more/e.py": "",
    } | {f"csrc/f{n}.cpp": "" for n in range(MOST)}  # fmt: skip
    for name, body in house.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(body)
    assert not mistakes(tmp_path)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert mistake in {m.partition(":")[0] for m in mistakes(tmp_path)}
