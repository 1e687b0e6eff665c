"""Ten kinds of model, inference and training: `optimize` with a budget for Inductor beside eager PyTorch and torch.compile.

python benchmarks/kinds.py [kind ...] [--budget 90] [--out FILE.json]

Each comes back faster than the better of both or as fast, and no less accurate, or the row says why not.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

import tensorlogic
from tensorlogic.compiler.trace import graph_facts
from tensorlogic.measure import timer
from tensorlogic.system import hardware

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
MODE = "reduce-overhead" if CUDA else "default"


class Recurrent(nn.Module):
    """Two LSTM layers and a head on the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(32, 48, 2, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


class Decoder(nn.Module):
    """One token a call, with its cache as tensors in and out."""

    def __init__(self, d: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm, self.qkv = heads, nn.LayerNorm(d), nn.Linear(d, 3 * d)
        self.out, self.up, self.down = nn.Linear(d, d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, t, d = x.shape
        q, new_k, new_v = (
            self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(x))), k, v


def pair(i: int, o: int) -> nn.Sequential:
    """Two convolutions, each with batch norm and ReLU."""
    first = nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())


class UNet(nn.Module):
    """Down, up, and skip connections between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = pair(3, 16), pair(16, 32), pair(32, 32), pair(64, 16)
        self.up, self.out = nn.ConvTranspose2d(32, 32, 2, 2), nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        d = F.interpolate(self.d(torch.cat([b, self.up(c)], 1)), scale_factor=2.0, mode="bilinear")
        return self.out(torch.cat([a, d], 1))


class Towers(nn.Module):
    """Two encoders whose outputs are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.b = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 32))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1)
        return a @ b.T * self.scale.exp()


class Experts(nn.Module):
    """Four small networks, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4)
        small = [nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)) for _ in range(4)]
        self.small = nn.ModuleList(small)

    def forward(self, x: Tensor) -> Tensor:
        w = self.gate(x).softmax(-1)
        return torch.stack([f(x) * w[:, i : i + 1] for i, f in enumerate(self.small)]).sum(0)


class Gated(nn.Module):
    """RMS norm and SwiGLU."""

    def __init__(self, d: int = 256) -> None:
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(d), nn.Linear(d, 2 * d, bias=False)
        self.up, self.down = nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Tied(nn.Module):
    """One layer used three times, one matrix for embedding and output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.embed = (
            nn.Linear(64, 64),
            nn.LayerNorm(64),
            nn.Embedding(50, 64),
        )
        self.out = nn.Linear(64, 50, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(3):
            x = x + F.gelu(self.layer(self.norm(x)))
        return self.out(x)


def perceptron() -> nn.Module:
    """Three layers."""
    first = nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.Tanh()
    return nn.Sequential(*first, nn.Linear(512, 10))


def encoder() -> nn.Module:
    """Two of PyTorch's Transformer layers."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2)


class Waves(nn.Module):
    """A product and many element-wise steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.w = nn.Linear(256, 256), nn.Parameter(randn(256))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for i in range(6):
            y = torch.sin(y * self.w + i) * torch.sigmoid(y) + y.clamp(-1, 1)
        return y.softmax(-1)


Kind = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]
KINDS: dict[str, Kind] = {
    "perceptron": (perceptron, lambda: (randn(256, 256),)),
    "convolutions": (lambda: pair(3, 16), lambda: (randn(8, 3, 64, 64),)),
    "encoder": (encoder, lambda: (randn(8, 64, 128),)),
    "decoder": (
        Decoder,
        lambda: (randn(8, 1, 64), randn(8, 4, 127, 16), randn(8, 4, 127, 16)),
    ),
    "recurrent": (Recurrent, lambda: (randn(32, 24, 32),)),
    "unet": (UNet, lambda: (randn(4, 3, 64, 64),)),
    "towers": (Towers, lambda: (randn(256, 64), randn(256, 48))),
    "experts": (Experts, lambda: (randn(512, 32),)),
    "gated": (Gated, lambda: (randn(4, 64, 256),)),
    "tied": (Tied, lambda: (torch.randint(0, 50, (16, 32)),)),
    "waves": (Waves, lambda: (randn(512, 256),)),
}


def row(kind: str, training: bool, budget_s: float) -> dict[str, Any]:
    """One kind of model, all three ways."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    make, inputs = KINDS[kind]
    model, args = make().to(DEVICE).train(training), tuple(v.to(DEVICE) for v in inputs())
    plain, compiled = copy.deepcopy(model), copy.deepcopy(model)
    with torch.set_grad_enabled(training):
        begin = time.perf_counter()
        fast = tensorlogic.optimize(model, args, training=training, budget_s=budget_s)
        ready = time.perf_counter() - begin
        peer = torch.compile(compiled, dynamic=False, mode=MODE)

        def step(call: nn.Module) -> Callable[[], Any]:
            weights = list(call.parameters())
            return lambda: graph_facts.step(call(*args), training, weights)

        calls = {"ours": step(fast), "eager": step(plain), "compile": step(peer)}
        calls["compile"]()
        us = timer.wall_samples(calls, DEVICE, 2.0)
    report = fast.report
    inductor = next((r for r in report.rows if r.op == "inductor"), None)
    best = min(("eager", "compile"), key=us.median)
    return {
        "kind": kind,
        "training": training,
        "outcome": report.outcome,
        "us": {name: us.median(name) for name in calls},
        "over eager": us.ratio("ours", "eager"),
        "over the best": us.ratio("ours", best),
        "error": report.error,
        "ready_s": ready,
        "inductor": None if inductor is None else inductor.refused or "serves",
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="kind")
    parser.add_argument("--budget", type=float, default=90.0)
    parser.add_argument("--inference", action="store_true", help="without training")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for kind in given.kinds:
        for training in (False,) if given.inference else (False, True):
            rows.append(found := row(kind, training, given.budget))
            ratio, low, high = found["over the best"]
            us = "  ".join(f"{name} {value:.0f} us" for name, value in found["us"].items())
            print(
                f"{kind:<13}{'training' if training else 'inference':<10} {found['outcome']:<10}{us}  over the best "
                f"{ratio:.2f} [{low:.2f}, {high:.2f}]  Inductor: {found['inductor']}",
                flush=True,
            )
    if given.out is not None:
        about = {"torch": torch.__version__, "machine": hardware.cpu(), "device": str(DEVICE)}
        given.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
