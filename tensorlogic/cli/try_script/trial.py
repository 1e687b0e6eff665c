"""The order of a trial: watch, tune, then run with and without help in turn; and what is read out of it."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...bench.terminal.progress import Tick
from ...bench.terminal.user_error import Problem
from ...measure.opportunity import Opportunity
from ...system.package import FOLDER

# of the program's time that a module must take to be optimised
SHARE = 0.05
PAIRS = (3, 9)  # runs of a script with and without help: least and most
# difference of outputs that counts as equal
BOUND = {"float16": 2e-2, "bfloat16": 8e-2, "float32": 1e-3, "float64": 1e-6}
GAIN = 1.02  # what less than this is no gain
APART = ("TENSORLOGIC_ENABLE", "TENSORLOGIC_LOCKFILE")  # would help the plain run, too
Gain = tuple[float, float, float]  # time before over time after, its 95 % interval


@dataclass
class Asked:
    """What a person asked for."""

    script: str = ""
    args: tuple[str, ...] = ()
    entry: str = ""  # module:function
    lockfile: Path | None = None
    again: bool = False  # run it again although it changes things outside
    budget_s: float = 60.0

    @property
    def command(self) -> str:
        """As it was typed."""
        return f"--entry {self.entry}" if self.entry else shlex.join([self.script, *self.args])


@dataclass
class Trial:
    """Everything that was found out; times in seconds."""

    asked: Asked
    look: dict[str, Any]
    repair: bool = False
    modules: dict[int, str] = field(default_factory=dict)
    tuned: dict[str, Any] = field(default_factory=dict)
    plain: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    calls: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    difference: float | None = None  # of outputs, relative, with and without help
    own: float = 0.0  # of two runs without
    agree: bool = True
    failure: str = ""  # what the program says with help, where it fails
    interrupted: bool = False
    opportunities: list[Opportunity] = field(default_factory=list)

    @property
    def gain(self) -> Gain | None:
        """Of the whole; None where nothing was timed."""
        return ratio(self.plain, self.ours)

    @property
    def main(self) -> Gain | None:
        """What counts: the whole, or one call where the program decides itself how long it runs."""
        whole, call = self.gain, ratio(*self.calls)
        return call if call is not None and whole is not None and whole[0] < call[0] else whole

    @property
    def won(self) -> bool:
        """True when the program is faster beyond doubt, and right."""
        gain = self.main
        sure = gain is not None and gain[1] > 1 and gain[0] >= GAIN
        return sure and self.agree and not self.failure


def ratio(before: list[float], after: list[float]) -> Gain | None:
    """Median of the paired ratios and their interval."""
    from ...measure.timer import Samples

    count = min(len(before), len(after))
    if not count:
        return None
    return Samples({"before": before[:count], "after": after[:count]}).ratio("before", "after")


class Failed(Exception):
    """A child's program did not end with exit code 0."""


