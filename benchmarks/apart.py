"""Seconds until a model is ready, by `tensorlogic.optimize` and by torch.compile, each in a process of its own with empty caches.

python benchmarks/apart.py name[@batch] ... [--seconds 110] [--times 2] [--out FILE.json]   names as zoo_more.py's and zoo.py's

What one leaves behind in a process, imports and compiled kernels, shortens the other's time by up to a third. A second count is
of a process that finds the caches of the first. Imports of PyTorch and of the model's library are not counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

CACHES = ("TENSORLOGIC_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
WAYS = ("optimize", "compile")
LIMIT_S = 120  # for one process


def child(way: str, name: str, batch: int) -> None:
    """Print the seconds of one way, the first use included, and what came of it."""
    import beside
    import torch
    import transformers as hf
    import zoo_more

    import tensorlogic

    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    model, first, _ = zoo_more.made(name, batch)
    model, first = model.to(beside.DEVICE, beside.DTYPE).eval(), beside.onto(first, beside.DTYPE)
    found: dict[str, Any] = {}
    with torch.no_grad():
        beside.outputs(model, first)  # the device and its libraries are awake
        begin = time.perf_counter()
        if way == "optimize":
            fast = tensorlogic.optimize(model, beside.example(first))
            beside.outputs(fast, first)
            found = {"outcome": fast.report.outcome, "notes": fast.report.notes}
        else:
            peer = torch.compile(model, mode=beside.PEER, dynamic=False)
            for _ in range(3):
                beside.calling(peer, first)()
        if beside.CUDA:
            torch.cuda.synchronize()
    print(json.dumps({"seconds": time.perf_counter() - begin, "device": beside.machine(), **found}))


def seconds(way: str, word: str, caches: Path) -> dict[str, Any]:
    """What a process of its own says."""
    own = {name: str(caches / name) for name in CACHES}
    command = [sys.executable, __file__, word, "--way", way]
    try:
        done = subprocess.run(
            command, env=os.environ | own, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"longer than {LIMIT_S} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["?"])[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """A line for each model; ends with 1 where a process failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--seconds", type=float, default=110.0, help="begin no further one after")
    parser.add_argument("--times", type=int, default=2, help="processes that share caches")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        name, _, batch = given.names[0].partition("@")
        child(given.way, name, int(batch or 1))
        return 0
    records, end = list[dict[str, Any]](), time.perf_counter() + given.seconds
    for word in given.names:
        if time.perf_counter() > end:
            print(f"{word}: no time was left")
            continue
        record: dict[str, Any] = {"name": word}
        for way in WAYS:
            with tempfile.TemporaryDirectory() as caches:
                record[way] = [seconds(way, word, Path(caches)) for _ in range(given.times)]
        records.append(record)
        both = [[r.get("seconds", float("nan")) for r in record[way]] for way in WAYS]
        print(
            f"{word:<20} optimize {both[0][0]:6.2f} s  torch.compile {both[1][0]:6.2f} s  "
            f"{both[0][0] / both[1][0]:.2f}   again {' '.join(f'{a:.2f} of {b:.2f} s' for a, b in list(zip(*both, strict=True))[1:])}  "
            f"{[r['failed'] for way in WAYS for r in record[way] if 'failed' in r] or ''}",
            flush=True,
        )
    if given.out:
        about = {"date": str(datetime.date.today()), "models": records}
        given.out.write_text(json.dumps(about, indent=1) + "\n")
    return int(any("failed" in r for m in records for way in WAYS for r in m[way]))


if __name__ == "__main__":
    raise SystemExit(main())
