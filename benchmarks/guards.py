"""What enable() costs calls that it does not repair: microseconds added to small float32 calls, with the hooks and without.

python benchmarks/guards.py [--json PATH]

PyTorch's own time and the enabled one are taken in turn, enabling and disabling between them; medians of all turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import tensorlogic
from tensorlogic.measure import timer
from tensorlogic.native import hook_extension, hook_ops
from tensorlogic.plans.environment import environment

CPU = torch.device("cpu")
TURNS, SECONDS = 7, 0.02  # of each call, and seconds for each turn


def calls() -> dict[str, Callable[[], object]]:
    """Small calls of the kernels that enable() stands before."""
    a, b, v = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    c, out = torch.randn(2, 4, 4), torch.empty(4, 4)
    weight = torch.nn.Parameter(torch.randn(4, 4))
    q = torch.randn(1, 2, 4, 4)
    x, filters = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3)
    attention = torch.nn.functional.scaled_dot_product_attention
    return {
        "mm": lambda: torch.mm(a, b),
        "mm, out=": lambda: torch.mm(a, b, out=out),
        "addmm": lambda: torch.addmm(v, a, b),
        "bmm": lambda: torch.bmm(c, c),
        "baddbmm": lambda: torch.baddbmm(c, c, c),
        "addmv": lambda: torch.addmv(v, a, v),
        "linear, recorded": lambda: torch.nn.functional.linear(a, weight),
        "attention": lambda: attention(q, q, q),
        "convolution": lambda: torch.conv2d(x, filters),
    }


def one(hooked: bool) -> None:
    """Print name -> [PyTorch's microseconds, enabled microseconds] as JSON."""
    if not hooked:
        hook_extension._state[:] = ["left out for this measurement"]
    elif hook_ops.available():
        sys.exit(f"guards: {hook_ops.available()}")
    found: dict[str, list[list[float]]] = {name: [[], []] for name in calls()}
    given = {name: [call] for name, call in calls().items()}
    for _ in range(TURNS):
        for i, switch in enumerate((tensorlogic.disable, tensorlogic.enable)):
            switch()
            for name, call in given.items():
                samples = timer.device_samples({name: call}, CPU, SECONDS, rounds=7)
                found[name][i].append(samples.quiet(name))
    print(json.dumps({n: [statistics.median(v) for v in pair] for n, pair in found.items()}))


def main() -> None:
    """Measure both in processes of their own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=("with", "without"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.one == "with")
        return
    found = {}
    for mode in ("with", "without"):
        again = [sys.executable, __file__, "--one", mode]
        out = subprocess.run(again, stdout=subprocess.PIPE, text=True, check=True).stdout
        found[mode] = json.loads(out.splitlines()[-1])
    for name, (alone, hooked) in found["with"].items():
        other = found["without"][name]
        print(
            f"{name}: PyTorch {alone:.2f} us, +{hooked - alone:.2f} with hooks, +{other[1] - other[0]:.2f} without"
        )
    if given.json:
        result = {
            "environment": environment(CPU).to_json(),
            "date": datetime.date.today().isoformat(),
            "us": found,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
