"""matmul's gradients as two products, and what follows a bare product, against float64: on a GPU, else in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic

from ...support.triton import DEVICE
from ...support.triton import close_to_largest as close
from ...support.triton import nan_filled as poisoned
from ...support.triton import randn as rand

from tensorlogic.dispatch import candidate_loading  # isort: skip
from tensorlogic.core.op import OPS  # isort: skip
from tensorlogic.kernels.gemm import bind

from tensorlogic.kernels.elementwise import epilogue_pass  # isort: skip
from tensorlogic.core.activations import activate  # isort: skip
from tensorlogic.ops.linear import cublaslt as linear_cublaslt  # isort: skip
from tensorlogic.ops.linear_batch_norm_relu import cublaslt as linear_batch_norm_relu_cublaslt  # isort: skip
from tensorlogic.core.key import Key  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
candidate_loading.ready(DEVICE.type)

FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "matrices": ((9, 20), (20, 33)),
    "rows of a batch": ((2, 3, 9, 20), (20, 33)),
    "a batch": ((3, 9, 20), (3, 20, 17)),
    "two batch dimensions": ((2, 2, 9, 20), (2, 2, 20, 17)),
    "a batch of one": ((1, 9, 20), (1, 20, 17)),
    "one column": ((9, 20), (20, 1)),
}


def laid(x: torch.Tensor, turned: bool) -> torch.Tensor:
    return x.mT.contiguous().mT if turned else x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("turned", ["neither", "a", "b", "dy"])
@pytest.mark.parametrize("needs", ["ab", "a", "b"])
def test_gradients_of_matmul(form: str, turned: str, needs: str) -> None:
    first, second = FORMS[form]
    a, b = (laid(rand(*s, dtype="f32"), turned == n) for s, n in ((first, "a"), (second, "b")))
    wide = [t.double().requires_grad_(n in needs) for t, n in ((a, "a"), (b, "b"))]
    a.requires_grad_("a" in needs)
    b.requires_grad_("b" in needs)
    y = wide[0] @ wide[1]
    dy = laid(torch.randn_like(y), turned == "dy")
    with tensorlogic.policy(tune="off", force={"matmul_backward": "triton.products"}):
        apart = form == "rows of a batch" and turned in ("a", "dy")  # not evenly: PyTorch's own
        assert served(a, b, dy.float()) != apart
        out = tensorlogic.matmul(a, b)
        found = torch.autograd.grad(out, [t for t in (a, b) if t.requires_grad], dy.float())
    want = torch.autograd.grad(y, [t for t in wide if t.requires_grad], dy)
    for ours, exact in zip(found, want, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-4, rtol=1e-4)


def served(a: torch.Tensor, b: torch.Tensor, dy: torch.Tensor) -> bool:
    """The candidate takes the key that backward will meet."""
    op = OPS["matmul_backward"]
    key = op.key((dy, a.detach(), b.detach(), None, "none", "11"), "backward")
    return op.candidates["triton.products"].unfit(key) is None


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_gradients_of_matmul_behind_an_activation(activation: str) -> None:
    a, b = rand(2, 9, 20, dtype="f32").requires_grad_(), rand(20, 33, dtype="f32").requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (a, b)]
    y = activate(wide[0] @ wide[1], activation)
    dy = torch.randn_like(y)
    with tensorlogic.policy(tune="off", force={"matmul_backward": "triton.products"}):
        found = torch.autograd.grad(tensorlogic.matmul(a, b, activation), (a, b), dy.float())
    for ours, exact in zip(found, torch.autograd.grad(y, wide, dy), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-4, rtol=1e-4)


def test_which_gradients_are_left_to_pytorch() -> None:
    op = OPS["matmul_backward"]

    def said(dy: Any, a: Any, b: Any, kept: Any = None, activation: str = "none") -> str:
        key = op.key((dy, a, b, kept, activation, "11"), "backward")
        return str(op.candidates["triton.products"].unfit(key))

    one = rand(3, 4, 5)
    assert "broadcast" in said(rand(3, 4, 6), rand(1, 4, 5), rand(3, 5, 6))
    assert "vector" in said(rand(6), rand(5), rand(5, 6))
    assert "empty" in said(rand(0, 6), rand(0, 5), rand(5, 6))
    assert "mixed" in said(rand(4, 6, dtype="f32"), rand(4, 5), rand(5, 6))
    assert "not contiguous" in said(rand(6, 4).t(), rand(4, 5), rand(5, 6), rand(4, 6), "relu")
    uneven = rand(3, 2, 8, 5)[:, :, :4][:, :, ::2]
    assert "evenly" in said(rand(3, 2, 2, 6), uneven.transpose(0, 1)[:2, :3].transpose(0, 1), one.new_ones(5, 6))  # fmt: skip


FINISH = {"BLOCK_R": 4, "BLOCK_C": 32, "num_warps": 4}


@pytest.mark.parametrize("kind", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("given", ["bias", "residual", "bias residual", ""])
@pytest.mark.parametrize("kept", [False, True])
def test_what_follows_a_product(kind: str, given: str, kept: bool) -> None:
    for m, n in ((1, 5), (7, 16), (33, 37)):
        z = poisoned(m + 1, n, dtype="f32")
        z[:m] = rand(m, n, dtype="f32")
        bias = rand(n, dtype="f32") if "bias" in given else None
        residual = rand(n, m, dtype="f32").t() if "residual" in given else None
        before = z[:m].double()
        for more in (bias, residual):
            before = before if more is None else before + more.double()
        for dtype, apart in (("f32", False), ("f32", True), ("f16", True)):
            y, held, source = (poisoned(m + 1, n, dtype=d) for d in (dtype, dtype, "f32"))
            source[:m] = z[:m]
            y, held = (y, held) if apart else (source, source) if not kept else (y, source)
            dtypes = {"z": "f32", "bias": bias is not None and "f32", "residual": residual is not None and "f32", "y": dtype, "kept": kept and dtype}  # fmt: skip
            strides = (0, 0) if residual is None else residual.stride()
            run = epilogue_pass.finish_launcher(
                m, n, {name: kind or None for name, kind in dtypes.items()}, strides, kind, FINISH, DEVICE, 4
            )  # fmt: skip
            given_ = (source[:m], bias, residual, y[:m], held[:m] if kept else None)
            assert run(*(t for t in given_ if t is not None))
            close(y[:m], activate(before, kind), dtype)
            assert y[m].isnan().all()
            if kept:
                close(held[:m], before, dtype)
                assert held[m].isnan().all()


def launched(op: str, key: Key, *args: Any) -> tuple[Tensor, ...]:
    """What `cublaslt.columns` gives, its product by tiles of ours, whatever the size."""
    columns = (linear_cublaslt if op == "linear" else linear_batch_norm_relu_cublaslt).columns
    plan = columns(key, "cublaslt")
    assert not isinstance(plan, str), plan
    ours = [
        replace(p, engine="triton") if isinstance(p, bind.Product) else p for p in plan.products
    ]
    steps = tuple(step.aligned(2) for step in ours)
    config = {"products": [step.configs()[0] for step in steps]}
    return bind.launcher(OPS[op], replace(plan, products=steps), config, DEVICE)(*args)  # type: ignore[return-value]


@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("given", ["bias", "residual", "bias residual"])
@pytest.mark.parametrize("save", [False, True])
def test_linear_by_a_bare_product(activation: str, given: str, save: bool) -> None:
    dtype = "f32"
    x, weight = rand(2, 9, 20, dtype=dtype), rand(33, 40, dtype=dtype)[:, ::2]
    bias = rand(33, dtype=dtype) if "bias" in given else None
    residual = rand(18, 35, dtype=dtype)[:, 1:34].view(2, 9, 33) if "residual" in given else None
    key = OPS["linear"].key((x, weight, bias, residual, activation, save), "forward" if save else "inference")  # fmt: skip
    outs = launched("linear", key, x, weight, bias, residual)
    z = x.double() @ weight.double().t()
    for more in (bias, residual):
        z = z if more is None else z + more.double()
    close(outs[0], activate(z, activation), dtype)
    assert (len(outs) == 2) == (save and activation == "gelu")
    if len(outs) == 2:
        close(outs[1], z, dtype)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_batch_norm_by_a_bare_product(dtype: str, given: bool, save: bool) -> None:
    x, weight, mean = rand(2, 9, 20, dtype=dtype), rand(33, 20, dtype=dtype), rand(33)
    var = rand(33, dtype="f32").abs() + 0.2
    bias, gamma, beta = (rand(33, dtype=d) if given else None for d in (dtype, "f16", "f16"))
    op = OPS["linear_batch_norm_relu"]
    args = (x, weight, bias, mean, var, gamma, beta)
    key = op.key((*args, 1e-5, False, 0.1, save), "forward" if save else "inference")
    outs = launched(op.name, key, *args)
    z = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    y = (z - mean.double()) * (var.double() + 1e-5).rsqrt()
    y = y * (1.0 if gamma is None else gamma.double()) + (0.0 if beta is None else beta.double())
    close(outs[0], torch.relu(y), dtype)
    assert len(outs) == 1 + save
    if save:
        close(outs[1], z, dtype)


def test_what_a_bare_product_is_not_for() -> None:
    op = OPS["linear"]

    def said(dtype: str, bias: Any, activation: str) -> str:
        args = (rand(9, 20, dtype=dtype), rand(33, 20, dtype=dtype), bias, None, activation, False)
        return str(linear_cublaslt.columns(op.key(args, "inference"), "cublaslt"))

    assert "16-bit" in said("f16", rand(33), "silu")
    assert "nothing follows" in said("f32", None, "none")
    assert "strided" in said("f32", rand(66, dtype="f32")[::2], "none")
    assert "mixed" in said("f32", rand(33), "none")


@pytest.mark.parametrize(
    ("left", "right"),
    [((1,), (8,)), ((1, 1), (8,)), ((8,), (1,)), ((2, 3), ()), ((), (3,)), ((1, 2), (2, 1)), ((2, 1), (1, 3))],
)  # fmt: skip
def test_batch_dimensions_broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """What stands for several matrices is served as PyTorch would, or left to it."""
    op = OPS["matmul"]
    a, b = rand(*left, 9, 20, dtype="f32"), rand(*right, 20, 17, dtype="f32")
    want = a.double() @ b.double()
    key = op.key((a, b, "none", False), "inference")
    candidate = op.candidates["triton.tiled"]
    reason = candidate.unfit(key)
    if {1, 2} <= {*left, *right}:
        assert reason is not None
        assert "evenly" in reason
        return
    assert reason is None
    (y,) = candidate.bind(key, candidate.configs(key)[0], DEVICE)(a, b)
    torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=1e-4)
