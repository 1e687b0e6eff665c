"""Cached derivatives of parameters and constants: kept while nothing changes, never stale."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import tensorlogic
from tensorlogic.core import weight_cache
from tensorlogic.core.weight_cache import DerivedCache


def widened(cache: DerivedCache, t: Tensor) -> Tensor:
    return cache.get(t, "f64", lambda x: x.double(), lambda v: v.numel() * 8)


def _load(p: Tensor) -> None:
    layer = torch.nn.Linear(4, 3, bias=False)
    layer.weight = p if isinstance(p, Parameter) else Parameter(p)
    layer.load_state_dict({"weight": torch.full((3, 4), 9.0)})


def _optimizer(p: Tensor) -> None:
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=1.0).step()


def _no_grad(p: Tensor) -> None:
    with torch.no_grad():
        p.mul_(3)


def _view(p: Tensor) -> None:
    p.detach()[0, 0] = 42.0


def _set(p: Tensor) -> None:
    with torch.no_grad():
        p.set_(torch.full((3, 4), 5.0))  # type: ignore[call-overload]


def _data(p: Tensor) -> None:
    p.data = torch.full((3, 4), 7.0)


def _swap(p: Tensor) -> None:
    torch.utils.swap_tensors(p, Parameter(torch.full((3, 4), 8.0)))


WRITES: tuple[Callable[[Tensor], None], ...] = (_load, _optimizer, _no_grad, _view, _set, _data)


@pytest.mark.parametrize("write", WRITES)
def test_writes_are_noticed(write: Callable[[Tensor], None]) -> None:
    cache, p = DerivedCache(), Parameter(torch.randn(3, 4))
    assert widened(cache, p) is widened(cache, p)
    assert (cache.hits, cache.misses) == (1, 1)
    write(p)
    assert torch.equal(widened(cache, p), p.detach().double())


def test_swapped_tensors_are_noticed() -> None:
    cache, p = DerivedCache(), Parameter(torch.randn(3, 4))
    assert torch.equal(widened(cache, p), p.detach().double())
    del cache  # a weak reference forbids swapping: PyTorch says so rather than leave a stale copy
    gc.collect()
    _swap(p)
    assert torch.equal(widened(DerivedCache(), p), p.detach().double())


def test_only_parameters_and_constants_are_kept() -> None:
    p, t = Parameter(torch.randn(2)), torch.randn(2)
    assert weight_cache.is_constant(p)
    assert not weight_cache.is_constant(t)
    assert tensorlogic.constant(t) is t
    assert weight_cache.is_constant(t)
    assert not weight_cache.is_constant(t.view(2))
    assert not weight_cache.is_constant(p.detach())
    with torch.inference_mode():
        assert not weight_cache.is_constant(torch.randn(2))
        assert not weight_cache.is_constant(tensorlogic.constant(torch.randn(2)))


def test_a_new_tensor_at_an_old_address_is_not_taken_for_it() -> None:
    cache = DerivedCache()
    for value in range(200):
        p = Parameter(torch.full((64,), float(value)))
        assert widened(cache, p)[0] == value
        del p
    assert cache.nbytes == 0
    marked = tensorlogic.constant(torch.ones(3))
    where = id(marked)
    del marked
    assert where not in weight_cache._CONSTANTS


def test_memory_is_bounded_and_counted() -> None:
    cache = DerivedCache(max_bytes=100 * 8)
    kept = [Parameter(torch.randn(30)) for _ in range(5)]
    for p in kept:
        widened(cache, p)
    assert cache.nbytes == 90 * 8
    big = Parameter(torch.randn(200))
    widened(cache, big)
    assert cache.nbytes == 90 * 8
    cache.configure(0)
    assert cache.nbytes == 0
    widened(cache, kept[0])
    assert cache.nbytes == 0
    with pytest.raises(ValueError, match="at least 0"):
        cache.configure(-1)


def test_invalidate_is_for_writes_nobody_can_see() -> None:
    weight = Parameter(torch.randn(3, 4))
    alias = weight.detach().numpy()
    x = torch.randn(2, 4).half()
    half = Parameter(weight.detach().half())
    before = weight_cache.CACHE.misses
    with tensorlogic.policy(force="torch.widened"), torch.no_grad():
        first = tensorlogic.linear(x, half)
        again = tensorlogic.linear(x, half)
        assert torch.equal(first, again)
        half.data.fill_(1.0)  # through .data: no version
        tensorlogic.invalidate(half)
        torch.testing.assert_close(
            tensorlogic.linear(x, half), F.linear(x, half), atol=4e-3, rtol=4e-3
        )
    assert weight_cache.CACHE.misses >= before + 2
    assert alias.shape == (3, 4)


@pytest.mark.parametrize("write", [_no_grad, _optimizer, _view])
def test_the_public_call_never_uses_a_stale_copy(write: Callable[[Tensor], None]) -> None:
    x, w = torch.randn(2, 4).half(), Parameter(torch.randn(3, 4).half())
    with tensorlogic.policy(force="torch.widened"):
        for _ in range(3):
            with torch.no_grad():
                torch.testing.assert_close(
                    tensorlogic.linear(x, w), F.linear(x, w), atol=4e-3, rtol=4e-3
                )
            write(w)


def test_threads_share_the_cache() -> None:
    cache, p = DerivedCache(), Parameter(torch.zeros(256))
    problems: list[float] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            value = widened(cache, p)
            if value.shape != p.shape:
                problems.append(1.0)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for t in threads:
        t.start()
    for i in range(200):
        with torch.no_grad():
            p.fill_(float(i))
        if widened(cache, p)[0] != i:
            problems.append(float(i))
    stop.set()
    for t in threads:
        t.join()
    assert problems == []


def test_settled_tensors_only() -> None:
    cache, p, made = DerivedCache(max_bytes=1000), Parameter(torch.randn(3, 4)), []

    def look(t: Tensor, nbytes: int = 96) -> Tensor | None:
        found: Tensor | None = cache.settled(
            t, "f64", lambda x: made.append(1) or x.double(), lambda _: nbytes
        )
        assert found is None or torch.equal(found, t.detach().double())
        return found

    assert look(p) is None
    first = look(p)
    assert first is not None
    assert look(p) is first
    assert (len(made), cache.nbytes) == (1, 96)
    for write in WRITES:
        for _ in range(2):  # training: never unchanged for two looks
            write(p)
            assert look(p) is None
        assert not cache.holds(p, "f64")
    assert (len(made), cache.nbytes) == (1, 0)
    assert (look(p) is None, look(p) is None) == (False, False)
    plain, other = torch.randn(3, 4), Parameter(torch.randn(3, 4))
    assert [look(plain), look(plain)] == [None, None]
    assert [look(other, 990), look(other, 990)] == [None, None]  # another would have to go
    assert cache.holds(p, "f64")
    cache.configure(0)
    assert [look(p), look(p), cache.nbytes] == [None, None, 0]


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_packed_layers_follow_their_weights(dtype: torch.dtype) -> None:
    layer, x = torch.nn.Linear(640, 832).to(dtype), torch.randn(40, 640).to(dtype)

    def check() -> None:
        for _ in range(4):
            with torch.no_grad(), tensorlogic.policy(tune="off", force="cpu.epilogue"):
                y = tensorlogic.linear(x, layer.weight, layer.bias)
            wanted = x.double() @ layer.weight.double().t() + layer.bias.double()
            assert (y.double() - wanted).norm() < 8 * torch.finfo(dtype).eps * wanted.norm()

    check()
    assert weight_cache.CACHE.holds(layer.weight, "tiles")
    with torch.no_grad():
        layer.weight.mul_(-2)
    check()
    _optimizer(layer.weight)
    check()
    layer.load_state_dict(torch.nn.Linear(640, 832).to(dtype).state_dict())
    check()
    layer.weight.data = torch.randn(832, 640).to(dtype)
    check()
    tensorlogic.invalidate(layer.weight)
    assert not weight_cache.CACHE.holds(layer.weight, "tiles")
    check()


def test_weights_that_die_while_bytes_are_counted() -> None:
    """A collection in the middle drops what was derived from them."""
    cache = weight_cache.CACHE

    def filled(count: int) -> list[Parameter]:
        made = [Parameter(torch.ones(2)) for _ in range(count)]
        for p in made:
            cache.get(p, "t", torch.clone, lambda t: t.nbytes)
        return made

    kept = filled(3000)
    for _ in range(10):
        dead: Any = nn.Module()
        dead.me, dead.held = dead, nn.ParameterList(filled(3))
        del dead
        assert cache.nbytes_on("cpu") >= 3000 * 8
        assert cache.nbytes_of(kept) == 3000 * 8
        cache.invalidate(Parameter(torch.ones(1)))
    gc.collect()
    cache.invalidate()
