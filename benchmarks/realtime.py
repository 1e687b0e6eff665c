"""How late a small network may answer: p50, p99, p99.9 and the worst of 10,000 synchronised calls, beside eager and torch.compile.

python benchmarks/realtime.py [--calls N] [--out FILE.json]   on the GPU if there is one
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import gc
import json
import platform
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.measure import timer
from tensorlogic.system import hardware

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.float16 if CUDA else torch.float32
Call = Callable[[], Any]
TURNS = 10
MARKS = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


def network() -> nn.Module:
    """Three linear layers, as a controller would have."""
    layers = (nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
    return nn.Sequential(*layers).to(DEVICE, DTYPE).eval()


def chain(x: Tensor) -> Tensor:
    """50 kernels."""
    for _ in range(50):
        x = x + 1
    return x


def processor() -> str:
    """The device's name."""
    if CUDA:
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    return next(
        (v.split(":")[1].strip() for v in lines if v.startswith("model name")), platform.processor()
    )


def latencies(ways: Mapping[str, Call], count: int) -> dict[str, dict[str, float]]:
    """Microseconds of `count` calls of each way, each waited for, in turns, so that what drifts on the machine is nobody's; with
    Python's garbage collection as in a program that cares: off."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, call in ways.items():
            for _ in range(50):
                call()
            gc.collect()
            gc.disable()
            try:
                times[name] += [timer.once(call, DEVICE) for _ in range(count // TURNS)]
            finally:
                gc.enable()
    return {name: _marks(sorted(found)) for name, found in times.items()}


def _marks(times: list[float]) -> dict[str, float]:
    found = {name: times[int(q * len(times))] for name, q in MARKS.items()}
    return {**found, "worst": times[-1]}


def hosted(steps: Any, x: Tensor) -> tuple[float, float]:
    """Microseconds of host time of a replayed call, and of one that is given the graph's own buffer, where nothing is to be copied."""
    given = {"whole": x}
    for replay in steps.replays():
        given["beyond"] = replay.static[0]
    calls = {name: [lambda v=v: steps(v)] for name, v in given.items()}
    found = timer.host_samples(calls, DEVICE, 0.4).values
    whole, beyond = (statistics.median(found[n]) for n in ("whole", next(reversed(given))))
    return whole, beyond


@torch.no_grad()
def main() -> None:
    """Measure and print one line a way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    model, x = network(), torch.randn(8, 256, device=DEVICE, dtype=DTYPE)
    compiled = torch.compile(
        copy.deepcopy(model), dynamic=False, mode="reduce-overhead" if CUDA else "default"
    )
    ways: dict[str, Callable[[Tensor], Any]] = {
        "eager": model,
        "torch.compile": compiled,
        "capture": tensorlogic.capture(model),
        "capture, views": tensorlogic.capture(model, unsafe_views=True),
        "optimize": tensorlogic.optimize(model, x),
    }
    calls: dict[str, Call] = {name: functools.partial(way, x) for name, way in ways.items()}
    table = latencies(calls, chosen.calls)
    for name, row in table.items():
        print(f"{name:15s} " + "  ".join(f"{k} {v:8.1f}" for k, v in row.items()) + "  us")
    steps = tensorlogic.capture(chain, unsafe_views=True)
    for _ in range(5):
        steps(x)
    host, beyond = hosted(steps, x)
    print(
        f"host time of a captured call of 50 kernels: {host:.2f} us, beyond its input's copy {beyond:.2f} us ({steps.reason or 'replayed'})"
    )
    if chosen.out:
        whole = {
            "device": processor(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "driver": hardware.gpu_driver() if CUDA else "",
            "date": datetime.date.today().isoformat(),
            "calls": chosen.calls,
            "us": table,
            "host_us_of_50_kernels": host if CUDA else None,
            "host_us_of_50_kernels_beyond_copies": beyond if CUDA else None,
        }
        chosen.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
