"""What a search by random calls in every context found: odd shapes under modes and compilers, rows that see nothing, large logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tensorlogic as t


class Through(TorchDispatchMode):
    """Lets every call pass; ours take the road of registered ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def gradients(fn: Callable[..., Tensor], *given: Any) -> list[Tensor]:
    """The result, and the gradient of its sum for every tensor that asks for one."""
    y = fn(*given)
    leaves = [g for g in given if isinstance(g, Tensor) and g.requires_grad]
    dy = torch.arange(1.0, y.numel() + 1).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def alike(got: list[Tensor], want: list[Tensor]) -> None:
    torch.testing.assert_close(got, want, equal_nan=True)


ZEROS, ONES = torch.zeros(0), torch.ones(0)
NO_OUTPUTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "linear": (lambda x, w: t.linear(x, w, None, None, "gelu"), lambda x, w: F.gelu(F.linear(x, w))),
    "gelu_linear": (
        lambda x, w: t.gelu_linear(x, w, None),
        lambda x, w: F.linear(F.gelu(x, approximate="tanh"), w),
    ),
    "layer_norm_linear": (
        lambda x, w: t.layer_norm_linear(x, None, None, w, None),
        lambda x, w: F.linear(F.layer_norm(x, (4,)), w),
    ),
    "linear_batch_norm_relu": (
        lambda x, w: t.linear_batch_norm_relu(x, w, None, ZEROS, ONES, None, None),
        lambda x, w: torch.relu(F.linear(x, w)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_OUTPUTS)
def test_no_output_features_under_a_mode(name: str) -> None:
    ours, theirs = NO_OUTPUTS[name]
    x = torch.randn(2, 3, 4, requires_grad=True)
    w = torch.randn(0, 4, requires_grad=True)

    def moded(*given: Tensor) -> Tensor:
        with Through():
            return ours(*given)

    alike(gradients(moded, x, w), gradients(theirs, x, w))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.uint8])
