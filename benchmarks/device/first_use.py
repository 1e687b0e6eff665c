"""What a GPU without shipped plans does: its first calls, what tuning them takes, and what is chosen beside the plans shipped for it.

python benchmarks/device/first_use.py [--seconds 60] [--shipped]

On a GPU that has shipped plans they are put out of sight until the last column: device time of the choice made here over that of
the shipped one's. A new process, an empty store and an empty cache of kernels. With `--shipped` they stay in sight, nothing is tuned,
and what is told are the first and the second call of every case in this process, and in another that finds its kernels compiled.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["TENSORLOGIC_CACHE_DIR"] = os.environ.get(
    "TENSORLOGIC_FIRST_USE_AGAIN"
) or tempfile.mkdtemp(prefix="tensorlogic-first-use-")
os.environ["TRITON_CACHE_DIR"] = os.environ["TENSORLOGIC_CACHE_DIR"] + "/triton"

import torch

import tensorlogic
from tensorlogic.bench import measure_case
from tensorlogic.core import policy
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.key import Key
from tensorlogic.core.op import Op
from tensorlogic.dispatch import nearest_plans
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.measure import timer
from tensorlogic.measure.verification import InputSet
from tensorlogic.plans import environment, open_stores, store

FOLDER = Path(os.environ["TENSORLOGIC_CACHE_DIR"])
SHIPPED = store.SHIPPED
AGAIN = "TENSORLOGIC_FIRST_USE_AGAIN"  # the folder of a first process, for the second
Case = tuple[str, Callable[..., Any], tuple[Any, ...]]


def cases() -> Iterator[Case]:
    """Name, our call, arguments."""

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") * scale).half()

    t = tensorlogic
    for n in (512, 2048):
        x, w, b, r = normal(n, n), normal(n, n, scale=n**-0.5), normal(n), normal(n, n)
        yield f"linear_residual_relu {n}", t.linear_residual_relu, (x, w, b, r)
        yield f"gelu_linear {n}", t.gelu_linear, (x, w, b)
        yield f"matmul {n}", t.matmul, (x, w)
        yield f"add_relu {n}", t.add_relu, (x, r)
        yield f"sum {n}", t.sum, (x,)
    q = normal(4, 8, 512, 64)
    yield "attention_scores 512", t.attention_scores, (q, q, 0.125)
    target = torch.randint(32000, (4096,), device="cuda")
    yield "softmax_cross_entropy 4096x32000", t.softmax_cross_entropy, (normal(4096, 32000), target)


def waited_ms(fn: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Milliseconds of one call whose result is waited for."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    fn(*args)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def against_shipped(op: Op, key: Key, device: torch.device) -> str:
    """Device time of the choice over the shipped plan's, side by side."""
    ours = dispatch_selector.decide(op, key, device, policy.current())
    store.SHIPPED = SHIPPED
    view = store.PlanStore(FOLDER / "none", environment.environment(device))
    serves = [id for id, candidate in op.candidates.items() if candidate.unfit(key) is None]
    theirs = view.get(key) or view.nearest(key, serves.__contains__, normal=op.normal)
    if theirs is None:
        return "no plan is shipped"
    config = nearest_plans.closest(op.candidates[theirs.captured], key, theirs.captured_config)
    picks = {"ours": ours.captured, "theirs": (theirs.captured, config)}
    said = f"{picks['theirs'][0]} {dict(picks['theirs'][1])}"
    if picks["ours"] == picks["theirs"]:
        return f"as shipped ({said})"
    sets = [InputSet(op, key, device, seed) for seed in range(3)]
    calls = {}
    for name, (id, config) in picks.items():
        launch = op.candidates[id].bind(key, config, device)
        calls[name] = [lambda s=s, run=launch: run(*s.fresh(op)) for s in sets]
    ratio, low, high = timer.device_samples(calls, device, 0.3).ratio("ours", "theirs")
    return f"{ratio:.2f} [{low:.2f}, {high:.2f}] of the time of {said}"


@torch.no_grad()
def with_plans(device: torch.device) -> None:
    """First calls where shipped plans answer, a line a case; then the same in a process that finds this one's kernels."""
    for name, fn, args in cases():
        first, second = waited_ms(fn, args), waited_ms(fn, args)
        op, key, _ = measure_case.meet(fn, args)[0]
        served = dispatch_selector.decide(op, key, device, policy.current())
        print(
            f"{name}: first call {first:.1f} ms, second {second:.2f}, by {served.eager[0]} ({served.source})",
            flush=True,
        )
    if AGAIN not in os.environ:
        print("again, kernels compiled", flush=True)
        found = {"TENSORLOGIC_CACHE_DIR": str(FOLDER), AGAIN: str(FOLDER)}
        subprocess.run([sys.executable, *sys.argv], env={**os.environ, **found}, check=True)


def main() -> None:
    """One line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--shipped", action="store_true")
    asked = parser.parse_args()
    end = time.perf_counter() + asked.seconds
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device) @ torch.zeros(1, device=device)
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    if asked.shipped:
        return with_plans(device)
    for name, fn, args in cases():
        if time.perf_counter() > end:
            print(f"{name}: no time left")
            continue
        store.SHIPPED = FOLDER
        with torch.no_grad():
            first, second = waited_ms(fn, args), waited_ms(fn, args)
            op, key, _ = measure_case.meet(fn, args)[0]
            served = dispatch_selector.decide(op, key, device, policy.current())
            learned = tensorlogic.tune(fn, *args)
            plan = open_stores.current(device).get(key)
            assert plan is not None
            us = {e.candidate: e.device_us for e in plan.evidence if e.status == "measured"}
            print(
                f"{name}: first call {first:.1f} ms, second {second:.2f}, by {served.eager[0]} ({served.source}); tuned in "
                f"{learned.seconds:.1f} s, {len(learned.plans)} keys: {plan.captured} {dict(plan.captured_config)}, "
                f"{us[EAGER] / us[plan.captured]:.2f} times as fast as eager; {against_shipped(op, key, device)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
