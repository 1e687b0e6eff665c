"""How `drawn_beside.py` times and checks one problem: graph replay through several sets of arguments, and float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from drawn_problems import CUDA, DEVICE, Problem
from torch import Tensor

from tensorlogic.core import policy, tolerance
from tensorlogic.core.key import Key
from tensorlogic.core.op import Op
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.measure import timer
from tensorlogic.system import capture_state

SETS, APART = 6, 100e6  # sets of arguments at most, and the bytes that they exceed together
ROUNDS, ROUNDS_S = 21, 1.0
REPLAY_S, MOST = 2e-3, 40  # of calls in one graph, and how many at most
LOSES, LEAST_US, FIRST = 1.03, 0.15, 1.10
WORST = 2.0  # times eager's error
Row = dict[str, Any]
Outputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Given:
    """One set of arguments, and the gradient that comes in."""

    args: tuple[Any, ...]
    incoming: Tensor | None


def called(fn: Callable[..., Tensor], problem: Problem, given: Given) -> Outputs:
    """The output, and the gradients of what has one."""
    if given.incoming is None:
        with torch.no_grad():
            return (fn(*given.args),)
    out = fn(*given.args)
    leaves = [given.args[i] for i in problem.leaves]
    grads = torch.autograd.grad(out, leaves, given.incoming, allow_unused=True)
    return (out.detach(), *grads)


def one_set(problem: Problem, seed: int) -> Given:
    """Arguments of their own."""
    torch.manual_seed(seed)
    args = problem.make(DEVICE)
    if not problem.leaves:
        return Given(args, None)
    with torch.no_grad():
        out = problem.eager(*args)
    for i in problem.leaves:
        args[i].requires_grad_()
    return Given(args, torch.randn_like(out) if out.dim() else torch.ones_like(out))


def sets(problem: Problem, seed: int) -> list[Given]:
    """So many that together they do not fit into a cache, at most SETS."""
    meta = problem.make(torch.device("meta"))
    nbytes = sum(a.numel() * a.itemsize for a in meta if isinstance(a, Tensor))
    count = max(1, min(SETS, int(APART // max(nbytes, 1)) + 1)) if CUDA else 2
    return [one_set(problem, 1000 * seed + 10 * problem.index + i) for i in range(count)]


class Replayed:
    """A captured graph of `count` calls that walk through the steps, replayed between two events."""

    def __init__(self, steps: Sequence[Callable[[], object]], count: int) -> None:
        self.count, self.graph = count, torch.cuda.CUDAGraph()
        steps[0]()  # whoever compiles or tunes does so on the usual stream
        side = torch.cuda.Stream(DEVICE)
        side.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(side):
            for step in steps:
                step()
        torch.cuda.synchronize(DEVICE)
        timer.give_back(DEVICE)
        recording = torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local")
        with capture_state.capture_lock(), recording:
            for i in range(count):
                steps[i % len(steps)]()
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.sample()

    def sample(self) -> float:
        """Microseconds of a call, of the second of two replays: it is queued while the first one runs."""
        self.graph.replay()
        self.start.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / self.count * 1e3

    def close(self) -> None:
        capture_state.destroy_later(self, "graph")


class Timed:
    """An implementation walking through the sets, a captured graph on a GPU; `outputs` of its last call, on the set `last`."""

    def __init__(
        self, fn: Callable[..., Tensor], problem: Problem, given: Sequence[Given], count: int
    ) -> None:
        self.outputs: Outputs = ()
        self.last = 0

        def call(i: int) -> None:
            self.outputs, self.last = called(fn, problem, given[i]), i

        steps: list[timer.Call] = [functools.partial(call, i) for i in range(len(given))]
        self.loop = Replayed(steps, count) if CUDA else timer._Loop(steps, DEVICE, REPLAY_S)
        self.sample = self.loop.sample

    def close(self) -> None:
        """Let go of the graph and what is in its memory."""
        self.outputs = ()
        self.loop.close()


def repeats(problem: Problem, given: Sequence[Given]) -> int:
    """Calls in a graph, the same of every implementation, by eager's time: all sets equally often."""
    calls = [functools.partial(called, problem.eager, problem, g) for g in (given[0], given[-1])]
    spent = min(timer.once(call, DEVICE) for call in calls)
    count = max(1, min(MOST, int(REPLAY_S * 1e6 / spent)))
    return len(given) * -(-count // len(given))


def composed(problem: Problem) -> Callable[..., Tensor]:
    """PyTorch's composition, compiled."""
    torch._dynamo.reset()
    eager = problem.eager
    return torch.compile(lambda *args: eager(*args), dynamic=False, fullgraph=True)


def met(problem: Problem, given: Given, force: str | None = None) -> list[tuple[Op, Key]]:
    """The keys that a call of ours meets, each once."""
    found: dict[str, tuple[Op, Key]] = {}

    def observe(op: Op, key: Key, device: torch.device) -> None:
        found.setdefault(key.text, (op, key))

    chosen = replace(policy.current(), tune="off", observer=observe, entries={})
    with policy.use(chosen if force is None else replace(chosen, force=force)):
        called(problem.ours, problem, given)
    return list(found.values())


def chosen(problem: Problem, given: Given) -> list[Row]:
    """What captured calls take of each key, with what decided; forward and backward as one where that is chosen."""
    found = []
    for op, key in met(problem, given):
        whole = op.joined(key)
        for its, k in [(op, key)] + ([whole] if whole else []):
            decision = dispatch_selector.decide(its, k, DEVICE, policy.current())
            id, config = decision.captured
            if its is op or its.candidates[id].parts is not None:
                found.append(
                    {"key": k.text, "id": id, "config": dict(config), "by": decision.source}
                )
    return found


def error(out: Tensor | None, ref: Tensor) -> float:
    """‖out − ref‖ / ‖ref‖ in float64 where the reference is finite in the output's dtype; infinite where only the output is not."""
    if out is None or out.shape != ref.shape:
        return float("inf")
    wide, fits = out.detach().double(), torch.isfinite(ref.to(out.dtype))
    if not bool(fits.all()):
        wide, ref = (torch.where(fits, t, 0) for t in (wide, ref))
    found = ((wide - ref).norm() / ref.norm().clamp_min(1e-300)).item() if ref.numel() else 0.0
    return found if found == found else float("inf")


def exact(problem: Problem, given: Given) -> Outputs:
    """The composition in float64."""
    args = [a.detach().double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in given.args]  # fmt: skip
    for i in problem.leaves:
        args[i].requires_grad_()
    incoming = None if given.incoming is None else given.incoming.double()
    return called(problem.eager, problem, Given(tuple(args), incoming))


def check(row: Row, problem: Problem, given: Sequence[Given], timed: dict[str, Timed]) -> None:
    """The errors of the outputs that were timed over eager's, as far as chance makes two such errors differ."""
    if not problem.checked or "eager" not in timed:
        return
    refs = {i: exact(problem, given[i]) for i in {t.last for t in timed.values()}}
    floor = torch.finfo(problem.dtype).eps * (4.0 if problem.dtype == torch.float32 else 0.25)
    eager = timed["eager"]
    plain = [
        None if ref is None else error(out, ref)
        for out, ref in zip(eager.outputs, refs[eager.last], strict=True)
    ]
    for name in timed.keys() - {"eager"}:
        worst, which = 0.0, 0
        pairs = zip(timed[name].outputs, refs[timed[name].last], plain, strict=True)
        for i, (out, ref, base) in enumerate(pairs):
            if ref is not None and base is not None:
                own = error(out, ref) / max(base, floor) / tolerance.chance(ref.numel())
                worst, which = max((worst, which), (own, i))
        row[f"{name}_error"] = worst
        if worst > WORST:
            row["wrong"] = [*row.get("wrong", []), f"{name}: output {which} {worst:.3g} times eager's error {plain[which]:.2e}"]  # fmt: skip


def compared(row: Row, timed: dict[str, Timed]) -> None:
    """Times of all in the same rounds; again where ours lost."""
    samplers = {name: t.sample for name, t in timed.items()}
    samples = timer._interleave(samplers, ROUNDS, ROUNDS_S)
    for turn in range(2):
        row |= {f"{name}_us": samples.median(name) for name in timed}
        peers = [name for name in ("eager", "compile") if name in timed]
        if not peers:
            return
        best = row["best"] = min(peers, key=samples.median)
        lost = []
        for name, most in (("ours", LOSES), ("first", FIRST)):
            if name in timed:
                row[f"{name}_ratio"], *row[f"{name}_interval"] = samples.ratio(name, best)
                over = row[f"{name}_us"] - row[f"{best}_us"]
                row[f"{name}_loses"] = row[f"{name}_ratio"] > most and over > LEAST_US
                lost.append(row[f"{name}_loses"])
        if turn == 0 and not any(lost):
            return
        if turn == 0:
            more = timer._interleave(samplers, ROUNDS, ROUNDS_S)
            for name in timed:
                samples.values[name] += more.values[name]
