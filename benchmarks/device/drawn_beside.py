"""Random problems of every public op, device time beside eager PyTorch and torch.compile: where do we lose?

    python benchmarks/device/drawn_beside.py [--seed 1] [--count 120] [--first 0] [--seconds 400] [--json PATH] [--ops linear ...]
        [--families gradients ...] [--dtypes float32 ...] [--size medium] [--compile]
    python benchmarks/device/drawn_beside.py --list   only what is drawn

First, worker processes fill torch.compile's cache on disk, in at most 0.4 of the time; which configurations it found best meanwhile
is forgotten. Then each problem is timed alone, by graph replay in interleaved rounds through several sets of arguments: eager, torch.compile
(`dynamic=False, fullgraph=True`), ours as a first call is served with an empty store (`first`: shipped plans or cost
models), and ours after `tensorlogic.tune`. The outputs that were timed are compared with float64. A problem LOSES where ours
takes 3 % and 0.15 us more than the best peer, twice, and is marked FIRST where the first choice takes 10 % more. Families take turns, so
that whatever time there is covers each. Exit code 1 where an output was wrong or a call of ours failed. Without a GPU: wall time in a loop of
calls on one set, torch.compile only with --compile, and small problems, to try this script, unless --size says otherwise.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib.util
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["DRAWN_BESIDE"] = os.environ.get("DRAWN_BESIDE") or tempfile.mkdtemp(prefix="drawn-")
os.environ["TENSORLOGIC_CACHE_DIR"] = os.path.join(os.environ["DRAWN_BESIDE"], "plans")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.environ["DRAWN_BESIDE"], "inductor")
os.environ["TRITON_CACHE_DIR"] = os.path.join(os.environ["DRAWN_BESIDE"], "triton")
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
from drawn_problems import (
    CUDA,
    DEVICE,
    DTYPES,
    FAMILIES,
    OPS,
    ROUND,
    SIZES,
    Problem,
    Wanted,
    drawn,
)
from drawn_timing import (
    Given,
    Row,
    Timed,
    called,
    check,
    chosen,
    compared,
    composed,
    met,
    one_set,
    repeats,
    sets,
)
from torch import Tensor
from torch._dynamo.utils import counters

import tensorlogic
from tensorlogic.autotune import config_queue
from tensorlogic.core.candidate import EAGER
from tensorlogic.measure import timer
from tensorlogic.plans import open_stores
from tensorlogic.plans.environment import environment
from tensorlogic.system import capture_state, compile_pool

ROOT = Path(os.environ["DRAWN_BESIDE"])  # of this process and its workers
WARMING = 0.4  # of the time
AHEAD, EARLY = 16, 6  # problems whose kernels compile while one is measured, and before
FAILURES: tuple[type[BaseException], ...] = (
    RuntimeError,  # torch.compile's, too, out of memory, and a device that fails
    torch._dynamo.exc.FailOnRecompileLimitHit,
    *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError),
)
if importlib.util.find_spec("triton"):
    from triton.errors import TritonError

    FAILURES = (*FAILURES, TritonError)


def said(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"


def warm(problems: Iterator[Problem], seed: int) -> None:
    """A worker: torch.compile's results of its share of the problems, to the cache on disk."""
    for problem in problems:
        begin = time.perf_counter()
        try:
            called(composed(problem), problem, one_set(problem, seed))
            timer.synchronize(DEVICE)
            print(f"{problem.index} done {time.perf_counter() - begin:.1f}", flush=True)
        except FAILURES as failure:
            print(f"{problem.index} failed {said(failure)}", flush=True)
        if CUDA:
            torch.cuda.empty_cache()


