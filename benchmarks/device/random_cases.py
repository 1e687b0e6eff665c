"""Random cases of every op, each candidate that fits against float64 with poisoned outputs; exits 1 if any is wrong.

python benchmarks/device/random_cases.py --seed 1 --count 10000 [--ops linear,matmul] [--first 0] [--seconds 600] [--workers 16]
    [--candidates triton.direct,triton.ahead]   only cases that one of them serves, and only these checked

A case is one public call with random shapes, strides, dtypes and alignments, and every key that it and its backward
pass meet; each candidate is checked in one of its configurations, drawn at random, and must give the same bits twice.
FAMILY cases in a row share what kernels are compiled for (op, dtype, layout, flags, what divides a length and its power of
two), and differ in lengths and values. Families go to processes of their own, which compile and check. Those of a
seed are always the same; with `--seconds`, or when the run is cut (Ctrl-C, or TERM as `timeout` sends it), it still says
what it found, and where to go on.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from drawn_cases import DEVICE, Family, family
from torch import Tensor

from tensorlogic.core import policy, tolerance
from tensorlogic.core.candidate import EAGER, Candidate, Config
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS, Op
from tensorlogic.dispatch import candidate_loading, dispatcher
from tensorlogic.measure.verification import Checker
from tensorlogic.system import heap_trim
from tensorlogic.system.compile_pool import CompileFailure

FAMILY = 20  # cases that share kernels
VARIANTS = 2  # configurations of a candidate that a family compiles before it keeps to them
MORE = 4  # checks of a candidate that seems wrong
GRACE_S = 15.0  # to finish a family when the time is over
SPOKEN_S = 10.0  # between two lines of progress
ATTEMPTS = 50  # at arguments that fit together and into memory
SEARCHED = 5000  # at arguments that a candidate asked for serves
LARGER = 4  # than any of the inputs may be: the output, of which several are kept in float64


@dataclass(frozen=True)
class Trial:
    """One candidate in one configuration on one key."""

    case: int
    op: Op
    key: Key
    candidate: Candidate
    config: Config


def met(op: Op, args: list[Any], elements: int) -> list[tuple[Op, Key]] | None:
    """The keys that a call and its backward pass meet; None where the arguments do not fit together, or make too much."""
    found: dict[str, tuple[Op, Key]] = {}

    def observe(op: Op, key: Key, device: torch.device) -> None:
        found.setdefault(key.text, (op, key))

    plain = replace(policy.current(), tune="off", force=EAGER, observer=observe, entries={})
    with policy.use(plain):
        try:
            out = dispatcher.call(op, tuple(args))
        except (TypeError, ValueError, IndexError):
            return None
        except RuntimeError as problem:
            if "must match" not in str(problem):  # shapes that do not broadcast
                raise
            return None
        if isinstance(out, Tensor) and out.numel() > LARGER * elements:
            return None
        if isinstance(out, Tensor) and out.requires_grad:
            leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
            torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
    return list(found.values())


def served(keys: list[tuple[Op, Key]], candidates: Sequence[str]) -> bool:
    """Whether one of `candidates` serves one of the keys; whichever do where none is named."""
    if not candidates:
        return True
    asked = [
        (op.candidates[id], key) for op, key in keys for id in candidates if id in op.candidates
    ]
    return any(candidate.unfit(key) is None for candidate, key in asked)


def cases(number: int, seed: int, ops: Sequence[Op], elements: int, candidates: Sequence[str]) -> Iterator[tuple[int, Family, random.Random, list[tuple[Op, Key]]]]:  # fmt: skip
    """(case, family, its random numbers, keys) of each case of family `number`."""
    attempts, widest = (
        (SEARCHED, max(15, elements.bit_length() - 8)) if candidates else (ATTEMPTS, 10)
    )
    rng = random.Random(f"{seed}:{number}")
    torch.manual_seed(rng.randrange(2**31))
    shared = family(rng, ops, elements, widest)
    for case in range(number * FAMILY, (number + 1) * FAMILY):
        for _ in range(attempts):
            args = shared.arguments(rng)
            keys = met(shared.op, args, elements) if args is not None else None
            if keys is not None and served(keys, candidates):
                break
            shared = family(rng, ops, elements, widest)
        else:
            raise RuntimeError(f"seed {seed}, case {case}: no arguments fit in {attempts} attempts")
        yield case, shared, rng, keys


def pick(shared: Family, candidate: Candidate, key: Key, rng: random.Random) -> Config | None:
    """A random configuration: at first any, then one whose kernels the family has compiled, if there is one."""
    choices = list(candidate.configs(key))
    rng.shuffle(choices)
    known = shared.built.setdefault((key.op, candidate.id), [])
    jobs = [tuple(candidate.jobs(key, c, DEVICE)) for c in choices]
    fresh = len(known) < VARIANTS and rng.random() < 0.5
    for config, needed in zip(choices, jobs, strict=True):
        if not fresh and shared.compiled.issuperset(needed):
            return config
    for config, needed in zip(choices, jobs, strict=True):
        if not shared.compiled.issuperset(needed):
            known.append(config)
            shared.compiled.update(needed)
            return config
    return choices[0] if choices else None


def verdict(trial: Trial, checker: Checker) -> str:
    """ "right", "refused: ..." where the machine cannot, or "wrong: ..."."""
    try:
        with torch.no_grad():
            launch = trial.candidate.bind(trial.key, trial.config, DEVICE)
            found = checker.check(launch, coarse=trial.candidate.coarse(trial.key))
            if found and trial.candidate.deterministic:
                return "right" if repeats(trial, checker, launch) else "wrong: other bits each time"
        return "right" if found else again(trial, checker, launch, str(found.reason))
    except (CompileFailure, torch.OutOfMemoryError) as problem:
        return f"refused: {type(problem).__name__}: {problem}"
    except Exception as problem:
        return f"wrong: raised {type(problem).__name__}: {problem}"


def again(trial: Trial, checker: Checker, launch: Any, reason: str) -> str:
    """ "wrong", or "unlucky": deterministic, off by rounding alone, and on MORE other draws of the inputs right, or on all as close as
    chance makes the errors of so few elements.

    Where sums cancel or a few elements make the output, eager's own error is a matter of luck, and so is twice of it.
    """
    coarse = trial.candidate.coarse(trial.key)
    with torch.no_grad():
        same = sum(not checker.check(launch, coarse=coarse) for _ in range(MORE))
        rounding, luck = "times" in reason and same == MORE, tolerance.of_those_that_miss
        others, chance = 0, bool(checker.check(launch, coarse=coarse, luck=luck))
        for draw in range(1, MORE + 1):
            other = Checker(trial.op, trial.key, DEVICE, draw)
            others += not other.check(launch, coarse=coarse)
            chance = chance and bool(other.check(launch, coarse=coarse, luck=luck))
    text = f"{reason}; again in {same} of {MORE} checks of the same inputs, in {others} of {MORE} of others"
    text += ", each by chance" if chance else ""
    return f"{'unlucky' if rounding and (chance or not others) else 'wrong'}: {text}"


def repeats(trial: Trial, checker: Checker, launch: Any) -> bool:
    """Whether two calls on the same inputs give the same bits."""
    first, second = (launch(*checker.sets[0].fresh(trial.op)) for _ in range(2))
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None]
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def prepared(op: Op, key: Key) -> Checker | None:
    """What the key's candidates are judged by; None where its inputs or results do not fit into memory."""
    try:
        with torch.no_grad():
            return Checker(op, key, DEVICE)
    except (torch.OutOfMemoryError, MemoryError):
        return None
    except RuntimeError as problem:
        if "allocate memory" not in str(problem):  # as a CPU says it
            raise
        return None


