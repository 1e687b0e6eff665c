"""What tests of ops share: cases of an op at a dtype, references, plain calls, operands, gradients beside PyTorch's, repaired products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import tensorlogic
from tensorlogic.compiler.rewrite.matcher import emitter
from tensorlogic.core import tolerance
from tensorlogic.core.op import OPS, Op
from tensorlogic.cpu_overrides import overrides
from tensorlogic.dispatch import candidate_loading, dispatcher
from tensorlogic.native import hook_extension
from tensorlogic.native import hook_ops as native_hook_ops

candidate_loading.ready("cuda" if torch.cuda.is_available() else "cpu")
PUBLIC = sorted(name for name, op in OPS.items() if not op.internal)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALL_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALF = (torch.float16, torch.bfloat16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# operands of the fused ops
X, W, B = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
LOGITS, TARGET = torch.randn(3, 6), torch.tensor([0, 5, 2])
Q, K = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
G, H = torch.randn(4), torch.randn(4)
MEAN, VAR = torch.zeros(5), torch.ones(5)


def cast(args: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The case on the device under test, its floating tensors in `dtype`."""

    def moved(a: Tensor) -> Tensor:
        made = torch.empty_strided(
            a.shape, a.stride(), dtype=dtype if a.is_floating_point() else a.dtype, device=DEVICE
        )
        return made.copy_(a)

    return [moved(a) if isinstance(a, Tensor) else a for a in args]


def cases(op: Op, dtype: torch.dtype) -> list[list[Any]]:
    """All example cases of an op."""
    torch.manual_seed(7)
    return [cast(case, dtype) for case in op.cases()]


def full(op: Op, case: Sequence[Any], save: bool = False) -> list[Any]:
    """Op-level arguments."""
    return [*case, save] if op.gradient is not None else list(case)


def call(op: Op, case: Sequence[Any], force: str | None = None) -> Tensor:
    """One public-like call through the mechanism, with a forced candidate or as the selector likes."""
    if force is None:
        return dispatcher.call(op, tuple(case))
    with tensorlogic.policy(force=force):
        return dispatcher.call(op, tuple(case))


def reference(op: Op, case: Sequence[Any]) -> Tensor:
    """The first output of the float64 reference."""
    wide = [tolerance.wide(a).clone() if isinstance(a, Tensor) else a for a in full(op, case)]
    outs = op.reference(*wide)
    return outs[0]


def eager(op: Op, case: Sequence[Any]) -> Tensor:
    """The first output of the same arithmetic in the case's own dtype."""
    copies = [a.clone() if isinstance(a, Tensor) else a for a in full(op, case)]
    fn = op.baseline or op.reference
    return fn(*copies)[0]


def runnable(op: Op, case: Sequence[Any], id: str, save: bool = False) -> bool:
    """Whether a candidate admits this case here."""
    key = op.key(full(op, case, save), "forward" if save else "inference")
    candidate = op.candidates[id]
    return candidate.available(key.device) is None and candidate.supports(key) is None


