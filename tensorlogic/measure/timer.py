"""The only timer: device time by graph replay or events, host time by queued calls, always paired and interleaved."""

from __future__ import annotations

import functools
import math
import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..system import capture_state

Call = Callable[[], object]
Calls = Mapping[str, Sequence[Call]]  # one for each set of inputs
CLEARED = 4.4e11  # bytes a second that NVIDIA's driver clears (H200)
BATCHES = 4  # of samples where a choice is close
LONG_US = 1e3  # a call on a CPU of which one is enough to look at
FOREIGN = 256  # rows of the product between calls
LEAST_US = 0.05  # that a call takes
_BETWEEN = "what runs between calls"
CLEARLY = 0.9  # of another's time, that every sample keeps
TURN_S = 5.0  # to wait for another thread's recording
PLACES = 1 << 26  # bytes of input sets on a CPU
# what a challenger must win by: runs of one CPU differ by 5 %
TOLERANCE = {"cuda": 0.02, "mps": 0.08, "cpu": 0.08}
# challengers this close to the fastest are equals: runs of one machine differ by as much
KINSHIP = {"cuda": 0.02, "mps": 0.1, "cpu": 0.1}
# to a bound: PyTorch's own calls vary by this much with where malloc put things
NEAR = {"cuda": 0.01, "mps": 0.16, "cpu": 0.16}
ASKED = frozenset((12, 24, 48, 96))  # rounds after which samples may tell enough