def run_family(number: int, seed: int, ops: Sequence[Op], elements: int, candidates: Sequence[str]) -> dict[str, Any]:  # fmt: skip
    """Check all cases of a family: how often each candidate was right, refused or wrong, and what was wrong."""
    tally, wrong, compiled = collections.Counter[str](), [], 0
    refused: dict[str, str] = {}
    for case, shared, rng, keys in cases(number, seed, ops, elements, candidates):
        for op, key in keys:
            checker: Checker | None = None
            for candidate in op.candidates.values():
                if candidate.id == EAGER or not candidate.background or candidate.unfit(key):
                    continue
                if candidates and candidate.id not in candidates:
                    continue
                config = pick(shared, candidate, key, rng)
                if config is None:
                    continue
                if checker is None:
                    checker = prepared(op, key)
                if checker is None:
                    tally[f"{op.name} without memory for it"] += 1
                    break
                found = verdict(Trial(case, op, key, candidate, config), checker)
                tally[f"{op.name} {candidate.id} {found.split(':')[0]}"] += 1
                if found.startswith("refused"):
                    refused[f"{op.name} {candidate.id}"] = f"{key.text} {dict(config)}: {found}"
                if found.startswith(("wrong", "unlucky")):
                    wrong.append(f"case {case} {key.text}\n  {candidate.id} {dict(config)}: {found}")  # fmt: skip
                if "illegal" in found or "misaligned" in found:  # nothing runs after it
                    return {"family": number, "tally": tally, "wrong": wrong, "compiled": 0, "stop": True}  # fmt: skip
        compiled = max(compiled, len(shared.compiled))
    heap_trim.give_back()
    return {"family": number, "tally": tally, "wrong": wrong, "compiled": compiled, "refused": refused}  # fmt: skip


