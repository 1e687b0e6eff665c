"""Do fresh stores choose alike? Tunes the benchmark's keys in several processes, each with an empty store, and compares.

python benchmarks/stability.py [--stores 5] [--device cpu] [--quick] [--json PATH]

Prints every key on which the stores differ and the share that agree; exits 1 below 98 %. An agreement by way of candidates
within each other's tolerance counts as a difference all the same.
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
from collections import Counter
from pathlib import Path

REQUIRED = 0.98


def one(device: str, quick: bool) -> None:
    """Tune every case of the suite in this process; print key -> [eager choice, captured choice] as JSON."""
    import torch

    from tensorlogic.bench import measure_case, suites
    from tensorlogic.plans import open_stores
    from tensorlogic.system import compile_pool

    chosen = suites.cases(suites.Selection(device, quick=quick))
    cases = [case for case in chosen if case.category != "transfer"]
    if device == "cuda":
        compile_pool.submit(measure_case.kernels(cases, torch.device(device)))
    with compile_pool.awaited():
        for case in cases:
            measure_case.tuned(case, torch.device(device))
    plans = open_stores.current(torch.device(device)).plans()
    print(json.dumps({p.key.text: [p.eager, p.captured] for p in plans}))


def main() -> int:
    """Run the stores one after the other and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stores", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.device, given.quick)
        return 0
    runs = []
    for store in range(given.stores):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            again = [
                sys.executable,
                __file__,
                "--one",
                "--device",
                given.device,
                *(["--quick"] if given.quick else []),
            ]
            out = subprocess.run(
                again,
                env=os.environ | {"TENSORLOGIC_CACHE_DIR": folder},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        runs.append(json.loads(out.stdout.splitlines()[-1]))
        seconds = time.monotonic() - begin
        print(f"store {store + 1}: {len(runs[-1])} keys in {seconds:.0f} s", flush=True)
    keys = sorted(set().union(*runs))
    differing = {
        key: Counter(str(run.get(key)) for run in runs)
        for key in keys
        if len({str(run.get(key)) for run in runs}) > 1
    }
    for key, seen in differing.items():
        print(key, dict(seen))
    share = 1 - len(differing) / len(keys)
    print(f"{len(keys)} keys, {given.stores} stores: {100 * share:.1f} % agree in all of them")
    if given.json:
        import torch

        from tensorlogic.plans.environment import environment

        given.json.write_text(
            json.dumps(
                {
                    "device": given.device,
                    "environment": environment(torch.device(given.device)).to_json(),
                    "date": datetime.date.today().isoformat(),
                    "keys": len(keys),
                    "share": share,
                    "differing": {k: dict(c) for k, c in differing.items()},
                },
                indent=1,
            )
            + "\n"
        )
    return 0 if share >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
