"""A trial on one screen, and the record that `--verify` holds it to."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...bench.result_file import write_text
from ...bench.terminal.user_error import Problem
from ...bench.text_table import aligned
from ...compiler.reporting import remedies
from ...measure.opportunity import time_text
from ...system.hardware import title
from .trial import Gain, Trial, ratio

FORMAT, SCHEMA = "tensorlogic try", 1
WHYS = 6  # lines of each list
# relative difference of two plain runs from which nothing is said
BEYOND = 0.1


def lines(trial: Trial) -> Iterator[str]:
    """The screen."""
    e = trial.look["environment"]
    yield f"tensorlogic try {trial.asked.command}"
    yield f"{title(e)}; PyTorch {e['torch']}"
    yield ""
    for part in (_verdict, _why, _keep, _time, _opportunities):
        yield from part(trial)
    if plans := trial.tuned.get("written"):
        yield f"written: {trial.asked.lockfile} (the lockfile, {plans} plans)"


def _interval(gain: Gain) -> str:
    return f"{gain[0]:.2f}x [{gain[1]:.2f}, {gain[2]:.2f}]"


def _median(values: list[float]) -> str:
    return time_text(1e6 * statistics.median_high(values))


def _verdict(trial: Trial) -> Iterator[str]:
    if trial.failure:
        yield "with us the program fails, so nothing was changed:"
        yield from (f"  {line}" for line in trial.failure.splitlines())
        return
    if trial.gain is None:
        yield "nothing was timed"
        return
    if not trial.won:
        wrong = "" if trial.agree else ": what was faster does not give the same outputs"
        yield f"nothing beats what you have{wrong}"
    entry = bool(trial.asked.entry)
    timed = {"a call" if entry else "the whole program": (trial.plain, trial.ours)}
    timed["a call of its modules"] = trial.calls
    cells = [["", "before", "after", "times as fast", "measured"]]
    for what, (before, after) in timed.items():
        if (gain := ratio(before, after)) is not None:
            how = f"{len(before)} {'calls' if entry else 'pairs of runs'} in turn"
            cells.append([what, _median(before), _median(after), _interval(gain), how])
    yield from aligned(cells, [True, False, False, True, True]).splitlines()
    if trial.tuned.get("ready", 0) > 0.5:
        yield f"not counted: {trial.tuned['ready']:.1f} s to get ready, once a process"
    yield from _agreement(trial)
    if trial.interrupted:
        yield "interrupted: what was measured until then"


def _agreement(trial: Trial) -> Iterator[str]:
    word = "agree" if trial.agree else "DIFFER"
    if trial.difference is None:
        yield "outputs: none could be compared: no module was called and no tensor was left"
    elif trial.own > BEYOND:
        yield f"outputs cannot be compared: two runs without us differ by {trial.own:.0%} of their size (draws that no seed reaches?)"
    else:
        yield f"outputs {word}: relative difference {trial.difference:.1e}; two runs without us: {trial.own:.1e}"


def _why(trial: Trial) -> Iterator[str]:
    helped = trial.tuned.get("helped", [])
    gains = [f"{h['name']}: {'; '.join(h['summary'].splitlines()[:2])}" for h in helped]
    gains += trial.tuned.get("gains", [])
    refused = [r for h in helped for r in h["refused"]] + trial.tuned.get("refused", [])
    for head, given in (("why", gains), ("refused", list(dict.fromkeys(refused)))):
        if given:
            yield head
            yield from (f"  {line}" for line in given[:WHYS])
            if len(given) > WHYS:
                yield f"  and {len(given) - WHYS} more"


def _keep(trial: Trial) -> Iterator[str]:
    if trial.won:
        yield "to keep it"
        if trial.repair:
            yield "  TENSORLOGIC_ENABLE=1 in the environment, or `tensorlogic.enable()` after `import torch, tensorlogic`"
        for h in trial.tuned.get("helped", ()):
            if h["outcome"] != "original":
                yield f"  {h['name']}: `model = tensorlogic.optimize(model, inputs)` before its calls"
        if trial.tuned.get("written"):
            yield "  the lockfile: TENSORLOGIC_LOCKFILE, or tensorlogic.policy"


def _time(trial: Trial) -> Iterator[str]:
    spent = trial.look["spent"]
    whole = sum(s["seconds"] for s in spent)
    if whole:
        yield "where its time goes"
        for s in spent[:WHYS]:
            yield f"  {s['seconds'] / whole:4.0%}  {s['calls']:>6} x {s['op'].removeprefix('aten::')}  {s['shapes'][:80]}"


def _opportunities(trial: Trial) -> Iterator[str]:
    outcomes = [h["outcome"] for h in trial.tuned.get("helped", ())]
    optimized = any(o != "original" for o in outcomes)
    parts = remedies.split(trial.opportunities, optimized, "captured" in outcomes)
    yield from remedies.lines(*parts, trial.main)


def record(trial: Trial) -> dict[str, Any]:
    """What a later run is held to."""
    about = {"format": FORMAT, "schema": SCHEMA, "command": trial.asked.command}
    outcome = {"gain": trial.main, "agree": trial.agree, "won": trial.won}
    return {**about, "environment": trial.look["environment"], **outcome}


def save(trial: Trial, path: Path) -> str:
    """Write the record; returns what is said of it."""
    write_text(path, json.dumps(record(trial), indent=1) + "\n", "the record")
    return f"written: {path.absolute()} (the record, for --verify)"


def held(path: Path) -> dict[str, Any]:
    """Read a record; Problem when it is missing, damaged or foreign."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Problem(f"{path} does not exist; a run of `tensorlogic try` without --verify writes it") from None  # fmt: skip
    except (OSError, ValueError) as problem:
        raise Problem(f"{path} cannot be read: {problem}") from problem
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise Problem(f"{path} is not a record of `tensorlogic try`")
    if document.get("schema") != SCHEMA or not isinstance(document.get("gain"), list):
        raise Problem(f"{path} is damaged or of another version: write it anew with `tensorlogic try`")  # fmt: skip
    return document


def lost(trial: Trial, known: dict[str, Any], margin: float) -> str | None:
    """Why a gain on record does not hold any more; None when it does."""
    if known["command"] != trial.asked.command:
        raise Problem(f"the record is of `{known['command']}`, not of `{trial.asked.command}`")
    if trial.failure:
        return "with us the program fails"
    if not trial.agree:
        return f"outputs differ by {trial.difference:.1e}"
    gain = trial.main
    if gain is None:
        return "nothing was timed"
    was = known["gain"]
    if known["won"] and gain[2] * (1 + margin) < was[1]:
        changes = [
            f"{n}: {known['environment'].get(n)} -> {trial.look['environment'].get(n)}"
            for n in ("device", "torch", "triton", "driver")
            if known["environment"].get(n) != trial.look["environment"].get(n)
        ]
        return f"the gain was {was[0]:.2f}x and is {_interval(gain)}" + (
            f" ({'; '.join(changes)})" if changes else ""
        )
    return None
