"""What rewriting left over, compiled by Inductor: four models by eager, torch.compile and the programs that `optimize` compares.

python benchmarks/left_over.py [name ...] [--training] [--out FILE.json] [--seconds 150]

On a GPU in float16 at usual sizes, elsewhere in float32 at small ones. Every program of one `optimize` call is timed beside the others,
in the same rounds: ours, the whole model by Inductor, ours with what is left over by Inductor, and what `optimize` returns. With
--training a call is forward and backward, and errors are those of the gradients.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler.inductor.comparison import Contest
from tensorlogic.compiler.trace.widening import widen
from tensorlogic.measure import timer

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.float16 if CUDA else torch.float32
D, LAYERS, BATCH, LENGTH = (768, 6, 8, 128) if CUDA else (128, 2, 2, 32)
BUDGET_S = 60.0


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


def error(out: Tensor, ref: Tensor) -> float:
    """Relative, root mean square."""
    return float((out - ref).norm() / ref.norm())


def stepping(call: Callable[[Tensor], Tensor], x: Tensor, wrt: list[Tensor]) -> Callable[[], Any]:
    """One call, or forward and backward where there is something to learn; gives one vector."""
    if not wrt:
        return lambda: call(x)
    return lambda: list(
        torch.autograd.grad(call(x).float().square().mean(), wrt, allow_unused=True)
    )


def vector(out: Any) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in torch.utils._pytree.tree_leaves(out)])


def measured(name: str, training: bool) -> dict[str, Any]:
    """One model: times of all programs in the same rounds, errors beside float64, the report's rows."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    make, data = MODELS[name]
    model = make().to(DEVICE, DTYPE).eval()
    x = data()
    rivals: dict[str, Any] = {}
    faster = Contest._faster

    def noting(self: Contest, rival: Any, row: Any, error: float, outcome: str) -> bool:
        if self.base is not None:
            rivals.setdefault("ours", self.base)
        rivals["whole model by Inductor" if outcome else "left over by Inductor"] = rival
        return faster(self, rival, row, error, outcome)

    wide = copy.deepcopy(model).double()
    peer = copy.deepcopy(model)

    def step(call: Callable[[Tensor], Tensor], holder: nn.Module) -> Callable[[], Any]:
        return stepping(call, x, [*holder.parameters()] if training else [])

    with torch.set_grad_enabled(training):
        ref = vector(stepping(wide, widen(x, torch.float64), [*wide.parameters()] * training)())
        Contest._faster = noting  # type: ignore[method-assign]
        try:
            begin = time.perf_counter()
            given = copy.deepcopy(model)
            fast = tensorlogic.optimize(given, x, training=training, budget_s=BUDGET_S)
            optimize_s = time.perf_counter() - begin
        finally:
            Contest._faster = faster  # type: ignore[method-assign]
        begin = time.perf_counter()
        mode = "reduce-overhead" if CUDA else "default"
        compiled = step(torch.compile(peer, mode=mode, dynamic=False), peer)
        for _ in range(3):
            compiled()
        compile_s = time.perf_counter() - begin
        calls: dict[str, Callable[[], Any]] = {
            "eager": step(model, model),
            f"torch.compile {mode}": compiled,
            **{key: step(p.serving, fast) for key, p in rivals.items()},
            "returned": step(fast, fast),
        }
        errors = {key: error(vector(call()), ref) for key, call in calls.items()}
        samples = timer.wall_samples(calls, DEVICE, 3.0)
    record = {
        "us": {key: samples.median(key) for key in calls},
        "over_eager": {key: samples.ratio("eager", key) for key in calls},
        "error": errors,
        "optimize_s": optimize_s,
        "compile_s": compile_s,
        "outcome": fast.report.outcome,
        "serves": fast._program.left_over if getattr(fast, "_program", None) else None,
        "report": str(fast.report),
    }
    print(f"== {name}: {record['outcome']}, optimize {optimize_s:.1f} s, compile {compile_s:.1f} s")
    for key in calls:
        ratio, low, high = record["over_eager"][key]
        print(
            f"   {key:<28} {record['us'][key]:9.1f} us  {ratio:5.2f}x [{low:.2f}, {high:.2f}]  error {errors[key]:.2e}"
        )
    print(fast.report, flush=True)
    return record


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*MODELS, []])
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no further model after that"
    )
    given = parser.parse_args()
    torch.compile(lambda v: v.sin() + 1)(
        torch.ones(8, device=DEVICE)
    )  # its import is nobody's time
    begin, found = time.perf_counter(), {}
    for name in given.names or MODELS:
        if time.perf_counter() - begin < given.seconds:
            found[name] = measured(name, given.training)
            if given.out:
                machine = torch.cuda.get_device_name() if CUDA else platform.processor()
                about = {"machine": machine, "torch": torch.__version__, "dtype": str(DTYPE)}
                given.out.write_text(json.dumps({**about, "models": found}, indent=1))
    return (
        0 if all(r["error"]["returned"] < 1.5 * r["error"]["eager"] for r in found.values()) else 1
    )


if __name__ == "__main__":
    raise SystemExit(main())