class Runner:
    """Runs a program's child processes in one temporary folder."""

    def __init__(self, asked: Asked, folder: Path) -> None:
        self.asked, self.folder = asked, folder
        self.spec: dict[str, Any] = asdict(asked) | {"repair": False, "modules": {}}
        self.spec["lockfile"] = str(asked.lockfile or "")
        kept = {k: v for k, v in os.environ.items() if k not in APART}
        path = os.pathsep.join(filter(None, (str(FOLDER.parent), kept.get("PYTHONPATH"))))
        self.env = {**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TENSORLOGIC_TUNE": "off"}

    def run(self, mode: str) -> dict[str, Any]:
        """One process; Failed with its last words when the program fails."""
        (self.folder / "spec.json").write_text(json.dumps(self.spec))
        command = [sys.executable, "-m", f"{__package__}.child_process", str(self.folder), mode]
        with (self.folder / f"{mode}.out").open("w+") as said:
            done = subprocess.run(
                command, stdout=said, stderr=subprocess.STDOUT, env=self.env, check=False
            )
            said.seek(0)
            lines = [line for line in said.read().splitlines() if line.strip()]
        path = self.folder / f"{mode}.json"
        if done.returncode or not path.exists():
            raise Failed("\n".join(lines[-8:]) or f"exit code {done.returncode}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def outputs(self, mode: str) -> dict[str, Any]:
        """What a run left for comparison."""
        import torch

        loaded: dict[str, Any] = torch.load(self.folder / f"{mode}.pt")
        return loaded


def attempt(asked: Asked, tick: Tick = lambda done, total, text: None) -> Trial:
    """Try a program.

    Raises:
        Problem: it does not exist, fails on its own, or changes things outside and `again` was not said.
    """
    if asked.script and not Path(asked.script).is_file():
        what = "is no file" if Path(asked.script).exists() else "does not exist"
        raise Problem(f"{asked.script} {what}; a Python file, or --entry module:function, is required")  # fmt: skip
    if bool(asked.script) == bool(asked.entry):
        raise Problem("a Python file or --entry module:function is required, one of them")
    if asked.entry and not asked.entry.partition(":")[2].isidentifier():
        raise Problem(f"--entry is {asked.entry!r}; module:function is required")
    with tempfile.TemporaryDirectory(prefix="tensorlogic-try-") as folder:
        return _trial(Runner(asked, Path(folder)), tick)


def _trial(runner: Runner, tick: Tick) -> Trial:
    from ...compiler.reporting import remedies

    asked = runner.asked
    tick(0, 4, "watching the program once")
    try:
        trial = Trial(asked, runner.run("look"))
    except Failed as problem:
        raise Problem(f"the program fails on its own:\n{problem}") from None
    outside = trial.look["outside"]
    if outside and not asked.again:
        raise Problem(
            "this program changes things outside: "
            + "; ".join(outside[:8])
            + ". It would be run about ten times more; say --again if that does no harm, or give a function without "
            "side effects: --entry module:function"
        )
    spent = trial.look["spent"]
    halves = any(set(s["dtypes"]) & set(remedies.HALVES) for s in spent)
    trial.repair = halves and trial.look["environment"]["kind"] == "cpu"
    trial.modules = _worth(trial.look, 1 if asked.entry else 2)  # a function is called often
    runner.spec |= {"repair": trial.repair, "modules": trial.modules}
    try:
        for step in (_turns if asked.entry else _pairs)(runner, trial):
            tick(*step)
    except Failed as problem:
        trial.failure = str(problem)
    except KeyboardInterrupt:
        trial.interrupted = True
        if trial.gain is None:
            raise
    seconds = min(trial.plain, default=trial.look["seconds"])
    trial.opportunities = remedies.opportunities(trial.look, seconds)
    return trial


def _worth(look: dict[str, Any], least: int) -> dict[int, str]:
    """Modules that are called that often and take a share of the time, with their main signature."""
    whole = sum(s["seconds"] for s in look["spent"])
    some = [m for m in look["modules"] if m["calls"] >= least and m["seconds"] >= SHARE * whole]
    return {m["number"]: m["signature"] for m in sorted(some, key=lambda m: m["seconds"])}


def _pairs(runner: Runner, trial: Trial) -> Iterator[tuple[int, int, str]]:
    """A script: tuned once, then whole runs in turn."""
    yield 1, 4, "tuning what it calls"
    trial.tuned = runner.run("tune")
    each = trial.look["seconds"] + trial.tuned["ready"] + 5
    pairs = max(PAIRS[0], min(PAIRS[1], int(runner.asked.budget_s / (2 * each))))
    for done in range(pairs):
        found = {}
        for mode in ("plain", "ours") if done % 2 == 0 else ("ours", "plain"):
            yield 2 * done, 2 * pairs, f"{'without' if mode == 'plain' else 'with'} us"
            found[mode] = runner.run(f"{mode}{done}")
        trial.plain.append(found["plain"]["seconds"])
        trial.ours.append(found["ours"]["seconds"])
        if found["plain"]["call"] and found["ours"]["call"]:
            trial.calls[0].append(found["plain"]["call"])
            trial.calls[1].append(found["ours"]["call"])
        trial.tuned["helped"] = found["ours"]["helped"]
        if done < 2:
            again = runner.outputs("plain1") if done else {}
            _compare(trial, runner.outputs("plain0"), again, runner.outputs("ours0"))


def _turns(runner: Runner, trial: Trial) -> Iterator[tuple[int, int, str]]:
    """A function: in one process."""
    yield 2, 4, "with and without us in turn"
    trial.tuned = runner.run("turns")
    trial.plain, trial.ours = (trial.tuned["samples"][n] for n in ("plain", "ours"))
    outputs: dict[str, dict[str, Any]] = {"plain": {}, "again": {}, "ours": {}}
    for name, tensor in runner.outputs("turns").items():
        which, _, rest = name.partition(" ")
        outputs[which][rest] = tensor
    _compare(trial, *outputs.values())


def _compare(
    trial: Trial, plain: dict[str, Any], again: dict[str, Any], ours: dict[str, Any]
) -> None:
    """How far outputs differ, relative to their size, beside what two plain runs differ by."""
    trial.agree = True
    for name in plain.keys() & ours.keys():
        far = _far(plain[name], ours[name])
        own = _far(plain[name], again[name]) if name in again else 0.0
        trial.difference = max(trial.difference or 0.0, far)
        trial.own = max(trial.own, own)
        if far > max(3 * own, BOUND.get(name.rpartition(" ")[2], 1e-3)):
            trial.agree = False


def _far(a: Any, b: Any) -> float:
    if a.shape != b.shape:
        return math.inf
    finite = a.isfinite()
    if not bool((finite == b.isfinite()).all()):
        return math.inf
    a, b = a[finite], b[finite]
    return float((a - b).norm() / a.norm().clamp_min(1e-30))
