"""Random cases of every op, each candidate that fits against float64 with poisoned outputs; exits 1 if any is wrong.

python benchmarks/device/random_cases.py --seed 1 --count 10000 [--ops linear,matmul] [--first 0] [--seconds 600]

A case is one public call with random shapes, strides, dtypes and alignments, and every key that it and its backward
pass meet; each candidate is checked in one of its configurations, drawn at random. Case i of a seed is always the same.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tensorlogic import compiling, dispatch, policies, registry
from tensorlogic.checking import Checker
from tensorlogic.compiling import CompileFailure
from tensorlogic.op import EAGER, OPS, Candidate, Config, Op
from tensorlogic.plans import Key

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_ELEMENTS = 2**21  # of one tensor
BATCH = 24  # cases whose kernels compile while others are checked


@dataclass
class Trial:
    """One candidate in one configuration on one key."""

    case: int
    op: Op
    key: Key
    candidate: Candidate
    config: Config


def side(rng: random.Random) -> int:
    """A length: small, odd, round, or next to a power of two."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randint(1, 20)
    if kind == 1:
        return rng.randint(1, 700)
    if kind == 2:
        return 8 * rng.randint(1, 128)
    return max(1, 2 ** rng.randint(2, 10) + rng.choice((-1, 0, 0, 1)))


def shaped(like: Tensor, sizes: dict[int, int]) -> tuple[int, ...]:
    """The template's shape with each length replaced, equal ones alike."""
    return tuple(sizes[n] for n in like.shape)


def laid_out(shape: Sequence[int], dtype: torch.dtype, rng: random.Random) -> Tensor:
    """A tensor of `shape`: contiguous, transposed, with padded rows, unaligned, with steps, or one row repeated."""
    kind = rng.choice(("plain",) * 5 + ("transposed", "padded", "offset", "steps", "repeated"))

    def fresh(*size: int) -> Tensor:
        made = torch.randn(size, device=DEVICE)
        return made.to(dtype) if dtype.is_floating_point else torch.zeros_like(made, dtype=dtype)

    if not shape or kind == "plain" or 0 in shape:
        return fresh(*shape)
    if kind == "offset":
        count, skip = torch.Size(shape).numel(), rng.randint(1, 7)
        return fresh(count + skip)[skip:].view(*shape)
    if kind == "steps":
        return fresh(*shape[:-1], 2 * shape[-1])[..., ::2]
    if kind == "padded" or len(shape) < 2:
        return fresh(*shape[:-1], shape[-1] + rng.choice((1, 5, 8, 64)))[..., : shape[-1]]
    if kind == "transposed":
        return fresh(*shape[:-2], shape[-1], shape[-2]).mT
    return fresh(*shape[:-2], 1, shape[-1]).expand(*shape)


def arguments(op: Op, rng: random.Random) -> list[Any] | None:
    """One of the op's example cases at other sizes, strides and dtypes; None where it would be too large."""
    template = rng.choice(list(op.cases()))
    tensors = [a for a in template if isinstance(a, Tensor)]
    sizes = {n: n if n == 0 else side(rng) for t in tensors for n in t.shape}
    if any(torch.Size(shaped(t, sizes)).numel() > MOST_ELEMENTS for t in tensors):
        return None
    dtype = rng.choice(DTYPES)
    made = []
    for a in template:
        if isinstance(a, Tensor):
            kind = dtype if a.is_floating_point() else a.dtype
            a = laid_out(shaped(a, sizes), kind, rng)
            if a.is_floating_point() and rng.random() < 0.6:
                a.requires_grad_()
        made.append(a)
    return made


def keys(op: Op, rng: random.Random) -> list[tuple[Op, Key]]:
    """The keys that a random call and its backward pass meet; none where the arguments do not fit together."""
    args = arguments(op, rng)
    if args is None:
        return []
    met: dict[str, tuple[Op, Key]] = {}

    def observe(op: Op, key: Key, device: torch.device) -> None:
        met.setdefault(key.text, (op, key))

    with policies.use(replace(policies.current(), tune="off", observer=observe, entries={})):
        try:
            out = dispatch.call(op, tuple(args))
        except (TypeError, ValueError, IndexError):
            return []
        if isinstance(out, Tensor) and out.requires_grad:
            leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
            torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
    return list(met.values())


def trials(case: int, seed: int, ops: Sequence[Op]) -> Iterator[Trial]:
    """Everything that case `case` of a seed checks, its kernels already being compiled."""
    rng = random.Random(f"{seed}:{case}")
    torch.manual_seed(rng.randrange(2**31))
    for op, key in keys(rng.choice(ops), rng):
        for candidate in op.candidates.values():
            if candidate.id == EAGER or candidate.unfit(key) is not None:
                continue
            choices = candidate.configs(key)
            if not choices:
                continue
            config = rng.choice(list(choices))
            compiling.submit(candidate.jobs(key, config, DEVICE))
            yield Trial(case, op, key, candidate, config)


def verdict(trial: Trial, checker: Checker) -> str:
    """ "right", "refused: ..." where the machine cannot, or "wrong: ..."."""
    try:
        for job in trial.candidate.jobs(trial.key, trial.config, DEVICE):
            compiling.settle(job)
        with torch.no_grad():
            launch = trial.candidate.bind(trial.key, trial.config, DEVICE)
            found = checker.check(launch)
    except (CompileFailure, torch.OutOfMemoryError) as problem:
        return f"refused: {type(problem).__name__}: {problem}"
    except Exception as problem:
        if "illegal" in str(problem) or "misaligned" in str(problem):  # nothing runs after it
            print(
                f"case {trial.case} {trial.key.text} {trial.candidate.id} {trial.config}: {problem}"
            )
            raise
        return f"wrong: raised {type(problem).__name__}: {problem}"
    return "right" if found else f"wrong: {found.reason}"


def main() -> int:
    """Check the cases asked for; print what was wrong and how much was right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--ops", default="")
    asked = parser.parse_args()
    registry.ready(DEVICE.type)
    wanted = asked.ops.split(",") if asked.ops else [n for n, op in OPS.items() if not op.internal]
    ops = [OPS[name] for name in wanted]
    begin, tally, wrong, done = time.monotonic(), collections.Counter[str](), 0, 0
    for start in range(asked.first, asked.first + asked.count, BATCH):
        batch = range(start, min(start + BATCH, asked.first + asked.count))
        waiting = [trial for case in batch for trial in trials(case, asked.seed, ops)]
        checkers: dict[str, Checker] = {}
        for trial in waiting:
            if trial.key.text not in checkers:
                with torch.no_grad():
                    checkers = {trial.key.text: Checker(trial.op, trial.key, DEVICE)}
            found = verdict(trial, checkers[trial.key.text])
            tally[f"{trial.candidate.id} {found.split(':')[0]}"] += 1
            if found.startswith("wrong"):
                wrong += 1
                print(f"case {trial.case} {trial.key.text}\n  {trial.candidate.id} {dict(trial.config)}: {found}", flush=True)  # fmt: skip
        done += len(batch)
        if time.monotonic() - begin > asked.seconds:
            break
    for name, count in sorted(tally.items()):
        print(f"{count:7d} {name}")
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"{done} cases of seed {asked.seed}, {sum(tally.values())} checks, {wrong} wrong, {time.monotonic() - begin:.0f} s, {where}")  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