def test_sums_of_whole_numbers_over_nothing_are_int64(dtype: torch.dtype) -> None:
    for dim in (None, (), 0):
        assert t.sum(torch.ones((), dtype=dtype), dim).dtype == torch.int64
    assert t.sum(torch.ones(3, dtype=dtype), ()).dtype == torch.int64


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize(("lead", "k"), [((0,), 3), ((2, 0), 3), ((2, 4), 0)])
def test_batch_norm_of_no_rows_and_of_no_columns(lead: tuple[int, ...], k: int, mode: bool) -> None:
    x, w = torch.randn(*lead, k, requires_grad=True), torch.randn(5, k, requires_grad=True)
    b, gamma = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    ours, theirs = ([torch.zeros(5), torch.ones(5)] for _ in range(2))

    def fused(x: Tensor, w: Tensor, b: Tensor, gamma: Tensor) -> Tensor:
        call = (x, w, b, *ours, gamma, None)
        if not mode:
            return t.linear_batch_norm_relu(*call, training=True)
        with Through():
            return t.linear_batch_norm_relu(*call, training=True)

    def separate(x: Tensor, w: Tensor, b: Tensor, gamma: Tensor) -> Tensor:
        z = F.linear(x, w, b)
        bn = F.batch_norm(z.flatten(0, -2), *theirs, gamma, None, True)
        return torch.relu(bn).view(z.shape)

    got, want = gradients(fused, x, w, b, gamma), gradients(separate, x, w, b, gamma)
    some = slice(0, 1) if k == 0 else slice(None)  # equal rows: their gradients are rounding alone
    alike(got[some], want[some])
    alike(ours, theirs)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_with_a_strided_gamma_has_the_gradients_of_a_dense_one(training: bool) -> None:
    x, w = torch.randn(6, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    gamma = torch.randn(5, 2)[:, 0]

    def call(gamma: Tensor) -> Callable[..., Tensor]:
        return lambda x, w: t.linear_batch_norm_relu(
            x, w, None, torch.zeros(5), torch.ones(5), gamma, None, training=training
        )

    alike(gradients(call(gamma), x, w), gradients(call(gamma.contiguous()), x, w))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize("which", ["mean", "var", "repeated"])
def test_batch_norm_with_strided_statistics_has_the_gradients_of_dense_ones(which: str, gamma: bool, training: bool) -> None:  # fmt: skip
    """PyTorch's backward on CPUs reads past strided running statistics (2.13): gradients of 1e26, others each time."""
    x, w = torch.randn(6, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    scale = torch.randn(5, requires_grad=True) if gamma else None

    def call(dense: bool) -> list[Any]:
        mean, var = torch.linspace(-1, 1, 10).view(5, 2), torch.linspace(0.5, 2, 10).view(5, 2)
        mean, var = mean[:, 0] if which == "mean" else mean[:, 0].clone(), var[:, 1] if which == "var" else var[:, 1].clone()  # fmt: skip
        if which == "repeated" and not training:
            mean, var = torch.full((1,), 0.5).expand(5), torch.full((1,), 2.0).expand(5)
        mean, var = (mean.clone(), var.clone()) if dense else (mean, var)
        y = t.linear_batch_norm_relu(x, w, None, mean, var, scale, None, training=training)
        leaves = [leaf for leaf in (x, w, scale) if leaf is not None]
        return [y, mean, var, *torch.autograd.grad(y.square().sum(), leaves)]

    for got, want in zip(call(dense=False), call(dense=True), strict=True):
        torch.testing.assert_close(got, want)


def scores(q: Tensor, k: Tensor, mask: Tensor, causal: bool) -> Tensor:
    z = (q @ k.mT * 0.5).masked_fill(~mask, float("-inf"))
    if causal:
        z = z.masked_fill(~torch.ones(z.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return torch.softmax(z, -1)


@pytest.mark.parametrize("id", ["cpu.fused", "torch.eager", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_that_sees_nothing_is_nan_as_a_whole(id: str | None, dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 8, dtype=dtype), torch.randn(70, 8, dtype=dtype)
    mask = torch.ones(70, dtype=torch.bool)
    mask[:1] = False  # the first row sees column 0 alone, and that is hidden
    with t.policy(force=id):
        y = t.attention_scores(q, k, 0.5, mask, True)
    want = scores(q.float(), k.float(), mask, True)
    torch.testing.assert_close(y.float(), want, equal_nan=True, atol=1e-3, rtol=2e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_no_gradient_comes_of_rows_that_see_nothing(causal: bool, mode: bool) -> None:
    q, k = torch.randn(3, 4, 8, requires_grad=True), torch.randn(3, 5, 8, requires_grad=True)
    mask = torch.rand(3, 4, 5) > 0.3
    mask[1, 2] = False
    mask[0, 0, 0] = False

    def ours(q: Tensor, k: Tensor) -> Tensor:
        if mode:
            with Through():
                return t.attention_scores(q, k, 0.5, mask, causal)
        with t.policy(force="cpu.fused"):
            return t.attention_scores(q, k, 0.5, mask, causal)

    want = gradients(lambda q, k: scores(q, k, mask, causal), q, k)
    assert all(g.isfinite().all() for g in want[1:])
    alike(gradients(ours, q, k), want)


@pytest.mark.parametrize("offset", [100.0, 1e4, 1e6])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mode", [False, True])
def test_large_logits_cost_no_accuracy(offset: float, smoothing: float, mode: bool) -> None:
    """Only their differences matter, and those are exact."""
    logits = (3 * torch.randn(64, 50) + offset).requires_grad_()
    target = torch.randint(50, (64,))

    def ours(x: Tensor) -> Tensor:
        if mode:
            with Through():
                return t.softmax_cross_entropy(x, target, label_smoothing=smoothing)
        return t.softmax_cross_entropy(x, target, label_smoothing=smoothing)

    wide = logits.detach().double().requires_grad_()
    exact = gradients(lambda x: F.cross_entropy(x, target, label_smoothing=smoothing), wide)
    # the mean that smoothing takes of a row is a sum of large numbers, PyTorch's as ours
    loss = 1e-6 * offset * smoothing + 2e-6 * float(exact[0])
    torch.testing.assert_close(
        gradients(ours, logits),
        [e.float() for e in exact],
        rtol=0,
        atol=loss,
    )


def test_classes_that_hardly_count_have_exact_gradients() -> None:
    logits = (3 * torch.randn(8, 50) + 1e4).requires_grad_()
    wide, target = logits.detach().double().requires_grad_(), torch.randint(50, (8,))
    with t.policy(force="cpu.fused"):
        got = gradients(lambda x: t.softmax_cross_entropy(x, target, reduction="sum"), logits)
    want = gradients(lambda x: F.cross_entropy(x, target, reduction="sum"), wide)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-7)


def test_a_loss_that_vanishes_is_exact() -> None:
    """The largest logit comes late in the row, far above the others, and is the target."""
    logits, target = torch.randn(4, 3000), torch.full((4,), 2900)
    logits[:, 2900] += torch.tensor([10.0, 20.0, 40.0, 55.0])
    with t.policy(force="cpu.fused"):
        got = t.softmax_cross_entropy(logits, target, reduction="none")
    want = F.cross_entropy(logits.double(), target, reduction="none")
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=3e-7)


def compiled(fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=dynamic)


@pytest.mark.parametrize("dim", [0, -1, (0, 1), (-1,)])
def test_a_dimension_that_the_compiler_takes_for_a_symbol(dim: Any) -> None:
    x = torch.randn(4, 5, requires_grad=True)
    for ours, theirs in ((t.sum, torch.sum), (t.max, torch.amax)):
        got = gradients(compiled(ours, dynamic=True), x, dim)
        alike(got, gradients(theirs, x, dim))


@pytest.mark.parametrize("value", [2, 0.5, True])
def test_a_number_and_a_tensor_without_dimensions_compile(value: float) -> None:
    for x in (torch.tensor(3), torch.tensor(1.5), torch.tensor(2.0).half(), torch.tensor(True)):
        got = compiled(lambda x: t.mul(x, value))(x)
        torch.testing.assert_close(got, x * value, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(10, 7), (2, 7, 5)])
def test_losses_that_are_not_reduced_compile(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, requires_grad=True)
    target = torch.randint(7, (shape[0], *shape[2:]))
    ours = compiled(lambda x: t.softmax_cross_entropy(x, target, reduction="none"), dynamic=True)
    alike(
        gradients(ours, logits),
        gradients(lambda x: F.cross_entropy(x, target, reduction="none"), logits),
    )


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("matmul", ((4, 0), (0, 3))),
        ("matmul", ((2, 4, 0), (2, 0, 3))),
        ("matmul", ((0, 4), (4, 3))),
        ("linear", ((4, 0), (3, 0))),
        ("linear", ((4, 4), (0, 4))),
        ("attention_scores", ((4, 0), (3, 0))),
        ("attention_scores", ((0, 4), (3, 4))),
    ],
)
def test_products_over_nothing_can_be_measured(name: str, shapes: tuple[Any, ...]) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    scale = [1.0] * (name == "attention_scores")
    learned = t.tune(getattr(t, name), *tensors, *scale)
    assert not learned.unmeasured
    assert len(learned.plans) == 1


class Marked(Tensor):
    """A subclass that changes nothing."""


def test_subclasses_beside_sparse_tensors() -> None:
    x, w, b = torch.randn(3, 4).as_subclass(Marked), torch.randn(5, 4), torch.randn(5)
    for layout in (Tensor.to_sparse, Tensor.to_sparse_csr):
        got = t.linear(layout(torch.randn(3, 4)), w, b.as_subclass(Marked))
        assert type(got) is Marked
        residual = torch.randn(3, 5)
        want = torch.relu(F.linear(x, w, b) + residual)
        torch.testing.assert_close(t.linear_residual_relu(x, w, b, layout(residual)), want)


@pytest.mark.parametrize("training", [True, False])
def test_statistics_that_ask_for_gradients(training: bool) -> None:
    x, w, mean = torch.randn(3, 4), torch.randn(5, 4), torch.zeros(5, requires_grad=True)
    with pytest.raises(ValueError, match=r"running_mean requires gradients.*running_mean\.detach"):
        t.linear_batch_norm_relu(x, w, None, mean, torch.ones(5), None, None, training=training)
    with torch.no_grad():
        t.linear_batch_norm_relu(x, w, None, mean, torch.ones(5), None, None, training=training)


def test_dropout_of_nothing_names_itself() -> None:
    with pytest.raises(TypeError, match=r"dropout_linear: x is i64\[3, 4\]"):
        t.dropout_linear(torch.ones(3, 4).long(), torch.ones(5, 4), None, p=0.0)
    with pytest.raises(ValueError, match="dropout_linear: x is f32"):
        t.dropout_linear(torch.ones(3, 5), torch.ones(5, 4), None, training=False)
