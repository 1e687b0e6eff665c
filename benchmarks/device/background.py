"""Measuring in the background on a GPU: loops of calls under tune="auto", as a program would make them.

python benchmarks/device/background.py [--seconds 8]

Prints, for each key: calls, microseconds a call, the share of the time that measuring took (5 % is promised), when its plan
came, what serves it then, and the largest difference of any result from eager PyTorch's.
Exits 1 when the share is exceeded by a step's estimate, a result is off, or a plan changed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["TENSORLOGIC_CACHE_DIR"] = tempfile.mkdtemp(prefix="tensorlogic-background-")

import torch
import torch.nn.functional as F

import tensorlogic
from tensorlogic.autotune import background_tuning
from tensorlogic.plans import open_stores

ALLOWED = 0.05 + 0.01  # the promise, and by how much the last step may have been misjudged


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """float16 on the GPU."""
    return (torch.randn(shape, device="cuda") * scale).half()


def cases() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]]:
    """Name -> our call, PyTorch's, arguments."""
    found = {}
    for m, k, n in ((192, 640, 320), (1536, 1536, 1536)):
        x, w, b, r = normal(m, k), normal(n, k, scale=k**-0.5), normal(n), normal(m, n)
        found[f"linear_residual_relu {m}x{k}x{n}"] = (
            tensorlogic.linear_residual_relu,
            lambda x, w, b, r: torch.relu(F.linear(x, w, b) + r),
            (x, w, b, r),
        )
    a, b = normal(3000, 1111), normal(3000, 1111)
    found["add_relu 3000x1111"] = (
        tensorlogic.add_relu,
        lambda a, b: torch.relu(a + b),
        (a, b),
    )
    logits, target = normal(2048, 9000), torch.randint(9000, (2048,), device="cuda")
    found["softmax_cross_entropy 2048x9000"] = (
        tensorlogic.softmax_cross_entropy,
        F.cross_entropy,
        (logits, target),
    )
    return found


def main() -> int:
    """Run each case for a while and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    seconds, failed = parser.parse_args().seconds, False
    device = torch.device("cuda", torch.cuda.current_device())
    open_stores.current(device)
    for name, (ours, plain, args) in cases().items():
        expected = plain(*args).float()
        served, worst, came, calls = set(), 0.0, None, 0
        with torch.no_grad(), tensorlogic.policy(tune="auto"):
            begin = time.perf_counter()
            while time.perf_counter() - begin < seconds:
                for _ in range(100):
                    out = ours(*args)
                calls += 100
                torch.cuda.synchronize()
                worst = max(worst, (out.float() - expected).abs().max().item())
                watches = [w for w in background_tuning._WATCHES.values() if w.done]
                if came is None and any(w.op.name in name for w in watches):
                    came = time.perf_counter() - begin
                for plan in open_stores.current(device).plans():
                    served.add((plan.key.text, plan.eager, str(plan.eager_config)))
            loop = time.perf_counter() - begin
        used = max(
            (w.used_s for w in background_tuning._WATCHES.values() if w.op.name in name),
            default=0.0,
        )
        share, plans = used / loop, [s for s in served if s[0].split()[0] in name]
        wrong = worst > 0.05 or len(plans) > 1 or share > ALLOWED
        failed |= wrong
        at = "no plan yet" if came is None else f"plan after {came:.1f} s: {[p[1:] for p in plans]}"
        print(
            f"{'FAILED' if wrong else 'ok    '} {name}: {calls} calls, {1e6 * loop / calls:.1f} us each, measuring took {100 * share:.1f} %, "
            f"{at}, largest difference {worst:.3g}",
            flush=True,
        )
        background_tuning.forget()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
