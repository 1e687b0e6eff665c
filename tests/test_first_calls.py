"""What the first call of a process waits for, and what it does not."""

import os
import random
import subprocess
import sys
import threading

import pytest
import torch

from tensorlogic.arguments import broadcast
from tensorlogic.ops.common import triton_launch


def test_calls_import_no_symbolic_algebra() -> None:
    """`torch.broadcast_shapes` and `torch.unravel_index` import sympy: half a second to two."""
    text = """
import sys, torch, tensorlogic
x, w = torch.randn(4, 8, 8).half(), torch.randn(8, 8).half()
q = torch.randn(2, 3, 5, 8)
tensorlogic.matmul(x, w)
tensorlogic.add_relu(x, w)
tensorlogic.attention_scores(q, q[:1], 1.0)
with tensorlogic.precision("adaptive", rtol=1e-2):
    tensorlogic.matmul(torch.randn(4, 64, 64), torch.randn(64, 64))
f = torch.randn(8, 8, requires_grad=True)
tensorlogic.gelu_linear(f, f, None).sum().backward()
tensorlogic.tune(tensorlogic.matmul, x, w)
assert "sympy" not in sys.modules
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr


def test_shapes_broadcast_as_in_pytorch() -> None:
    rng = random.Random(3)
    ends = set()
    for _ in range(2000):
        shapes = [
            tuple(rng.choice((0, 1, 1, 2, 3)) for _ in range(rng.randrange(4)))
            for _ in range(rng.randrange(1, 4))
        ]
        try:
            want = tuple(torch.broadcast_shapes(*shapes))
        except RuntimeError:
            with pytest.raises(RuntimeError, match="do not broadcast"):
                broadcast(*shapes)
            ends.add("refused")
        else:
            assert broadcast(*shapes) == want
            ends.add("right")
    assert ends == {"refused", "right"}


def test_kernels_compile_while_the_driver_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one waits for a C compiler; the other needs its result only to load what it compiled."""
    building, built = threading.Event(), threading.Event()

    def slow() -> None:
        with triton_launch._driving:
            building.set()
            assert built.wait(20)

    monkeypatch.setattr(triton_launch, "_driver", slow)
    thread = threading.Thread(target=triton_launch._begun)
    thread.start()
    try:
        assert building.wait(20)
        assert triton_launch._loading.acquire(timeout=5), "a kernel waits for the driver"
        triton_launch._loading.release()
    finally:
        built.set()
        thread.join()


def test_whoever_compiles_waits_for_what_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once would do it twice."""
    begun, done = threading.Event(), threading.Event()
    times: list[str] = []

    def key() -> None:
        if not done.is_set():
            begun.set()
            assert done.wait(20)
        times.append(threading.current_thread().name)

    cache = pytest.importorskip("triton.runtime.cache")
    monkeypatch.setattr(cache, "triton_key", key)
    first = threading.Thread(target=triton_launch.warm, name="first")
    second = threading.Thread(target=triton_launch.warm, name="second")
    first.start()
    assert begun.wait(20)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    done.set()
    first.join()
    second.join()
    assert times == ["first", "second"]
