"""Runs the kernel tests on a GPU under compute-sanitizer and writes a table: per file and tool, what was named and how it ended.

    python tools/sanitize.py                                          # memcheck, racecheck and initcheck of all kernel tests
    python tools/sanitize.py tests/kernels/test_row_kernels.py --tools racecheck -k layer_norm --seconds 300
    python tools/sanitize.py @reports/rest-racecheck.txt --tools racecheck   # what an earlier run's time did not suffice for

A file's tests are shared out to processes of `--tests` each, several at once, on all GPUs there are; every process has tests from all of a
file, and every file's first process is begun before the second of any. Without the caching allocator every tensor is an allocation of its
own, whose edges memcheck sees. Kernels that Triton's cache does not hold are compiled under the tool, in turn: run the tests without it
before, on all cores. Ends with 1 where anything was named, failed or not over in time; `--table FILE` keeps the table, `--reports FOLDER`
what processes with anything to report printed, and the tests that were not over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck")
# Errors of CUDA's API: not those that PyTorch and cuBLASLt meet and handle
OPTIONS = {"memcheck": ("--report-api-errors", "explicit")}
TESTS = ROOT / "tests" / "kernels"
OTHER_DEVICES = ("cpu", "metal")  # folders
# No kernel of ours is launched on the GPU
APART = ("test_gluon_standin", "gemm/test_cublaslt", "gemm/test_few_columns")
APART += tuple(
    f"triton_runtime/test_{name}"
    for name in ("interpreter", "launch", "launch_plan", "launch_plan_device", "scratch")
)
NAMED = re.compile(r"(?:Race reported between \w+ access|^=+ +) ?at (?:void )?([\w:]+)", re.M)
SUMMARY = re.compile(
    r"SUMMARY: (?:(\d+) hazards? displayed|(\d+) errors? were not printed|(\d+) errors?)"
)
# Of pytest -v; the tool may write between a test's name and its outcome
OVER = re.compile(r"(?:^|\s)(PASSED|SKIPPED|XFAIL|FAILED|ERROR)\b.*\[ *\d+%\]$", re.M)
BARE = ("-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=0")
PYTEST = (sys.executable, "-u", "-m", "pytest", *BARE)
PRINTED = 100  # reports that a tool prints of a run
UNATTACHED = "No attachable process found"
ATTEMPTS = 3
PORTS = 10  # that one tool may try, as is its own default
running: set[int] = set()  # process groups, which do not hear of the terminal's Ctrl-C
interrupted = threading.Event()


@dataclass(frozen=True)
class Ended:
    """How some tests of a file ended under a tool."""

    tests: int
    over: int
    reports: int = 0
    named: frozenset[str] = frozenset()  # kernels
    failed: int = 0
    trouble: str = ""


@dataclass(frozen=True)
class Place:
    """What a process has to itself."""

    device: str | None  # CUDA_VISIBLE_DEVICES; None leaves it as it is
    port: int  # the tool's first, by which it finds what it watches: the same for two, and one waits for it in vain
    workers: int  # racecheck's threads; left to itself it takes all cores, in every process


def kernel_tests() -> list[Path]:
    """Test files that start kernels, largest first."""
    found = {
        str(path.relative_to(TESTS).with_suffix("")): path for path in TESTS.rglob("test_*.py")
    }
    taken = [
        path
        for name, path in found.items()
        if path.parent.name not in OTHER_DEVICES
        and not name.endswith("_compile")
        and name not in APART
    ]
    return sorted(taken, key=lambda path: -path.stat().st_size)


def name_of(path: Path) -> str:
    """A test file's name in the table: its path in tests/ without the ending; its name alone where it lies elsewhere."""
    tests = ROOT / "tests"
    return str(path.relative_to(tests).with_suffix("")) if tests in path.parents else path.stem


