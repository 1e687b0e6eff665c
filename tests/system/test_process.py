"""Locks of the process: made anew in forked children, open to who holds them already, given back where something fails."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

from tensorlogic.autotune import background_tuning
from tensorlogic.compiler.runtime import program
from tensorlogic.core import weight_cache
from tensorlogic.cuda_graphs.replay import Line
from tensorlogic.dispatch import candidate_loading
from tensorlogic.native import call_extension, cpu_library, hook_extension
from tensorlogic.plans import open_stores
from tensorlogic.system import compile_pool, thread_output

LOCKS: dict[str, tuple[Any, str]] = {
    "background": (background_tuning, "_BUSY"),
    "calls": (call_extension, "_lock"),
    "compiling": (compile_pool, "_making"),
    "derived": (weight_cache, "_LOCK"),
    "hooks": (hook_extension, "_lock"),
    "native": (cpu_library, "_lock"),
    "registry": (candidate_loading, "_LOCK"),
    "stores": (open_stores, "_LOCK"),
    "serve": (program, "_REFRESHING"),
    "streams": (thread_output, "TURN"),
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
        with hook_extension._lock:
            hook_extension.count_policies(0)
            done.set()

    threading.Thread(target=inside, daemon=True).start()
    assert done.wait(20)


def test_buffers_are_free_again_where_a_turn_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(torch.device("cuda", 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)

    def fails() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(line, "turn", fails)
    with pytest.raises(KeyboardInterrupt):
        line.enter()
    assert not line.lock.locked()
