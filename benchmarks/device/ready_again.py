"""Seconds until `optimize` is ready in a first process and in a second one that finds its decisions, beside torch.compile's.

python benchmarks/device/ready_again.py [--small] [--out FILE.json]

Both processes share one empty cache folder; torch.compile starts from an empty one in each.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import DEVICE, resnet, transformer

import tensorlogic


def seconds(action: Callable[[], Any]) -> float:
    """Of an action and what it has queued."""
    begin = time.perf_counter()
    action()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


@torch.no_grad()
def measured(small: bool, compiling: bool) -> list[dict[str, Any]]:
    """Every model in this process."""
    image = torch.randn(1, 3, 64 if small else 224, 64 if small else 224)
    cases = (
        ("resnet", resnet((1, 1, 1, 1)) if small else resnet(), image),
        ("transformer", transformer(2, 128, 4) if small else transformer(), torch.randn(1, 128, 128 if small else 768)),
    )  # fmt: skip
    rows = []
    for name, model, x in cases:
        dtype = torch.float32 if small else torch.float16
        model, x = model.to(DEVICE, dtype).eval(), x.to(DEVICE, dtype)
        model(x)
        made: list[Any] = []
        row: dict[str, Any] = {"model": name}
        row["ready_s"] = seconds(lambda: made.append(tensorlogic.optimize(model, (x,))))  # noqa: B023
        row["ready_s"] += seconds(lambda: made[0](x))  # noqa: B023
        report = made[0].report
        row |= {"outcome": report.outcome, "after_us": report.after_us, "notes": report.notes}
        want, got = copy.deepcopy(model).double()(x.double()), made[0](x)
        row["error"] = ((got.double() - want).norm() / want.norm()).item()
        if compiling:
            mode = "reduce-overhead" if DEVICE.type == "cuda" else "default"
            peer = torch.compile(copy.deepcopy(model), dynamic=False, mode=mode)
            row["compile_s"] = seconds(lambda: (peer(x), peer(x)))  # noqa: B023
        rows.append(row)
    return rows


def main() -> None:
    """Run both processes and print what each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--alone", action="store_true", help="without torch.compile")
    parser.add_argument("--child", choices=("first", "second"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.child:
        torch.compile(lambda v: v.sin() + 1)(torch.ones(8, device=DEVICE))  # nobody's time
        print("set up", flush=True)
        sys.stdin.readline()
        print(json.dumps(measured(given.small, given.child == "first" and not given.alone)))
        return
    cache, found, children = tempfile.mkdtemp(), {}, {}
    for child in ("first", "second"):
        env = {**os.environ, "TENSORLOGIC_CACHE_DIR": cache}
        env["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
        flags = [*["--small"] * given.small, *["--alone"] * given.alone]
        command = [sys.executable, __file__, "--child", child, *flags]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        children[child] = subprocess.Popen(command, env=env, **pipes)
    for process in children.values():  # neither sets up while the other measures
        process.stdout.readline()
    for child, process in children.items():
        found[child] = json.loads(process.communicate("go\n")[0].splitlines()[-1])
        for row in found[child]:
            print(child, json.dumps(row), flush=True)
    for first, second in zip(found["first"], found["second"], strict=True):
        text = f"{first['model']}: {first['ready_s']:.2f} s, then {second['ready_s']:.2f} s"
        if not given.alone:
            share = second["ready_s"] / first["compile_s"]
            text += f", torch.compile {first['compile_s']:.2f} s: {share:.2f} of it"
        print(text)
    if given.out:
        given.out.write_text(json.dumps({"torch": torch.__version__, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
