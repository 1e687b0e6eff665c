"""Locks of the process: made anew in forked children, given back where something fails, open to who holds them already."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import tensorlogic
from tensorlogic import (
    background,
    calls,
    compiling,
    derived,
    hooks,
    native,
    registry,
    selector,
    stores,
)
from tensorlogic.program import streams
from tensorlogic.program.graphs import Line

LOCKS: dict[str, tuple[Any, str]] = {
    "background": (background, "_BUSY"),
    "calls": (calls, "_lock"),
    "compiling": (compiling, "_making"),
    "derived": (derived, "_LOCK"),
    "hooks": (hooks, "_lock"),
    "native": (native, "_lock"),
    "registry": (registry, "_LOCK"),
    "stores": (stores, "_LOCK"),
    "streams": (streams, "TURN"),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_finds_no_lock_that_a_thread_of_its_parent_holds() -> None:
    held, over = threading.Barrier(len(LOCKS) + 1), threading.Event()

    def hold(module: Any, name: str) -> None:
        with getattr(module, name):
            held.wait()
            over.wait()

    threads = [threading.Thread(target=hold, args=where) for where in LOCKS.values()]
    for thread in threads:
        thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        free = [getattr(*where).acquire(blocking=False) for where in LOCKS.values()]
        os._exit(0 if all(free) else 1)
    over.set()
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_who_counts_policies_while_the_hooks_are_loaded_does_not_wait_for_itself() -> None:
    done = threading.Event()

    def inside() -> None:
        with hooks._lock:
            hooks.apart(0)
            done.set()

    threading.Thread(target=inside, daemon=True).start()
    assert done.wait(20)


def test_weights_that_die_while_bytes_are_counted() -> None:
    """A collection in the middle drops what was derived from them."""
    cache = derived.CACHE

    def filled(count: int) -> list[nn.Parameter]:
        made = [nn.Parameter(torch.ones(2)) for _ in range(count)]
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
        cache.invalidate(nn.Parameter(torch.ones(1)))
    gc.collect()
    cache.invalidate()


def test_buffers_are_free_again_where_a_turn_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(torch.device("cuda", 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)

    def fails() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(line, "turn", fails)
    with pytest.raises(KeyboardInterrupt):
        line.enter()
    assert not line.lock.locked()


def test_one_pool_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    class Slow:
        def __init__(self, count: int) -> None:
            made.append(count)
            time.sleep(0.05)

    monkeypatch.setattr(compiling, "_Workers", Slow)
    monkeypatch.setattr(compiling, "_workers", None)
    monkeypatch.setattr(compiling, "SUPPORTED", True)
    monkeypatch.setenv("TENSORLOGIC_COMPILE_WORKERS", "1")
    threads = [threading.Thread(target=compiling._pool) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_the_first_fixed_decision_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads that meet a key at once under `deterministic=True`, both are served by one decision."""
    fixed = selector._fixed
    other = selector.Decision(("torch.eager", {}), ("torch.eager", {}), "of the other thread")
    found = list[Any]()

    def slow(op: Any, key: Any, store: Any, source: str) -> Any:
        mine = fixed(op, key, store, source)
        monkeypatch.setattr(selector, "_fixed", lambda *_: other)
        device = torch.device("cpu")
        thread = threading.Thread(
            target=lambda: found.append(selector._lasting(op, key, device, store))
        )
        thread.start()
        thread.join()
        found.append(mine)
        return mine

    selector.FIXED.clear()
    monkeypatch.setattr(selector, "_fixed", slow)
    with tensorlogic.policy(deterministic=True):
        tensorlogic.add(torch.ones(5, 3), torch.ones(5, 3))
    (stays,) = selector.FIXED.values()
    assert found[0] is stays
    assert found[1] is not stays
    selector.FIXED.clear()
