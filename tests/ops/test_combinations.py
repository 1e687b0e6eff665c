"""Features of PyTorch upon each other: each worked alone, these pairs did not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import tensorlogic
from tensorlogic.cpu_overrides import overrides
from tensorlogic.dispatch import self_test
from tensorlogic.native import hook_extension
from tensorlogic.native import hook_ops as native_hook_ops

from ..support.helpers import TABLE, close, leaves


@pytest.mark.parametrize("name", TABLE)
def test_gradients_of_many_vectors_at_once(name: str) -> None:
    """What jacobian(vectorize=True) asks for, cold and warm, after and before a plain backward."""
    ours, theirs, _ = TABLE[name]
    mine, plain = leaves(name), leaves(name)
    dys = torch.randn(3, *theirs(*plain).shape)
    for _ in range(2):
        got = torch.autograd.grad(ours(*mine), mine, dys, is_grads_batched=True)
        want = torch.autograd.grad(theirs(*plain), plain, dys, is_grads_batched=True)
        close(got, want)
        close(
            torch.autograd.grad(ours(*mine), mine, dys[0]),
            torch.autograd.grad(theirs(*plain), plain, dys[0]),
        )


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", TABLE)
def test_traces_with_symbolic_sizes(name: str, mode: str) -> None:
    ours, theirs, _ = TABLE[name]
    given = leaves(name, grad=False)
    graph = make_fx(lambda *t: ours(*t), tracing_mode=mode)(*given)
    close(graph(*given), theirs(*given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_a_residual_without_dimensions(dtype: torch.dtype) -> None:
    """It takes part in no promotion, so the sum stays what autocast makes of the product."""
    x, w, r = torch.randn(3, 8), torch.randn(5, 8), torch.tensor(0.7)
    with torch.autocast("cpu", dtype):
        got, want = tensorlogic.linear(x, w, None, r), F.linear(x, w) + r
        torch.testing.assert_close(got, want)
        assert tensorlogic.linear(x, w, None, torch.ones(5)).dtype is torch.float32
        wide = tensorlogic.linear(x.double(), w.double(), None, r.double())
    assert wide.dtype is torch.float64


@pytest.mark.parametrize("name", ["linear_silu", "layer_norm_linear", "gelu_linear"])
def test_gradients_of_many_vectors_through_more_than_two_dimensions(name: str) -> None:
    ours, theirs, _ = TABLE[name]
    mine, plain = ([torch.randn(2, 3, 6, requires_grad=True), *leaves(name)[1:]] for _ in range(2))
    dys = torch.randn(3, 2, 3, 5)
    with torch.no_grad():
        plain[0].copy_(mine[0])
    close(
        torch.autograd.grad(ours(*mine), mine, dys, is_grads_batched=True),
        torch.autograd.grad(theirs(*plain), plain, dys, is_grads_batched=True),
    )


def test_enabled_gradients_of_many_vectors_refuse_no_candidate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No number may be drawn there: a check has to wait, its candidate is not to blame."""
    self_test.forget()
    x = torch.randn(36, 32).half().requires_grad_()
    tensorlogic.enable()
    try:
        y = x @ torch.randn(32, 32).half()
        torch.autograd.grad(y, x, torch.randn(2, 36, 32).half(), is_grads_batched=True)
    finally:
        tensorlogic.disable()
    assert not caplog.records
    assert not any(self_test._NOTES.known.values())


@pytest.mark.parametrize("hardware", [True, False])
def test_nothing_stands_in_front_of_what_is_fast(
    hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convolutions and attention of float16 where it has hardware; bfloat16 attention elsewhere, once it was seen."""
    if native_hook_ops.available() is not None:
        pytest.skip(str(native_hook_ops.available()))
    asked: list[str] = []

    def spy(name: str, repair: overrides.Repair) -> overrides.Repair:
        return lambda *args, **rest: (asked.append(name), repair(*args, **rest))[1]

    for name, repair in overrides.WIDENED.items():
        monkeypatch.setitem(overrides.WIDENED, name, spy(name, repair))
    monkeypatch.setattr(overrides, "no_float16", lambda: not hardware)
    x, w, q = torch.randn(1, 4, 12, 12), torch.randn(4, 4, 3, 3), torch.randn(1, 2, 40, 16)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    tensorlogic.enable()
    hook_extension.count_policies(
        -1
    )  # the policy of all tests: under one the guards remember nothing
    try:
        with torch.no_grad():
            for _ in range(3):
                F.conv2d(x.half(), w.half())
                F.scaled_dot_product_attention(*[q.half()] * 3)
            known = [] if hardware else ["convolution", attention] * 3
            assert asked == known
            for _ in range(3):
                F.conv2d(x.bfloat16(), w.bfloat16())
                F.scaled_dot_product_attention(*[q.bfloat16()] * 3)
            assert asked == known + [attention] * (not hardware)
    finally:
        hook_extension.count_policies(1)
        hook_extension.forget()
        tensorlogic.disable()
