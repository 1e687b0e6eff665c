"""Libraries built from other sources than those that lie here are noticed: called as they are, they would lack what is called."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorlogic.native import call_extension, cpu_library, hook_extension
from tensorlogic.native import library_files as native_library_files

ROOT = Path(cpu_library.__file__).parents[2]
BUILDER = runpy.run_path(str(ROOT / "tools" / "build_native.py"))
CALLS = "tensorlogic_calls-2.13.0.cpython-311-x86_64-linux-gnu"


@pytest.mark.parametrize(
    ("name", "note", "part"),
    [
        (BUILDER["LIBRARY"], "stamp", None),
        ("libtensorlogic_hooks-2.13.0.so", "libtensorlogic_hooks-2.13.0.stamp", "hooks"),
        (f"{CALLS}.so", f"{CALLS}.stamp", "calls"),
    ],
)
def test_other_sources_show(name: str, note: str, part: str | None, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    now = BUILDER["stamp"]("g++", (), part)
    rest, sources = now.split()
    for text, stale in ((now, []), (f"{rest}\n{sources[::-1]}\n", [name]), (rest, [])):
        (tmp_path / note).write_text(text)
        assert BUILDER["stale"](tmp_path) == stale, text
    (tmp_path / note).unlink()  # put here by other means
    assert BUILDER["stale"](tmp_path) == []


def test_sources_beside_the_library_are_not_its_own() -> None:
    assert len({BUILDER["sources"](part) for part in (None, "hooks", "calls")}) == 3


@pytest.mark.parametrize("module", [cpu_library, hook_extension, call_extension])
def test_what_is_stale_is_not_loaded(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = (native_library_files if module is cpu_library else module).library()
    if not path.exists():
        pytest.skip(f"{path.name} is not built")
    monkeypatch.setattr(native_library_files, "stale", lambda: frozenset([path.name]))
    said = module._load()
    assert isinstance(said, str)
    assert path.name in said
    assert "built from other sources" in said
    assert "run `python tools/build_native.py`" in said


def test_a_named_library_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looked: list[Callable[..., Any]] = []
    monkeypatch.setattr(native_library_files.runpy, "run_path", looked.append)
    monkeypatch.setenv("TENSORLOGIC_NATIVE_LIBRARY", str(tmp_path / "own.so"))
    assert native_library_files.stale.__wrapped__() == frozenset()
    assert looked == []
