"""From `optimize` without a budget to Inductor's part in it: when calls are as fast as torch.compile's, and what they pay for that.

python benchmarks/catching_up.py [name ...] [--seconds 60] [--out FILE.json]

The models of left_over.py, called one call after the other as in a busy service. Each call is timed to its end: the median of each
second, the longest call of each, and in the end torch.compile of the same model beside what serves then, in the same rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path
from typing import Any

import left_over
import torch
from beside import DEVICE, PEER, machine, waiting
from torch import Tensor, nn

import tensorlogic
from tensorlogic.measure import timer
from tensorlogic.system import idle_resources

AFTER_S = 2.0  # of calls once all is decided
TOLD_S = 5.0
AS_FAST = 1.03  # times torch.compile's


def served(fast: nn.Module, x: Tensor, seconds: float) -> list[tuple[float, float]]:
    """When each call began and how long it took, until what competes in the background has been compared, and a little longer."""
    calls, begin, end, told = list[tuple[float, float]](), time.perf_counter(), seconds, 0.0
    while (now := time.perf_counter() - begin) < end:
        fast(x)
        timer.synchronize(DEVICE)
        calls.append((now, time.perf_counter() - begin - now))
        if now >= told + TOLD_S:  # a run that is cut shows how far it came
            print(json.dumps(by_second([c for c in calls if c[0] >= told])), flush=True)
            told = now
        if end == seconds and not waiting(fast):
            end = min(seconds, now + AFTER_S)
    return calls


def by_second(calls: list[tuple[float, float]]) -> list[dict[str, float]]:
    """Calls, their median and the longest, second by second."""
    seconds: dict[int, list[float]] = {}
    for at, took in calls:
        seconds.setdefault(int(at), []).append(took * 1e6)
    return [
        {"second": s, "calls": len(v), "median_us": statistics.median(v), "longest_us": max(v)}
        for s, v in seconds.items()
    ]


@torch.no_grad()
def measured(name: str, seconds: float) -> dict[str, Any]:
    """One model: calls until all is decided, and torch.compile beside it."""
    torch.manual_seed(0)
    make, data = left_over.MODELS[name]
    model, x = make().to(DEVICE, left_over.DTYPE).eval(), data()
    begin = time.perf_counter()
    fast = tensorlogic.optimize(model, x)
    ready = time.perf_counter() - begin
    if not waiting(fast):
        return {"ready_s": ready, "outcome": fast.report.outcome, "reason": "nothing competes"}
    cores = idle_resources.idle_cores()
    print(f"{name}: ready in {ready:.1f} s, {cores:.0f} cores idle", flush=True)
    calls = served(fast, x, seconds)
    begin = time.perf_counter()
    peer = torch.compile(model, mode=PEER, dynamic=False)
    for _ in range(3):
        peer(x)
    compile_s = time.perf_counter() - begin
    last = {"eager": lambda: model(x), "compile": lambda: peer(x), "ours": lambda: fast(x)}
    samples = timer.wall_samples(last, DEVICE, 2.0)
    rows, limit = by_second(calls), AS_FAST * samples.median("compile")
    late = max((r["second"] for r in rows if r["median_us"] > limit), default=-1)
    paused = sorted((t for _, t in calls), reverse=True)[:5]
    return {
        "ready_s": ready,
        "idle_cores": cores,
        "compile_s": compile_s,
        "us": {key: samples.median(key) for key in last},
        "over_compile": samples.ratio("ours", "compile"),
        "as_fast_after_s": None if rows and late == rows[-1]["second"] else late + 1,
        "decided_after_s": calls[-1][0],
        "longest_s": paused,
        "p99_us": statistics.quantiles([t * 1e6 for _, t in calls], n=100)[-1],
        "seconds": rows,
        "report": str(fast.report),
    }


def main() -> int:
    """Measure the models that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["encoder"], choices=list(left_over.MODELS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {}
    for name in given.names:
        found[name] = record = measured(name, given.seconds)
        print(name, json.dumps({k: v for k, v in record.items() if k != "report"}))
        print(record.get("report", ""), flush=True)
        if given.out:
            about = {"device": machine(), "date": str(datetime.date.today())}
            about |= {"torch": torch.__version__, "dtype": str(left_over.DTYPE)}
            given.out.write_text(json.dumps({**about, "models": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
