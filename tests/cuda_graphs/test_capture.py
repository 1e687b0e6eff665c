"""capture: each call's work done once, outputs kept, kinds bounded, gradients right; the graphs themselves are CUDA's.

Where there is no GPU, a tape that records a Python call stands for the CUDA graph, so that everything around it is tested.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.core.weight_cache import CACHE
from tensorlogic.cuda_graphs import capture

from ..support.graphs import CUDA, DEVICE, PythonTape, captured, gradients, net


@torch.no_grad()
def test_outputs_are_kept_across_replays() -> None:
    model, xs = net(), [torch.randn(3, 4, device=DEVICE) for _ in range(6)]
    fast = captured(model)
    outs = [fast(x) for x in xs]
    assert fast.graphs == 1
    for x, out in zip(xs, outs, strict=True):
        torch.testing.assert_close(out, model(x))


@torch.no_grad()
def test_unsafe_views_are_the_graphs_own() -> None:
    model, x = net(), torch.randn(3, 4, device=DEVICE)
    fast = captured(model, unsafe_views=True)
    outs = [fast(x) for _ in range(5)]
    assert outs[3].data_ptr() == outs[4].data_ptr()
    torch.testing.assert_close(outs[4], model(x))


@torch.no_grad()
def test_every_call_does_its_work_once() -> None:
    total = torch.zeros((), device=DEVICE)

    def step(x: Tensor) -> Tensor:
        total.add_(x.sum())
        return total * 1

    fast = captured(step)
    for n in range(1, 7):
        assert fast(torch.ones(2, device=DEVICE)).item() == 2 * n
    assert total.item() == 12
    assert fast.graphs == 1


@torch.no_grad()
def test_least_recently_used_kinds_go() -> None:
    model = net()
    fast = captured(model, max_graphs=2)
    for rows in (1, 2, 1, 2, 1, 2):
        fast(torch.ones(rows, 4, device=DEVICE))
    assert fast.graphs == 2
    for _ in range(3):
        x = torch.randn(3, 4, device=DEVICE)
        torch.testing.assert_close(fast(x), model(x))
    assert len(fast.entries) == 2
    rows = [key[1][0][0][0] for key in fast.entries]
    assert rows == [2, 3]


@torch.no_grad()
def test_batches_are_filled_to_buckets_and_cut_again() -> None:
    model = net()
    fast = captured(model, batch=0, buckets=(4, 8))
    for rows in (1, 3, 4, 2, 4, 7, 8, 5):
        x = torch.randn(rows, 4, device=DEVICE)
        out = fast(x)
        assert out.shape == (rows, 4)
        torch.testing.assert_close(out, model(x))
    assert len(fast.entries) == 2
    x = torch.randn(9, 4, device=DEVICE)  # larger than any bucket: of its own size
    torch.testing.assert_close(fast(x), model(x))


@torch.no_grad()
def test_modes_values_and_structures_are_kinds_of_their_own() -> None:
    def fn(x: Tensor, factor: float = 1.0, rest: Any = None) -> Any:
        return {"y": x * factor, "more": (x + 1, "text", rest)}

    fast = captured(fn)
    x = torch.randn(3, device=DEVICE)
    for _ in range(4):
        for factor in (1.0, 2.0):
            out = fast(x, factor, rest=None)
            torch.testing.assert_close(out["y"], x * factor)
            torch.testing.assert_close(out["more"][0], x + 1)
            assert out["more"][1:] == ("text", None)
    assert fast.graphs == 2


@pytest.mark.skipif(not CUDA, reason="only a real capture refuses what Python needs from the GPU")
@torch.no_grad()
def test_data_dependent_functions_run_as_they_are() -> None:
    fast = captured(lambda x: x * 2 if x.sum().item() > 0 else x - 1)
    for _ in range(5):
        assert torch.equal(fast(torch.ones(3, device=DEVICE)), torch.full((3,), 2.0, device=DEVICE))
    assert fast.reason
    assert fast.graphs == 0
    torch.randn(3, device=DEVICE)  # the failed capture left nothing behind


@torch.no_grad()
def test_a_failed_capture_says_why_and_runs_the_function() -> None:
    def fn(x: Tensor) -> Tensor:
        return x  # an output that is an input cannot be replayed

    fast = captured(fn)
    x = torch.ones(3, device=DEVICE)
    for _ in range(4):
        assert fast(x) is x
    assert "input" in str(fast.reason)


@torch.no_grad()
def test_a_recording_that_failed_is_tried_once_more() -> None:
    """What broke it may be somebody else's, such as a graph that is destroyed meanwhile."""
    tries: list[int] = []

    class Broken(PythonTape):
        failing = 1

        def record(self, fn: Callable[[], Any]) -> Any:
            tries.append(1)
            if len(tries) <= self.failing:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().record(fn)

    class Hopeless(Broken):
        failing = 9

    for tape, graphs, count in ((Broken, 1, 2), (Hopeless, 0, 2)):
        tries.clear()
        model, x = net(), torch.randn(3, 4, device=DEVICE)
        fast = tensorlogic.capture(model)
        fast.tape = tape
        for i in range(capture.EAGER_CALLS + capture.PAUSE):
            torch.testing.assert_close(fast(x), model(x))
            assert (fast.reason is None) == (i < capture.EAGER_CALLS)
        for _ in range(2 * (capture.EAGER_CALLS + capture.PAUSE)):
            torch.testing.assert_close(fast(x), model(x))
        assert (fast.graphs, len(tries), fast.reason is None) == (graphs, count, graphs == 1)


