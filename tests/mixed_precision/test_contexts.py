"""Where a precision policy holds: decorated objects and coroutines, tasks that take turns, and not inside of graphs."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.core.numeric_mode import PrecisionWarning


def mode() -> str | None:
    found = policy.current().precision
    return None if found is None else found.mode


class Later:
    async def __call__(self) -> str | None:
        await asyncio.sleep(0)
        return mode()


class Now:
    def __call__(self) -> str | None:
        return mode()


class Parts:
    def __call__(self) -> Iterator[str | None]:
        yield mode()


class LaterParts:
    async def __call__(self) -> AsyncIterator[str | None]:
        yield mode()


async def coroutine(_: int) -> str | None:
    await asyncio.sleep(0)
    return mode()


def generator() -> Iterator[str | None]:
    yield mode()


def test_what_is_called_runs_under_the_policy_that_decorates_it() -> None:
    decorate = tensorlogic.precision("f16")
    assert decorate(Now())() == decorate(functools.partial(mode))() == "f16"
    for late in (Later(), functools.partial(coroutine, 1)):
        assert asyncio.run(decorate(late)()) == "f16"
    assert mode() is None


@pytest.mark.parametrize("fn", [Parts(), LaterParts(), generator, functools.partial(generator)])
def test_what_runs_after_the_call_is_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="is a generator, which runs after the call"):
        tensorlogic.precision("f16")(fn)


def test_tasks_that_take_turns_keep_their_policies() -> None:
    async def task(name: str) -> set[str | None]:
        met = set()
        with tensorlogic.precision(name):
            for _ in range(4):
                await asyncio.sleep(0)
                met.add(mode())
        return met

    async def both() -> list[set[str | None]]:
        return await asyncio.gather(task("f32"), task("f16"))

    assert asyncio.run(both()) == [{"f32"}, {"f16"}]


def test_an_argument_breaks_a_graph_and_says_so() -> None:
    asked = tensorlogic.precision("f16")
    a, b = torch.randn(6, 7).double(), torch.randn(7, 5).double()

    def fn(a: Tensor, b: Tensor) -> Tensor:
        return tensorlogic.matmul(a, b, precision=asked) * 2

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a policy of tensorlogic holds"):
        torch.compile(fn, backend="eager", fullgraph=True)(a, b)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(fn, backend="eager")(a, b), fn(a, b))


def test_a_block_that_fails_says_nothing_more(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(KeyError), tensorlogic.precision("adaptive", rtol=1e-3):
        raise KeyError
    assert mode() is None
    assert not [w for w in recwarn if w.category is PrecisionWarning]


def test_a_policy_within_a_budget_is_made_once_and_forgotten_with_the_others() -> None:
    half, a = tensorlogic.precision("f16"), torch.randn(8, 8)
    with half:
        first = policy.current()
    with half:
        assert policy.current() is first
    for i in range(policy.MOST + 20):
        tensorlogic.matmul(a, a, precision=tensorlogic.precision("adaptive", rtol=0.5 / (i + 1)))
    assert len(policy._WITH) <= policy.MOST
    with half:  # one of those whose warm keys are forgotten when plans change
        again = policy.current()
    assert policy._INTERNED[again.identity] is again
    with tensorlogic.policy(deterministic=True), half:
        assert policy.current() is not again
        assert policy.current().deterministic
