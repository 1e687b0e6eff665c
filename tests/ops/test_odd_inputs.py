"""What a new user gets wrong: an error that says which argument, what it is, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tensorlogic as t

from ..support.helpers import LOGITS, MEAN, TARGET, VAR, B, G, H, K, W, X, bn, ce, scores

FREED = torch.randn(3, 4)
FREED.untyped_storage().resize_(0)


def drop(p: Any, x: Any = X) -> Tensor:
    return t.dropout_linear(x, W, B, p=p)


# what is called, the exception, words that the message must hold: the argument, what came, what is required
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "list for x": (lambda: t.linear([1.0], W), TypeError, ("linear: x is list", "as_tensor")),
    "numpy x": (lambda: t.linear(X.numpy(), W), TypeError, ("x is ndarray", "as_tensor")),
    "float for a matrix": (lambda: t.matmul(2.0, W), TypeError, ("a is float 2.0", "Tensor")),
    "None for weight": (lambda: t.linear(X, None), TypeError, ("weight is NoneType", "Tensor")),
    "number for bias": (lambda: t.linear(X, W, 1), TypeError, ("bias is int 1", "Tensor or None")),
    "two numbers": (lambda: t.add(1, 2), TypeError, ("add: a is int 1", "Tensor is required")),
    "string operand": (lambda: t.mul(X, "2"), TypeError, ("mul: b is str '2'", "Tensor")),
    "integer weight": (lambda: t.linear(X, W.long()), TypeError, ("weight is i64[5, 4]", "float")),
    "integer x": (lambda: t.linear(X.int(), W), TypeError, ("x is i32[3, 4]", "floating")),
    "bool matmul": (lambda: t.matmul(X > 0, W.t()), TypeError, ("a is bool[3, 4]", "floating")),
    "mixed dtypes": (
        lambda: t.linear(X.half(), W),
        TypeError,
        ("weight is f32[5, 4]", "x is f16[3, 4]", "must be equal", ".to(dtype)"),
    ),
    "mixed bias": (lambda: t.linear(X, W, B.double()), TypeError, ("bias is f64[5]", "x is f32")),
    "meta weight": (
        lambda: t.linear(X, W.to("meta")),
        ValueError,
        ("weight is f32[5, 4] on meta", "x is on cpu", "one device", ".to('cpu')"),
    ),
    "meta operand": (lambda: t.add(X, X.to("meta")), ValueError, ("b is", "meta", "one device")),
    "meta target": (lambda: ce(target=TARGET.to("meta")), ValueError, ("target", "one device")),
    "transposed weight": (
        lambda: t.linear(X, W.t()),
        ValueError,
        ("x is f32[3, 4]", "last dimension must be 5", "weight.t()"),
    ),
    "bias of K": (lambda: t.linear(X, W, G), ValueError, ("bias is f32[4]", "shape [5]")),
    "weight with 3 dims": (lambda: t.linear(X, W[None]), ValueError, ("weight", "two dimensions")),
    "x without dims": (lambda: t.linear(X[0, 0], W), ValueError, ("x is f32[]", "last dimension")),
    "residual": (
        lambda: t.linear_residual_relu(X, W, B, X),
        ValueError,
        ("linear_residual_relu: residual is f32[3, 4]", "broadcasts to [3, 5]"),
    ),
    "no residual": (
        lambda: t.linear_residual_relu(X, W, B, None),  # type: ignore[arg-type]
        TypeError,
        ("linear_residual_relu: residual is NoneType", "torch.Tensor is required"),
    ),
    "residual too large": (
        lambda: t.linear(X, W, None, torch.zeros(2, 3, 5)),
        ValueError,
        ("residual is f32[2, 3, 5]", "[3, 5]"),
    ),
    "activation": (
        lambda: t.linear(X, W, activation="relu6"),
        ValueError,
        ("activation is 'relu6'", "'relu'", "'gelu_tanh'"),
    ),
    "activation function": (
        lambda: t.matmul(X, W.t(), activation=torch.relu),
        ValueError,
        ("activation is", "one of"),
    ),
    "unhashable activation": (
        lambda: t.linear(X, W, activation=["relu"]),
        ValueError,
        ("activation is ['relu']", "one of"),
    ),
    "approximate": (lambda: t.gelu(X, "erf"), ValueError, ("approximate is 'erf'", "'none'")),
    "approximate None": (
        lambda: t.gelu_linear(X, W, B, None),
        ValueError,
        ("approximate is None",),
    ),
    "matmul shapes": (lambda: t.matmul(X, W), ValueError, ("a is f32[3, 4]", "(4)", "(5)", ".mT")),
    "matmul batches": (
        lambda: t.matmul(torch.ones(2, 3, 4), torch.ones(3, 4, 5)),
        ValueError,
        ("a is f32[2, 3, 4]", "do not broadcast"),
    ),
    "matmul of a number": (lambda: t.matmul(X[0, 0], X), ValueError, ("a is f32[]", "a * b")),
    "add shapes": (lambda: t.add(X, B), ValueError, ("a is f32[3, 4]", "b is f32[5]", "broadcast")),
    "affine shapes": (lambda: t.affine(X, B, G), ValueError, ("scale is f32[5]", "broadcast")),
    "gelu of integers": (lambda: t.gelu(X.int()), TypeError, ("gelu: x is i32[3, 4]", ".float()")),
    "silu of complex": (lambda: t.silu(X + 0j), TypeError, ("silu: x is c64[3, 4]", "real")),
    "softmax of integers": (lambda: t.softmax(X.int()), TypeError, ("x is i32", "dtype=")),
    "softmax into integers": (
        lambda: t.softmax(X, 0, torch.int32),
        TypeError,
        ("dtype is torch.int32", "floating"),
    ),
    "softmax dim": (lambda: t.softmax(X, 2), ValueError, ("dim is 2", "from -2 to 1")),
    "softmax dim None": (lambda: t.softmax(X, None), ValueError, ("dim is None", "x is f32[3, 4]")),
    "statistics of another dtype": (
        lambda: bn(mean=MEAN.double()),
        TypeError,
        ("running_mean is f64[5]", "x is f32[3, 4]", "float32 beside halves"),
    ),
    "maxima of nothing over all": (
        lambda: t.max(X[:0], ()),
        ValueError,
        ("x is f32[0, 4]", "at least one element"),
    ),
    "sum dim": (lambda: t.sum(X, -3), ValueError, ("dim is -3", "from -2 to 1")),
    "sum dim twice": (lambda: t.sum(X, (0, -2)), ValueError, ("dim is (0, -2)", "twice")),
    "sum dim float": (lambda: t.sum(X, 1.5), TypeError, ("dim is 1.5", "int")),
    "sum dim name": (lambda: t.sum(X, "rows"), TypeError, ("dim is 'rows'", "int")),
    "mean of integers": (lambda: t.mean(TARGET), TypeError, ("mean: x is i64[3]", "x.float()")),
    "max of nothing": (lambda: t.max(X[:0], 0), ValueError, ("x is f32[0, 4]", "one element")),
    "min of nothing": (lambda: t.min(X[:0]), ValueError, ("x is f32[0, 4]", "one element")),
    "p of one": (lambda: drop(1.0), ValueError, ("p is 1.0", "[0, 1)")),
    "p negative": (lambda: drop(-0.1), ValueError, ("p is -0.1", "[0, 1)")),
    "p NaN": (lambda: drop(math.nan), ValueError, ("p is nan", "[0, 1)")),
    "p text": (lambda: drop("half"), TypeError, ("p is str 'half'", "[0, 1)")),
    "p bool": (lambda: drop(True), TypeError, ("p is bool True", "[0, 1)")),
    "p tensor": (lambda: drop(torch.tensor(0.5)), TypeError, ("p is f32[]", "number")),
    "dropout of a list": (lambda: drop(0.5, [1.0]), TypeError, ("dropout_linear: x is list",)),
    "generator": (
        lambda: t.dropout_linear(X, W, B, generator=7),
        TypeError,
        ("generator is int 7", "torch.Generator"),
    ),
    "eps negative": (
        lambda: t.layer_norm_linear(X, G, H, W, B, -1.0),
        ValueError,
        ("eps is -1.0",),
    ),
    "eps NaN": (lambda: bn(eps=math.nan), ValueError, ("eps is nan", "at least 0")),
    "gamma of N": (lambda: t.layer_norm_linear(X, B, H, W, B), ValueError, ("gamma", "shape [4]")),
    "momentum": (lambda: bn(momentum=1.5), ValueError, ("momentum is 1.5", "[0, 1]")),
    "no statistics": (
        lambda: bn(mean=None, var=None),
        ValueError,
        ("running_mean", "training=True"),
    ),
    "half the statistics": (lambda: bn(mean=None, training=True), ValueError, ("given together",)),
    "statistics of K": (lambda: bn(mean=G, var=G), ValueError, ("running_mean", "shape [5]")),
    "integer statistics": (lambda: bn(mean=MEAN.long()), TypeError, ("running_mean is i64[5]",)),
    "one row in training": (lambda: bn(X[:1], training=True), ValueError, ("more than one row",)),
    "float target": (lambda: ce(target=TARGET.float()), TypeError, ("target", "int64", ".long()")),
    "target shape": (lambda: ce(target=TARGET[:2]), ValueError, ("target is i64[2]", "[N, C]")),
    "integer logits": (lambda: ce(LOGITS.int()), TypeError, ("logits is i32[3, 6]", "floating")),
    "no classes": (lambda: ce(LOGITS[:, :0]), ValueError, ("logits is f32[3, 0]",)),
    "target beyond": (lambda: ce(target=TARGET + 1), IndexError, ("6",)),
    "target below": (lambda: ce(target=TARGET - 1), IndexError, ("-1",)),
    "reduction": (lambda: ce(reduction="avg"), ValueError, ("reduction is 'avg'", "'mean'")),
    "smoothing": (
        lambda: ce(label_smoothing=1.1),
        ValueError,
        ("label_smoothing is 1.1", "[0, 1]"),
    ),
    "smoothing NaN": (
        lambda: ce(label_smoothing=math.nan),
        ValueError,
        ("label_smoothing is nan",),
    ),
    "ignore_index": (lambda: ce(ignore_index=1.5), TypeError, ("ignore_index is float 1.5", "int")),
    "scale NaN": (lambda: scores(scale=math.nan), ValueError, ("scale is nan", "finite")),
    "scale inf": (lambda: scores(scale=math.inf), ValueError, ("scale is inf", "finite")),
    "scale tensor": (lambda: scores(scale=torch.ones(())), TypeError, ("scale is f32[]", "number")),
    "scale None": (lambda: scores(scale=None), TypeError, ("scale is NoneType", "number")),
    "q and k": (lambda: scores(k=K[..., :3]), ValueError, ("k is f32[2, 5, 3]", "one D")),
    "q without rows": (lambda: scores(q=G), ValueError, ("q is f32[4]", "[..., S, D]")),
    "q and k batches": (lambda: scores(q=torch.ones(3, 3, 4)), ValueError, ("do not broadcast",)),
    "mask shape": (lambda: scores(mask=torch.ones(4, 5)), ValueError, ("mask", "[2, 3, 5]")),
    "integer mask": (
        lambda: scores(mask=torch.ones(3, 5).int()),
        TypeError,
        ("mask is i32[3, 5]",),
    ),
    "nested": (
        lambda: t.relu(torch.nested.nested_tensor([G, G[:2]], layout=torch.jagged)),
        TypeError,
        ("relu: x is a nested tensor", "pad"),
    ),
    "strided nested": (
        lambda: t.softmax(torch.nested.nested_tensor([G, G[:2]])),
        TypeError,
        ("softmax: x is a nested tensor", "pad"),
    ),
    "nested residual": (
        lambda: t.linear(X, W, B, torch.nested.nested_tensor([B, B])),
        TypeError,
        ("linear: residual is a nested tensor", "pad"),
    ),
    "activation array": (
        lambda: t.linear(X, W, B, None, np.zeros(2)),
        ValueError,
        ("linear: activation is array([0., 0.])", "one of"),
    ),
    "activation tensor": (lambda: t.matmul(X, X.t(), X), ValueError, ("activation is f32[3, 4]",)),
    "dims for keepdim": (lambda: t.sum(X, 0, 1), TypeError, ("sum: keepdim is int 1", "True or")),
    "dims in a dict": (lambda: t.max(X, {}), TypeError, ("max: dim is {}", "tuple of ints")),
    "softmax dtype": (lambda: t.softmax(X, 0, 1.5), TypeError, ("dtype is float 1.5", "float32")),
    "causal number": (lambda: scores(is_causal=1), TypeError, ("is_causal is int 1", "True or")),
    "complex mask": (
        lambda: scores(mask=torch.ones(3, 5) + 1j),
        TypeError,
        ("mask is c64[3, 5]", "real floating"),
    ),
    "training word": (
        lambda: t.dropout_linear(X, W, B, training="no"),
        TypeError,
        ("dropout_linear: training is str 'no'", "True or False"),
    ),
    "training None": (lambda: bn(training=None), TypeError, ("training is NoneType", "True or")),
    "to nowhere": (lambda: t.to(X, None), TypeError, ("to: device is NoneType", "'cuda'")),
    "to a dtype": (lambda: t.to(X, torch.float16), TypeError, ("to: device is dtype", "'cpu'")),
    "to at once": (
        lambda: t.to(X, "cpu", asynchronous="no"),
        TypeError,
        ("to: asynchronous is str 'no'", "True or False"),
    ),
    "array of words": (
        lambda: t.to(np.array(["a"]), "cpu"),
        TypeError,
        ("to: tensor is ndarray of <U1", "shape [1]", "astype"),
    ),
    "array of objects": (
        lambda: t.unified(np.array([object()])),
        TypeError,
        ("unified: tensor is ndarray of object", "array of numbers", "astype"),
    ),
    "array backwards": (
        lambda: t.to(np.arange(3.0)[::-1], "cpu"),
        ValueError,
        ("to: tensor is ndarray of float64", "strides [-8]", "ascontiguousarray"),
    ),
    "unified sparse": (
        lambda: t.unified(X.to_sparse()),
        TypeError,
        ("unified: tensor is torch.sparse_coo", "dense", "to_dense"),
    ),
    "training by a word": (
        lambda: t.optimize(torch.nn.Linear(4, 5), X, training="yes"),
        TypeError,
        ("optimize: training is str 'yes'", "True or False"),
    ),
    "dynamic by a word": (
        lambda: t.optimize(torch.nn.Linear(4, 5), X, dynamic="batch"),
        TypeError,
        ("optimize: dynamic is str 'batch'", "True or False"),
    ),
    "budget by a word": (
        lambda: t.optimize(torch.nn.Linear(4, 5), X, budget_s="1"),
        ValueError,
        ("optimize: budget_s is '1'", "seconds from 0"),
    ),
    "folder for a lockfile": (
        lambda: t.policy(lockfile="/").__enter__(),
        FileNotFoundError,
        ("policy: lockfile '/' is no file", "plans export"),
    ),
    "figures of no device": (
        lambda: t.pool.stats(None),
        TypeError,
        ("pool.stats: device is NoneType", "'cpu'"),
    ),
    "shrink to None": (
        lambda: t.pool.shrink_to_fit(None),
        TypeError,
        ("pool.shrink_to_fit: max_bytes", "whole number, got None"),
    ),
    "enable a word": (lambda: t.enable(pool="no"), TypeError, ("enable: pool is str 'no'",)),
    "precision array": (
        lambda: t.precision(np.zeros(2)),
        ValueError,
        ("precision: mode is array([0., 0.])", "'adaptive'"),
    ),
    "no memory": (lambda: t.matmul(FREED, W.t()), RuntimeError, ("data",)),
    "tune of a tensor": (lambda: t.tune(X), TypeError, ("tune: fn is Tensor", "function")),
    "explain of a name": (lambda: t.explain("linear"), TypeError, ("explain: fn is str",)),
    "candidates of a stranger": (lambda: t.candidates(torch.relu, X), ValueError, ("linear",)),
    "invalidate of a name": (lambda: t.invalidate("w"), TypeError, ("invalidate: tensor is str",)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", WRONG)
def test_errors_say_which_what_and_how(name: str) -> None:
    """Cold and after warm calls alike."""
    call, error, words = WRONG[name]
    for _ in range(2):
        with pytest.raises(error) as caught:
            call()
        for word in words:
            assert word in str(caught.value)
        t.linear(X, W, B)
        t.sum(X, 1)
        scores()


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [(), []])
def test_no_dimensions_are_all_of_them_as_in_pytorch(dim: Any, keepdim: bool) -> None:
    for ours, theirs in ((t.sum, torch.sum), (t.mean, torch.mean), (t.max, torch.amax), (t.min, torch.amin)):  # fmt: skip
        x = torch.randn(3, 4).requires_grad_()
        torch.testing.assert_close(ours(x, dim, keepdim), theirs(x, dim, keepdim))
        (got,) = torch.autograd.grad(ours(x, dim, keepdim).sum(), x)
        (want,) = torch.autograd.grad(theirs(x, dim, keepdim).sum(), x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(ours(X[0, 0], dim), X[0, 0])


def test_statistics_of_halves_are_theirs_or_float32() -> None:
    x, w = X.half(), W.half()
    for dtype in (torch.float16, torch.float32):
        y = t.linear_batch_norm_relu(x, w, None, MEAN.to(dtype), VAR.to(dtype), None, None)
        assert y.dtype == torch.float16
    with pytest.raises(TypeError, match="running_mean is bf16"):
        t.linear_batch_norm_relu(x, w, None, MEAN.bfloat16(), VAR.bfloat16(), None, None)
