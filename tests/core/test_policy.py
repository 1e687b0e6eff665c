"""Policies: nested, in threads and tasks, in backward passes, and what is said of wrong ones."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.core.candidate import EAGER, Candidate
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import decision, dispatcher
from tensorlogic.system import settings

from ..support.plans import (
    RELU,
    Served,
    key_of,
    plan,
    put,  # the fixture
)
from ..support.plans import served as served  # a fixture


def test_policies_nest_and_end(served: Served) -> None:
    x = torch.randn(4)
    with tensorlogic.policy(force="toy.a", tune="off"):
        tensorlogic.relu(x)
        with tensorlogic.policy(force="toy.b"):
            tensorlogic.relu(x)
            with tensorlogic.policy(tune="full"):
                tensorlogic.relu(x)
        with pytest.raises(KeyError), tensorlogic.policy(force=EAGER):
            raise KeyError
        tensorlogic.relu(x)
    tensorlogic.relu(x)
    assert served[:4] == ["toy.a", "toy.b", "toy.b", "toy.a"]
    for wrong, error in (({"tune": "always"}, ValueError), ({"force": 3}, TypeError)):
        with pytest.raises(error), tensorlogic.policy(**wrong):  # type: ignore[arg-type]
            pass
    with pytest.raises(FileNotFoundError, match="plans export"), tensorlogic.policy(lockfile="no"):
        pass


def test_policies_belong_to_their_thread_and_task(served: Served) -> None:
    x = torch.randn(4)
    seen: dict[str, str] = {}
    barrier = threading.Barrier(2)

    def work(force: str) -> None:
        with tensorlogic.policy(force=force, tune="off"):
            barrier.wait()
            for _ in range(50):
                tensorlogic.relu(x)
            seen[force] = policy.current().forced("relu") or ""
            barrier.wait()

    threads = [threading.Thread(target=work, args=(f,)) for f in ("toy.a", "toy.b")]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert seen == {"toy.a": "toy.a", "toy.b": "toy.b"}
    assert (served.count("toy.a"), served.count("toy.b")) == (50, 50)

    async def task(force: str) -> str | None:
        with tensorlogic.policy(force=force):
            await asyncio.sleep(0.001)
            return policy.current().forced("relu")

    async def both() -> list[str | None]:
        return await asyncio.gather(task("toy.a"), task("toy.b"))

    assert asyncio.run(both()) == ["toy.a", "toy.b"]


@pytest.mark.parametrize("make", ["policy", "placement"])
def test_a_policy_may_be_entered_again(make: str) -> None:
    again = tensorlogic.policy(force="toy.a") if make == "policy" else tensorlogic.placement("cpu")
    before = policy.current()
    with again as first, tensorlogic.policy(tune="off"):
        with again as inside, again:
            assert (inside.meaning, inside.tune) == (first.meaning, "off")
        assert policy.current().meaning == first.meaning

    async def task(wait: int) -> bool:
        with again as mine:
            await asyncio.sleep(wait * 0.001)
            return policy.current() is mine is first

    async def crossing() -> list[bool]:
        return await asyncio.gather(task(2), task(1), task(0), task(3))

    assert asyncio.run(crossing()) == [True] * 4
    assert again(policy.current)() is first
    assert policy.current() is before
    with pytest.raises(RuntimeError, match="without having been entered"):
        again.__exit__()


def test_a_policy_is_entered_by_threads_at_once() -> None:
    again, barrier = tensorlogic.policy(force="toy.a"), threading.Barrier(4, timeout=10)
    found: list[bool] = []

    def work() -> None:
        before = policy.current()
        for _ in range(20):
            with again as mine:
                barrier.wait()
                found.append(policy.current() is mine)
            found.append(policy.current() is before)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [True] * 160


@pytest.fixture
def backward_calls(monkeypatch: pytest.MonkeyPatch) -> Served:
    """toy.back of pointwise_backward, which writes down its calls."""
    calls: Served = []
    op = OPS["pointwise_backward"]

    def launch(*dynamic: Any, eager: Any) -> Any:
        calls.append("toy.back")
        return eager(*dynamic)

    def bind(key: Key, config: Any, device: torch.device) -> Any:
        eager = op.candidates[EAGER].bind(key, {}, device)
        return lambda *dynamic: launch(*dynamic, eager=eager)

    monkeypatch.setitem(op.candidates, "toy.back", Candidate("toy.back", bind, trusted=True))
    policy.forget_entries()
    return calls


def test_backward_runs_under_the_policy_of_its_forward(
    served: Served, backward_calls: Served
) -> None:
    x = torch.randn(6, requires_grad=True)
    chosen = {"relu": "toy.a", "pointwise_backward": "toy.back"}
    with tensorlogic.policy(force=chosen):
        out = tensorlogic.relu(x).sum()
        thread_out = tensorlogic.relu(x).sum()
    out.backward()
    worker = threading.Thread(target=thread_out.backward)
    worker.start()
    worker.join()
    assert backward_calls == ["toy.back", "toy.back"]
    with policy.use(policy.ROOT):
        put(plan(key_of(x, True), "toy.a"))
        out = tensorlogic.relu(x).sum()
        with tensorlogic.policy(force=chosen):
            out.backward()
    assert backward_calls == ["toy.back", "toy.back"]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 3.0 * (x > 0))


def test_forcing_an_unknown_candidate_falls_back_to_eager(served: Served) -> None:
    x = torch.tensor([-1.0, 2.0])
    with tensorlogic.policy(force="nobody.nothing"):
        assert tensorlogic.relu(x).tolist() == [0, 2]
    assert dispatcher.call(RELU, (x,)).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"force": 3}, "force is 3; it must be a candidate id"),
        ({"force": {"relu": 3}}, "force is {'relu': 3}; it must be a candidate id"),
        ({"deterministic": "no"}, "deterministic is 'no'; it must be True or False"),
        ({"lockfile": 3}, "lockfile is int; it must be the path"),
    ],
)
def test_a_policy_names_the_argument_that_is_of_another_type(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=f"policy: {said}"), tensorlogic.policy(**changes):
        pass


def test_a_home_that_nobody_has_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "~nobody-of-that-name/x'; ~ must stand"
    with pytest.raises(ValueError, match=f"policy: lockfile is '{said}"):
        tensorlogic.policy(lockfile="~nobody-of-that-name/x").__enter__()
    monkeypatch.setenv("TENSORLOGIC_CACHE_DIR", "~nobody-of-that-name/x")
    with pytest.raises(ValueError, match=f"TENSORLOGIC_CACHE_DIR is '{said}"):
        settings.cache_folder()


def test_forcing_what_does_not_exist_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(ValueError, match=r"force names rleu; the ops are .*relu"),
        tensorlogic.policy(force={"rleu": EAGER}),
    ):
        pass
    monkeypatch.setattr(decision, "_SAID", set())
    x = torch.randn(8)
    with tensorlogic.policy(force="torch.eagre"):
        assert torch.equal(tensorlogic.relu(x), torch.relu(x))
    assert "torch.eagre was forced, but no op has it here" in caplog.text
    assert "torch.eager" in caplog.text
