"""Run in a process of its own, where AddressSanitizer watches every access: `python -m tests.support.metal.sanitized [BUG]`."""

from __future__ import annotations

import sys

import torch

from tensorlogic.core.op import OPS

from . import planted as metal_planted
from . import standin as metal_standin
from . import trials as metal_trials


def main() -> None:
    """Every shader in float16 at all sizes; with the name of a planted bug, linear's tiled one with it. Prints how many ran."""
    bug = sys.argv[1] if len(sys.argv) > 1 else None
    torch.mps.compile_shader = metal_standin.compile_shader
    pairs = metal_trials.PAIRS
    if bug is not None:
        pairs = [("linear", "metal.tiled")]
        torch.mps.compile_shader = lambda s: metal_standin.compile_shader(
            metal_planted.planted(s, bug)
        )
    else:
        metal_trials.prepare(metal_trials.DTYPES[:1], cases=False)
    ran = 0
    for name, id in pairs:
        for trial in metal_trials.trials(OPS[name], id, torch.float16, cases=False):
            trial.launch()
            ran += 1
    print(ran)


if __name__ == "__main__":
    main()