def warmed(asked: argparse.Namespace, end: float) -> None:
    """Let worker processes do so until `end`; what they found best while they disturbed each other is not kept."""
    begin, workers, logs = time.monotonic(), [], []
    count = max(1, min(asked.processes, asked.count))
    for i in range(count):
        command = [sys.executable, __file__, *sys.argv[1:], "--warm", f"{i}/{count}"]
        logs.append(ROOT / f"worker-{i}.txt")
        # no other number of threads than here: it would be part of what is looked up in the cache
        env = os.environ | {"TENSORLOGIC_COMPILE_WORKERS": "0"}
        with logs[-1].open("w") as log:
            workers.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))
    cut = 0
    try:
        for worker in workers:
            try:
                worker.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                cut += 1
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    done, failed = (sum(f" {word} " in line for line in lines) for word in ("done", "failed"))
    print(f"{done} of {asked.count} compiled ahead by {count} processes, {failed} failed, {cut} processes cut, {time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    if done == 0:
        print("a worker said:", *lines[-12:], sep="\n  ")
    for best in (ROOT / "inductor").rglob("*.best_config"):
        best.unlink()


def ids(choices: Sequence[Row]) -> str:
    return "+".join(dict.fromkeys(c["id"] for c in choices)) or "PyTorch"


def ahead(problem: Problem, seed: int) -> None:
    """Start to compile what tuning the problem will need."""
    try:
        keys = met(problem, one_set(problem, seed), EAGER)
        for op, key in keys:
            for its, k in ((op, key), *op.twins(key)):
                compile_pool.submit(config_queue.kernels(its, k, DEVICE))
    except FAILURES as failure:
        print(f"{problem.index} {problem.text}: not compiled ahead: {said(failure)}", flush=True)


def compile_ahead(coming: Iterator[tuple[int, Problem]], last: int, seed: int) -> None:
    """The same for all that come until problem `last`, counted from 0."""
    for at, problem in coming:
        ahead(problem, seed)
        if at >= last:
            return


def built(row: Row, name: str, build: Callable[[], Any]) -> Any:
    """What was built; None, with the reason kept, where that failed."""
    try:
        return build()
    except FAILURES as failure:
        row.setdefault("failed", {})[name] = said(failure)
        return None


def tuned(row: Row, problem: Problem, given: Given) -> None:
    """Measure what the call meets; once more where kernels were still being compiled."""
    for _ in range(2):
        learned = tensorlogic.tune(lambda: called(problem.ours, problem, given))
        row["tune_s"] = row.get("tune_s", 0.0) + learned.seconds
        row["unfinished"], row["unmeasured"] = len(learned.unfinished), len(learned.unmeasured)
        if not learned.unfinished:
            return


def one(problem: Problem, seed: int, compiles: bool) -> Row:
    """One problem's record."""
    name = str(problem.dtype).removeprefix("torch.")
    row: Row = {"index": problem.index, "family": problem.family, "op": problem.op, "text": problem.text, "dtype": name}  # fmt: skip
    os.environ["TENSORLOGIC_CACHE_DIR"] = str(ROOT / "plans" / str(problem.index))
    open_stores.forget()  # what other problems measured serves no first call
    timed: dict[str, Timed] = {}
    started = time.perf_counter()
    try:
        made = built(row, "arguments", lambda: (g := sets(problem, seed), repeats(problem, g)))
        if made is None:
            return row
        given, count = made

        def begin(name: str, fn: Callable[..., Tensor]) -> None:
            found = built(row, name, lambda: Timed(fn, problem, given, count))
            timed.update({} if found is None else {name: found})

        with tensorlogic.policy(tune="off"):
            row["first"] = built(row, "first choice", lambda: chosen(problem, given[0])) or []
            begin("first", problem.ours)
        built(row, "tune", lambda: tuned(row, problem, given[0]))
        with tensorlogic.policy(tune="off"):
            row["ours"] = built(row, "choice", lambda: chosen(problem, given[0])) or []
            begin("ours", problem.ours)
        begin("eager", problem.eager)
        if compiles:
            start, hits = time.perf_counter(), counters["aot_autograd"]["autograd_cache_hit"]
            begin("compile", composed(problem))
            row["compile_s"] = time.perf_counter() - start
            row["compiled_ahead"] = counters["aot_autograd"]["autograd_cache_hit"] > hits
        if timed:
            built(row, "timing", lambda: compared(row, timed))
            built(row, "check", lambda: check(row, problem, given, timed))
    finally:
        for t in timed.values():
            t.close()
        row["all_s"] = time.perf_counter() - started
    return row


def shown(row: Row) -> str:
    """One line."""

    def us(name: str) -> str:
        return f"{row[f'{name}_us']:.2f}" if f"{name}_us" in row else "-"

    def ratio(name: str) -> str:
        return f"{row[f'{name}_ratio']:.3f}" if f"{name}_ratio" in row else "-"

    marks = [mark for mark, on in (("LOSES", row.get("ours_loses")), ("FIRST", row.get("first_loses")), ("WRONG", row.get("wrong"))) if on]  # fmt: skip
    late = [f"unfinished {row['unfinished']}"] if row.get("unfinished") else []
    by = "/".join(dict.fromkeys(c["by"].split()[0] for c in row.get("first", [])))
    line = (
        f"{row['index']:4d} {row['text']:<70} ours {us('ours'):>8} us {ids(row.get('ours', []))}, "
        f"first {us('first')} {ids(row.get('first', []))} ({by}), eager {us('eager')}, compile {us('compile')}, "
        f"ratio {ratio('ours')}, first {ratio('first')}  {' '.join(marks + late)}"
    )
    problems = [f"{name} failed: {text}" for name, text in row.get("failed", {}).items()]
    return "\n       ".join([line.rstrip(), *row.get("wrong", []), *problems])


def summary(rows: Sequence[Row]) -> Row:
    """Counts, by family, too, and geometric means of peers' times over ours."""
    means: dict[str, float] = {}
    for peer, name in itertools.product(("eager", "compile"), ("ours", "first")):
        both = [r for r in rows if f"{peer}_us" in r and f"{name}_us" in r]
        if both:
            speeds = (r[f"{peer}_us"] / r[f"{name}_us"] for r in both)
            means[f"{peer}_over_{name}"] = statistics.geometric_mean(speeds)
    families: dict[str, collections.Counter[str]] = {}
    for row in rows:
        failed = row.get("failed", {}).keys()
        families.setdefault(row["family"], collections.Counter()).update(
            {
                "cases": 1,
                "lose": int(row.get("ours_loses", False)),
                "first": int(row.get("first_loses", False)),
                "wrong": int("wrong" in row),
                "failed": int(bool(failed - {"compile", "check"})),
                "not compiled": int("compile" in failed),
                "unchecked": int("check" in failed),
                "unfinished": int(row.get("unfinished", 0) > 0),
            }
        )
    total = sum(families.values(), collections.Counter[str]())
    return {"means": means, "families": {f: dict(c) for f, c in families.items()}, "total": dict(total)}  # fmt: skip


def told(rows: Sequence[Row]) -> Row:
    """Print the losers again, the worst first, and the summary, which is returned."""
    found = summary(rows)
    for name, mark in (("ours", "LOSES"), ("first", "FIRST")):
        lost = [r for r in rows if r.get(f"{name}_loses")]
        print(f"\n{mark}: {len(lost)} of {len(rows)}")
        for r in sorted(lost, key=lambda r: -r[f"{name}_ratio"]):
            low, high = r[f"{name}_interval"]
            print(f"{r[f'{name}_ratio']:7.3f} [{low:.3f}, {high:.3f}] {r[f'{name}_us']:9.2f} us {ids(r[name])}, {r['best']} {r[r['best'] + '_us']:.2f}  {r['index']} {r['text']}")  # fmt: skip
    print()
    for family, counts in found["families"].items():
        print(f"{family:12s} " + ", ".join(f"{n} {what}" for what, n in counts.items() if n))
    print("total        " + ", ".join(f"{n} {what}" for what, n in found["total"].items() if n))
    spent = {
        name: sum(r.get(f"{name}_s", 0.0) for r in rows) for name in ("tune", "compile", "all")
    }
    print(f"{spent['all']:.0f} s: tune {spent['tune']:.0f}, torch.compile {spent['compile']:.0f}, which found {sum(r.get('compiled_ahead', False) for r in rows)} compiled")  # fmt: skip
    for pair, mean in found["means"].items():
        print(f"geometric mean {pair.replace('_', ' ')}: {mean:.3f}x")
    return found


def alive() -> bool:
    """Whether the device still answers."""
    try:
        timer.synchronize(DEVICE)
        return torch.ones(1, device=DEVICE).item() == 1.0
    except RuntimeError:
        return False


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the problem to begin with")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--families", nargs="*", default=list(ROUND), choices=list(FAMILIES), metavar="FAMILY"
    )
    parser.add_argument("--ops", nargs="*", default=list(OPS), choices=list(OPS), metavar="OP")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=sorted(set(DTYPES)), metavar="DTYPE")  # fmt: skip
    parser.add_argument("--size", choices=list(SIZES), default="large" if CUDA else "small", help="of the largest problems")  # fmt: skip
    parser.add_argument("--processes", type=int, default=12, help="that compile ahead; 0: none")
    parser.add_argument("--list", action="store_true", help="only what is drawn")
    parser.add_argument("--compile", action="store_true", default=CUDA, help="without a GPU, too")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    return parser.parse_args()