@torch.no_grad()
def test_a_call_on_another_device_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fast = tensorlogic.capture(lambda x: x + 1)
    for _ in range(3):
        assert torch.equal(fast(torch.ones(2)), torch.full((2,), 2.0))
        assert "cpu" in str(fast.reason)
    fast.tape = PythonTape  # a device that can
    for _ in range(4):
        assert torch.equal(fast(torch.ones(2)), torch.full((2,), 2.0))
    assert (fast.graphs, fast.reason) == (1, None)


@pytest.mark.skipif(CUDA, reason="the reason where there is no GPU")
def test_without_a_gpu_the_function_runs_and_the_reason_is_told() -> None:
    model = net()
    fast = tensorlogic.capture(model)
    x = torch.ones(2, 4)
    assert fast(x).shape == (2, 4)
    assert "cpu" in str(fast.reason)
    assert "packed weights" in str(fast.reason)
    assert (fast.graphs, fast.nbytes) == (0, 0)
    weight = next(model.parameters())
    CACHE.get(weight, "tiles", Tensor.double, lambda t: t.nbytes)  # as a call that packs would
    assert fast.nbytes == 2 * weight.nbytes


@gradients
def test_gradients_forward_and_backward() -> None:
    model = net()
    twin = net()
    twin.load_state_dict(model.state_dict())
    fast = captured(model)
    for i in range(6):
        x = torch.randn(3, 4, device=DEVICE, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        (fast(x) * (i + 1)).square().sum().backward()
        (twin(y) * (i + 1)).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)  # they accumulate
    assert fast.graphs == 1


@gradients
def test_two_forwards_before_backward() -> None:
    model, fast = net(), None
    fast = captured(model)
    for _ in range(5):
        a, b = torch.randn(3, 4, device=DEVICE), torch.randn(3, 4, device=DEVICE)
        model.zero_grad()
        (fast(a).square().sum() + fast(b).square().sum()).backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        (model(a).square().sum() + model(b).square().sum()).backward()
        for g, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad)


@gradients
def test_closures_keep_their_gradients() -> None:
    model = net()
    fast = captured(lambda x: model(x).square().sum())
    for _ in range(5):
        x = torch.randn(3, 4, device=DEVICE)
        model.zero_grad()
        fast(x).backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        for g, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad)
    assert fast.graphs == 1


