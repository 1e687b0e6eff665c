"""The wheel: for any platform without native libraries, for the one they need with them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]


def wheel(tmp_path: Path, libraries: dict[str, bytes]) -> Path:
    """Built from a copy of the tree that has these native libraries."""
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns("_native", "__pycache__", "benchmarks")
    for name in ("tensorlogic", "tools"):
        shutil.copytree(ROOT / name, tree / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    folder = tree / "tensorlogic" / "_native"
    folder.mkdir()
    for name, content in libraries.items():
        (folder / name).write_bytes(content)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (made,) = tmp_path.glob("*.whl")
    return made


def test_pure_without_libraries(tmp_path: Path) -> None:
    made = wheel(tmp_path, {})
    assert made.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(made).namelist()
    assert {"tensorlogic_enable.pth", "_tensorlogic_enable.py", "_tensorlogic_cli.py"} <= set(names)
    assert {"tensorlogic/py.typed", "tensorlogic/bench/report/page.html.jinja"} <= set(names)
    shipped = {path.name for path in (ROOT / "tensorlogic" / "plans" / "shipped").glob("*.json")}
    assert {f"tensorlogic/plans/shipped/{name}" for name in shipped} <= set(names)
    assert len(shipped) > 1
    assert "tensorlogic/plans/legacy_hashes.json" in names
    assert not [n for n in names if n.startswith(("tests/", "csrc/", "tools/"))]


def test_without_libraries_of_other_sources(tmp_path: Path) -> None:
    csrc = tmp_path / "tree" / "csrc"
    csrc.mkdir(parents=True)
    (csrc / "a.cpp").touch()
    made = wheel(tmp_path, {"libtensorlogic_native.so": b"GLIBC_2.28", "stamp": b"build other"})
    assert made.name.endswith("-py3-none-any.whl")
    assert not [n for n in zipfile.ZipFile(made).namelist() if n.endswith(".so")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads what glibc is needed")
def test_platform_of_the_libraries(tmp_path: Path) -> None:
    content = {"libone.so": b"..GLIBC_2.17..GLIBC_2.4", "libtwo.so": b"GLIBC_2.28"}
    made = wheel(tmp_path, content)
    assert "-py3-none-manylinux_2_28_" in made.name
    names = zipfile.ZipFile(made).namelist()
    assert {f"tensorlogic/_native/{name}" for name in content} <= set(names)