def collected(what: Sequence[str], part: str) -> dict[str, list[str]]:
    """Tests of each file, by its name, as pytest finds them; in the order of what was asked for."""
    paths = [Path(name.split("::")[0]) for name in what]
    root = os.path.commonpath([path.parent for path in paths])  # pytest names no file outside
    command = [*PYTEST, "--rootdir", root, "--collect-only", "-q", "-k", part, *what]
    answer = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False
    )
    if answer.returncode not in (0, 5):  # 5: there is no such test
        raise SystemExit(f"pytest could not collect the tests:\n{answer.stdout}{answer.stderr}")
    found: dict[str, list[str]] = {name_of(path): [] for path in paths}
    for line in answer.stdout.splitlines():
        path, colons, test = line.partition("::")
        if colons:
            whole = Path(root, path)
            found[name_of(whole)].append(f"{whole}::{test}")
    return found


def shares(tests: Sequence[str], most: int) -> list[Sequence[str]]:
    """The tests in shares of that many at most, each from all of the file."""
    many = -(-len(tests) // most)
    return [tests[i::many] for i in range(many)]


def ended(status: int | None, text: str, tests: int) -> Ended:
    """How a process ended from what it printed; its status is None where the time was over."""
    over = OVER.findall(text)
    failed = sum(outcome in ("FAILED", "ERROR") for outcome in over)
    named = frozenset(NAMED.findall(text))
    found = SUMMARY.search(text)
    if found is None:
        trouble = "" if status is None else f"ended with {status} before its summary"
        return Ended(
            tests, len(over), len(re.findall(r"^=+ Error", text, re.M)), named, failed, trouble
        )
    displayed, unprinted, errors = found.groups()
    reports = int(unprinted) + PRINTED if unprinted else int(displayed or errors)
    trouble = "" if status in (0, 1) else f"ended with {status}"
    return Ended(tests, len(over), reports, named, failed, trouble)


def together(parts: Iterable[Ended]) -> str:
    """What is said of a file: "clean" where all its tests were over and nothing was named."""
    parts = list(parts)
    tests, over = sum(p.tests for p in parts), sum(p.over for p in parts)
    said = []
    if reports := sum(p.reports for p in parts):
        names = sorted({name for p in parts for name in p.named})
        said.append(f"{reports} reports: {', '.join(names[:3]) or 'no kernel named'}")
    if failed := sum(p.failed for p in parts):
        said.append(f"{failed} tests failed")
    said += sorted({p.trouble for p in parts if p.trouble})
    if over < tests:
        said.append(f"{over} of {tests} tests over")
    return "; ".join(said) or "clean"


def run(tool: str, tests: Sequence[str], until: float, place: Place, kept: Path | None) -> Ended:
    """Some tests under one tool, until then at most; what is printed is kept where there is anything to report."""
    command = [
        "compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--target-processes", "application-only",
        "--kill", "--launch-timeout", "120", "--port", str(place.port), "--max-connections", str(PORTS),
        *OPTIONS.get(tool, ()), *(("--racecheck-num-workers", str(place.workers)) if tool == "racecheck" else ()),
        *PYTEST, "-v", *tests,
    ]  # fmt: skip
    about = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if place.device is not None:
        about["CUDA_VISIBLE_DEVICES"] = place.device
    status: int | None = None
    text = ""
    for _ in range(ATTEMPTS):
        if time.monotonic() >= until:
            break
        status, text = printed(command, about, until)
        if UNATTACHED not in text:
            break
    result = ended(status, text, len(tests))
    if kept is not None and together([result]) != "clean":
        kept.write_text(text, encoding="utf-8")
        with (kept.parent / f"rest-{tool}.txt").open("a", encoding="utf-8") as rest:
            rest.writelines(f"{name}\n" for name in tests[result.over :])
    return result


def printed(
    command: Sequence[str], about: Mapping[str, str], until: float
) -> tuple[int | None, str]:
    """A process's status, None where the time was over, and what it printed."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=about, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    running.add(process.pid)
    if interrupted.is_set():  # before it could be found among those
        stop(process.pid)
    try:
        text, _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
        return process.returncode, text
    except subprocess.TimeoutExpired:
        stop(process.pid)
        text, _ = process.communicate()
        return None, text
    finally:
        stop(process.pid)


def stop(group: int) -> None:
    """End a tool and what it runs."""
    running.discard(group)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def places(many: int, port: int) -> Iterator[Place]:
    """Where that many processes run at once: on all GPUs in turns, with ports and a share of the cores of their own."""
    import torch

    visible = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",")[:visible] if given else [str(i) for i in range(visible)]
    workers = max(1, (os.cpu_count() or 1) // many)
    for i in range(many):
        device = names[i % visible] if visible > 1 else None
        yield Place(device, port + PORTS * i, workers)


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
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, fromfile_prefix_chars="@"
    )  # fmt: skip
    parser.add_argument(
        "tests_of", metavar="files", nargs="*", help="test files or tests; all kernel tests if none"
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tests", type=int, default=24, help="of a process, at most")
    parser.add_argument(
        "--port", type=int, default=20000, help="first of ten a process, free of another run's"
    )
    parser.add_argument("--seconds", type=float, default=7200.0, help="for all of it")
    parser.add_argument("--table", type=Path, help="where to write the table, too")
    parser.add_argument("--reports", type=Path, help="folder for what was printed")
    parser.add_argument("-k", default="not compile and not spill", help="which tests, as pytest's")
    given = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        parser.error(
            "compute-sanitizer is not on the PATH: it comes with CUDA's toolkit, and with pip install nvidia-cuda-sanitizer-api"
        )
    if given.tests < 1 or given.processes < 1:
        parser.error(f"--tests {given.tests} --processes {given.processes}: 1 or more are required")
    missing = [name for name in given.tests_of if not Path(name.split("::")[0]).is_file()]
    if missing:
        parser.error(f"no such test files: {', '.join(missing)}")
    asked = [_absolute(name) for name in given.tests_of] or [str(path) for path in kernel_tests()]
    if given.reports is not None:
        given.reports.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + given.seconds
    tests = collected(asked, given.k)
    begun = [
        (tool, name, share, number)
        for tool in given.tools
        for number, name, share in _in_turns(tests, given.tests)
    ]
    found: dict[tuple[str, str], list[Ended]] = {(t, n): [] for t in given.tools for n in tests}
    free: queue.SimpleQueue[Place] = queue.SimpleQueue()
    for place in places(given.processes, given.port):
        free.put(place)

    def one(what: tuple[str, str, Sequence[str], int]) -> None:
        tool, name, share, number = what
        kept = given.reports and given.reports / f"{tool}-{name.replace('/', '.')}-{number}.txt"
        place = free.get()
        try:
            result = run(tool, share, until, place, kept)
        finally:
            free.put(place)
        found[tool, name].append(result)
        print(
            f"{tool:10s} {name:36s} {number:3d} {len(share):4d} tests  {together([result])}",
            flush=True,
        )

    with ThreadPoolExecutor(given.processes) as several:
        try:
            list(several.map(one, begun))
        except KeyboardInterrupt:
            interrupted.set()
            several.shutdown(wait=False, cancel_futures=True)
            for group in list(running):
                stop(group)
            print("interrupted")
            return 130
    said = {key: together(parts) for key, parts in found.items()}
    text = table(given.tools, said)
    if given.table is not None:
        given.table.write_text(text + "\n", encoding="utf-8")
    else:
        print(f"\n{text}")
    return int(any(what != "clean" for what in said.values()))


def _absolute(name: str) -> str:
    path, colons, test = name.partition("::")
    return f"{Path(path).resolve()}{colons}{test}"


def _in_turns(
    tests: Mapping[str, Sequence[str]], most: int
) -> Iterator[tuple[int, str, Sequence[str]]]:
    """The first share of every file, then the second: what there is time for is spread over all of them."""
    for number, row in enumerate(zip_longest(*(shares(of, most) for of in tests.values()))):
        for name, share in zip(tests, row, strict=True):
            if share is not None:
                yield number, name, share


if __name__ == "__main__":
    sys.exit(main())
