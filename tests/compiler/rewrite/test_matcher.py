"""Every rule: a model that must match, and a near miss that must not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tensorlogic.compiler.rewrite.matcher import emitter, rewrite
from tensorlogic.compiler.rewrite.rule_set import RULES
from tensorlogic.compiler.trace.exporter import trace
from tensorlogic.compiler.trace.graph_facts import constants
from tensorlogic.compiler.trace.side_effects import probe
from tensorlogic.compiler.verify import equivalence
from tensorlogic.guards.errors import Untraceable
from tensorlogic.ops.rms_norm import RMS_NORM
from tensorlogic.ops.swiglu import SWIGLU


class Says(nn.Module):
    """A model with the usual layers, whose forward is given."""

    def __init__(self, forward: Callable[..., Any], training: bool = False) -> None:
        super().__init__()
        self.lin, self.out, self.nobias = nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(8, 8, False)
        self.norm, self.plain = nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)
        self.bn, self.bn2 = nn.BatchNorm1d(8), nn.BatchNorm2d(4)
        self.conv, self.drop = nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.5)
        self.rgb, self.says = nn.Parameter(torch.ones(3)), forward
        self.train(training)

    def forward(self, *args: Any) -> Any:
        return self.says(self, *args)


def ops(
    forward: Callable[..., Any], *args: Tensor, training: bool = False, grad: bool = False
) -> list[str]:
    """The ops that a model's regions become, in its order."""
    with torch.set_grad_enabled(grad):
        traced = trace(Says(forward, training), args, {})
    if grad:
        constants(traced.graph, set())
    return [r.op for r in rewrite(traced.graph, [r for r in RULES if r.training or not grad])]


X = torch.randn(5, 8)
IMAGE = torch.randn(2, 3, 6, 6)
Q = torch.randn(2, 3, 5, 4)
TARGET = torch.tensor([0, 1, 2, 3, 4])


def scores(q: Tensor, k: Tensor, by: float = 0.5) -> Tensor:
    return q @ k.transpose(-2, -1) * by


def rms(x: Tensor, gamma: Tensor, dim: int = -1, wide: bool = False) -> Tensor:
    """As LLaMA writes it."""
    y = x.to(torch.float32) if wide else x
    y = y * torch.rsqrt(y.pow(2).mean(dim, keepdim=True) + 1e-6)
    return gamma * y.to(x.dtype)


