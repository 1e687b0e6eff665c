"""How every GPU candidate of ours behaves beside being right: same bits each time, on a side stream, captured; exits 1 if one does not.

python benchmarks/device/conduct.py [--seed 1] [--keys 3] [--candidates triton.direct,...] [--share 0/8]

Of each candidate a few random keys (benchmarks/device/drawn_cases.py), each in a configuration of its own. On each: right against
float64 with poisoned outputs; the same bits in five calls; on a side stream, behind work that delays it, the bits of the values
that the inputs have by then, without waiting; captured in a CUDA graph and replayed on other values, the bits of a plain call on them.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import random_cases
import torch
from torch import Tensor

from tensorlogic.core.candidate import Launcher
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS, Op
from tensorlogic.dispatch import candidate_loading
from tensorlogic.measure import verification
from tensorlogic.measure.verification import Checker
from tensorlogic.system.compile_pool import CompileFailure

DEVICE = torch.device("cuda")
DELAY = 200_000_000  # cycles of a GPU: 100 ms
REPEATS = 5
OURS = ("triton.", "cublaslt.")


def same(first: Any, second: Any) -> bool:
    """Whether two launches gave the same bits."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def kept(outs: Any) -> list[Tensor | None]:
    """Copies of what came out."""
    return [None if o is None else o.clone() for o in outs]


def misconduct(trial: random_cases.Trial) -> str | None:
    """What a candidate does wrong on a key, or None; raises CompileFailure."""
    op, key = trial.op, trial.key
    checker = Checker(op, key, DEVICE)
    launch = trial.candidate.bind(key, trial.config, DEVICE)
    found = random_cases.verdict(trial, checker)
    if found.startswith("wrong"):
        return found
    first, second = (kept(launch(*s.fresh(op))) for s in checker.sets)
    for _ in range(REPEATS - 1):
        if not same(first, launch(*checker.sets[0].fresh(op))):
            return "other bits in another call"
    given, other = checker.sets[0].fresh(op), checker.sets[1].fresh(op)
    return beside(launch, given, other, second) or captured(launch, given, other, first, second)


def overwrite(given: list[Any], values: list[Any]) -> None:
    """Give the tensors the values of others, in place and on the current stream."""
    for mine, theirs in zip(given, values, strict=True):
        if isinstance(mine, Tensor):  # all of its memory: it may be one row, repeated
            verification._bytes(mine).copy_(verification._bytes(theirs))


def originals(given: list[Any]) -> list[Any]:
    """The tensors with all their memory, copied."""
    return [verification._copied(a) if isinstance(a, Tensor) else a for a in given]


def beside(launch: Launcher, given: list[Any], other: list[Any], want: Any) -> str | None:
    """On a side stream: not before what was queued there, and without waiting for it."""
    before = originals(given)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(DELAY)
        overwrite(given, other)
        outs = launch(*given)
        waited = side.query()
    side.synchronize()
    found = None if same(outs, want) else "other bits on a side stream"
    overwrite(given, before)
    torch.cuda.synchronize()
    return "it waited for its stream" if waited else found


def captured(launch: Launcher, given: list[Any], other: list[Any], first: Any, second: Any) -> str | None:  # fmt: skip
    """In a CUDA graph: replayed twice on the first values, then on others."""
    before = originals(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = launch(*given)
    for values, want in ((before, first), (before, first), (other, second)):
        for out in outs:
            if out is not None and out.is_floating_point():
                out.fill_(float("nan"))
        overwrite(given, values)  # after that: an output may be an input
        graph.replay()
        torch.cuda.synchronize()
        if not same(outs, want):
            return "other bits from a captured graph"
    return None


@dataclass
class Tally:
    """How many keys of each candidate were looked at, and what was wrong."""

    most: int
    counted: collections.Counter[str] = field(default_factory=collections.Counter)
    seen: set[tuple[str, str, str]] = field(default_factory=set)
    wrong: int = 0

    def look(self, number: int, op: Op, key: Key) -> None:
        """At every candidate of ours that serves the key and has not had its share."""
        for candidate in op.candidates.values():
            name, mark = f"{op.name} {candidate.id}", (op.name, candidate.id, key.text)
            fits = candidate.id.startswith(OURS) and candidate.unfit(key) is None
            if not fits or mark in self.seen or self.counted[name] >= self.most:
                continue
            self.seen.add(mark)
            choices = list(candidate.configs(key))
            config = choices[number % len(choices)]
            try:
                with torch.no_grad():
                    reason = misconduct(random_cases.Trial(number, op, key, candidate, config))
            except CompileFailure as failure:
                print(f"{name} refused: {failure}")
                continue
            self.counted[name] += 1
            if reason is not None:
                self.wrong += 1
                print(f"WRONG {candidate.id} {dict(config)} {key.text}: {reason}", flush=True)


def main() -> int:
    """A few keys of every candidate; what was wrong, and how many were looked at."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keys", type=int, default=3)
    parser.add_argument("--candidates", default="")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument(
        "--share", default="0/1", help="of the candidates: 2/8 is the third of eight"
    )
    given = parser.parse_args()
    candidate_loading.ready("cuda")
    begin, tally = time.monotonic(), Tally(given.keys)
    asked = given.candidates.split(",") if given.candidates else []
    part, parts = map(int, given.share.split("/"))
    pairs = [
        (op, id)
        for op in OPS.values()
        for id in op.candidates
        if not op.internal and id.startswith(OURS) and (not asked or id in asked)
    ]
    for op, id in pairs[part::parts]:
        for number in range(given.keys):
            if time.monotonic() - begin > given.seconds:
                print(f"no time left at {op.name} {id}")
                break
            try:
                *_, keys = next(random_cases.cases(number, given.seed, [op], 2**21, [id]))
            except RuntimeError:
                print(f"{op.name} {id}: no key found that it serves")
                break
            for met, key in keys:
                tally.look(number, met, key)
    for name, count in sorted(tally.counted.items()):
        print(f"{count:4d} {name}")
    print(
        f"{sum(tally.counted.values())} keys of {len(tally.counted)} candidates, seed {given.seed}: {tally.wrong} wrong, "
        f"{time.monotonic() - begin:.0f} s, {torch.cuda.get_device_name()}"
    )
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