def asked_for(asked: argparse.Namespace) -> Iterator[Problem]:
    """The problems of the options."""
    wanted = Wanted(asked.ops, asked.dtypes, SIZES[asked.size], asked.families)
    return drawn(asked.seed, asked.first, asked.count, wanted)


def timed_all(asked: argparse.Namespace, begin: float) -> list[Row]:
    """Every problem in turn until the time is over, printed and kept as they come."""
    rows: list[Row] = []
    problems = list(asked_for(asked))
    coming = iter(enumerate(problems if CUDA else []))
    compile_ahead(coming, EARLY, asked.seed)
    try:
        if asked.compile and asked.processes > 0:
            warmed(asked, begin + WARMING * asked.seconds)
        for at, problem in enumerate(problems):
            if time.monotonic() - begin > asked.seconds:
                break
            compile_ahead(coming, at + AHEAD, asked.seed)
            rows.append(one(problem, asked.seed, asked.compile))
            print(shown(rows[-1]), flush=True)
            kept(asked, rows, {})
            if not alive():
                rows[-1].setdefault("failed", {})["device"] = "it answers no more"
                print("the device is lost", flush=True)
                break
    except KeyboardInterrupt:
        print("cut:", flush=True)
    if len(rows) < len(problems):
        print(f"{len(rows)} of {len(problems)} problems in time: go on with --first {asked.first + len(rows)}")  # fmt: skip
    return rows


