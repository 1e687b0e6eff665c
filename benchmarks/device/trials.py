"""Kernels on trial beside what is chosen today: checked against float64, then timed by graph replays, inputs out of the cache.

python benchmarks/device/trials.py [both|chosen ...] [--rounds 9]

A trial that is wrong is not timed. What wins becomes a candidate with tests of its own; then, or where it loses, it goes from here.
"chosen" tunes calls that new candidates serve, and says what they were measured at.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from trial_shapes import DEVICE, Shape, both, miss, poison, rand

import tensorlogic
from tensorlogic.autotune import tune
from tensorlogic.kernels.triton_runtime import launch
from tensorlogic.system.compile_pool import CompileFailure

PARTS: dict[str, list[Callable[[], Shape]]] = {
    "both": [lambda: both(4096, 32000, "f16"), lambda: both(8192, 16384, "bf16"), lambda: both(2048, 128256, "f16")],
}  # fmt: skip


def chosen() -> None:
    """Tune calls that have candidates nobody has measured, and print what each of these took."""
    x = rand(1, 5120, dtype="bf16"), rand(1, 3072, dtype="f16")
    w = rand(5120, 5120, dtype="bf16", scale=0.01), rand(768, 3072, dtype="f16", scale=0.01)
    logits, few = rand(4096, 32000, dtype="f16"), rand(512, 32000, dtype="f32")
    target = torch.randint(32000, (4096,), device=DEVICE)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        *((tensorlogic.sum, (rand(n, dtype="f16"),)) for n in (1 << 18, 1 << 20, 1 << 22)),
        (tensorlogic.max, (rand(1000003, dtype="bf16"),)),
        *((tensorlogic.linear, (a, b)) for a, b in zip(x, w, strict=True)),
        (tensorlogic.softmax_cross_entropy, (logits, target)),
        (tensorlogic.softmax_cross_entropy, (few, target[:512])),
        *(
            (tensorlogic.attention_scores, (*(rand(4, 16, n, 64, dtype="f16") for _ in "qk"), 0.125))
            for n in (256, 512, 1024)
        ),
    ]  # fmt: skip
    for fn, args in calls:
        tune.whole(fn, *args)
        print(tensorlogic.explain(fn, *args), flush=True)


def compile_all(shapes: list[Shape]) -> None:
    """Compile every trial in processes, into the cache that they share with this one."""
    jobs = {j: None for s in shapes for b in s.trials.values() for j in launch.collect(b, DEVICE)}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1), context) as pool:
        for job, done in [(j, pool.submit(j.run)) for j in jobs]:
            try:
                done.result()
            except CompileFailure as failure:
                print(f"{job.kernel} {dict(job.constexprs)}: {failure}", flush=True)


def capture(
    fn: Callable[..., bool], sets: list[tuple[Any, ...]], calls: int
) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls that walk through the input sets."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for s in sets:
            fn(*s)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            fn(*sets[i % len(sets)])
    return graph


def bandwidth() -> float:
    """GB/s of torch.add into a reused output, read and written."""
    a, b = rand(1 << 27, dtype="f16"), rand(1 << 27, dtype="f16")
    out = torch.empty_like(a)

    def add() -> bool:
        torch.add(a, b, out=out)
        return True

    return 6 * a.numel() / statistics.median(replayed(capture(add, [()], 4), 4) for _ in range(9)) / 1e3  # fmt: skip


def replayed(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds of one call in a replay."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls * 1e3


def run(shape: Shape, rounds: int, peak: float) -> None:
    """Check and time a shape's trials; a line each, fastest first, with the share of `peak` (GB/s)."""
    calls = max(3, min(24, int(3e9 / shape.nbytes)))
    graphs, samples, notes = {}, dict[str, list[float]](), {}
    for name, build in shape.trials.items():
        try:
            fn = build()
        except CompileFailure as failure:
            print(f"  {name}: {str(failure)[-160:]}")
            continue
        poison(shape)
        if not fn(*shape.sets[0]):
            print(f"  {name}: declined")
            continue
        torch.cuda.synchronize()
        off = miss(shape)
        notes[name] = off
        if off > shape.limit:
            print(f"  {name}: WRONG, error {off:.2e}")
            continue
        graphs[name], samples[name] = capture(fn, shape.sets, calls), []
        graphs[name].replay()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, graph in random.sample(list(graphs.items()), len(graphs)):
            samples[name].append(replayed(graph, calls))
    print(
        f"{shape.name}, {len(shape.sets)} sets, {calls} calls; floor {shape.nbytes / peak / 1e3:.2f} us"
    )
    for name in sorted(samples, key=lambda n: statistics.median(samples[n])):
        us = statistics.median(samples[name])
        print(
            f"  {us:9.2f} us {shape.nbytes / us / 1e3 / peak:6.3f}  {name} ({notes[name]:.1e})",
            flush=True,
        )


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "chosen", []], default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    torch.manual_seed(0)
    peak = bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch.add moves {peak:.0f} GB/s")
    shapes = [make() for part in asked.parts for make in PARTS.get(part, ())]
    compile_all(shapes)
    for shape in shapes:
        run(shape, asked.rounds, peak)
    if "chosen" in asked.parts:
        chosen()


if __name__ == "__main__":
    main()
