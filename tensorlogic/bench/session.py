"""One run of the benchmark: limits first, then row by row, saved as it goes; Ctrl-C keeps what was measured."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ..autotune.tune import Learned
from ..core import policy
from ..core.candidate import EAGER
from ..plans import open_stores
from ..plans.plan import Plan
from ..plans.store import PlanStore
from ..system import compile_pool, settings
from . import machine_info, machine_limits, measure_case, suites
from .cases import Case
from .result_file import Results, Row, load
from .terminal.progress import Tick
from .terminal.user_error import Problem
from .text_table import aligned

SAVE_EVERY_S = 5.0
METHOD = {
    "inputs": "normally distributed, fixed seeds; sets that calls walk through: on a GPU as many, two to eight, as exceed its cache twice, elsewhere two (one above 256 MiB); caches not flushed; weights are parameters",
    "order": "a result is compared with float64 before it is timed; implementations are timed in turn, in shuffled order, in one run",
    "device_us": "cuda: replay of a captured graph of several calls between two events, over their number; mps: a loop between two events; elsewhere: a loop between two synchronisations",
    "host_us": "cuda: calls queued without waiting",
    "transfer": "each transfer is waited for",
    "speed": "median of the per-round ratios, 95 % interval by order statistics; over the fastest of PyTorch's calls",
}


def pick_device(name: str | None) -> torch.device:
    """The named device, or the best one here; Problem when it is absent."""
    gpu, apple = torch.cuda.is_available(), torch.backends.mps.is_available()
    name = name or ("cuda" if gpu else "mps" if apple else "cpu")
    unknown = Problem(f"device is {name!r}; cpu, cuda, cuda:N or mps is required")
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise unknown from problem
    if device.type not in ("cpu", "cuda", "mps"):
        raise unknown
    if device.type == "mps" and not apple:
        raise Problem("device is 'mps', but there is no Apple GPU here")
    if device.type != "cuda":
        return device
    if not gpu:
        raise Problem(
            "device is 'cuda', but PyTorch sees no CUDA device here; `tensorlogic doctor` says what is missing"
        )
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise Problem(f"device is {name!r}, but there are {count} CUDA devices here")
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index)


def bench(
    *,
    quick: bool = False,
    ops: Iterable[str] = (),
    sizes: Iterable[int] = (),
    dtypes: Iterable[str] = (),
    device: str | None = None,
    json: str | Path | None = None,
    resume: bool = False,
    tick: Tick = lambda done, total, text: None,
) -> Results:
    """Measure, and write the result file as rows come in.

    Args:
        quick: fewer sizes and rounds.
        ops: operations or categories; sizes: sides of matrices, or numbers of elements; dtypes: "f16", "bf16", "f32".
        device: "cpu", "cuda", "cuda:N" or "mps"; None takes the best one here.
        json: where the result file goes; None names one in the cache folder. resume: keep the rows that it holds already.
        tick: called with rows done, rows in all, and what comes next.

    Returns:
        The results, `complete` unless a KeyboardInterrupt came; `path` is their file.

    Raises:
        Problem: nothing is selected, the device is absent, or the file cannot be written.
    """
    where = pick_device(device)
    selection = suites.Selection(where.type, quick, tuple(ops), tuple(sizes), tuple(dtypes))
    cases = suites.cases(selection)
    effort = measure_case.QUICK if quick else measure_case.FULL
    before = machine_info.state(where)
    about = {"selection": asdict(selection), "effort": asdict(effort), "method": METHOD}
    run = {"quick": quick, **about, "before": before}
    results = Results(machine_info.describe(where), run)
    run["busy"] = machine_info.busy(before, results.machine["usable_cores"])
    path = Path(json) if json is not None else _default_path(results)
    results.rows = _kept(results, path) if resume else []
    if results.rows:
        run["kept"] = len(results.rows)  # of an earlier run: time and state are of the others
    results.write(path)
    begin, others = time.perf_counter(), machine_info.Others()
    try:
        with policy.measuring():
            _measure(results, cases, where, effort, tick)
        results.complete = True
    except KeyboardInterrupt:
        run["interrupted"] = True
    run["seconds"] = round(time.perf_counter() - begin, 1)
    run["others"] = others.share(results.machine["usable_cores"])
    run["after"] = after = machine_info.state(where)
    run["throttled"] = machine_info.throttled(after)
    results.write(path)
    return results


def _measure(
    results: Results,
    cases: list[Case],
    device: torch.device,
    effort: measure_case.Effort,
    tick: Tick,
) -> None:
    have = {r.id for r in results.rows}
    todo = [c for c in cases if c.id not in have]
    tick(0, len(todo), "limits of this machine")
    dtypes = list(dict.fromkeys(c.dtype for c in cases))
    results.ceilings = machine_limits.find(device, dtypes, effort.budget_s)
    if device.type == "cuda":
        _prepare(todo, device, tick)
    saved = time.monotonic()
    for done, case in enumerate(todo):
        tick(done, len(todo), case.id)
        results.rows.append(measure_case.measured(case, device, effort))
        if time.monotonic() - saved > SAVE_EVERY_S and results.path is not None:
            results.write(results.path)
            saved = time.monotonic()
    order = {case.id: i for i, case in enumerate(cases)}
    results.rows.sort(key=lambda r: order.get(r.id, len(order)))
    tick(len(todo), len(todo), "done")


@compile_pool.awaited()
def _prepare(cases: list[Case], device: torch.device, tick: Tick) -> None:
    """Compile in all workers and measure every key before the first row is timed, so that no compiler disturbs a row."""
    with torch.no_grad():
        compile_pool.submit(measure_case.kernels(cases, device))
    for done, case in enumerate(cases):
        if case.category != "transfer":
            tick(done, len(cases), f"tuning {case.id}")
            measure_case.tuned(case, device)


def _kept(results: Results, path: Path) -> list[Row]:
    """Rows of an earlier, interrupted run on this machine."""
    if not path.exists():
        return []
    earlier = load(path)
    if earlier.machine["id"] != results.machine["id"]:
        raise Problem(
            f"{path} was measured on another machine or with other software; "
            "it cannot be resumed here"
        )
    return earlier.rows


def _default_path(results: Results) -> Path:
    device = str(results.machine["environment"]["device"]).lower()
    model = re.sub(r"[^a-z0-9]+", "-", device).strip("-")[:40]
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return settings.cache_folder() / "bench" / f"{model}-{stamp}.json"


def newest() -> Path:
    """The last result file that was written to the cache folder; Problem when there is none."""
    folder = settings.cache_folder() / "bench"
    found = sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise Problem(
            f"no result file was given and {folder} holds none; write one with `tensorlogic bench`"
        )
    return found[-1]


@compile_pool.awaited()
def tune(
    *,
    quick: bool = False,
    ops: Iterable[str] = (),
    sizes: Iterable[int] = (),
    dtypes: Iterable[str] = (),
    device: str | None = None,
    tick: Tick = lambda done, total, text: None,
) -> str:
    """Measure the keys of the selected cases and remember the choices; returns what was learned, a line a key, and their sum."""
    where = pick_device(device)
    wanted = suites.Selection(where.type, quick, tuple(ops), tuple(sizes), tuple(dtypes))
    cases = [c for c in suites.cases(wanted) if c.category != "transfer"]
    total = Learned()
    if where.type == "cuda":
        with torch.no_grad():
            compile_pool.submit(measure_case.kernels(cases, where))
    for done, case in enumerate(cases):
        tick(done, len(cases), case.id)
        with policy.measuring():
            learned = measure_case.tuned(case, where)
        if learned is None:
            total.unmeasured.append(case.id)
            continue
        total.plans += learned.plans
        total.known += learned.known
        total.unmeasured += learned.unmeasured
        total.seconds += learned.seconds
    tick(len(cases), len(cases), "done")
    return "\n\n".join([*([choices(total.plans)] if total.plans else []), str(total)])


def choices(plans: Sequence[Plan]) -> str:
    """A line a plan: who serves eager and captured calls, device time beside PyTorch's, how many candidates were measured and refused."""
    lines = [["candidate", "captured", "us", "PyTorch us", "x", "measured", "refused", "key"]]
    for plan in plans:
        us = {e.candidate: e.device_us for e in plan.evidence if e.status == "measured"}
        ours, theirs = us.get(plan.captured), us.get(EAGER)
        captured = "" if plan.captured == plan.eager else plan.captured
        times = ["" if t is None else f"{t:.2f}" for t in (ours, theirs)]
        ratio = f"{theirs / ours:.2f}" if ours and theirs else ""
        counts = [str(len(us)), str(sum(e.status == "refused" for e in plan.evidence))]
        lines.append([plan.eager, captured, *times, ratio, *counts, plan.key.text])
    return aligned(lines, [True, True, *[False] * 5, True])


def store(device: str | None) -> tuple[PlanStore, torch.device]:
    """The plan store of a device, and the device."""
    where = pick_device(device)
    return open_stores.current(where), where
