"""The timer: paired rounds, medians and intervals, loops of the right length, and what a study makes of them."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.autotune import tuner
from tensorlogic.compiler.verify import equivalence
from tensorlogic.core import tolerance
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS
from tensorlogic.measure import timer
from tensorlogic.measure.verification import Checker
from tensorlogic.plans.environment import environment

from ..support.clockwork import Clock
from ..support.helpers import PUBLIC, cases, full

INF = float("inf")

CPU = torch.device("cpu")
Spin = Callable[[float], None]


def spin(us: float) -> None:
    end = time.perf_counter() + us * 1e-6
    while time.perf_counter() < end:
        pass


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Spin:
    """What takes so many microseconds by a clock that nothing else moves."""
    clock = Clock()
    clock.stands_in(monkeypatch, timer)
    return lambda us: clock.sleep(us * 1e-6)


def test_rounds_are_shared_and_ratios_paired() -> None:
    samples = timer.Samples({"a": [1.0, 10.0, 2.0, 4.0], "b": [2.0, 20.0, 4.0, 8.0]})
    assert samples.median("a") == 3.0
    ratio, low, high = samples.ratio("b", "a")
    assert (ratio, low, high) == (2.0, 2.0, 2.0)
    assert samples.spread("a") == pytest.approx(
        (statistics.quantiles([1, 2, 4, 10], n=4)[2] - statistics.quantiles([1, 2, 4, 10], n=4)[0])
        / 6
    )
    assert timer.Samples({"a": [5.0]}).spread("a") == 0.0


def test_intervals_cover_the_median() -> None:
    """In 95 % of samples the interval holds the true median (here within what 400 trials allow)."""
    rng = random.Random(1)
    hits = 0
    for _ in range(400):
        middle, low, high = timer.interval(sorted(rng.gauss(0, 1) for _ in range(15)))
        assert low <= middle <= high
        hits += low <= 0 <= high
    assert hits >= 0.92 * 400
    assert timer.interval([1.0, 2.0]) == (1.5, 1.0, 2.0)


def test_device_samples_rank_and_size_correctly(work: Spin) -> None:
    calls: dict[str, Any] = {
        "short": [lambda: work(50), lambda: work(50)],
        "long": [lambda: work(200), lambda: work(200)],
    }
    samples = timer.device_samples(calls, CPU, budget_s=0.1)
    assert len(samples.values["short"]) == len(samples.values["long"])
    assert samples.values["short"] == pytest.approx([50.0] * 15)
    assert samples.ratio("long", "short") == pytest.approx((4.0, 4.0, 4.0))


def test_device_samples_are_what_a_clock_on_the_wall_says() -> None:
    calls: dict[str, Any] = {"short": [lambda: spin(50)], "long": [lambda: spin(200)]}
    samples = timer.device_samples(calls, CPU, budget_s=0.1)
    for name, us in (
        ("short", 50),
        ("long", 200),
    ):  # later, never earlier, where others have the cores
        assert us <= min(samples.values[name]) < 50 * us


def test_every_input_set_is_walked_through_and_the_budget_kept(work: Spin) -> None:
    seen: list[int] = []

    def step(i: int) -> Any:
        return lambda: (seen.append(i), work(20))

    begin = timer.time.perf_counter()
    timer.device_samples({"x": [step(0), step(1)]}, CPU, budget_s=0.05)
    timer.host_samples({"x": [step(0), step(1)]}, CPU, budget_s=0.05)
    assert timer.time.perf_counter() - begin < 0.5
    assert abs(seen.count(0) - seen.count(1)) < len(seen) / 3


def test_what_runs_between_calls_does_not_count(work: Spin) -> None:
    ran: list[str] = []

    def call(name: str, us: float) -> Any:
        return lambda: (ran.append(name), work(us))

    calls = {"short": [call("short", 500.0)], "long": [call("long", 3000.0)]}
    samples = timer.device_samples(calls, CPU, 0.2, 9, call("between", 1500.0))
    assert set(samples.values) == {"short", "long"}
    assert samples.values["short"] == pytest.approx([500.0] * 9)
    assert samples.values["long"] == pytest.approx([3000.0] * 9)
    pairs = list(itertools.pairwise(ran))
    assert ("short", "between") in pairs
    assert ("short", "short") not in pairs
    assert timer.vendor_gap_filler(CPU) is None
    nothing = timer.device_samples({"a": [lambda: None]}, CPU, 0.02, 5, call("between", 300.0))
    assert min(nothing.values["a"]) >= timer.LEAST_US


@pytest.mark.parametrize("sets", [2, 3, 8])
def test_between_others_a_set_that_fits_the_cache_comes_cold_and_warm(
    sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: dict[str, list[int | str]] = {}
    ran: list[int | str] = []

    class Walk:
        def __init__(self, steps: list[Any]) -> None:
            ran.clear()
            for step in steps:
                step()
            walked["a" if 0 in ran else "between"] = [*ran]

        def sample(self) -> float:
            return 1.0

        def close(self) -> None:
            pass

    monkeypatch.setattr(timer, "_loop", lambda steps, device, share_s: Walk(steps))
    steps = [lambda i=i: ran.append(i) for i in range(sets)]
    timer.device_samples({"a": steps}, CPU, 0.02, 5, lambda: ran.append("-"))
    twice = [(i, "-") for i in range(sets) for _ in range(1 if sets == 2 else 2)]
    assert walked == {"a": [*itertools.chain(*twice)], "between": ["-"]}


@pytest.mark.parametrize("direction", ["backward", "inference"])
def test_gradients_are_timed_between_other_kernels(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    between: list[Any] = []

    def timed(calls: Any, device: torch.device, budget_s: float, rounds: int, beside: Any) -> Any:
        between.append(beside)
        return timer.Samples({name: [10.0] * 8 for name in calls})

    def foreign(device: torch.device) -> Any:
        return "a foreign kernel"

    monkeypatch.setattr(timer, "device_samples", timed)
    monkeypatch.setattr(timer, "vendor_gap_filler", foreign)
    name, args = ("relu", (torch.ones(3, 4), False))
    if direction == "backward":
        name, args = "softmax_backward", (torch.ones(3, 4), torch.ones(3, 4), 1)
    key = OPS[name].key(args, direction)
    assert tuner.KeyTuner(OPS[name], key, CPU, environment(CPU)).run() is not None
    assert set(between) == {"a foreign kernel" if direction == "backward" else None}


def test_slow_calls_get_few_rounds(work: Spin) -> None:
    made: list[int] = []
    timer.device_samples({"x": [lambda: (made.append(1), work(20e3))]}, CPU, budget_s=0.01)
    assert 5 <= len(made) <= 10


def judged(out: Any, plain: Any, ref: Any) -> str | None:
    return tolerance.judge((out,), (plain,), (ref,)).reason


def test_where_all_has_cancelled_noise_is_compared_with_noise() -> None:
    """Gradients of scores whose keys are all the same sum to 0: what rounding left of a row is one number, by chance a small one."""
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return size * torch.randn(100_000, 1, generator=generator) * key

    key = torch.randn(4, generator=generator)
    size = torch.randn(100_000, 1, generator=generator).exp() * 1e-4
    ref = torch.randn(100_000, 4, generator=generator, dtype=torch.float64) * 1e-6
    eager, ours = noise(), noise()
    assert judged(ours, eager, ref) is None
    assert "times eager's" in str(judged(ours * 3, eager, ref))
    large = torch.randn(100_000, 4, generator=generator, dtype=torch.float64)
    made = [(large + t).float() for t in (ours, eager)]
    assert "further from the reference" in str(judged(*made, large))


def test_chance_is_three_deviations_of_the_ratio_of_two_errors() -> None:
    generator = torch.Generator().manual_seed(0)
    for count, share in ((1, 0.04), (2, 0.02), (4, 0.01), (16, 0.004), (63, 0.004)):
        ours, eager = torch.randn(2, 100_000, count, generator=generator).norm(dim=-1)
        beyond = (ours / eager > tolerance.chance(count)).double().mean().item()
        assert share / 4 < beyond < share, count
    assert tolerance.chance(64) == tolerance.chance(0) == 1.0


@pytest.mark.parametrize("last", [1, 2, 8])
def test_rows_of_few_elements_are_not_measured_by_eagers_luck(last: int) -> None:
    """20,000 sums that cancel: the largest of their errors is beyond four times their mean somewhere, and in that place eager's is small."""
    generator = torch.Generator().manual_seed(last)
    for _ in range(10):
        ref = torch.randn(20_000 // last, last, generator=generator, dtype=torch.float64)
        ours, eager = (1e-5 * torch.randn(ref.shape, generator=generator) for _ in range(2))
        assert judged((ref + ours).float(), (ref + eager).float(), ref) is None
        ours[77, 0] = 8e-4
        assert judged((ref + ours).float(), (ref + eager).float(), ref) is not None


@pytest.mark.parametrize("shape", [(20_000, 1), (20_000, 3), (4096, 32), (300_000, 2)])
def test_one_element_that_eager_misses_far_allows_no_others(shape: tuple[int, ...]) -> None:
    ref = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ref[5, 0] = 1000
    eager, nothing = ref.float(), torch.zeros(shape)
    eager[5, 0], nothing[5, 0] = 900, 1000
    some = eager.clone()
    some[100:110] = 0
    assert judged(eager, eager, ref) is None
    assert judged(nothing, eager, ref) is not None
    assert "further from the reference" in str(judged(some, eager, ref))


@pytest.mark.parametrize("shape", [(), (5,), (20, 5), (300, 1), (7, 64)])
def test_complex_numbers_are_judged_whatever_their_rows(shape: tuple[int, ...]) -> None:
    ref = torch.randn(shape, dtype=torch.complex128)
    eager = ref.to(torch.complex64)
    wrong = eager.clone()
    wrong.view(-1)[-1] *= 1j
    assert judged(eager, eager, ref) is None
    assert judged(wrong, eager, ref) is not None


def test_luck_is_no_licence_where_eager_is_exact_but_for_one_element() -> None:
    """Every element off by two spacings, eager by one in one of 262,144."""
    ref = (torch.arange(4096 * 64).reshape(4096, 64) % 8 + 1).double()
    eager = ref.half()
    eager[7, 7] += eager[7, 7] * 2**-10
    out = (ref * (1 + 2**-9)).half()
    for luck in (None, tolerance.of_those_that_miss):
        assert not tolerance.judge((out,), (eager,), (ref,), luck=luck)


def test_chance_knows_how_many_elements_make_an_error() -> None:
    """Two errors of 1,000 elements, hardly more than one of which counts: each is 1 / std of three numbers that may be nearly equal."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 1000, 3, generator=generator, dtype=torch.float64)

    def misses() -> torch.Tensor:
        noise = 1e-3 * torch.randn(rows.shape, generator=generator, dtype=torch.float64)
        return (rows + noise).std(-1).reciprocal() - rows.std(-1).reciprocal()

    ours, eager = misses(), misses()
    times = ours.norm(dim=-1) / eager.norm(dim=-1)
    allowed = torch.tensor([tolerance.of_those_that_miss(e) for e in eager]).clamp_min(2.0)
    assert (times > 2).double().mean() > 0.1
    assert (times > allowed).double().mean() < 0.06
    even = torch.randn(1000, generator=generator)
    assert tolerance.of_those_that_miss(even) == tolerance.of_all(even) == 1.0
    one = torch.zeros(1000).index_fill_(0, torch.tensor([7]), 0.1)
    assert tolerance.of_those_that_miss(one) == pytest.approx(tolerance.chance(1))
    assert tolerance.of_those_that_miss(1e80 * one.double()) == pytest.approx(tolerance.chance(1))
    assert tolerance.of_those_that_miss(0 * even) == 1.0


@pytest.mark.parametrize(
    ("count", "near", "far"), [(1, 7.0, 25.0), (8, 2.8, 3.1), (64, 1.9, 2.1), (4096, 1.9, 2.1)]
)
def test_outputs_of_few_elements_may_differ_as_chance_makes_them(
    count: int, near: float, far: float
) -> None:
    """In models' checks; where candidates are judged, twice eager's error is the bound whatever the size."""
    ref = torch.full((count,), 3.0, dtype=torch.float64)
    plain, nearly, wrong = ((ref + times * 1e-5).float() for times in (1.0, near, far))
    assert equivalence.compare(nearly, plain, ref)
    assert "times eager's" in str(equivalence.compare(wrong, plain, ref).reason)
    assert bool(judged(nearly, plain, ref)) == (count < 64)
    alike = equivalence.compare(nearly, plain, ref).error
    assert alike == pytest.approx(1.0 if count < 64 else near, rel=0.03)


@pytest.mark.parametrize(
    ("made", "eager", "exact", "right"),
    [
        (-65504.0, -INF, -65531.0, True),  # one rounding apart, on either side of the range
        (INF, 65504.0, 65519.9, True),
        (65504.0, INF, 65504.0 * 1.1, False),  # beyond it by more than an element may be off
        (INF, 64000.0, 64000.0, False),
        (-INF, 65504.0, 65519.9, False),
        (0.0, INF, 65531.0, False),
        (100.0, INF, 65531.0, False),
    ],
)
def test_judging_leaves_the_end_of_the_range_to_rounding(
    made: float, eager: float, exact: float, right: bool
) -> None:
    ref = torch.randn(64, 64, dtype=torch.float64)
    ref[0, 0], out, plain = INF, ref.half(), ref.half()
    ref[3, 5], out[3, 5], plain[3, 5] = exact, made, eager
    reason = judged(out, plain, ref)
    assert reason is None if right else "infinities" in str(reason)


def test_judging_sees_each_way_of_being_wrong() -> None:
    ref = torch.randn(64, 64, dtype=torch.float64)
    plain = ref.half()
    assert judged(plain.clone(), plain, ref) is None
    for change, words in (
        (lambda t: t.__setitem__((3, 5), float("nan")), "NaN"),
        (lambda t: t.__setitem__((3, 5), float("inf")), "infinities"),
        (lambda t: t[7].roll(1), None),
        (lambda t: t.mul_(1.01), "times eager's"),
        (lambda t: t.__setitem__((0, 0), t[0, 0] + 0.25), "wrong"),
        (lambda t: t[63].zero_(), "times eager's"),
    ):
        out = plain.clone()
        change(out)
        reason = judged(out, plain, ref)
        assert (reason is None) if words is None else (words in (reason or "")), words
    assert "bf16" in (judged(plain.bfloat16(), plain, ref) or "")
    assert "meta" in (judged(plain.to("meta"), plain, ref) or "")
    nan = plain.clone().fill_(float("nan"))
    assert judged(nan, nan, ref * float("nan")) is None
    assert judged(torch.empty(0), torch.empty(0), torch.empty(0).double()) is None
    whole = torch.arange(5)
    assert judged(whole, whole, whole) is None
    assert "differs" in (judged(whole + 1, whole, whole) or "")


@pytest.mark.parametrize("shape", [(), (5,), (300, 1), (7, 64), (5, 100), (3, 5, 2)])
@pytest.mark.parametrize("off", [0.5, 20.0, 500.0])
def test_a_rows_bound_and_its_elements_say_the_same(shape: tuple[int, ...], off: float) -> None:
    ref = torch.randn(shape, dtype=torch.float64)
    eps, eager_miss = 1e-7, torch.randn_like(ref) * 1e-8
    miss = eager_miss.clone()
    miss.view(-1)[-1] += off * eps
    last = shape[-1] if shape else 1
    size, worst = ref.abs().reshape(-1, last), eager_miss.abs().reshape(-1, last).amax(-1, True)
    row = size.square().mean(-1, keepdim=True).sqrt()
    usual = worst.mean()
    if last < 64:
        deviation = eager_miss.abs().median() / 0.6745
        usual = max(usual, deviation * (2 * math.log(ref.numel())) ** 0.5)
    allowed = 16 * eps * (row + size + 0.1 * row.square().mean().sqrt()) + 4 * (worst + usual)
    exact = (miss.abs().reshape(-1, last) / allowed).amax().item()
    found = tolerance._largest_excess(miss, eager_miss, ref, eps, True, 1.0, 0.0)
    assert (found > 1) == (exact > 1)
    assert found == pytest.approx(exact) or exact < found <= 1


def test_evidence_says_why_each_lost() -> None:
    x, w = torch.randn(32, 32).half(), torch.randn(32, 32).half()
    op = OPS["linear"]
    key = op.key((x, w, None, None, "relu", False), "inference")
    plan = tuner.KeyTuner(op, key, CPU, environment(CPU)).run()
    assert plan is not None
    by_id = {e.candidate: e for e in plan.evidence}
    assert set(by_id) == set(op.candidates)
    assert by_id[plan.eager].reason == "chosen"
    for e in by_id.values():
        assert e.reason
        assert e.source == op.candidates[e.candidate].source
        if e.status == "measured":
            assert e.device_us > 0
            assert e.host_us > 0
    assert by_id["onednn.linear"].status == "refused"
    assert EAGER in str(tensorlogic.explain(tensorlogic.linear, x, w, None, None, "relu"))


@pytest.mark.parametrize("name", PUBLIC)
def test_shipped_candidates_pass_the_check_that_measuring_makes(name: str) -> None:
    """What our own kernels keep for backward, touch and return is what the check wants, on the op's first cases."""
    op = OPS[name]
    for i, case in enumerate(cases(op, torch.float16)[:2]):
        for save in (False, True) if op.gradient is not None else (False,):
            key = op.key(full(op, case, save), "forward" if save else "inference")
            checker = Checker(op, key, CPU)
            for candidate in op.candidates.values():
                slow = candidate.id.startswith("triton.") and i > 0  # in the interpreter
                if candidate.id == EAGER or slow or candidate.unfit(key) is not None:
                    continue
                before = torch.get_rng_state()
                with torch.no_grad():
                    verdict = checker.check(candidate.bind(key, candidate.configs(key)[0], CPU))
                assert verdict, f"{candidate.id} on {key.text}: {verdict.reason}"
                assert torch.equal(torch.get_rng_state(), before), f"{candidate.id} draws"


def test_a_key_that_cannot_be_measured_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS["relu"]
    x = torch.randn(4)

    def full_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room for the inputs")

    monkeypatch.setattr(tuner, "Checker", full_memory)
    assert tuner.KeyTuner(op, op.key((x, False), "inference"), CPU, environment(CPU)).run() is None
    learned = tensorlogic.tune(tensorlogic.relu, x)
    assert len(learned.unmeasured) == 1
    assert "could not be measured" in str(learned)
    assert tensorlogic.relu(x).shape == x.shape


def test_enough_sets_to_outgrow_a_gpus_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cuda = torch.device("cuda", 0)
    found = [timer.cold_sets(mib << 20, cuda) for mib in (1, 16, 40, 200)]
    assert found == [8, 7, 3, 2]
    assert [timer.cold_sets(mib << 20, CPU) for mib in (1, 16, 200)] == [8, 4, 2]


def test_a_copy_of_inputs_is_the_same_elsewhere() -> None:
    op = OPS["linear"]
    x = torch.randn(9, 64, dtype=torch.float16)[1:, :32]  # rows apart
    weight = torch.randn(33 * 32 + 1, dtype=torch.float16)[1:].view(33, 32)  # not aligned
    key = op.key((x, weight, None, None, "none", False), "inference")
    (first, second), made = Checker(op, key, CPU).sets, []
    for s in (first, second):
        made.append(s.copy(op, key))
        for a, b in zip(s.dynamic, made[-1].dynamic, strict=True):
            if a is None:
                assert b is None
                continue
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
            assert a.data_ptr() != b.data_ptr()
            assert (a.data_ptr() ^ b.data_ptr()) & 15 == 0


def test_memory_given_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver clears it at a tenth of the bandwidth: 8 GB take 18 ms."""
    reserved, slept = iter([9e9, 1e9, 1e9, 1e9]), []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(reserved))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(time, "sleep", slept.append)
    for _ in range(2):
        timer.give_back(torch.device("cuda", 0))
    assert slept == [pytest.approx(0.018, rel=0.05), 0.0]
    timer.give_back(CPU)


@pytest.mark.parametrize("name", [
    "softmax_cross_entropy", "softmax_cross_entropy_backward", "softmax_cross_entropy_together"
])  # fmt: skip
def test_losses_are_timed_with_every_row_and_checked_with_ignored_ones(name: str) -> None:
    """A kernel that skips rows which count for nothing must not win by rows that few callers have."""
    op, logits, target = OPS[name], torch.randn(64, 16), torch.zeros(64, dtype=torch.int64)
    given = {
        "softmax_cross_entropy": (logits, target, -100, 0.0, "mean", True),
        "softmax_cross_entropy_backward": (torch.ones(()), logits, target, torch.zeros(64), torch.ones(1), -100, 0.0, "mean"),
        "softmax_cross_entropy_together": (torch.ones(()), logits, target, -100, 0.0, "mean"),
    }[name]  # fmt: skip
    checker = Checker(op, op.key(given, "backward"), CPU)
    hidden = [(s.tensors(op)["target"] == -100).sum().item() for s in checker.probes]
    assert hidden == [0, 0, 9]
    assert all((s.tensors(op)["target"] >= 0).all() for s in checker.cold())
