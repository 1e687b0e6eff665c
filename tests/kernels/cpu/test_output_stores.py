"""Outputs stored in the caches or past them (test_native: the same values): offered where they are large, chosen with who reads them next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.autotune import tuner
from tensorlogic.core.candidate import EAGER, Candidate
from tensorlogic.core.op import OPS, Op
from tensorlogic.dispatch import candidate_loading
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.kernels.cpu import output_stores
from tensorlogic.measure import timer, verification
from tensorlogic.native import cpu_library
from tensorlogic.plans import open_stores
from tensorlogic.plans.environment import environment
from tensorlogic.plans.plan import Evidence, Plan

from ...support.clockwork import Clock

pytestmark = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)
CPU = torch.device("cpu")
LARGE = output_stores.LEAST // 2  # halves


def op_of(name: str) -> Op:
    candidate_loading.ready("cpu")
    return OPS[name]


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).half()


def test_what_is_offered_and_what_serves_unmeasured() -> None:
    past = cpu_library.op("past_caches")
    assert (past((32 << 20) - 1), past(32 << 20)) == (False, True)
    assert output_stores.configs(output_stores.LEAST - 1) == [{}]
    assert output_stores.configs(output_stores.ASKED - 1, True) == [{}]

    def names(nbytes: int, asks: bool = True) -> list[str]:
        return [c["stores"] for c in output_stores.configs(nbytes, asks)]

    assert names(output_stores.LEAST, asks=False) == ["usual", "past_caches"]
    assert names(output_stores.ASKED) == ["near", "usual"]
    assert names(output_stores.LEAST) == ["near", "usual", "past_caches"]
    assert names(output_stores.NEAR) == ["usual", "near", "past_caches"]
    assert names(32 << 20) == ["past_caches", "usual"]
    for name, least in (("past_caches", output_stores.LEAST), ("near", output_stores.ASKED)):
        config = {"stores": name}  # another key's, too: by size where it is not offered
        assert output_stores.code(config, least) == output_stores.CODES[name]
        assert output_stores.code(config, least - 1) == 0
    for op, args, nbytes in (
        ("relu", (half(LARGE),), 2 * LARGE),
        ("affine", (half(8, LARGE), half(LARGE), half(LARGE)), 16 * LARGE),
        ("add", (torch.randn(64), torch.randn(64)), 256),
    ):
        key = op_of(op).key((*args, False), "inference")
        assert list(op_of(op).candidates["cpu.fused"].configs(key)) == output_stores.configs(
            nbytes, True
        )


def test_nothing_is_offered_where_both_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "isa", lambda: "portable")
    assert output_stores.configs(1 << 30) == [{}]


class Launched:
    """What launchers of native operators were made with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fixed: list[tuple[Any, ...]] = []
        real = cpu_library.launcher

        def launcher(name: str, *fixed: Any) -> Callable[..., Any]:
            self.fixed.append((name, *fixed))
            return real(name, *fixed)

        monkeypatch.setattr(cpu_library, "launcher", launcher)


def stored(op: str, args: tuple[Any, ...], way: str) -> None:
    """A plan for a call, as measuring would leave it where ours takes half of PyTorch's time."""
    candidates, config = op_of(op).candidates, {"stores": way}
    evidence = [
        Evidence(EAGER, {}, "measured", 200.0, 200.0, source=candidates[EAGER].source),
        Evidence(
            "cpu.fused", config, "measured", 100.0, 100.0, source=candidates["cpu.fused"].source
        ),
    ]
    key = op_of(op).key(args, "inference")
    open_stores.current(CPU).put(Plan(key, "cpu.fused", config, "cpu.fused", config, evidence))
    tensorlogic.core.policy.forget_entries()


@pytest.mark.parametrize("way", ["near", "past_caches"])
def test_a_plan_decides_however_it_is_called(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = half(LARGE), half(LARGE)
    stored("add_relu", (x, y, False), way)
    made, code = Launched(monkeypatch), output_stores.CODES[way]
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(tensorlogic.add_relu(x, y), torch.relu(x + y))
        assert made.fixed == [("add_relu", code)]
        compiled = torch.compile(lambda x, y: tensorlogic.add_relu(x, y), backend="aot_eager")
        compiled(x, y)
    assert len(made.fixed) > 1
    assert set(made.fixed) == {("add_relu", code)}


@pytest.mark.parametrize(
    ("nbytes", "way", "code"),
    [(output_stores.LEAST, "past_caches", 3), (output_stores.ASKED, "near", 0)],
)
def test_a_smaller_neighbour_is_stored_by_size_where_the_way_is_not_offered(
    nbytes: int, way: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = half(nbytes // 2), half(nbytes // 2)
    stored("add_relu", (x, y, False), way)
    made, small = Launched(monkeypatch), nbytes // 2 - 64
    with torch.no_grad():
        key = op_of("add_relu").key((x[:small], y[:small], False), "inference")
        found = dispatch_selector.decide(
            op_of("add_relu"), key, CPU, tensorlogic.core.policy.current()
        )
        assert found.source.startswith("neighbour")
        assert found.eager == ("cpu.fused", output_stores.configs(2 * small, asks=True)[0])
        tensorlogic.add_relu(x[:small], y[:small])
    assert made.fixed[0] == ("add_relu", code)  # what comes after it are small samples, to vouch


def toy(clock: Clock, then_ms: dict[str, float], takes_ms: dict[str, float]) -> Op:
    """An op whose one candidate has two configurations, told apart by what comes after them."""

    def wrong(x: Tensor) -> Tensor:
        return x + 1

    op = Op(wrong, flops=lambda key: 1.0, traffic=lambda key: 1.0, listed=False)
    op.add(Candidate(EAGER, bind=lambda key, config, device: lambda x: (clock.sleep(8e-3), (x + 1,))[1]))  # fmt: skip
    ways: dict[int, str] = {}

    def bind(key: Any, config: Any, device: Any) -> Any:
        def launch(x: Tensor) -> tuple[Tensor]:
            clock.sleep(takes_ms[config["way"]] * 1e-3)
            out = x + 1
            ways[id(out)] = config["way"]
            return (out,)

        return launch

    def then(outs: Any) -> None:
        clock.sleep(then_ms[ways[id(outs[0])]] * 1e-3)

    configs = [{"way": "kept"}, {"way": "sent"}]
    op.add(Candidate("toy.ways", bind=bind, configs=lambda key: configs, then=then))
    return op


@pytest.mark.parametrize(("after_sent_ms", "best"), [(0.0, "sent"), (3.0, "kept")])
def test_who_goes_on_with_the_output_has_a_say(
    after_sent_ms: float, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way that is faster by 1 ms alone is chosen unless that costs who comes next more than twice as much."""
    (clock := Clock(tick=1e-6)).stands_in(monkeypatch, timer, tuner, verification)
    op = toy(clock, {"kept": 0.0, "sent": after_sent_ms}, {"kept": 2.0, "sent": 1.0})
    key = op.key((torch.randn(64),), "inference")
    plan = tuner.KeyTuner(op, key, CPU, environment(CPU)).run()
    assert plan is not None
    assert (plan.eager, plan.eager_config) == ("toy.ways", {"way": best})
    evidence = next(e for e in plan.evidence if e.candidate == "toy.ways")
    assert evidence.device_us == pytest.approx(
        {"kept": 2000.0, "sent": 1000.0}[best], rel=0.01
    )  # of the call alone: what comes after is nobody's merit
