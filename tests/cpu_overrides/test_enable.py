"""enable() and disable(): every half-precision product repaired, forward and backward, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.cpu_overrides import enable, overrides
from tensorlogic.native import hook_extension
from tensorlogic.native import hook_ops as native_hook_ops

from ..support.helpers import (
    HALF,
    error,
    r,  # the fixture
)
from ..support.helpers import enabled as enabled  # a fixture
from ..support.helpers import served as served  # a fixture

# name -> arguments and named arguments; the call is torch.<name>
CALLS: dict[str, Callable[[torch.dtype], tuple[tuple[Tensor, ...], dict[str, Any]]]] = {
    "mm": lambda d: ((r(33, 64, dtype=d), r(64, 40, dtype=d)), {}),
    "mm transposed": lambda d: ((r(64, 33, dtype=d).t(), r(40, 64, dtype=d).t()), {}),
    "mm strided": lambda d: ((r(66, 128, dtype=d)[::2, ::2], r(64, 80, dtype=d)[:, ::2]), {}),
    "mm expanded": lambda d: ((r(1, 64, dtype=d).expand(33, 64), r(64, 40, dtype=d)), {}),
    "bmm": lambda d: ((r(3, 17, 32, dtype=d), r(3, 32, 24, dtype=d)), {}),
    "bmm transposed": lambda d: ((r(3, 32, 17, dtype=d).mT, r(3, 24, 32, dtype=d).mT), {}),
    "mv": lambda d: ((r(300, 128, dtype=d), r(128, dtype=d)), {}),
    "mv transposed": lambda d: ((r(128, 300, dtype=d).t(), r(128, dtype=d)), {}),
    "addmm": lambda d: ((r(40, dtype=d), r(33, 64, dtype=d), r(64, 40, dtype=d)), {}),
    "addmm matrix": lambda d: (
        (r(33, 40, dtype=d), r(33, 64, dtype=d), r(40, 64, dtype=d).t()),
        {},
    ),
    "addmm column": lambda d: ((r(33, 1, dtype=d), r(33, 64, dtype=d), r(64, 40, dtype=d)), {}),
    "addmm scaled": lambda d: (
        (r(33, 40, dtype=d), r(33, 64, dtype=d), r(64, 40, dtype=d)),
        {"beta": 0.5, "alpha": -2},
    ),
    "baddbmm": lambda d: (
        (r(3, 17, 24, dtype=d), r(3, 17, 32, dtype=d), r(3, 32, 24, dtype=d)),
        {"beta": 0.5},
    ),
    "addmv": lambda d: ((r(300, dtype=d), r(300, 128, dtype=d), r(128, dtype=d)), {}),
    "addmv scaled": lambda d: (
        (r(300, dtype=d), r(300, 128, dtype=d), r(128, dtype=d)),
        {"beta": 2, "alpha": 0.25},
    ),
    "addbmm": lambda d: ((r(17, 24, dtype=d), r(3, 17, 32, dtype=d), r(3, 32, 24, dtype=d)), {}),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", CALLS)
def test_products_lie_within_rounding_in_every_form(
    name: str, dtype: torch.dtype, enabled: None
) -> None:
    fn = getattr(torch, name.split()[0])
    args, named = CALLS[name](dtype)
    ref = fn(*(a.double() for a in args), **named)
    with native_hook_ops.suspended():
        own = fn(*args, **named)
    y = fn(*args, **named)
    assert (y.shape, y.dtype, y.stride()) == (own.shape, own.dtype, own.stride())
    budget = max(1.05 * error(own, ref), 1e-6)
    assert error(y, ref) <= budget
    out = torch.full_like(own, float("nan"))
    assert fn(*args, **named, out=out) is out
    assert error(out, ref) <= budget
    grown = torch.empty(0, dtype=dtype)
    assert error(fn(*args, **named, out=grown), ref) <= budget
    if name.startswith("add") or name.startswith("badd"):
        c = args[0].expand(own.shape).clone()
        with native_hook_ops.suspended():
            own = getattr(c.clone(), fn.__name__ + "_")(*args[1:], **named)
        budget = max(1.05 * error(own, ref), 1e-6)
        assert getattr(c, fn.__name__ + "_")(*args[1:], **named) is c
        assert error(c, ref) <= budget


def test_beta_zero_ignores_what_was_there(enabled: None) -> None:
    a, b = r(33, 64), r(64, 40)
    c = torch.full((33, 40), float("nan"), dtype=torch.float16)
    assert torch.equal(torch.addmm(c, a, b, beta=0), torch.mm(a, b))
    assert torch.addmv(c[:, 0], a, b[:, 0], beta=0).isfinite().all()
    assert torch.baddbmm(c[None], a[None], b[None], beta=0).isfinite().all()


def test_an_output_may_be_an_input(enabled: None) -> None:
    a, b = r(64, 64), r(64, 64)
    ref = a.double() @ b.double()
    assert error(torch.mm(a, b, out=a), ref) < 1e-3


def test_sums_that_leave_float16_on_the_way_stay_finite(enabled: None) -> None:
    a = torch.full((32, 512), 200.0, dtype=torch.float16)
    b = torch.full((512, 32), 200.0, dtype=torch.float16)
    b[256:] = -200.0
    assert torch.equal(a @ b, torch.zeros(32, 32, dtype=torch.float16))


BAD: dict[str, Callable[[], Any]] = {
    "inner sizes": lambda: r(64, 64) @ r(32, 64),
    "dtypes": lambda: torch.mm(r(64, 64), r(64, 64).float()),
    "bmm batches": lambda: torch.bmm(r(2, 64, 64), r(3, 64, 64)),
    "bmm dimensions": lambda: torch.bmm(r(64, 64), r(64, 64)),
    "addmm shape": lambda: torch.addmm(r(3), r(64, 64), r(64, 64)),
    "out dtype": lambda: torch.mm(r(64, 64), r(64, 64), out=torch.empty(64, 64)),
    "in place shape": lambda: r(1, 64).addmm_(r(64, 64), r(64, 64)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_pytorchs_own_error(name: str, enabled: None) -> None:
    with native_hook_ops.suspended(), pytest.raises(RuntimeError) as own:
        BAD[name]()
    with pytest.raises(RuntimeError) as ours:
        BAD[name]()
    assert str(ours.value) == str(own.value)


@pytest.mark.parametrize("dtype", HALF)
def test_empty_and_tiny_products_are_pytorchs(
    dtype: torch.dtype, served: list[str], enabled: None
) -> None:
    for m, k, n in ((0, 64, 64), (64, 0, 64), (64, 64, 0), (2, 3, 4)):
        assert torch.mm(r(m, k, dtype=dtype), r(k, n, dtype=dtype)).shape == (m, n)
    assert served == []


def test_guards_remember_what_is_pytorchs_until_plans_change(served: list[str]) -> None:
    if native_hook_ops.available() is not None:
        pytest.skip(str(native_hook_ops.available()))
    tensorlogic.enable()
    hook_extension.count_policies(
        -1
    )  # the policy of all tests: under one the guards remember nothing
    asked: list[str] = []
    a, b = r(40, 64), r(64, 40)
    try:
        with tensorlogic.policy(force="torch.eager"):
            a @ b
            a @ b  # a policy is in force: the guards ask each time
        assert served == ["matmul"]
        chosen = overrides._launcher
        overrides._launcher = lambda *args: asked.append("asked") or (None, True)  # type: ignore[assignment]
        policy.forget_entries()
        for _ in range(3):
            a @ b
        assert asked == ["asked"]
        policy.ROOT.entries.clear()  # even without the entry, the guard knows
        a @ b
        assert asked == ["asked"]
        policy.forget_entries()
        a @ b
        a[:, ::2] @ b[::2]  # other strides are another key
        assert asked == ["asked"] * 3
    finally:
        overrides._launcher = chosen
        hook_extension.count_policies(1)
        policy.forget_entries()
        tensorlogic.disable()


def test_other_dtypes_keep_their_bits_and_their_kernels(served: list[str], enabled: None) -> None:
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.int32):
        a, b = (10 * r(33, 64)).to(dtype), (10 * r(64, 40)).to(dtype)
        with native_hook_ops.suspended():
            own = a @ b
        assert torch.equal(a @ b, own)
    assert served == []


@pytest.mark.usefixtures("no_f16")
def test_disable_restores_pytorch_bit_for_bit(enabled: None) -> None:
    a, b = r(65, 300), r(300, 64)
    with native_hook_ops.suspended():
        own = a @ b
    tensorlogic.enable()  # again: nothing changes
    first = a @ b
    tensorlogic.disable()
    tensorlogic.disable()
    assert not enable.enabled()
    assert torch.equal(a @ b, own)
    tensorlogic.enable()
    assert torch.equal(a @ b, first)


@pytest.mark.usefixtures("no_f16")
@pytest.mark.parametrize("which", ["q", "kv", "all"])
def test_attention_over_overlapping_windows(which: str, enabled: None) -> None:
    windows, plain = r(1, 1, 96).unfold(-1, 64, 1), r(1, 1, 33, 64)
    assert windows.stride()[-2:] == (1, 1)
    q = windows if which != "kv" else plain
    k = windows if which != "q" else plain
    leaves = [t.detach().requires_grad_() for t in (q, k, k)]
    wide = [t.detach().double().contiguous().requires_grad_() for t in (q, k, k)]
    y, ref = (F.scaled_dot_product_attention(*ts, is_causal=True) for ts in (leaves, wide))
    assert error(y, ref) < 2e-3
    dy = r(*y.shape)
    grads, wanted = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(ref, wide, dy.double())
    for got, want in zip(grads, wanted, strict=True):
        assert error(got, want) < 1e-2


@pytest.mark.usefixtures("no_f16")
def test_a_convolution_with_an_overlapping_weight_is_laid_out_as_pytorch_has_it(
    enabled: None,
) -> None:
    x, w = r(3, 2, 9, 8), r(100).as_strided((4, 2, 3, 3), (1, 1, 1, 1))
    with native_hook_ops.suspended():
        own = F.conv2d(x, w, padding=1)
    y = F.conv2d(x, w, padding=1)
    assert y.stride() == own.stride()
    assert error(y, F.conv2d(x.double(), w.double().contiguous(), padding=1)) < 1e-3


def test_modes_and_transforms(enabled: None) -> None:
    layer, x = nn.Linear(64, 48).half(), r(32, 64)
    ref = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    with torch.inference_mode():
        assert error(layer(x), ref) < 1e-3
        fresh = r(32, 64)
        assert error(fresh @ fresh.t(), fresh.double() @ fresh.double().t()) < 1e-3
    with torch.autocast("cpu", dtype=torch.float16):
        y = F.linear(x.float(), layer.weight.float(), layer.bias.float())
        assert y.dtype == torch.float16
        assert error(y, ref) < 1e-3
        assert torch.mm(x, x.t(), out=torch.empty(32, 32, dtype=torch.float16)).isfinite().all()
    batched = torch.func.vmap(torch.mm)(r(3, 32, 64), r(3, 64, 16))
    assert error(batched, torch.bmm(r(3, 32, 64).double(), r(3, 64, 16).double())) < 1e-3
    traced = torch.jit.trace(layer, (x,))
    assert error(traced(x), ref) < 1e-3
    with torch.device("cpu"):  # a function mode
        assert error(layer(x), ref) < 1e-3


def test_measuring_sees_pytorch_without_repairs(enabled: None, served: list[str]) -> None:
    from tensorlogic.measure import isolation

    with isolation.preserved(torch.device("cpu")):
        r(64, 64) @ r(64, 64)
    assert served == []
    r(64, 64) @ r(64, 64)
    assert served == ["matmul"]
    with tensorlogic.policy(force="torch.eager"), native_hook_ops.suspended():
        own = r(64, 64) @ r(64, 64)
    with tensorlogic.policy(force="torch.eager"):
        assert torch.equal(r(64, 64) @ r(64, 64), own)


def test_pool_without_hooks_is_refused_before_anything_changes() -> None:
    tensorlogic.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook_extension, "_state", ["absent"])
        with pytest.raises(RuntimeError, match=r"pool=True.*tcmalloc"):
            tensorlogic.enable(pool=True)
    assert not enable.enabled()
