"""Peak memory of a call of a whole model, as it is and through `optimize`, beside what its report says it holds.

python benchmarks/device/peak_memory.py [--out FILE.json]

A model may take more than eager's peak by what the report states: graphs' memory, folded and packed weights. Exits 1 where one takes more.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import torch
from torch import Tensor, nn

import tensorlogic

DEVICE = torch.device("cuda")
SLACK = 1 << 20  # what an allocator rounds


def cases() -> Iterator[tuple[str, Callable[[], nn.Module], Tensor]]:
    """Name, a maker of the model, its input."""
    for batch in (1, 32):
        image = torch.randn(batch, 3, 224, 224, device=DEVICE, dtype=torch.float16)
        yield f"resnet50, batch {batch}", models.resnet, image
        tokens = torch.randn(batch, 128, 768, device=DEVICE, dtype=torch.float16)
        yield f"transformer, batch {batch}", models.transformer, tokens


def used() -> int:
    """Bytes of tensors that live, after what nobody holds is gone."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def peak(model: nn.Module, x: Tensor, before: int) -> int:
    """Bytes at most in a call, beyond what was there."""
    used()
    torch.cuda.reset_peak_memory_stats()
    model(x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@torch.no_grad()
def measured(make: Callable[[], nn.Module], x: Tensor) -> dict[str, Any]:
    """One model: peaks, what the report says is held, and what stays reserved."""
    model = make().to(DEVICE, torch.float16).eval()
    model(x)
    before = used()
    eager = peak(model, x, before)
    fast = tensorlogic.optimize(model, x)
    fast(x)
    ours = peak(fast, x, before)
    held = fast.report.bytes
    return {
        "eager": eager,
        "ours": ours,
        "held": held,
        "reserved": torch.cuda.memory_reserved(),
        "outcome": fast.report.outcome,
        "ok": ours <= eager + held + SLACK,
    }


def main() -> int:
    """One line a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    for name, make, x in cases():
        row = {"model": name, **measured(make, x)}
        mib = {k: f"{row[k] / 2**20:.1f} MiB" for k in ("eager", "ours", "held", "reserved")}
        print(f"{'ok' if row['ok'] else 'MORE'} {name} ({row['outcome']}): " + ", ".join(f"{k} {v}" for k, v in mib.items()), flush=True)  # fmt: skip
        rows.append(row)
    if asked.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        asked.out.write_text(json.dumps({**about, "models": rows}, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
