"""Two ranks over gloo: rank 0 measures, both take its choice, nobody measures in the background."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import json, os, sys
import torch, torch.distributed as dist
import tensorlogic
from tensorlogic.autotune import background_tuning as background; from tensorlogic.plans import open_stores as stores
from tensorlogic.core.op import OPS; from tensorlogic.core.candidate import Candidate
from tensorlogic.autotune.tuner import KeyTuner

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
runs = []
measure = KeyTuner.run
KeyTuner.run = lambda self: runs.append(self.key.text) or measure(self)
x = torch.randn(64, 48)
learned = tensorlogic.tune(tensorlogic.gelu, x)
plan = next(iter(stores.current(x.device).plans()))
with tensorlogic.policy(tune="auto"):
    for _ in range(2000):
        tensorlogic.silu(x)
print(json.dumps({"chosen": plan.eager, "measured": plan.measured, "runs": runs, "plans": len(learned.plans), "watched": len(background._WATCHES)}))
dist.barrier()  # gloo aborts a rank whose peer has already left
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads may still hold tensors, and take the interpreter down where it ends before them
"""


@pytest.mark.slow
def test_ranks_choose_together(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), address],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TENSORLOGIC_CACHE_DIR": str(tmp_path / f"cache{rank}")},
        )
        for rank in (0, 1)
    ]
    said = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    assert said[0]["chosen"] == said[1]["chosen"]
    assert said[0]["measured"] == said[1]["measured"]
    assert said[0]["plans"] == said[1]["plans"] == 1
    assert len(said[0]["runs"]) == 1
    assert said[1]["runs"] == []
    assert said[0]["watched"] == said[1]["watched"] == 0