MATCHES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], list[str]]] = {
    "linear": (lambda m, x: m.lin(x), (X,), ["linear"]),
    "product with a transposed weight": (lambda m, x: x @ m.lin.weight.t(), (X,), ["linear"]),
    "addmm": (lambda m, x: torch.addmm(m.lin.bias, x, m.lin.weight.t()), (X,), ["linear"]),
    "addmm, weight by columns": (
        lambda m, x: torch.addmm(m.lin.bias, x, m.lin.weight),
        (X,),
        ["linear"],
    ),
    "bias added later": (lambda m, x: m.lin.bias + m.nobias(x), (X,), ["linear"]),
    "residual": (lambda m, x: m.lin(x) + x, (X,), ["linear"]),
    "residual first": (lambda m, x: x + m.lin(x), (X,), ["linear"]),
    "residual and relu": (lambda m, x: F.relu(x + m.lin(x)), (X,), ["linear"]),
    "in place": (lambda m, x: m.lin(x).add_(x).relu_(), (X,), ["linear"]),
    "gelu": (lambda m, x: F.gelu(m.lin(x)), (X,), ["linear"]),
    "gelu, tanh": (lambda m, x: F.gelu(m.lin(x), approximate="tanh"), (X,), ["linear"]),
    "silu": (lambda m, x: F.silu(m.lin(x)), (X,), ["linear"]),
    "silu written out": (lambda m, x: (y := m.norm(x)) * torch.sigmoid(y), (X,), ["silu"]),
    "relu as clamp": (lambda m, x: m.lin(x).clamp(min=0), (X,), ["linear"]),
    "gelu written out": (
        lambda m, x: (
            0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        ),
        (X,),
        ["gelu"],
    ),
    "gelu by erf": (lambda m, x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), (X,), ["gelu"]),
    "gelu and linear": (lambda m, x: m.out(F.gelu(x)), (X,), ["gelu_linear"]),
    "layer norm and linear": (lambda m, x: m.out(m.norm(x)), (X,), ["layer_norm_linear"]),
    "batch norm folded": (lambda m, x: m.bn(m.lin(x)), (X,), ["linear"]),
    "batch norm folded, relu": (lambda m, x: F.relu(m.bn(m.lin(x))), (X,), ["linear"]),
    "dropout in evaluation": (lambda m, x: m.out(m.drop(x)), (X,), ["linear"]),
    "convolution": (lambda m, x: m.conv(x), (IMAGE,), ["convolution"]),
    "convolution, batch norm": (lambda m, x: m.bn2(m.conv(x)), (IMAGE,), ["convolution"]),
    "convolution, all": (
        lambda m, x: F.relu(m.bn2(m.conv(x)) + F.avg_pool2d(x.mean(1, True), 1).expand(2, 4, 6, 6)),
        (IMAGE,),
        ["convolution"],
    ),
    "convolution, gelu": (lambda m, x: F.gelu(m.conv(x)), (IMAGE,), ["convolution"]),
    "convolution, residual, silu": (
        lambda m, x: F.silu(m.conv(x) + x[:, :1].expand(2, 4, 6, 6)),
        (IMAGE,),
        ["convolution"],
    ),
    "convolution, layer scale, residual": (
        lambda m, x: m.conv(x) * m.bn2.weight.view(4, 1, 1) + x[:, :1].expand(2, 4, 6, 6),
        (IMAGE,),
        ["convolution"],
    ),
    "linear, layer scale, residual": (
        lambda m, x: x + m.norm.weight * m.lin(x),
        (X,),
        ["linear"],
    ),
    "group norm": (lambda m, x: F.group_norm(x, 1, m.rgb, m.rgb), (IMAGE,), ["group_norm"]),
    "cross-entropy": (
        lambda m, x, t: F.cross_entropy(x, t),
        (X, TARGET),
        ["softmax_cross_entropy"],
    ),
    "cross-entropy in two steps": (
        lambda m, x, t: F.nll_loss(F.log_softmax(x, 1), t),
        (X, TARGET),
        ["softmax_cross_entropy"],
    ),
    "attention scores": (lambda m, q, k: scores(q, k).softmax(-1), (Q, Q), ["attention_scores"]),
    "attention": (lambda m, q, k, v: scores(q, k).softmax(-1) @ v, (Q, Q, Q), ["attention"]),
    "attention, scaled first": (
        lambda m, q, k, v: ((q / 2) @ k.transpose(2, 3)).softmax(dim=-1) @ v,
        (Q, Q, Q),
        ["attention"],
    ),
    "attention, masked": (
        lambda m, q, k, v: (scores(q, k) + torch.ones(5, 5).tril().log()).softmax(-1) @ v,
        (Q, Q, Q),
        ["attention"],
    ),
    "attention by name": (
        lambda m, q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        (Q,),
        ["attention"],
    ),
    "add and relu": (lambda m, a: F.relu(a + a.sin()), (X,), ["add_relu"]),
    "mul and relu": (lambda m, a: F.relu(a * a.sin()), (X,), ["mul_relu"]),
    "rms norm": (lambda m, x: rms(x, m.norm.weight), (X,), ["rms_norm"]),
    "rms norm, by a product": (
        lambda m, x: x * torch.rsqrt((x * x).mean(-1, True) + 1e-6) * m.norm.weight,
        (X,),
        ["rms_norm"],
    ),
    "rms norm in halves": (
        lambda m, x: rms(x.half(), m.norm.weight.half(), wide=True),
        (X,),
        ["rms_norm"],
    ),
    "rms norm by name": (lambda m, x: F.rms_norm(x, (8,), m.norm.weight, 1e-6), (X,), ["rms_norm"]),
    "rms norm and linear": (
        lambda m, x: m.lin(rms(x, m.norm.weight)),
        (X,),
        ["rms_norm", "linear"],
    ),
    "swiglu": (lambda m, x: F.silu(m.lin(x)) * m.nobias(x), (X,), ["swiglu"]),
    "swiglu, gate last": (lambda m, x: m.nobias(x) * F.silu(m.lin(x)), (X,), ["swiglu"]),
    "affine": (lambda m, x: x * m.lin.bias + m.norm.bias, (X,), ["affine"]),
}
MISSES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], list[str]]] = {
    "add with a factor": (lambda m, x: torch.add(m.lin(x), x, alpha=2), (X,), ["linear"]),
    "residual of another dtype": (lambda m, x: m.lin(x) + x.double(), (X,), ["linear"]),
    "residual that enlarges": (
        lambda m, x: m.lin(x[:1]) + x.sin() + m.lin(x).sum(),
        (X,),
        ["linear", "linear"],
    ),
    "value used twice": (lambda m, x: (y := m.lin(x)) + F.relu(y), (X,), ["linear"]),
    "gelu written out, other number": (
        lambda m, x: (
            0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.05 * torch.pow(x, 3.0))))
        ),
        (X,),
        [],
    ),
    "sigmoid of another": (lambda m, x: x * torch.sigmoid(x + 1), (X,), []),
    "clamp from one": (lambda m, x: x.clamp(min=1), (X,), []),
    "layer norm without scale": (lambda m, x: m.out(m.plain(x)), (X,), ["linear"]),
    "layer norm over two dimensions": (
        lambda m, x: m.lin(F.layer_norm(x, (5, 8), m.lin.weight[:5], m.lin.weight[:5])),
        (X,),
        ["linear"],
    ),
    "rms norm over rows": (lambda m, x: rms(x, m.norm.weight, 0), (X,), []),
    "norm by the mean of another": (
        lambda m, x: m.norm.weight * (x * torch.rsqrt(x.sin().pow(2).mean(-1, True) + 1e-6)),
        (X,),
        [],
    ),
    "norm by the fourth power": (
        lambda m, x: m.norm.weight * (x * torch.rsqrt(x.pow(4).mean(-1, True) + 1e-6)),
        (X,),
        [],
    ),
    "gate of another input": (
        lambda m, x: F.silu(m.lin(x)) * m.nobias(x.sin()),
        (X,),
        ["linear", "linear"],
    ),
    "gate through gelu": (
        lambda m, x: F.gelu(m.lin(x)) * m.nobias(x),
        (X,),
        ["linear", "linear"],
    ),
    "softmax over rows": (lambda m, q, k: scores(q, k).softmax(1), (Q, Q), []),
    "softmax in another dtype": (
        lambda m, q, k: scores(q, k).softmax(-1, dtype=torch.float64),
        (Q, Q),
        [],
    ),
    "class weights": (lambda m, x, t: F.cross_entropy(x, t, weight=x[0].abs()), (X, TARGET), []),
    "class probabilities": (lambda m, x: F.cross_entropy(x, x.softmax(1)), (X,), []),
    "convolution, value used twice": (
        lambda m, x: m.bn2(y := m.conv(x)) * y,
        (IMAGE,),
        ["convolution"],
    ),
    "convolution, residual that enlarges": (
        lambda m, x: m.conv(x)[:1].sin() + m.conv(x),
        (IMAGE,),
        ["convolution", "convolution"],
    ),
    "convolution scaled along its rows": (
        lambda m, x: m.conv(x) * m.out.bias,
        (IMAGE,),
        ["convolution"],
    ),
    "convolution scaled by what is no constant": (
        lambda m, x: m.conv(x) * x.sum((0, 2, 3))[:1].expand(4).reshape(4, 1, 1),
        (IMAGE,),
        ["convolution"],
    ),
    "convolution, activation and its input": (
        lambda m, x: F.gelu(y := m.conv(x)) * y,
        (IMAGE,),
        ["convolution"],
    ),
    "instance norm": (lambda m, x: F.instance_norm(x, weight=m.rgb, bias=m.rgb), (IMAGE,), []),
    "transposed convolution": (
        lambda m, x: F.conv_transpose2d(x, m.conv.weight.transpose(0, 1)),
        (IMAGE,),
        [],
    ),
    "attention weights used twice": (
        lambda m, q, k, v: (w := scores(q, k).softmax(-1)) @ v + w.sum(),
        (Q, Q, Q),
        ["attention_scores"],
    ),
    "gelu used twice": (lambda m, x: m.out(g := F.gelu(x)) + g[:, :6], (X,), ["linear"]),
    "affine that enlarges": (lambda m, x: x[:1] * m.lin.bias + x, (X,), []),
    "sum used twice": (lambda m, a: F.relu(y := a + a.sin()) * y, (X,), []),
    "product used twice": (lambda m, a: F.relu(y := a * a.sin()) + y, (X,), []),
    "transposed the other way": (lambda m, x: x @ m.lin.weight, (X,), []),
    "batch norm over channels of rows": (
        lambda m, x: m.bn(m.lin(x).unsqueeze(0).transpose(1, 2)),
        (X,),
        ["linear"],
    ),
    "written to in between": (
        lambda m, x: (
            b := m.lin.bias.clone(),
            y := m.nobias(x),
            v := b.view(2, 4),
            v.add_(1),
            y + b,
        )[-1],
        (X,),
        ["linear"],
    ),
}