@dataclass
class Samples:
    """Microseconds per call of several implementations, one entry a round; the rounds are shared, so ratios pair up."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Median microseconds per call."""
        return float(np.median(self.values[name]))

    def quiet(self, name: str) -> float:
        """Lower quartile of the microseconds per call: what a round takes that nothing else on the machine disturbs."""
        values = sorted(self.values[name])
        return values[(len(values) - 1) // 4]

    def spread(self, name: str) -> float:
        """Half the distance between the quartiles, relative to the median."""
        values = self.values[name]
        if len(values) < 4:
            return 0.0
        low, middle, high = np.percentile(values, (25, 50, 75), method="weibull")
        return float(high - low) / 2 / max(float(middle), 1e-9)

    def ratio(self, name: str, other: str) -> tuple[float, float, float]:
        """Median of the per-round ratios name/other, with its 95 % interval by order statistics."""
        pairs = zip(self.values[name], self.values[other], strict=True)
        return interval(sorted(a / max(b, 1e-9) for a, b in pairs))


Told = Callable[[Samples], bool] | None


def interval(ordered: Sequence[float]) -> tuple[float, float, float]:
    """Median of sorted values and the distribution-free 95 % interval of that median."""
    n, middle = len(ordered), float(np.median(ordered))
    if n < 6:
        return middle, ordered[0], ordered[-1]
    reach = 0.98 * math.sqrt(n)
    low = max(0, math.floor((n - 1) / 2 - reach))
    high = min(n - 1, math.ceil((n - 1) / 2 + reach))
    return middle, ordered[low], ordered[high]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished everything queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def give_back(device: torch.device) -> None:
    """Return PyTorch's unused GPU memory, and wait while the driver clears it: 2.3 ms a GB, in which timings are a tenth too slow."""
    if device.type != "cuda":
        return
    before = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    time.sleep(max(0, before - torch.cuda.memory_reserved(device)) / CLEARED)


def cold_sets(nbytes: int, device: torch.device) -> int:
    """How many sets of `nbytes` timing goes through, 2 to 8: on a GPU so many that no call finds its own in the cache,
    elsewhere what fits into `PLACES`, since where in memory tensors happen to lie is worth up to 5 %.
    """
    if device.type != "cuda":
        return max(2, min(8, PLACES // max(nbytes, 1)))
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(8, 2 * cache // max(nbytes, 1) + 1))


def once(call: Call, device: torch.device) -> float:
    """Microseconds of one synchronised call."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e6


def device_samples(
    calls: Calls,
    device: torch.device,
    budget_s: float,
    rounds: int = 15,
    between: Call | None = None,
) -> Samples:
    """Device time per call in microseconds; each implementation is a list of calls (one per input set) that are walked through.

    CUDA: replay of a captured graph of several calls between two events. On an Apple GPU: a loop of calls between two events.
    Elsewhere: a loop of calls between synchronisations. `between`: what runs between the calls; its own time does not count.
    Where it does, each set that fits a cache comes twice: a training step has just made some of what its gradients read.
    """
    if between is not None:
        apart = {name: _apart(steps, between) for name, steps in calls.items()}
        samples = device_samples({**apart, _BETWEEN: [between]}, device, budget_s, rounds)
        own = samples.quiet(_BETWEEN)
        return Samples({n: [max(us - own, LEAST_US) for us in samples.values[n]] for n in calls})
    share_s = budget_s / max(len(calls), 1) / rounds
    loops = {name: _loop(list(steps), device, share_s) for name, steps in calls.items()}
    try:
        return _interleave({name: loop.sample for name, loop in loops.items()}, rounds, budget_s)
    finally:
        for loop in loops.values():
            loop.close()


def _apart(steps: Sequence[Call], between: Call) -> list[Call]:
    """The calls with something else after each; where there are sets enough that one fits a cache, each set twice."""
    times = 2 if len(steps) > 2 else 1
    return [_both(step, between) for step in steps for _ in range(times)]


def _both(first: Call, second: Call) -> Call:
    def call() -> None:
        first()
        second()

    return call


def vendor_gap_filler(device: torch.device) -> Call | None:
    """A small product of the vendor's, to run between calls that never meet themselves in use; None where launches do not overlap.

    Kernels of ours begin while those before them end, as long as these are ours too. Among kernels of PyTorch's they have to
    wait: a backward pass of two products by tiles seemed 0.965 of PyTorch's time alone at 1024, and was 1.03 in a training step.
    """
    if device.type != "cuda":
        return None
    a, b = (torch.zeros(FOREIGN, FOREIGN, dtype=torch.float16, device=device) for _ in range(2))
    return functools.partial(torch.mm, a, b, out=torch.empty_like(a))


def elimination_rounds(
    calls: Calls, device: torch.device, share_s: float, rounds: int, close: float, stays: str
) -> dict[str, Samples]:
    """Device times as above, each beside those of `stays`: after one round, implementations leave whose best was half as
    much again as the fastest one's time, after `rounds` those beyond `close` times the fastest, and those of which every
    sample was slower than each of its own. The others run as many rounds more, unless only one is left beside `stays` and
    every sample of it was a tenth faster.
    """
    loops = {n: _loop(list(steps), device, share_s / 3 / rounds) for n, steps in calls.items()}
    found: dict[str, Samples] = {}

    def timed(names: Sequence[str], share: float, heats: int) -> Samples:
        samples = _interleave({n: loops[n].sample for n in names}, heats, share * len(names))
        for n in names:  # rounds are shared by those that are left
            before = found[n].values if n in found else {}
            joined = {m: [*before.get(m, []), *samples.values[m]] for m in names}
            found[n] = Samples(joined)
        return samples

    try:
        once = {n: loops[n].sample() for n in calls}
        left = _near({n: min(*loops[n].first, once[n]) for n in calls}, 1.5, stays)
        samples = timed(left, share_s / 3, rounds)
        left = _near({n: samples.median(n) for n in left}, close, stays)
        best = min((n for n in left if n != stays), key=samples.median)
        worst = max(samples.values[best])
        left = [n for n in left if n in (best, stays) or min(samples.values[n]) < worst]
        if len(left) > 2 or worst > CLEARLY * min(samples.values[stays]):
            timed(left, share_s / 2, rounds)
        for name in calls.keys() - found.keys():
            found[name] = Samples({name: [once[name]], stays: [once[stays]]})
        return found
    finally:
        for loop in loops.values():
            loop.close()


def _near(times: Mapping[str, float], close: float, stays: str) -> list[str]:
    bound = close * min(t for name, t in times.items() if name != stays)
    return [name for name, t in times.items() if name == stays or t <= bound]


def host_samples(calls: Calls, device: torch.device, budget_s: float, rounds: int = 7) -> Samples:
    """Host time per call in microseconds: calls queued without waiting, so that only the caller's own time counts."""

    def sampler(steps: list[Call]) -> Callable[[], float]:
        share_s = budget_s / max(len(calls), 1) / rounds
        count = _repeats(once(steps[0], device), share_s, least=8, most=200)

        def sample() -> float:
            synchronize(device)
            start = time.perf_counter()
            for i in range(count):
                steps[i % len(steps)]()
            spent = time.perf_counter() - start
            synchronize(device)
            return spent / count * 1e6

        return sample

    samplers = {name: sampler(list(steps)) for name, steps in calls.items()}
    return _interleave(samplers, rounds, budget_s)


def wall_samples(
    calls: Mapping[str, Call],
    device: torch.device,
    budget_s: float,
    rounds: int = 200,
    again: bool = False,
    told: Told = None,
) -> Samples:
    """Wall time of one synchronised call in microseconds, each round in another order: what one who waits for the result sees.

    `again`: of the second of two, so that what another call has left behind, threads that still spin say, does not count.
    `told`: whether samples tell what they are wanted for; asked now and then, and where they do no more are taken.
    """

    def sample(call: Call) -> float:
        return once(call, device) if not again else [once(call, device) for _ in range(2)][1]

    samplers = {name: functools.partial(sample, call) for name, call in calls.items()}
    for first in samplers.values():
        first()
    return _interleave(samplers, rounds, budget_s / 2, told)


Sampler = Callable[[Calls, torch.device, float, int], Samples]


def settled(
    sampler: Sampler,
    calls: Calls,
    device: torch.device,
    budget_s: float,
    bounds: Mapping[str, float],
) -> Samples:
    """Samples in which no implementation's standing is left open: those whose interval of the ratio to the fastest
    straddles or nears their bound are sampled again beside it in several batches, so that choices repeat from run to run.
    """
    samples = sampler(calls, device, budget_s, 16)
    best = min(calls, key=samples.quiet)
    doubtful = []
    for name in calls:
        _, low, high = samples.ratio(name, best)
        bound, ratio = 1 + bounds[name], samples.quiet(name) / max(samples.quiet(best), 1e-9)
        near = abs(ratio - bound) < NEAR[device.type]
        if name != best and (near or low <= bound <= high):
            doubtful.append(name)
    if doubtful:
        names = (best, *doubtful)
        before, ballast = samples.quiet(best), []
        again = Samples({name: [] for name in names})
        for i in range(BATCHES):
            # what is allocated from here on lies elsewhere
            ballast.append(torch.empty(40_000 * (i + 1), dtype=torch.uint8, device=device))
            batch = sampler({name: calls[name] for name in names}, device, budget_s, 16)
            for name in names:
                again.values[name] += batch.values[name]
        # the others were timed beside the first samples
        drift = before / max(again.quiet(best), 1e-9)
        for name in names:
            samples.values[name] = [value * drift for value in again.values[name]]
    return samples


def _interleave(
    samplers: Mapping[str, Callable[[], float]], rounds: int, budget_s: float, told: Told = None
) -> Samples:
    order, samples = random.Random(0), Samples({name: [] for name in samplers})
    begin = time.perf_counter()
    for done in range(rounds):
        for name, sample in order.sample(list(samplers.items()), len(samplers)):
            samples.values[name].append(sample())
        if done >= 4 and time.perf_counter() - begin > 2 * budget_s:
            break
        if told is not None and done + 1 in ASKED and told(samples):
            break
    return samples


def _repeats(call_us: float, share_s: float, least: int, most: int) -> int:
    return max(least, min(most, int(share_s * 1e6 / max(call_us, 0.1))))


class _Loop:
    """Calls on one set in a loop between two synchronisations, timed on the host; each sample takes the next set."""

    def __init__(self, steps: list[Call], device: torch.device, share_s: float) -> None:
        self.steps, self.device, self.turn = steps, device, 0
        self.first = [once(steps[0], device)]
        if self.first[0] < LONG_US:
            self.first.append(once(steps[0], device))
        self.count = _repeats(min(self.first), min(share_s, 2e-3), least=1, most=500)

    def sample(self) -> float:
        step = self.steps[self.turn % len(self.steps)]
        self.turn += 1
        # what a single long call finds in the cache is little beside its time
        if self.count > 1:
            step()
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(self.count):
            step()
        synchronize(self.device)
        return (time.perf_counter() - start) / self.count * 1e6

    def close(self) -> None:
        self.steps.clear()


class _Events(_Loop):
    """Calls in a loop between two events of an Apple GPU."""

    def sample(self) -> float:
        start, end = (torch.mps.Event(enable_timing=True) for _ in range(2))
        synchronize(self.device)
        start.record()
        for i in range(self.count):
            self.steps[i % len(self.steps)]()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / self.count * 1e3


class _Graph:
    """A captured CUDA graph of several calls, timed by events around its replay."""

    def __init__(self, steps: list[Call], device: torch.device, share_s: float) -> None:
        self.first = [once(steps[0], device) for _ in range(2)]
        # all sets, so that the next replay meets none of them in the cache
        self.count = _repeats(min(self.first), min(share_s, 2e-3), least=len(steps), most=40)
        self.device = device
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), capture_state.uncached():
            for step in steps:
                step()
        torch.cuda.synchronize(device)
        give_back(device)  # a capture would return it, too, and not wait
        recording = torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local")
        with capture_state.capture_lock(TURN_S), capture_state.uncached(), recording:
            for i in range(self.count):
                steps[i % len(steps)]()
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        torch.cuda.synchronize(device)

    def sample(self) -> float:
        assert self.graph is not None
        self.start.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / self.count * 1e3

    def close(self) -> None:
        capture_state.destroy_later(self, "graph")
        self.graph = None


def _loop(steps: list[Call], device: torch.device, share_s: float) -> _Loop | _Graph:
    if device.type == "cuda":
        try:
            # of a failed capture it is said that it is empty
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                return _Graph(steps, device, share_s)
        except RuntimeError:  # it synchronises or allocates: timed as it runs
            torch.cuda.synchronize(device)
    return (_Events if device.type == "mps" else _Loop)(steps, device, share_s)