def serve(seed: int, ops: Sequence[Op], elements: int, candidates: Sequence[str]) -> None:
    """A worker: numbers of families in on stdin, what was found out on stdout as JSON."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a compiler prints must not disturb the protocol
    for line in sys.stdin:
        found = run_family(int(line), seed, ops, elements, candidates)
        print(json.dumps(found), file=results, flush=True)
        torch.cuda.empty_cache()
        if found.get("stop"):
            return


class Workers:
    """Threads that each own one worker process and give it one family at a time, until the time is over."""

    def __init__(self, count: int, command: Sequence[str], families: Sequence[int]) -> None:
        self.command, self.found = command, queue.Queue[dict[str, Any] | None]()
        self.lock, self.waiting, self.count = threading.Lock(), iter(families), count
        self.stopped, self.busy = False, dict[int, subprocess.Popen[str]]()
        for _ in range(count):
            threading.Thread(target=self._drive, daemon=True).start()

    def results(self) -> Iterator[dict[str, Any]]:
        """What each family found, as it comes."""
        while self.count:
            try:
                result = self.found.get(timeout=GRACE_S if self.stopped else None)
            except queue.Empty:
                for number, worker in list(self.busy.items()):
                    print(f"family {number} was not finished in time: go back to it", flush=True)
                    worker.kill()
                return
            if result is None:
                self.count -= 1
            else:
                yield result

    def end(self) -> None:
        """Stop at once; families under way are lost."""
        self.stopped = True
        for worker in list(self.busy.values()):
            worker.kill()

    def _next(self) -> int | None:
        with self.lock:
            return None if self.stopped else next(self.waiting, None)

    def _start(self) -> subprocess.Popen[str]:
        path = os.pathsep.join(p for p in sys.path if p)
        single = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TENSORLOGIC_COMPILE_WORKERS": "0"}
        return subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | single,
            text=True,
        )

    def _drive(self) -> None:
        worker = self._start()
        while (number := self._next()) is not None:
            assert worker.stdin is not None
            assert worker.stdout is not None
            self.busy[number] = worker
            try:
                print(number, file=worker.stdin, flush=True)
                line = worker.stdout.readline()
            except OSError:
                line = ""
            del self.busy[number]
            if line:
                self.found.put(json.loads(line))
            else:
                code = worker.wait()
                self.found.put({"family": number, "tally": {}, "compiled": 0, "wrong": [f"family {number}: the process ended ({code})"]})  # fmt: skip
            if not line or json.loads(line).get("stop"):
                worker = self._start()
        worker.kill()
        worker.wait()
        self.found.put(None)


def main() -> int:
    """Check the cases asked for; print what was wrong and how much was right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--ops", default="")
    parser.add_argument("--candidates", default="")
    parser.add_argument(
        "--elements",
        type=int,
        default=2**21,
        help="of one input, at most; outputs may have 4 times as many",
    )
    parser.add_argument("--workers", type=int, default=(os.cpu_count() or 1) if DEVICE.type == "cuda" else 0)  # fmt: skip
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    candidate_loading.ready(DEVICE.type)
    wanted = asked.ops.split(",") if asked.ops else [n for n, op in OPS.items() if not op.internal]
    candidates = asked.candidates.split(",") if asked.candidates else []
    if candidates and not asked.ops:
        wanted = [n for n in wanted if not OPS[n].candidates.keys().isdisjoint(candidates)]
    if unknown := [name for name in wanted if name not in OPS]:
        parser.error(f"--ops: no op is called {', '.join(unknown)}; there are {', '.join(OPS)}")
    ops = [OPS[name] for name in wanted]
    if asked.serve:
        serve(asked.seed, ops, asked.elements, candidates)
        return 0
    families = range(asked.first // FAMILY, -(-(asked.first + asked.count) // FAMILY))
    begin, tally, wrong, done, kernels = time.monotonic(), collections.Counter[str](), 0, 0, 0
    workers, refused = None, dict[str, str]()
    if asked.workers:
        command = [sys.executable, os.path.abspath(__file__), "--serve", "--seed", str(asked.seed)]
        workers = Workers(
            asked.workers,
            [
                *command,
                "--ops",
                ",".join(wanted),
                "--elements",
                str(asked.elements),
                "--candidates",
                asked.candidates,
            ],
            families,
        )
        results: Iterator[dict[str, Any]] = workers.results()
    else:
        results = (
            run_family(number, asked.seed, ops, asked.elements, candidates) for number in families
        )
    spoken = begin
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for found in results:
            tally.update(found["tally"])
            refused.update(found.get("refused", {}))
            for line in found["wrong"]:
                print(line, flush=True)
            wrong += sum(": unlucky: " not in line for line in found["wrong"])
            done, kernels = done + 1, kernels + found["compiled"]
            now = time.monotonic()
            if now - spoken > SPOKEN_S:
                spoken = now
                print(f"... {done * FAMILY} cases, {sum(tally.values())} checks, {wrong} wrong, {now - begin:.0f} s", flush=True)  # fmt: skip
            if now - begin > asked.seconds:
                if workers is None:
                    break
                workers.stopped = True
    except KeyboardInterrupt:
        print("cut:", flush=True)
        if workers is not None:
            workers.end()
    for name, count in sorted(tally.items()):
        why = refused.get(name.removesuffix(" refused"), "") if name.endswith("refused") else ""
        print(f"{count:7d} {name} {why and 'as ' + why}")
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(
        f"{done * FAMILY} cases of seed {asked.seed} from {families.start * FAMILY}, {sum(tally.values())} checks, "
        f"{kernels} kernels, {wrong} wrong, {time.monotonic() - begin:.0f} s, {where}"
    )
    if done < len(families):
        print(f"go on with --first {(families.start + done) * FAMILY}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
