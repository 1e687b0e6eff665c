"""Every document is true as far as a machine can tell: its code runs, its links lead somewhere, its modules exist."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import tensorlogic
from tests.support import doc_runner as support_doc_runner

ROOT = Path(__file__).parents[2]
EVERY = sorted(
    str(p.relative_to(ROOT)) for p in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
)
TRANSLATED = [name for name in EVERY if name.endswith(".ja.md")]
DOCUMENTS = [name for name in EVERY if name not in TRANSLATED]  # whose code runs
MARKED = re.compile(r"<!-- (\w+) .*?<!-- end \1 -->", re.DOTALL)
COMMENT = re.compile(r"\s+# .*$", re.MULTILINE)
NAMES = [f"tensorlogic.{name}" for name in tensorlogic.__all__]
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)]+)\)")
DOCS = ("index", "tutorial", "how-to", "best-practices", "method", "architecture", "figures")


def run(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """What running them in one fresh process gave, by name."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TENSORLOGIC_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.doc_runner", str(folder / "run"), *names],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {r["name"]: r for r in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of everything; documents compare times, which a busy machine may spoil once, so what went wrong has a second chance."""
    found = run(tmp_path_factory.mktemp("docs"), [*DOCUMENTS, *NAMES])
    first = {name: r["wrong"] for name, r in found.items() if r["wrong"]}
    if first:
        found |= run(tmp_path_factory.mktemp("again"), list(first))
    for name, wrong in first.items():
        if found[name]["wrong"]:
            found[name]["wrong"] += ["before:", *wrong]
        else:
            warnings.warn(f"{name} went wrong once: {wrong}", stacklevel=1)
    return found


@pytest.mark.parametrize("name", DOCUMENTS)
def test_code_of_documents_runs(results: dict[str, dict[str, Any]], name: str) -> None:
    assert not results[name]["wrong"], "\n".join(results[name]["wrong"])
    code = [
        b for b in support_doc_runner.blocks((ROOT / name).read_text()) if b[0] in ("python", "sh")
    ]
    assert results[name]["ran"] == len(code)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_runs(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    assert not results[name]["wrong"], "\n".join(results[name]["wrong"])
    assert results[name]["ran"] >= 1, f"{name} has no example"


@pytest.mark.parametrize("name", TRANSLATED)
def test_translations_are_faithful(name: str) -> None:
    """The same code but for its comments, the same generated tables, headings of the same depth, links and words of code."""
    text, original = ((ROOT / n).read_text() for n in (name, name.replace(".ja", "")))
    code, theirs = (
        [
            (lang, COMMENT.sub("", code))
            for lang, code, _ in support_doc_runner.blocks(t)
            if lang != "text"
        ]
        for t in (text, original)
    )
    assert code == theirs
    assert [m[0] for m in MARKED.finditer(text)] == [m[0] for m in MARKED.finditer(original)]
    prose = [re.sub(r"```.*?```", "", MARKED.sub("", t), flags=re.DOTALL) for t in (text, original)]
    depths = [re.findall(r"^#+(?= )", p, re.MULTILINE) for p in prose]
    assert depths[0] == depths[1]
    ours, others = (set(LINK.findall(p)) - {name, name.replace(".ja", "")} for p in prose)
    assert ours == others
    words = [set(re.findall(r"`([^`]+)`", re.sub(r"\s+", " ", p))) for p in prose]
    assert words[0] == words[1]
    assert len([p for p in prose[0].split("\n\n") if p.strip()]) == len(
        [p for p in prose[1].split("\n\n") if p.strip()]
    )


@pytest.mark.parametrize("name", EVERY)
def test_links_lead_somewhere(name: str) -> None:
    for target in LINK.findall((ROOT / name).read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = ((ROOT / name).parent / file).resolve() if file else ROOT / name
        assert path.exists(), f"{name} links to {target}"
        assert path.is_relative_to(ROOT)
        if anchor:
            assert anchor in _anchors(path.read_text()), f"{name} links to {target}"


def _anchors(text: str) -> set[str]:
    """The anchors that the headings of a Markdown file get."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


MEASURED = re.compile(r"\d[\d.,]*\s?(?:ns|µs|us|ms|s|[KMG]B/s|[GT]FLOPS|%|x|×|times)(?![\w×*])")
RECORDS = {
    "CHANGELOG.md",
    "docs/measured.md",
}  # dated, with device, of the state they were found in
GIVEN = {  # figures outside marks that are not results of ours
    "README.md": {"95 %", "5 %"},  # intervals, and the share that background tuning may take
    "docs/choosing-precision.md": {
        "10,000 times",
        "5 %",
    },  # constants of the code, `adapting.UNLIKELY` and `trials.SHARE`
    "docs/figures.md": {"93 GB/s", "121 %", "1.4 times"},  # the notes'
    "docs/how-to.md": {"95 %"},
    "docs/method.md": {
        "95 %",
        "20 ms",
        "2 %",
        "8 %",
        "10 %",
        "5 %",
    },  # intervals, and constants of the code
    "docs/tutorial.md": {"5 %", "2.00x"},
}


@pytest.mark.parametrize("name", [n for n in DOCUMENTS if n not in RECORDS])
def test_measured_figures_stand_between_marks(name: str) -> None:
    """What is measured comes out of a result file by `make tables`; any other figure with a unit is named above."""
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
    text = re.sub(
        r"`[^`]*`", "", re.sub(r"<!-- (\w+).*?<!-- end \1 -->", "", text, flags=re.DOTALL)
    )
    assert set(MEASURED.findall(text)) - GIVEN.get(name, set()) == set()


def test_the_index_lists_every_public_name_and_no_other() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    table = text[text.index("## Functions") : text.index("## Other packages")]
    assert set(re.findall(r"`(\w+)`", table)) == set(tensorlogic.__all__)


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    named = re.findall(r"^\.\. auto\w+:: tensorlogic\.(?:memory\.)?(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(tensorlogic.__all__), "one ```{eval-rst} block for each name"


def test_every_page_is_in_the_table_of_the_site() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    listed = set(text[text.index("{toctree}") :].split()) & {p.stem for p in (ROOT / "docs").glob("*.md")}  # fmt: skip
    assert listed == {p.stem for p in (ROOT / "docs").glob("*.md")} - {"index"}


def test_modules_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    files = [p for part in ("tensorlogic", "tests") for p in (ROOT / part).rglob("*.py")]
    assert not {n for n in named if not any(f"/{p.as_posix()}".endswith(f"/{n}") for p in files)}
    assert len(named) > 20


@pytest.mark.parametrize("name", DOCS)
def test_the_documents_are_there_and_say_what_they_must(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert text.startswith("# ")
    if name in ("tutorial", "best-practices", "method"):
        assert re.search(
            r"without a lockfile\s+a later\s+process may choose another\s+candidate and round",
            text,
            re.I,
        )


def test_the_runner_reports_what_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n```python\nassert a == 2\n```\n```text\nnot run\n```\n"
        "```python\n>>> a + 1\n3\n```\n```sh\ntensorlogic plans verify absent.json\n```\n"
    )
    ran, wrong = support_doc_runner.document(page)
    assert ran == 4
    assert [w.splitlines()[0].split(":")[0] for w in wrong[::2]] == ["page.md", "page.md"]
    assert len(wrong) == 3
    assert "AssertionError" in wrong[0]
    assert "Expected" in wrong[1]
    assert "does not end with 0" in wrong[2]


def test_every_extra_that_the_documents_name_exists() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    for name in EVERY:
        for extra in re.findall(r"tensorlogic-engine\[(\w+)\]", (ROOT / name).read_text()):
            assert re.search(rf"^{extra} = \[", declared, re.MULTILINE), f"{name} names {extra}"
    assert importlib.util.find_spec("tensorlogic") is not None
