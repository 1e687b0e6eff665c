"""One run of a program in a process of its own: `python -m tensorlogic.cli.try_script.child_process FOLDER MODE`.

FOLDER holds `spec.json` (what to run, which levers); the run leaves `MODE.json` and `MODE.pt` there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...autotune import tune
from ...autotune.tune import Learned
from ...compiler.reporting.op_profile import Profile, device, summed
from ...core import policy
from ...core.candidate import EAGER
from ...measure import timer
from ...plans import open_stores
from ...plans.lockfile import export_lockfile
from ...system import settings
from .assist import Help
from .observe import Modules, Outside

LEAST_ROUNDS, MOST_ROUNDS = 6, 25  # of a function that is called with and without help in turn
Program = Callable[[], Any]


def main(folder: str, mode: str) -> int:
    """Run it; the exit code is the program's own."""
    place = Path(folder)
    spec = json.loads((place / "spec.json").read_text())
    program = _function(spec) if spec["entry"] else _script(spec)
    help, modules = Help(spec["repair"], {int(n): s for n, s in spec["modules"].items()}), Modules()
    found: dict[str, Any] = {"exit": 0}
    # a program without seeds of its own draws the same numbers in every run, so that outputs can be compared
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    if mode == "look":
        _look(program, modules, found, str(place), warm=bool(spec["entry"]))
    elif mode == "turns":
        _turns(program, modules, help, found, spec)
    else:
        _whole(program, modules, help, found, mode, spec)
    found["ready"], found["helped"] = help.seconds, help.helped
    (place / f"{mode}.json").write_text(json.dumps(found))
    torch.save(modules.outputs, place / f"{mode}.pt")
    return int(found["exit"])


def _script(spec: dict[str, Any]) -> Program:
    def program() -> Any:
        sys.argv = [spec["script"], *spec["args"]]
        sys.path.insert(0, str(Path(spec["script"]).resolve().parent))
        names = runpy.run_path(spec["script"], run_name="__main__")
        return {n: v for n, v in names.items() if isinstance(v, torch.Tensor)}

    return program


def _function(spec: dict[str, Any]) -> Program:
    module, _, name = spec["entry"].partition(":")
    sys.path.insert(0, os.getcwd())
    function: Program = getattr(importlib.import_module(module), name)
    return function


def _ends(program: Program, modules: Modules, found: dict[str, Any]) -> None:
    """Run to the end, be it by sys.exit, and keep what it leaves."""
    try:
        modules.keep("result", program())
    except SystemExit as end:
        found["exit"] = end.code if isinstance(end.code, int) else int(end.code is not None)


def _look(program: Program, modules: Modules, found: dict[str, Any], ours: str, warm: bool) -> None:
    """Watch the program; a function that will be called again and again is watched when it is warm."""
    outside, profile = Outside(ours, str(settings.cache_folder())), Profile()
    outside.active = True
    if warm:
        program()
    begin = time.perf_counter()
    with modules.watching(), profile:
        _ends(program, modules, found)
    found["seconds"] = time.perf_counter() - begin
    outside.active = False
    found["outside"] = list(outside.found)
    found |= summed(profile)
    found["modules"] = [asdict(c) for c in modules.called.values()]


def _whole(
    program: Program, modules: Modules, help: Help, found: dict[str, Any], mode: str, spec: dict[str, Any]
) -> None:  # fmt: skip
    """The whole program once: tuned with help ("tune"), plain or with help ("ours")."""
    help.watch, begin = modules.serve, time.perf_counter()
    with modules.watching() if mode.startswith("plain") else help:
        if mode == "tune":
            found |= _learned(tune.whole(lambda: _ends(program, modules, found)), spec)
        else:
            _ends(program, modules, found)
    found["seconds"] = time.perf_counter() - begin - help.seconds
    found["call"] = statistics.median_high(modules.times) if modules.times else None


def _turns(
    program: Program, modules: Modules, help: Help, found: dict[str, Any], spec: dict[str, Any]
) -> None:
    """A function in one process, with and without help in turn, after it was tuned."""

    def kept(name: str) -> None:
        torch.manual_seed(0)
        modules.keep(name, program())

    kept("plain")
    kept("again")
    with help:
        found |= _learned(tune.whole(program), spec)
        kept("ours")
    samples: dict[str, list[float]] = {"plain": [], "ours": []}
    begin = time.perf_counter()
    with policy.policy(tune="off"):  # choices do not change while times are taken
        while len(samples["plain"]) < MOST_ROUNDS:
            for name, context in (("plain", contextlib.nullcontext()), ("ours", help)):
                with context:
                    program()  # finds its road and its caches
                    samples[name].append(timer.once(program, device()) / 1e6)
            spent = time.perf_counter() - begin
            if len(samples["plain"]) >= LEAST_ROUNDS and spent > spec["budget_s"] / 2:
                break
    found["samples"] = samples


def _learned(learned: Learned, spec: dict[str, Any]) -> dict[str, Any]:
    """What tuning found: the keys that gain, the largest gain first; what was refused; and the lockfile."""
    store = open_stores.current(device())
    plans = {p.key.text: p for p in store.plans()}
    met = [plans[k.text] for k in learned.keys if k.text in plans]
    gains, refused = [], []
    for plan in met:
        times = {e.candidate: max(e.device_us, e.host_us) for e in plan.evidence if e.status == "measured"}  # fmt: skip
        ours, theirs = times.get(plan.eager), times.get(EAGER)
        if plan.eager != EAGER and ours and theirs:
            gains.append((ours - theirs, f"{plan.key.text}: {plan.eager}, {theirs:.4g} -> {ours:.4g} us"))  # fmt: skip
        refused += [
            f"{e.candidate}: {e.reason} ({plan.key.op})"
            for e in plan.evidence
            if e.status == "refused" and e.reason.startswith(("wrong", "failed"))
        ]
    written = export_lockfile(Path(spec["lockfile"]), met, [store.environment]) if spec["lockfile"] and met else 0  # fmt: skip
    return {"gains": [text for _, text in sorted(gains)], "refused": refused, "written": written}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