@pytest.mark.parametrize("name", MATCHES)
def test_matches(name: str) -> None:
    forward, args, expected = MATCHES[name]
    assert ops(forward, *args) == expected


@pytest.mark.parametrize("name", MISSES)
def test_near_misses(name: str) -> None:
    forward, args, expected = MISSES[name]
    assert ops(forward, *args) == expected


def test_training_rules_keep_gradients() -> None:
    block = lambda m, x: F.relu(m.bn(m.lin(x)))  # noqa: E731  the same model twice
    assert ops(block, X, training=True, grad=True) == ["linear_batch_norm_relu"]
    norm = lambda m, x: F.relu(m.bn2(m.conv(x)))  # noqa: E731  nothing is folded while it is learned
    assert ops(norm, IMAGE, training=True, grad=True) == ["convolution"]
    assert ops(lambda m, x: F.relu(m.conv(x)), IMAGE, training=True, grad=True) == ["convolution"]
    assert ops(lambda m, x: m.out(m.drop(x)), X, training=True, grad=True) == ["dropout_linear"]


def test_training_rules_miss_what_is_used_twice() -> None:
    block = lambda m, x: F.relu(m.bn(y := m.lin(x))) * y  # noqa: E731
    assert ops(block, X, training=True, grad=True) == ["linear"]
    dropped = lambda m, x: m.out(d := m.drop(x)) * d[:, :6]  # noqa: E731
    assert ops(dropped, X, training=True, grad=True) == ["linear"]


