"""How long `import tensorlogic` takes beyond PyTorch's own import, and the command line until it shows help.

python benchmarks/import_time.py [--runs 10] [--json PATH]

Each run is a fresh process with compiled bytecode; a first one, which may have to write it, does not count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

IMPORTS = "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import tensorlogic; print(b - a, time.perf_counter() - b)"
HELP = "import sys; sys.path.insert(0, sys.argv.pop(1)); import _tensorlogic_cli; _tensorlogic_cli.main()"
STARTUP = Path(__file__).resolve().parent.parent / "tools" / "startup"


def _once() -> dict[str, float]:
    """Seconds of one run of each."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    given = {"env": env, "capture_output": True, "text": True, "check": True}
    torch_s, ours_s = subprocess.run([sys.executable, "-c", IMPORTS], **given).stdout.split()
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", HELP, str(STARTUP), "--help"], **given)
    return {
        "import torch": float(torch_s),
        "import tensorlogic, after torch": float(ours_s),
        "tensorlogic --help": time.perf_counter() - begin,
    }


def main() -> None:
    """Print the medians, and write every run where it is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    _once()
    runs = [_once() for _ in range(given.runs)]
    samples = {name: [round(r[name] * 1e3, 1) for r in runs] for name in runs[0]}
    for name, values in samples.items():
        print(
            f"{name}: {statistics.median(values):.0f} ms ({min(values):.0f} to {max(values):.0f})"
        )
    if given.json:
        import torch

        from tensorlogic.bench import machine_info

        found = {
            "machine": machine_info.describe(torch.device("cpu"))["environment"],
            "date": datetime.date.today().isoformat(),
            "unit": "ms",
            "samples": samples,
        }
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
