"""What the first call of a process waits for, and what it does not."""

import gc
import hashlib
import importlib
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import tensorlogic
from tensorlogic.core.argument_checks import broadcast
from tensorlogic.dispatch import candidate_loading
from tensorlogic.kernels.triton_runtime import launch, toolchain
from tensorlogic.system import process


@pytest.mark.slow
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
        with launch._driving:
            building.set()
            assert built.wait(20)

    monkeypatch.setattr(launch, "_driver", slow)
    thread = threading.Thread(target=launch._begun)
    thread.start()
    try:
        assert building.wait(20)
        assert launch._loading.acquire(timeout=5), "a kernel waits for the driver"
        launch._loading.release()
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
    first = threading.Thread(target=toolchain.warm, name="first")
    second = threading.Thread(target=toolchain.warm, name="second")
    first.start()
    assert begun.wait(20)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    done.set()
    first.join()
    second.join()
    assert times == ["first", "second"]


def test_what_is_hashed_is_handed_the_interpreter_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of several hundred megabytes; by default another thread keeps it 5 ms every time, and the hash is ready last."""
    cache = pytest.importorskip("triton.runtime.cache")
    before, seen = sys.getswitchinterval(), list[float]()

    def key() -> None:
        seen.append(sys.getswitchinterval())
        raise OSError("a file that cannot be read")

    monkeypatch.setattr(cache, "triton_key", key)
    toolchain._warmed()
    assert seen
    assert seen[0] <= toolchain.HANDING_S * 1.01 < before
    assert sys.getswitchinterval() == before


def test_large_files_are_hashed_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same bytes, so the same name in Triton's cache."""
    cache = pytest.importorskip("triton.runtime.cache")
    text = random.Random(1).randbytes(5_000_000)
    (tmp_path / "large").write_bytes(text)
    (tmp_path / "small").write_bytes(text[:1000])
    with toolchain._opened(tmp_path / "small", encoding="latin-1", newline="") as file:
        assert file.read() == text[:1000].decode("latin-1")
    monkeypatch.setattr(toolchain, "LARGE", 1 << 20)
    pieces: dict[str, list[int]] = {}
    whole: dict[str, bytes] = {}

    def key() -> None:
        for name in ("large", "small"):
            digest = hashlib.sha256()
            with cache.open(tmp_path / name, "rb") as file:
                while piece := file.read(1 << 18):
                    pieces.setdefault(name, []).append(len(piece))
                    digest.update(piece)
            whole[name] = digest.digest()

    monkeypatch.setattr(cache, "triton_key", key)
    toolchain._warmed()
    assert pieces == {"large": [len(text)], "small": [1000]}
    assert whole == {n: hashlib.sha256(t).digest() for n, t in (("large", text), ("small", text[:1000]))}  # fmt: skip
    assert not hasattr(cache, "open")


def test_triton_s_own_files_have_the_name_they_had() -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    plain = cache.triton_key.__wrapped__()
    cache.triton_key.cache_clear()
    toolchain._warmed()
    assert cache.triton_key.cache_info().currsize == 1
    assert cache.triton_key() == plain


def test_nothing_is_collected_while_candidates_are_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection walks all of PyTorch's objects, 50 ms and more, and finds nothing."""
    seen: list[bool] = []

    def found(group: str) -> list[importlib.metadata.EntryPoint]:
        seen.append(gc.isenabled())
        return []

    monkeypatch.setattr(candidate_loading, "_READY", set())
    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    assert gc.isenabled()
    candidate_loading.ready("cpu")
    assert seen == [False]
    assert gc.isenabled()


def test_garbage_is_collected_again_once_everybody_is_through() -> None:
    inside, out = threading.Event(), threading.Event()

    def other() -> None:
        with process.paused():
            inside.set()
            assert out.wait(20)

    thread = threading.Thread(target=other)
    with process.paused():
        thread.start()
        assert inside.wait(20)
    assert not gc.isenabled()
    out.set()
    thread.join()
    assert gc.isenabled()
    gc.disable()
    try:
        with process.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_model_is_optimised_without_full_collections() -> None:
    """What was made lately is collected, and thresholds are the program's own before and after, in whatever order threads end."""
    own, seen = gc.get_threshold(), []

    class Looks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((gc.isenabled(), gc.get_threshold()))
            return x + 1

    gc.set_threshold(500, 7, 8)
    try:
        tensorlogic.optimize(Looks(), torch.ones(2), budget_s=0)
        assert set(seen) == {(True, (500, 7, process.NEVER))}
        assert gc.get_threshold() == (500, 7, 8)
        one, two = process.no_full_gc(), process.no_full_gc()
        one.__enter__()
        two.__enter__()
        one.__exit__(None, None, None)
        assert gc.get_threshold() == (500, 7, process.NEVER)
        two.__exit__(None, None, None)
        assert gc.get_threshold() == (500, 7, 8)
        with pytest.raises(ValueError, match="inside"), process.no_full_gc():
            raise ValueError("inside")
        assert gc.get_threshold() == (500, 7, 8)
        with process.no_full_gc():
            gc.set_threshold(9, 9, 9)  # a program that sets its own meanwhile keeps it
        assert gc.get_threshold() == (9, 9, 9)
    finally:
        gc.set_threshold(*own)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_child_process_collects_as_its_parent_did() -> None:
    """Where it was forked while another thread was inside, which the child does not have."""
    script = """
import gc, os, sys, threading, time
from tensorlogic.system import process as starting
inside, out = threading.Event(), threading.Event()
def other():
    with starting.paused(), starting.no_full_gc():
        inside.set(); out.wait(20)
own = gc.get_threshold()
thread = threading.Thread(target=other); thread.start(); inside.wait(20)
assert not gc.isenabled() and gc.get_threshold()[2] == starting.NEVER
pid = os.fork()
if not pid:
    ok = gc.isenabled() and gc.get_threshold() == own
    with starting.paused(), starting.no_full_gc():
        ok = ok and not gc.isenabled() and gc.get_threshold()[2] == starting.NEVER
    os._exit(0 if ok and gc.isenabled() and gc.get_threshold() == own else 1)
code = os.waitpid(pid, 0)[1]
out.set(); thread.join()
assert gc.isenabled() and gc.get_threshold() == own
sys.exit(code != 0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