@pytest.mark.slow
def test_rewritten_graphs_compute_the_same() -> None:
    for forward, args, _ in (*MATCHES.values(), *MISSES.values()):
        model = Says(forward)
        with torch.no_grad():
            traced = trace(model, args, {})
            rewrite(traced.graph, RULES)
            env: dict[str, Any] = {n: t for n, (_, t) in traced.state.items()}
            env |= dict(zip(traced.inputs, traced.example, strict=True))
            calls = [n for n in traced.graph.nodes if n.op == "call_function"]
            equivalence.evaluate(calls, env, None)
            out = env[traced.graph.output_node().args[0][0].name]
            torch.testing.assert_close(out, model(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda m, x: (setattr(m, "calls", getattr(m, "calls", 0) + 1), m.lin(x))[1], "calls"),
        (lambda m, x: m.lin(x) if x.sum() > 0 else x, "torch.export"),
        (lambda m, x: m.lin(x) * __import__("random").random(), "random"),
        (lambda m, x: m.lin(x) * float(__import__("numpy").random.rand()), "numpy"),
    ],
)
def test_untraceable_models_say_why(forward: Callable[..., Any], reason: str) -> None:
    model = Says(forward)

    def traced() -> None:
        probe(model, (X,), {})
        trace(model, (X,), {})

    with pytest.raises(Untraceable, match=reason):
        traced()
    assert not hasattr(model, "calls")


def test_prints_are_noticed_and_swallowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe(Says(lambda m, x: (print("called"), m.lin(x))[1]), (X,), {}).prints
    assert not capsys.readouterr().out


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ways_of_norm_and_gate_compute_the_same(dtype: torch.dtype) -> None:
    x, w, v = (torch.randn(n, 16).to(dtype) for n in (6, 8, 8))
    b, gamma = torch.randn(8).to(dtype), torch.rand(16).to(dtype)
    for composite, args in (
        (RMS_NORM, (x, gamma, 1e-6)),
        (SWIGLU, (x, w, b, v, b)),
        (SWIGLU, (x, w, None, v, None)),
    ):
        wide = composite(*(a.double() if isinstance(a, Tensor) else a for a in args))
        for way in composite.ways:
            graph = fx.Graph()
            places = [
                graph.placeholder(f"p{i}") if isinstance(a, Tensor) else a
                for i, a in enumerate(args)
            ]
            graph.output(way.emit(emitter(graph), tuple(places)))
            given = [a for a in args if isinstance(a, Tensor)]
            out = fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*given)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(out.double(), wide, rtol=8 * eps, atol=16 * eps)
