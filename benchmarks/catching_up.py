"""From `optimize` without a budget to Inductor's part in it: when calls are as fast as torch.compile's, and what they pay for that.

python benchmarks/catching_up.py [name ...] [--seconds 60] [--out FILE.json]

Four models that mix products with what no rule knows, called one call after the other as in a busy service. Each call is timed to its end: the median of each
second, the longest call of each, and in the end torch.compile of the same model beside what serves then, in the same rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from beside import DEVICE, PEER, machine, waiting
from torch import Tensor, nn

import tensorlogic
from tensorlogic.measure import timer
from tensorlogic.system import idle_resources

CUDA = DEVICE.type == "cuda"
DTYPE = torch.float16 if CUDA else torch.float32
D, LAYERS, BATCH, LENGTH = (768, 6, 8, 128) if CUDA else (128, 2, 2, 32)
AFTER_S = 2.0  # of calls once all is decided
TOLD_S = 5.0
AS_FAST = 1.03  # times torch.compile's


class ScaleNorm(nn.Module):
    """x g / |x|, and a gate: a norm that no rule knows."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.g, self.gate = nn.Parameter(torch.ones(d)), nn.Parameter(torch.rand(d))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        y = (wide / wide.norm(dim=-1, keepdim=True).clamp_min(1e-5)) * x.shape[-1] ** 0.5
        return y.to(x.dtype) * self.g * torch.sigmoid(self.gate * x)


class Encoder(nn.Module):
    """Attention and a feed-forward layer behind odd norms, each branch scaled."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.n1, self.n2, self.heads = ScaleNorm(d), ScaleNorm(d), d // 64
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.s1, self.s2 = (nn.Parameter(torch.full((d,), 0.5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(F.normalize(q, dim=-1) * 8, F.normalize(k, dim=-1), v)
        x = x + torch.tanh(self.out(a.transpose(1, 2).reshape(b, s, d))) * self.s1
        return x + self.down(F.mish(self.up(self.n2(x)))) * self.s2


class Image(nn.Module):
    """ConvNeXt's second block: depthwise convolution, norm over channels, global response norm between two 1x1 layers."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(d, d, 7, padding=3, groups=d), nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.gamma, self.beta = (nn.Parameter(torch.rand(4 * d)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(self.conv(x).permute(0, 2, 3, 1))))
        size = y.float().norm(dim=(1, 2), keepdim=True)
        size = (size / (size.mean(-1, keepdim=True) + 1e-6)).to(y.dtype)
        y = self.gamma * (y * size) + self.beta + y
        return x + self.down(y).permute(0, 3, 1, 2)


class Decoder(nn.Module):
    """RMS norms, rotated queries and keys, a gated feed-forward layer."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.n1, self.n2, self.heads = nn.RMSNorm(d), nn.RMSNorm(d), d // 64
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.gate, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((d, 3 * d), (d, 3 * d), (3 * d, d))
        )
        angle = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
        self.register_buffer("cos", torch.cos(angle).repeat(1, 2))
        self.register_buffer("sin", torch.sin(angle).repeat(1, 2))

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, d))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Waves(nn.Module):
    """A product between long element-wise chains."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mix, self.w = nn.Linear(d, d), nn.Parameter(torch.rand(6, d))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x)
        for w in self.w:
            y = torch.sin(y * w) + torch.exp(-y * y) * torch.sigmoid(y) + 0.1 * y
        y = y - y.mean(-1, keepdim=True)
        return x + y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * torch.softmax(y, -1)


def rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(BATCH, *shape, device=DEVICE, dtype=DTYPE)


def stack(block: Callable[[int], nn.Module], d: int, layers: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(block(d) for _ in range(layers)))


SIDE = 56 if CUDA else 14
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "encoder": (stack(Encoder, D, LAYERS), rows(LENGTH, D)),
    "image": (stack(Image, 96 if CUDA else 32, LAYERS // 2), rows(96 if CUDA else 32, SIDE, SIDE)),
    "decoder": (stack(Decoder, D, LAYERS), rows(LENGTH, D)),
    "waves": (stack(Waves, D, LAYERS), rows(LENGTH, D)),
}


def served(fast: nn.Module, x: Tensor, seconds: float) -> list[tuple[float, float]]:
    """When each call began and how long it took, until what competes in the background has been compared, and a little longer."""
    calls, begin, end, told = list[tuple[float, float]](), time.perf_counter(), seconds, 0.0
    while (now := time.perf_counter() - begin) < end:
        fast(x)
        timer.synchronize(DEVICE)
        calls.append((now, time.perf_counter() - begin - now))
        if now >= told + TOLD_S:  # a run that is cut shows how far it came
            print(json.dumps(by_second([c for c in calls if c[0] >= told])), flush=True)
            told = now
        if end == seconds and not waiting(fast):
            end = min(seconds, now + AFTER_S)
    return calls


def by_second(calls: list[tuple[float, float]]) -> list[dict[str, float]]:
    """Calls, their median and the longest, second by second."""
    seconds: dict[int, list[float]] = {}
    for at, took in calls:
        seconds.setdefault(int(at), []).append(took * 1e6)
    return [
        {"second": s, "calls": len(v), "median_us": statistics.median(v), "longest_us": max(v)}
        for s, v in seconds.items()
    ]


@torch.no_grad()
def measured(name: str, seconds: float) -> dict[str, Any]:
    """One model: calls until all is decided, and torch.compile beside it."""
    torch.manual_seed(0)
    make, data = MODELS[name]
    model, x = make().to(DEVICE, DTYPE).eval(), data()
    begin = time.perf_counter()
    fast = tensorlogic.optimize(model, x)
    ready = time.perf_counter() - begin
    if not waiting(fast):
        return {"ready_s": ready, "outcome": fast.report.outcome, "reason": "nothing competes"}
    cores = idle_resources.idle_cores()
    print(f"{name}: ready in {ready:.1f} s, {cores:.0f} cores idle", flush=True)
    calls = served(fast, x, seconds)
    begin = time.perf_counter()
    peer = torch.compile(model, mode=PEER, dynamic=False)
    for _ in range(3):
        peer(x)
    compile_s = time.perf_counter() - begin
    last = {"eager": lambda: model(x), "compile": lambda: peer(x), "ours": lambda: fast(x)}
    samples = timer.wall_samples(last, DEVICE, 2.0)
    rows, limit = by_second(calls), AS_FAST * samples.median("compile")
    late = max((r["second"] for r in rows if r["median_us"] > limit), default=-1)
    paused = sorted((t for _, t in calls), reverse=True)[:5]
    return {
        "ready_s": ready,
        "idle_cores": cores,
        "compile_s": compile_s,
        "us": {key: samples.median(key) for key in last},
        "over_compile": samples.ratio("ours", "compile"),
        "as_fast_after_s": None if rows and late == rows[-1]["second"] else late + 1,
        "decided_after_s": calls[-1][0],
        "longest_s": paused,
        "p99_us": statistics.quantiles([t * 1e6 for _, t in calls], n=100)[-1],
        "seconds": rows,
        "report": str(fast.report),
    }


def main() -> int:
    """Measure the models that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["encoder"], choices=list(MODELS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {}
    for name in given.names:
        found[name] = record = measured(name, given.seconds)
        print(name, json.dumps({k: v for k, v in record.items() if k != "report"}))
        print(record.get("report", ""), flush=True)
        if given.out:
            about = {"device": machine(), "date": str(datetime.date.today())}
            about |= {"torch": torch.__version__, "dtype": str(DTYPE)}
            given.out.write_text(json.dumps({**about, "models": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
