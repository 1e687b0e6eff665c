"""GPU launchers in C on a GPU: results, streams, captures, recorded gradients, alignment, memory, threads."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorlogic
from tensorlogic.autotune import background_tuning
from tensorlogic.core import policy
from tensorlogic.dispatch import autograd, bound_call, dispatcher, fast_path
from tensorlogic.kernels.triton_runtime import launch_plan
from tensorlogic.native import call_extension, cuda_driver

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
N = 128


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    with tensorlogic.policy(tune="off"):
        yield
    policy.forget_entries()


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((N, N), (N, N), (N,), (N, N))
    x, w, b, res = (torch.randn(s, device="cuda", dtype=dtype, generator=generator) for s in shapes)
    return x, w / 8, b, res


def test_the_driver_is_found() -> None:
    assert (
        call_extension.module() is not None or cuda_driver.driver(torch.device("cuda")) is not None
    )
    assert isinstance(launch_plan.empty(torch.device("cuda")), call_extension.module().Empty)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "force", ["triton.tiled", "triton.flat", "triton.rows", "triton.blocks", "cublaslt.epilogue"]
)
def test_results_are_right_and_calls_are_plans(dtype: torch.dtype, force: str) -> None:
    x, w, b, res = tensors(dtype)
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    ops: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "linear": (
            lambda: tensorlogic.linear(x, w, b, res, "relu"),
            torch.relu(F.linear(x.double(), w.double(), b.double()) + res),
        ),
        "matmul": (lambda: tensorlogic.matmul(x, w), x.double() @ w.double()),
        "add_relu": (lambda: tensorlogic.add_relu(x, res), torch.relu(x.double() + res.double())),
        "softmax": (lambda: tensorlogic.softmax(x, -1), torch.softmax(x.double(), -1)),
        "sum": (lambda: tensorlogic.sum(x, 1), x.double().sum(1)),
    }
    with torch.no_grad(), tensorlogic.policy(force=force):
        for name, (ours, expected) in ops.items():
            for _ in range(4):
                torch.testing.assert_close(
                    ours().double(), expected, msg=lambda m, n=name: f"{n}: {m}", **near
                )


def quick(fn: Callable[..., Any]) -> Any:
    """The compiled front of a public function."""
    found = [s for p, (_, s) in fast_path._SCOPES.items() if fast_path.FRONTS[p] is fn]
    return found[0]["compiled"]


def test_a_warm_call_is_served_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b, res = tensors(torch.float16)
    with torch.no_grad(), tensorlogic.policy(force="triton.tiled"):
        y = tensorlogic.linear(x, w, b, res, "relu")
        monkeypatch.setattr(dispatcher, "call", None)
        assert torch.equal(quick(tensorlogic.linear)(x, w, b, res, "relu"), y)
        assert (
            quick(tensorlogic.linear)(x.float(), w.float(), b.float(), res.float(), "relu") is None
        )
        assert quick(tensorlogic.linear)(x.cpu(), w.cpu(), b.cpu(), res.cpu(), "relu") is None


def test_bound_launchers_are_plans() -> None:
    x, w, b, res = tensors(torch.float16)
    op = tensorlogic.core.op.OPS["linear"]
    for id in ("triton.tiled", "cublaslt.epilogue"):
        with tensorlogic.policy(force=id) as chosen:
            bound = bound_call.bind(op, [x, w, b, res, "relu", False], chosen, False)
        assert bound.choice.candidate.id == id
        assert call_extension.is_plan(bound.launch), id


def test_less_aligned_tensors_are_served_right() -> None:
    x, w, b, res = tensors(torch.float16)
    moved = torch.empty(N * N + 1, device="cuda", dtype=torch.float16)[1:].view(N, N).copy_(x)
    with torch.no_grad(), tensorlogic.policy(force="triton.tiled"):
        expected = tensorlogic.linear(x, w, b, res, "relu")
        for _ in range(3):
            y = tensorlogic.linear(moved, w, b, res, "relu")
            torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)


def test_a_side_stream_is_used_and_memory_belongs_to_it() -> None:
    x, w, b, res = tensors(torch.float16)
    with torch.no_grad(), tensorlogic.policy(force="triton.tiled"):
        expected = tensorlogic.linear(x, w, b, res, "relu")
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            y = tensorlogic.linear(x, w, b, res, "relu")
            assert not side.query()
        torch.cuda.current_stream().wait_stream(side)
        torch.testing.assert_close(y, expected, rtol=0, atol=0)


def test_calls_are_captured_and_replayed() -> None:
    x, w, b, res = tensors(torch.float16)
    with torch.no_grad():
        for _ in range(3):
            tensorlogic.linear_residual_relu(x, w, b, res)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = tensorlogic.linear_residual_relu(x, w, b, res)
            s = tensorlogic.sum(tensorlogic.add_relu(y, res))
        x.mul_(-0.5)
        graph.replay()
        torch.cuda.synchronize()
        expected = torch.relu(F.linear(x.double(), w.double(), b.double()) + res)
        torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)
        total = torch.relu(y.double() + res.double()).sum()
        torch.testing.assert_close(s.double(), total, rtol=1e-2, atol=1.0)
        again = tensorlogic.linear_residual_relu(x, w, b, res)
        torch.testing.assert_close(again.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_recorded_gradients(dtype: torch.dtype) -> None:
    given = tensors(dtype)
    ours = [t.clone().requires_grad_() for t in given]
    exact = [t.double().requires_grad_() for t in given]
    torch.relu(F.linear(*exact[:3]) + exact[3]).sum().backward()
    for _ in range(3):
        for t in ours:
            t.grad = None
        tensorlogic.linear_residual_relu(*ours).sum().backward()
        for t, e in zip(ours, exact, strict=True):
            assert t.grad is not None
            assert e.grad is not None
            gap = (t.grad.double() - e.grad).norm() / e.grad.norm()
            assert gap < (2e-2 if dtype == torch.float16 else 3e-3)


def test_threads_and_no_leak() -> None:
    x, w, b, res = tensors(torch.float16)
    wrong: list[Any] = []
    with torch.no_grad():
        expected = tensorlogic.linear_residual_relu(x, w, b, res)

        def work() -> None:
            with torch.no_grad(), tensorlogic.policy(tune="off"):
                for _ in range(200):
                    if not torch.equal(tensorlogic.linear_residual_relu(x, w, b, res), expected):
                        wrong.append(1)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(200):
            tensorlogic.linear_residual_relu(x, w, b, res)
        assert torch.cuda.memory_allocated() == before


def test_running_out_of_memory_is_said_as_before() -> None:
    empty = launch_plan.empty(torch.device("cuda"))
    with pytest.raises(torch.OutOfMemoryError):
        empty((1 << 40,), (1,), torch.float32)


def test_a_key_under_study_is_counted_by_its_plan() -> None:
    """Calls in C count towards the study that they pay for, which ends with a plan."""
    a, b = (torch.randn(96, 104, device="cuda", dtype=torch.float16) for _ in range(2))
    expected = torch.relu(a + b)
    until = time.perf_counter() + 20
    with torch.no_grad(), tensorlogic.policy(tune="auto"):
        while time.perf_counter() < until:
            for _ in range(500):
                y = tensorlogic.add_relu(a, b)
            watches = [w for w in background_tuning._WATCHES.values() if "96,104" in w.key.text]
            if not watches or any(w.used_s > 0 for w in watches):
                break  # a plan is there, or calls have paid for a step
        torch.testing.assert_close(y, expected)
    assert not watches or max(w.used_s for w in watches) > 0


def test_recorded_calls_are_c_and_backward_finds_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b, res = tensors(torch.float16)
    x.requires_grad_()
    with tensorlogic.policy(force="triton.tiled", tune="off"):
        first = tensorlogic.linear(x, w, b, res, "relu")
        monkeypatch.setattr(autograd.Recording, "forward", None)
        again = quick(tensorlogic.linear)(x, w, b, res, "relu")
        assert again.grad_fn.name() == "RecordedBackward"
        torch.testing.assert_close(again, first, rtol=0, atol=0)
        (g,) = torch.autograd.grad(again.sum(), x)
        exact = (first > 0).double() @ w.double()
        assert (g.double() - exact).norm() < 1e-2 * exact.norm()
