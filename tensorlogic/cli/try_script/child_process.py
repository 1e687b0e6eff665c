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
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
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
CURVE = (1, 2, 4, 8, 16, 32)  # batch sizes
CURVE_S = 0.15  # seconds for each


def main(folder: str, mode: str) -> int:
    """Run it; the exit code is the program's own."""
    place = Path(folder)
    spec = json.loads((place / "spec.json").read_text())
    program = _function(spec) if spec["entry"] else _script(spec)
    _seed()
    if mode == "turns":
        found, outputs = _turns(program, spec)
    else:
        found, outputs = _once(program, spec, mode, place)
    (place / f"{mode}.json").write_text(json.dumps(found))
    torch.save(outputs, place / f"{mode}.pt")
    return int(found.get("exit", 0))


def _seed() -> None:
    """A program without seeds of its own draws the same numbers in every run, so that outputs can be compared."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _script(spec: dict[str, Any]) -> Callable[[], Any]:
    def program() -> Any:
        sys.argv = [spec["script"], *spec["args"]]
        sys.path.insert(0, str(Path(spec["script"]).resolve().parent))
        names = runpy.run_path(spec["script"], run_name="__main__")
        return {n: v for n, v in names.items() if isinstance(v, torch.Tensor)}

    return program


def _function(spec: dict[str, Any]) -> Callable[[], Any]:
    module, _, name = spec["entry"].partition(":")
    sys.path.insert(0, os.getcwd())
    function: Callable[[], Any] = getattr(importlib.import_module(module), name)
    return function


def _help(spec: dict[str, Any]) -> Help:
    return Help(spec["repair"], {int(n): s for n, s in spec["modules"].items()})


def _once(
    program: Callable[[], Any], spec: dict[str, Any], mode: str, place: Path
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The whole program once: watched ("look"), tuned with help ("tune"), plain or with help ("ours")."""
    modules, help = Modules(), _help(spec)
    found: dict[str, Any] = {"exit": 0}
    begin = time.perf_counter()
    if mode == "look":
        _look(program, modules, found, str(place), warm=bool(spec["entry"]))
    elif mode == "tune":
        help.watch = modules.serve
        with help:
            learned = tune.whole(lambda: _ends(program, modules, found))
        found |= _learned(learned, spec)
    else:
        helping = mode.startswith("ours")
        help.watch = modules.serve
        with help if helping else modules.watching():
            _ends(program, modules, found)
    found.setdefault("seconds", time.perf_counter() - begin - help.seconds)
    found["ready"] = help.seconds
    found["helped"] = [asdict(h) for h in help.helped.values()]
    found["modules"] = [asdict(c) for c in modules.called.values()]
    found["call"] = sorted(modules.times)[len(modules.times) // 2] if modules.times else None
    return found, modules.outputs


def _ends(program: Callable[[], Any], modules: Modules, found: dict[str, Any]) -> None:
    """Run to the end, be it by sys.exit, and keep what it leaves."""
    try:
        modules.keep("result", program())
    except SystemExit as end:
        found["exit"] = end.code if isinstance(end.code, int) else int(end.code is not None)


def _look(
    program: Callable[[], Any], modules: Modules, found: dict[str, Any], ours: str, warm: bool
) -> None:
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
    found["curve"] = _curve(modules)


def _curve(modules: Modules) -> list[tuple[int, float]]:
    """Batch size -> microseconds of the most called module, its inputs repeated along the first dimension."""
    counts = {
        n: sum(c.calls for c in modules.called.values() if c.number == n) for n in modules.last
    }
    often = max(counts, key=counts.__getitem__, default=None)
    if often is None or counts[often] < 8:
        return []
    module, args, kwargs = modules.last[often]
    size = next((a.shape[0] for a in args if isinstance(a, torch.Tensor) and a.dim()), 0)
    if not size or size > 4 or kwargs or not all(_batched(a, size) for a in args):
        return []
    found = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for times in CURVE:
            given = [
                a.repeat(times, *[1] * (a.dim() - 1)) if isinstance(a, torch.Tensor) else a
                for a in args
            ]
            try:
                calls: dict[str, timer.Call] = {"it": partial(module, *given)}
                samples = timer.wall_samples(calls, device(), CURVE_S)
            except RuntimeError:  # a model of one batch size
                break
            found.append((size * times, samples.median("it")))
    return found


def _batched(value: Any, size: int) -> bool:
    return not isinstance(value, torch.Tensor) or (value.dim() > 0 and value.shape[0] == size)


def _turns(
    program: Callable[[], Any], spec: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A function in one process, with and without help in turn, after it was tuned."""
    help, plain, ours = _help(spec), Modules(), Modules()
    samples = timer.Samples({"plain": [], "ours": []})
    outputs: dict[str, torch.Tensor] = {}
    torch.manual_seed(0)
    plain.keep("result", program())
    torch.manual_seed(0)
    again = Modules()
    again.keep("result", program())
    with help:
        learned = tune.whole(program)
        torch.manual_seed(0)
        ours.keep("result", program())
    for name, kept in (("plain", plain), ("again", again), ("ours", ours)):
        outputs |= {f"{name} {n}": t for n, t in kept.outputs.items()}
    begin = time.perf_counter()
    with _steady():
        while len(samples.values["plain"]) < MOST_ROUNDS:
            for name, context in (("plain", contextlib.nullcontext()), ("ours", help)):
                with context:
                    program()  # finds its road and its caches
                    samples.values[name].append(timer.once(program, device()) / 1e6)
            spent = time.perf_counter() - begin
            if len(samples.values["plain"]) >= LEAST_ROUNDS and spent > spec["budget_s"]:
                break
    return {
        "exit": 0,
        "samples": samples.values,
        **_learned(learned, spec),
        "ready": help.seconds,
        "helped": [asdict(h) for h in help.helped.values()],
    }, outputs


@contextlib.contextmanager
def _steady() -> Iterator[None]:
    """Choices do not change while times are taken."""
    with policy.policy(tune="off"):
        yield


def _learned(learned: Learned, spec: dict[str, Any]) -> dict[str, Any]:
    """What tuning found: each key's choice beside PyTorch's own, what was refused; and the lockfile."""
    store = open_stores.current(device())
    plans = {p.key.text: p for p in store.plans()}
    met = [plans[k.text] for k in learned.keys if k.text in plans]
    found = []
    for plan in met:
        times = {e.candidate: max(e.device_us, e.host_us) for e in plan.evidence if e.status == "measured"}  # fmt: skip
        refused = [
            f"{e.candidate}: {e.reason}"
            for e in plan.evidence
            if e.status == "refused" and e.reason.startswith(("wrong", "failed"))
        ]
        found.append(
            {
                "key": plan.key.text,
                "candidate": plan.eager,
                "us": times.get(plan.eager),
                "eager_us": times.get(EAGER),
                "refused": refused,
            }
        )
    written = 0
    if spec["lockfile"] and met:
        written = export_lockfile(Path(spec["lockfile"]), met, [store.environment])
    return {"learned": str(learned), "keys": found, "written": written}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
