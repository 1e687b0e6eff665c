"""Runs the kernel tests on a GPU under compute-sanitizer and writes a table: per file and tool, what was named and how it ended.

    python tools/sanitize.py                                          # memcheck, racecheck and initcheck of all kernel tests
    python tools/sanitize.py tests/test_triton_rows.py --tools racecheck -k layer_norm --seconds 300

Each file under each tool is a process of its own, several at once, the largest files first. Without the caching allocator every tensor is
an allocation of its own, whose edges memcheck sees. Kernels that Triton's cache does not hold are compiled under the tool, in turn: run the
tests without it before, on all cores. Ends with 1 where anything was named, failed or not over in time; `--table FILE` keeps the table.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck")
APART = ("launch",)  # starts no kernel that is checked
OTHERS = ("precision_kernels", "precision_bytes", "precision_mend", "group_norm")
NAMED = re.compile(r"Race reported between \w+ access at (\w+)\+|^=+ +at (?:void )?([\w:]+)", re.M)
SUMMARY = re.compile(
    r"SUMMARY: (?:(\d+) hazards? displayed|(\d+) errors? were not printed|(\d+) errors?)"
)
PRINTED = 100  # reports that a tool prints of a run
running: set[int] = set()  # process groups, which do not hear of the terminal's Ctrl-C


def kernel_tests() -> list[Path]:
    """Test files that start kernels, largest first."""
    found = [
        p for p in (ROOT / "tests").glob("test_triton_*.py") if not p.stem.endswith("_compile")
    ]
    found = [p for p in found if p.stem.removeprefix("test_triton_") not in APART]
    found += [ROOT / "tests" / f"test_{name}.py" for name in OTHERS]
    return sorted(found, key=lambda path: -path.stat().st_size)


def outcome(status: int, text: str) -> str:
    """What a tool named, in how many reports, and which kernels, from what it printed; "clean" where nothing."""
    found = SUMMARY.search(text)
    if found is None:
        return f"ended with {status} before its summary"
    displayed, unprinted, errors = found.groups()
    reports = int(unprinted) + PRINTED if unprinted else int(displayed or errors)
    if reports:
        return f"{reports} reports: {kernels(text)}"
    if status == 5 or status == 0:  # 5: the part has no test in this file
        return "clean"
    failed = len(re.findall(r"^FAILED ", text, re.M))
    return f"nothing named, {failed} tests failed"


def kernels(text: str) -> str:
    """The first three that reports name."""
    names = sorted({one or other for one, other in NAMED.findall(text)})
    return ", ".join(names[:3]) or "no kernel named"


def run(tool: str, path: Path, part: str, until: float) -> str:
    """One file under one tool, until then at most."""
    left = until - time.monotonic()
    if left <= 0:
        return "not begun"
    command = [
        "compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--target-processes", "application-only",
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path), "-k", part,
    ]  # fmt: skip
    about = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=about, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    running.add(process.pid)
    try:
        text, _ = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        stop(process.pid)
        text, _ = process.communicate()
        named = f", with reports: {kernels(text)}" if NAMED.search(text) else ", nothing named"
        return f"not over after {left:.0f} s{named}"
    finally:
        stop(process.pid)
    return outcome(process.returncode, text)


def stop(group: int) -> None:
    """End a tool and what it runs."""
    running.discard(group)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def table(tools: Sequence[str], found: Mapping[tuple[str, str], str]) -> str:
    """A row a file, a column a tool."""
    files = sorted({name for _, name in found})
    rows = [["", *tools], *([name, *(found[tool, name] for tool in tools)] for name in files)]
    wide = [max(len(row[i]) for row in rows) for i in range(len(tools) + 1)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip()
        for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; see above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", help="test files; all kernel tests if none")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=7200.0, help="for all of it")
    parser.add_argument("--table", type=Path, help="where to write the table, too")
    parser.add_argument("-k", default="not compile and not spill", help="which tests, as pytest's")
    given = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH: it comes with CUDA's toolkit")
    missing = [str(path) for path in given.files if not path.is_file()]
    if missing:
        parser.error(f"no such test files: {', '.join(missing)}")
    files = [path.resolve() for path in given.files] or kernel_tests()
    until = time.monotonic() + given.seconds
    asked = [(tool, path) for tool in given.tools for path in files]
    found: dict[tuple[str, str], str] = {}

    def one(what: tuple[str, Path]) -> None:
        tool, path = what
        found[tool, path.stem] = run(tool, path, given.k, until)
        print(f"{tool:10s} {path.stem:36s} {found[tool, path.stem]}", flush=True)

    with ThreadPoolExecutor(max(1, given.processes)) as several:
        try:
            list(several.map(one, asked))
        except KeyboardInterrupt:
            several.shutdown(wait=False, cancel_futures=True)
            for group in list(running):
                stop(group)
            print("interrupted")
            return 130
    text = table(given.tools, found)
    if given.table is not None:
        given.table.write_text(text + "\n", encoding="utf-8")
    else:
        print(f"\n{text}")
    return int(any(what != "clean" for what in found.values()))


if __name__ == "__main__":
    sys.exit(main())