def far_rows(columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of logits far from 0, all alike or in part, and targets, whose smoothed losses are small or finite all the same."""
    largest = torch.finfo(dtype).max
    x, t = torch.randn(7, columns).to(dtype), torch.arange(7) % columns
    x[0], x[1] = -largest, largest
    x[2, columns // 2 :] = -largest
    t[3], x[3, columns // 2 :] = columns - 1, -largest
    x[4] += largest / 8 if dtype == torch.float16 else 1e6
    x[5], x[5, 0], t[5] = -largest, largest, 1  # more than the type holds
    x[6, 1:], t[6] = float("-inf"), 0
    return x, t


def guessed_best(monkeypatch: pytest.MonkeyPatch, op: Op, id: str, device: torch.device) -> None:
    """A candidate that keys nobody has measured take: it is expected to be ten times as fast as PyTorch."""
    candidate_loading.ready(device.type)
    likely = replace(op.candidates[id], guess=lambda key: 0.1)
    monkeypatch.setitem(op.candidates, id, likely)


def off(y: Tensor, want: Tensor) -> float:
    """The largest relative 2-norm of the error of a row or a column."""
    y, want = tolerance.wide(y), tolerance.wide(want)
    tiny = torch.finfo(torch.float64).tiny
    return max(
        float(((y - want).norm(dim=d) / want.norm(dim=d).clamp_min(tiny)).max()) for d in (-1, -2)
    )


def by_way(emit_way: Any, args: tuple[Any, ...]) -> Tensor:
    """The output of one way of a step."""
    graph, given = fx.Graph(), [a for a in args if isinstance(a, Tensor)]
    places = []
    for i, a in enumerate(args):
        if isinstance(a, Tensor):
            places.append(graph.placeholder(f"p{i}"))
            places[-1].meta["val"] = a
        else:
            places.append(a)
    graph.output(emit_way(emitter(graph), tuple(places)))
    out: Tensor = fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*given)
    return out


def bn(x: Any = X, w: Any = W, b: Any = B, mean: Any = MEAN, var: Any = VAR, **more: Any) -> Tensor:
    return tensorlogic.linear_batch_norm_relu(x, w, b, mean, var, None, None, **more)


def ce(logits: Any = LOGITS, target: Any = TARGET, **more: Any) -> Tensor:
    return tensorlogic.softmax_cross_entropy(logits, target, **more)


def scores(q: Any = Q, k: Any = K, scale: Any = 0.5, **more: Any) -> Tensor:
    return tensorlogic.attention_scores(q, k, scale, **more)


def batch_norm_relu(
    x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, g: Tensor, h: Tensor, t: bool
) -> Tensor:
    return torch.relu(F.batch_norm(F.linear(x, w, b), mean, var, g, h, t))


def plain_scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.5, -1)


Call = Callable[..., Tensor]
# name -> (ours, PyTorch's composition, shapes of its tensors)
TABLE: dict[str, tuple[Call, Call, tuple[tuple[int, ...], ...]]] = {
    "add": (tensorlogic.add, torch.add, ((4, 6), (6,))),
    "sub": (tensorlogic.sub, torch.sub, ((4, 6), (4, 1))),
    "mul": (tensorlogic.mul, torch.mul, ((4, 6), (6,))),
    "div": (tensorlogic.div, torch.div, ((4, 6), (4, 6))),
    "relu": (tensorlogic.relu, torch.relu, ((4, 6),)),
    "gelu": (tensorlogic.gelu, F.gelu, ((4, 6),)),
    "silu": (tensorlogic.silu, F.silu, ((4, 6),)),
    "add_relu": (tensorlogic.add_relu, lambda a, b: torch.relu(a + b), ((4, 6), (6,))),
    "mul_relu": (tensorlogic.mul_relu, lambda a, b: torch.relu(a * b), ((4, 6), (6,))),
    "affine": (tensorlogic.affine, lambda x, s, b: x * s + b, ((4, 6), (6,), (6,))),
    "softmax": (tensorlogic.softmax, lambda x: torch.softmax(x, -1), ((4, 6),)),
    "sum": (lambda x: tensorlogic.sum(x, 1), lambda x: torch.sum(x, 1), ((4, 6),)),
    "mean": (lambda x: tensorlogic.mean(x, 0), lambda x: torch.mean(x, 0), ((4, 6),)),
    "max": (lambda x: tensorlogic.max(x, 1), lambda x: torch.amax(x, 1), ((4, 6),)),
    "min": (lambda x: tensorlogic.min(x, 0), lambda x: torch.amin(x, 0), ((4, 6),)),
    "matmul": (tensorlogic.matmul, torch.matmul, ((4, 6), (6, 5))),
    "matmul_gelu": (
        lambda a, b: tensorlogic.matmul(a, b, "gelu"),
        lambda a, b: F.gelu(a @ b),
        ((4, 6), (6, 5)),
    ),
    "linear": (tensorlogic.linear, F.linear, ((4, 6), (5, 6), (5,))),
    "linear_residual_relu": (
        tensorlogic.linear_residual_relu,
        lambda x, w, b, r: torch.relu(F.linear(x, w, b) + r),
        ((4, 6), (5, 6), (5,), (4, 5)),
    ),
    "linear_silu": (
        lambda x, w, b: tensorlogic.linear(x, w, b, activation="silu"),
        lambda x, w, b: F.silu(F.linear(x, w, b)),
        ((4, 6), (5, 6), (5,)),
    ),
    "gelu_linear": (
        tensorlogic.gelu_linear,
        lambda x, w, b: F.linear(F.gelu(x, approximate="tanh"), w, b),
        ((4, 6), (5, 6), (5,)),
    ),
    "layer_norm_linear": (
        tensorlogic.layer_norm_linear,
        lambda x, g, h, w, b: F.linear(F.layer_norm(x, (6,), g, h), w, b),
        ((4, 6), (6,), (6,), (5, 6), (5,)),
    ),
    "linear_batch_norm_relu": (
        lambda x, w, b, g, h: tensorlogic.linear_batch_norm_relu(
            x, w, b, torch.zeros(5), torch.ones(5), g, h, training=True
        ),
        lambda x, w, b, g, h: batch_norm_relu(x, w, b, torch.zeros(5), torch.ones(5), g, h, True),
        ((4, 6), (5, 6), (5,), (5,), (5,)),
    ),
    "linear_batch_norm_relu_eval": (
        lambda x, w, b, g, h: tensorlogic.linear_batch_norm_relu(
            x, w, b, torch.zeros(5), torch.ones(5), g, h
        ),
        lambda x, w, b, g, h: batch_norm_relu(x, w, b, torch.zeros(5), torch.ones(5), g, h, False),
        ((4, 6), (5, 6), (5,), (5,), (5,)),
    ),
    "softmax_cross_entropy": (
        lambda x: tensorlogic.softmax_cross_entropy(
            x, torch.tensor([1, 5, -100, 0]), label_smoothing=0.1
        ),
        lambda x: F.cross_entropy(x, torch.tensor([1, 5, -100, 0]), label_smoothing=0.1),
        ((4, 6),),
    ),
    "attention_scores": (
        lambda q, k: tensorlogic.attention_scores(q, k, 0.5),
        plain_scores,
        ((2, 4, 6), (1, 5, 6)),
    ),
}
TWICE = tuple(n for n in TABLE if n not in ("relu", "add", "sub", "sum", "mean", "max", "min"))


def leaves(name: str, dtype: torch.dtype = torch.float32, **about: Any) -> list[Tensor]:
    torch.manual_seed(11)
    return [
        torch.randn(s).to(dtype).requires_grad_(about.get("grad", True)) for s in TABLE[name][2]
    ]


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


@pytest.fixture(params=["hooks", "python"])
def enabled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Enabled by compiled guards and by those in Python; disabled afterwards."""
    if request.param == "hooks" and native_hook_ops.available() is not None:
        pytest.skip(str(native_hook_ops.available()))
    tensorlogic.disable()
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # over before the policy of all tests is left, which the hooks count
        if request.param == "python":
            patch.setattr(hook_extension, "_state", ["absent"])
        tensorlogic.enable()
        yield
        tensorlogic.disable()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that repairs hand to the choice, in order."""
    names: list[str] = []
    original = overrides._launcher

    def spy(op: Any, *args: Any) -> Any:
        names.append(op.name)
        return original(op, *args)

    monkeypatch.setattr(overrides, "_launcher", spy)
    return names


def r(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())