def test_a_whole_training_step() -> None:
    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())

    def stepper(m: nn.Module) -> Callable[[Tensor], Tensor]:
        opt = torch.optim.AdamW(m.parameters(), lr=1e-2, capturable=CUDA)

        def step(x: Tensor) -> Tensor:
            opt.zero_grad(set_to_none=True)
            loss = m(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        return step

    fast, plain = captured(stepper(model)), stepper(twin)
    for _ in range(8):
        x = torch.randn(3, 4, device=DEVICE)
        torch.testing.assert_close(fast(x), plain(x))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert fast.reason is None


@torch.no_grad()
def test_random_numbers_go_on() -> None:
    drop = nn.Dropout(0.5)
    fast = captured(drop)
    x = torch.ones(256, device=DEVICE)
    torch.manual_seed(3)
    outs = [fast(x) for _ in range(6)]
    assert len({tuple(o.tolist()) for o in outs}) == 6
    torch.manual_seed(3)
    for out in outs:
        torch.testing.assert_close(out, drop(x))


@torch.no_grad()
def test_replaced_and_moved_parameters_are_followed() -> None:
    model = net()
    fast = captured(model)
    x = torch.randn(3, 4, device=DEVICE)

    def follows() -> None:
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x))

    follows()
    model[0].weight.mul_(2)
    follows()
    model[0].weight.data = torch.randn(8, 4, device=DEVICE)
    follows()
    model[2] = nn.Linear(8, 4, device=DEVICE)
    follows()
    model[1].register_forward_hook(lambda m, a, out: out + 1)
    follows()


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="fn is int"):
        tensorlogic.capture(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_graphs is 0"):
        tensorlogic.capture(net(), max_graphs=0)
    with pytest.raises(ValueError, match="batch"):
        tensorlogic.capture(net(), buckets=[4])


@torch.no_grad()
def test_inputs_that_are_written_to() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    fast = captured(fn)
    for n in range(5):
        a, b = torch.randn(3, device=DEVICE), torch.randn(3, device=DEVICE)
        c, d = a.clone(), b.clone()
        torch.testing.assert_close(fast(a, b), fn(c, d))
        if CUDA or n != 2:  # a tape of Python has done the third call's work while recording
            torch.testing.assert_close(a, c)
    assert fast.graphs == 1
    a = torch.ones(3, device=DEVICE)
    assert torch.equal(fast(a, a), torch.full((3,), 4.0, device=DEVICE))  # one tensor given twice


@torch.no_grad()
def test_threads_get_their_own_results() -> None:
    model = net()
    fast = captured(model)
    x = torch.zeros(3, 4, device=DEVICE)
    for _ in range(3):
        fast(x)

    def serve(n: int) -> bool:
        x = torch.full((3, 4), float(n), device=DEVICE)
        expected = model(x)
        return all(torch.allclose(fast(x), expected) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(serve, range(4)))


def test_one_thread_records_and_others_are_served_meanwhile() -> None:
    """Two recordings at once leave a CUDA graph behind that aborts the process when it is destroyed."""
    begun, go = threading.Event(), threading.Event()
    count = []

    class Slow(PythonTape):
        def record(self, fn: Callable[[], Any]) -> Any:
            count.append(1)
            begun.set()
            assert go.wait(30)
            return super().record(fn)

    fast, x = tensorlogic.capture(lambda v: v + 1), torch.zeros(3, device=DEVICE)
    fast.tape = Slow
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        for _ in range(capture.EAGER_CALLS):
            fast(x)
        other = pool.submit(torch.no_grad()(fast), x)
        assert begun.wait(30)
        assert torch.equal(fast(x), x + 1)
        go.set()
        assert torch.equal(other.result(), x + 1)
        assert torch.equal(fast(x + 1), x + 2)
    assert (len(count), fast.graphs) == (1, 1)
