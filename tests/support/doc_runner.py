"""Run the code of documents and docstrings in a process of its own: `python -m tests.support.doc_runner FOLDER NAME...`.

A name is a Markdown file of the checkout, or "tensorlogic.NAME" for the docstring of a public name. The blocks of a file
share one namespace and run in order in an empty folder: `python` blocks (with `>>>` as doctests), and `sh` blocks whose
lines begin with `tensorlogic`. One line of JSON for each name says what went wrong.
"""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(text: str) -> Iterator[tuple[str, str, int]]:
    """Language, code and first line of every fenced block."""
    for found in FENCE.finditer(text):
        yield found[1], found[2], text.count("\n", 0, found.start()) + 2


def document(path: Path) -> tuple[int, list[str]]:
    """How many blocks of a file ran, and what went wrong."""
    scope: dict[str, Any] = {"__name__": path.stem}
    ran, wrong = 0, []
    for language, code, line in blocks(path.read_text()):
        run = {"python": _python, "sh": _shell}.get(language)
        if run is None:
            continue
        ran += 1
        problem = run(code, scope, f"{path.name}:{line}")
        if problem:
            wrong.append(problem)
    return ran, wrong


def _python(code: str, scope: dict[str, Any], where: str) -> str | None:
    if ">>> " in code:
        return _doctest(code, scope, where)[1]
    try:
        exec(compile(code, where, "exec"), scope)
    except Exception:  # whatever a document's code raises is the finding
        return f"{where}\n{traceback.format_exc()}"
    return None


def _shell(code: str, scope: dict[str, Any], where: str) -> str | None:
    from tensorlogic.cli.main import main

    for words in (shlex.split(line, comments=True) for line in code.splitlines()):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            good = not words or (words[0] == "tensorlogic" and main(words[1:]) == 0)
        if not good:
            return f"{where}: {shlex.join(words)} does not end with 0:\n{said.getvalue()[-2000:]}"
    return None


def _doctest(text: str, scope: dict[str, Any], where: str) -> tuple[int, str | None]:
    test = doctest.DocTestParser().get_doctest(text, scope, where, where, 0)
    said = io.StringIO()
    failed = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.write, clear_globs=False)
    return len(test.examples), said.getvalue() if failed.failed else None


def public(name: str) -> tuple[int, list[str]]:
    """The same for a public name's docstring; a module's functions count as its own."""
    import tensorlogic

    value = getattr(tensorlogic, name.partition(".")[2])
    parts = [value]
    if isinstance(value, ModuleType):
        made_here = (
            v for v in vars(value).values() if getattr(v, "__module__", "") == value.__name__
        )
        parts += [v for v in made_here if inspect.isroutine(v) and not v.__name__.startswith("_")]
    ran, wrong = 0, []
    for part in parts:
        scope = dict(vars(value)) if isinstance(value, ModuleType) else {}
        count, problem = _doctest(inspect.getdoc(part) or "", scope, f"{name} {part.__name__}")
        ran += count
        wrong += [problem] if problem else []
    return ran, wrong


def main(folder: str, *names: str) -> None:
    """Run each name from a folder of its own; results go to stdout, everything that the code prints to stderr."""
    for index, name in enumerate(names):
        place = Path(folder) / str(index)
        place.mkdir(parents=True)
        os.chdir(place)
        with contextlib.redirect_stdout(sys.stderr):
            ran, wrong = document(ROOT / name) if name.endswith(".md") else public(name)
        print(json.dumps({"name": name, "ran": ran, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