def kept(asked: argparse.Namespace, rows: Sequence[Row], found: Row) -> None:
    """Write what there is, where that was asked for."""
    if asked.json is None:
        return
    record = {
        "environment": environment(DEVICE).to_json(),
        "tensorlogic": tensorlogic.__version__,
        "python": sys.version.split()[0],
        "date": datetime.date.today().isoformat(),
        **{
            name: getattr(asked, name)
            for name in ("seed", "first", "count", "seconds", "ops", "dtypes", "size")
        },
        **found,
        "cases": list(rows),
    }
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(record, indent=1, default=str) + "\n")


@compile_pool.awaited()  # kernels of what comes next are compiled meanwhile
def main() -> int:
    """Draw, compile ahead, time, tell."""
    begin, asked = time.monotonic(), options()
    if asked.warm:
        share, count = map(int, asked.warm.split("/"))
        problems = list(asked_for(asked))
        warm(iter(problems[share::count]), asked.seed)
        return 0
    try:
        if asked.list:
            for problem in asked_for(asked):
                print(f"{problem.index:4d} {problem.family:10s} {problem.text}")
            return 0
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `timeout` sends it
        capture_state.install() if CUDA else None
        where = environment(DEVICE)
        print(f"{where.device}, {where.driver}, PyTorch {where.torch}, Triton {where.triton}, seed {asked.seed}", flush=True)  # fmt: skip
        rows = timed_all(asked, begin)
        found = told(rows)
        kept(asked, rows, found)
        return 1 if found["total"].get("wrong") or found["total"].get("failed") else 0
    finally:
        shutil.rmtree(ROOT, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
