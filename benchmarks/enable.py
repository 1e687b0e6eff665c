"""An unmodified float16 script on the CPU, with and without TENSORLOGIC_ENABLE=1: are the answers the same, and the times?

    python benchmarks/enable.py [--json PATH] [arguments of examples/half_transformer.py]
    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 TENSORLOGIC_NATIVE_ISA=avx512_bf16 TENSORLOGIC_CACHE_DIR=/tmp/limited \
        python benchmarks/enable.py           as a processor without float16 arithmetic would do

Runs both twice, in turn, in fresh processes, and keeps the faster of each. Exit code 1 where the answers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

from tensorlogic.bench.machine_info import limits
from tensorlogic.plans.environment import environment
from tools.docs.facts import enabled

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "half_transformer.py"
# As an interpreter does into whose site-packages a wheel has put the files of tools/startup.
LAUNCH = "import runpy, site, sys; site.addsitedir(sys.argv[1]); sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
TIMES = re.compile(r"batch (\d+) inference ([\d.]+) ms, training step ([\d.]+) ms")


def run(enable: str, arguments: list[str]) -> tuple[list[str], dict[str, float]]:
    """The script's answers, and its times in ms by what was timed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TENSORLOGIC_ENABLE": enable}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(ROOT / "tools" / "startup"), str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    answers, times = [], {}
    for line in done.stdout.splitlines():
        if found := TIMES.fullmatch(line):
            batch, inference, training = found.groups()
            times[f"inference, batch {batch}"] = float(inference)
            times[f"training step, batch {batch}"] = float(training)
        else:
            answers.append(line)
    return answers, times


def same(one: list[str], other: list[str]) -> bool:
    """Equal classes, and numbers within float16's rounding."""
    a, b = (" ".join(lines).split() for lines in (one, other))
    return len(a) == len(b) and all(
        x == y or ("." in x and "." in y and abs(float(x) / float(y) - 1) < 5e-3)
        for x, y in zip(a, b, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options, arguments = parser.parse_known_args()
    runs: dict[str, list[tuple[list[str], dict[str, float]]]] = {"0": [], "1": []}
    for _ in range(2):
        for enable, found in runs.items():
            found.append(run(enable, arguments))
    equal = all(same(runs["0"][0][0], answers) for found in runs.values() for answers, _ in found)
    best = {e: {k: min(t[k] for _, t in found) for k in found[0][1]} for e, found in runs.items()}
    cpu = environment(torch.device("cpu"))
    rows = [[what, off, best["1"][what], off / best["1"][what]] for what, off in best["0"].items()]
    result = {
        "machine": cpu.device,
        "threads": cpu.threads,
        "torch": torch.__version__,
        "date": str(date.today()),
        "limited to": limits(),
        "rows": rows,
        "same": equal,
    }
    print(enabled(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
