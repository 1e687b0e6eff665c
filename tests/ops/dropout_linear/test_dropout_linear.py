"""dropout_linear: the share that is dropped, the same mask in backward, reproducible from seeds and generators."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorlogic
from tensorlogic.core import policy as core_policy
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS, Op
from tensorlogic.ops.common.dropout_rng import keep_mask

OP = OPS["dropout_linear"]
IDS = tuple(OP.candidates)
EYE = torch.eye(32)


def usable(x: Tensor, id: str, save: bool = False) -> bool:
    key = OP.key((x, EYE.to(x), None, 0.5, 1, 2, None, save), "forward" if save else "inference")
    return OP.candidates[id].unfit(key) is None


def mask_of(x: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """Which elements of x survive, seen through an identity weight."""
    return tensorlogic.dropout_linear(x, EYE.to(x), None, p=p, generator=generator)


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_scale_and_independence(id: str, p: float) -> None:
    x = torch.ones(256, 32)
    if not usable(x, id):
        pytest.skip(f"{id} does not serve this case")
    with tensorlogic.policy(force=id), torch.no_grad():
        out = mask_of(x, p)
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))
    n = x.numel()
    bound = 5 * (p * (1 - p) / n) ** 0.5
    assert abs(1 - kept.double().mean().item() - p) < bound
    for dim in (0, 1):  # no row or column is special
        share = kept.double().mean(dim)
        assert share.std() < 3 * (p * (1 - p) / x.shape[dim]) ** 0.5
    pairs = (kept[:, 1:] & kept[:, :-1]).double().mean().item()
    assert abs(pairs - (1 - p) ** 2) < 3 * bound


@pytest.mark.parametrize("id", IDS)
def test_reproducible_and_never_the_same_twice(id: str) -> None:
    x = torch.ones(16, 32)
    if not usable(x, id):
        pytest.skip(f"{id} does not serve this case")
    with tensorlogic.policy(force=id), torch.no_grad():
        torch.manual_seed(3)
        first, second = mask_of(x, 0.5), mask_of(x, 0.5)
        torch.manual_seed(3)
        assert torch.equal(mask_of(x, 0.5), first)
        assert not torch.equal(first, second)
        own = torch.Generator().manual_seed(3)
        before = torch.get_rng_state()
        assert torch.equal(mask_of(x, 0.5, own), first)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_backward_uses_the_mask_of_forward(id: str, dtype: torch.dtype) -> None:
    x, w = torch.randn(24, 32).to(dtype), torch.randn(8, 32).to(dtype)
    if not usable(x, id, save=True):
        pytest.skip(f"{id} does not serve this case")
    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    bias = torch.zeros(8, dtype=dtype, requires_grad=True)
    with tensorlogic.policy(force=id):
        torch.manual_seed(7)
        with torch.no_grad():
            kept = mask_of(torch.ones_like(x), 0.25) != 0
        torch.manual_seed(7)
        out = tensorlogic.dropout_linear(leaf, weight, bias, p=0.25)
        dy = torch.randn_like(out)
        dx, dw, db = torch.autograd.grad(out, [leaf, weight, bias], dy)
    dropped = x.double() * kept / 0.75
    close = {"rtol": 1e-2, "atol": 2e-2} if dtype is torch.float16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(out.double(), F.linear(dropped, w.double()), **close)
    torch.testing.assert_close(dx.double(), dy.double() @ w.double() * kept / 0.75, **close)
    torch.testing.assert_close(dw.double(), dy.double().t() @ dropped, **close)
    torch.testing.assert_close(db.double(), dy.double().sum(0), **close)


def test_seeds_are_run_time_values_not_keys() -> None:
    """A thousand draws must not make a thousand warm keys."""
    from tensorlogic.core import policy as core_policy

    core_policy.forget_entries()
    x = torch.ones(4, 32)
    for _ in range(50):
        mask_of(x, 0.5)
    assert sum(len(b) for b in core_policy.current().entries.values()) == 1


def test_states_of_traced_calls_draw_anew() -> None:
    x = torch.ones(64, 32)
    torch._dynamo.reset()
    fn = torch.compile(lambda t: mask_of(t, 0.5), backend="aot_eager", fullgraph=True)
    first, second = fn(x), fn(x)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    third = fn(x)
    torch.manual_seed(1)
    assert torch.equal(fn(x), third)
    leaf = x.clone().requires_grad_()
    out = fn(leaf)
    out.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad != 0, out != 0)


def test_threads_draw_different_masks() -> None:
    x = torch.ones(64, 32)
    seen: list[Tensor] = []
    threads = [threading.Thread(target=lambda: seen.append(mask_of(x, 0.5))) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len({tuple(m.flatten().tolist()) for m in seen}) == 6


def test_the_mask_function_is_uniform_and_depends_on_all_it_should() -> None:
    cpu = torch.device("cpu")
    mask = keep_mask((200, 100), 0.3, 2**61 + 1, 12, cpu)
    assert abs(mask.double().mean().item() - 0.7) < 0.02
    assert torch.equal(mask, keep_mask((200, 100), 0.3, 2**61 + 1, 12, cpu))
    for seed, offset in ((2**61 + 2, 12), (2**61 + 1, 13), (1, 12), (2**61 + 1, 2**40 + 12)):
        assert not torch.equal(mask, keep_mask((200, 100), 0.3, seed, offset, cpu))
    state = torch.tensor([2**61 + 1, 12])
    assert torch.equal(mask, keep_mask((200, 100), 0.3, state[0], state[1], cpu))
    assert torch.equal(mask.flatten()[:50], keep_mask((50,), 0.3, 2**61 + 1, 12, cpu))


@pytest.mark.parametrize("batched", ["x", "weight"])
@pytest.mark.parametrize("own", [False, True])
def test_vmap_draws_as_it_is_told(batched: str, own: bool) -> None:
    x, w = torch.ones(5, 32), torch.eye(32)
    dims = (0, None) if batched == "x" else (None, 0)
    given = (x.expand(3, 5, 32), w) if batched == "x" else (x, w.expand(3, 32, 32))
    generator = torch.Generator() if own else torch.default_generator

    def masks(randomness: str) -> Tensor:
        generator.manual_seed(7)
        passed = generator if own else None
        call = lambda x, w: tensorlogic.dropout_linear(x, w, None, p=0.5, generator=passed)  # noqa: E731
        return torch.func.vmap(call, dims, randomness=randomness)(*given)

    same, different = masks("same"), masks("different")
    assert torch.equal(same[0], same[2])
    assert not torch.equal(different[0], different[2])
    assert set(different.flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(masks("different"), different)
    with pytest.raises(RuntimeError, match="randomness"):
        masks("error")


def test_transformed_gradients_have_the_mask_of_the_output() -> None:
    x, w = torch.ones(6, 32), torch.eye(32)
    call = lambda x: tensorlogic.dropout_linear(x, w, None, p=0.5)  # noqa: E731
    out, back = torch.func.vjp(call, x)
    assert torch.equal(back(torch.ones(6, 32))[0], out)
    with pytest.raises(ValueError, match="last dimension must be 32"):
        torch.func.vmap(call, randomness="different")(torch.ones(3, 5, 31))


def test_double_backward_of_eager() -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    with tensorlogic.policy(force=EAGER):
        out = tensorlogic.dropout_linear(x, w, None, p=0.5)
        (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(dx.sum(), w)
    assert again.abs().sum() > 0


@pytest.mark.parametrize("id", IDS)
def test_the_registered_op_returns_the_mask_it_declares(id: str) -> None:
    x, w = torch.randn(6, 32), torch.randn(4, 32)
    with tensorlogic.policy(force=id):
        args = (x, w, None, 0.25, 1, 2, torch.tensor([3, 4]), True)
        y, mask = torch.ops.tensorlogic.dropout_linear(*args)
    assert mask.shape == x.shape
    expected = F.linear(x * mask / 0.75, w)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_keys_that_captured_calls_meet_are_measured_with_it(
    training: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured call is PyTorch's dropout and, recorded, our linear, whose keys tune would not meet otherwise."""

    def met(fn: Callable[..., Tensor]) -> dict[str, Key]:
        seen: dict[str, Key] = {}

        def observe(op: Op, key: Key, device: torch.device) -> None:
            seen[op.name] = replace(key, device="cuda")

        policy = replace(core_policy.current(), tune="off", observer=observe, entries={})
        x = torch.randn(2, 3, 16).half().requires_grad_(training)
        weight = torch.randn(4, 16).half().requires_grad_(training)
        with core_policy.use(policy), torch.set_grad_enabled(training):
            out = fn(x, weight, torch.randn(4).half() if bias else None)
            if training:
                out.sum().backward()
        return seen

    def fn(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return tensorlogic.dropout_linear(x, w, b, 0.5)

    fused = met(fn)
    monkeypatch.setattr("tensorlogic.ops.dropout_linear.capturing", lambda device: True)
    captured = met(fn)
    assert len(captured) == (2 if training else 0)
    twins = [twin for name, key in fused.items() for twin in OPS[name].twins(key)]
    keys = [key for op, key in twins if op.name.startswith("linear")]
    assert keys == list(captured.values())
    for op, key in twins:
        assert op.name == key.op
