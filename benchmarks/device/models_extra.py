"""Whole models on a GPU, what the other scripts do not reach: varying sizes, training, time to ready, host time of a replay.

python benchmarks/device/models_extra.py [part ...] [--small] [--seconds S] [--out FILE.json]
parts: host, ready, dynamic, training, convolutions (all of them by default); --small: sizes for a trial on a CPU
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # torch.compile compiles from cold

import torch
import torch.nn.functional as F
from models import error, resnet
from replay_host import table as host_table
from torch import Tensor, nn

import tensorlogic
from tensorlogic.measure import timer

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
HALF = torch.float16 if CUDA else torch.float32
MODE = "reduce-overhead" if CUDA else "default"


@dataclass
class Row:
    """One finding: what it is, its value, its unit, and the most (or, negated, the least) that is aimed at."""

    part: str
    what: str
    value: float
    unit: str = ""
    aim: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        """True where there is no aim or it is met."""
        return self.aim is None or (
            self.value <= self.aim if self.aim >= 0 else self.value >= -self.aim
        )

    def __str__(self) -> str:
        aim = "" if self.aim is None else f"{'<=' if self.aim >= 0 else '>='} {abs(self.aim):g}"
        mark = "    " if self.aim is None else ("ok  " if self.ok else "MISS")
        return f"{mark} {self.part:12s} {self.what:58s} {self.value:10.4g} {self.unit:3s} {aim:8s} {self.note}"


class Table(list[Row]):
    """Rows, shown as they come and kept in a file, so that a run that is cut leaves what it found."""

    def __init__(self, out: Path | None) -> None:
        super().__init__()
        self.out = out

    def put(self, *row: Any, **more: Any) -> None:
        """One more row."""
        self.append(Row(*row, **more))
        print(self[-1], flush=True)
        if self.out:
            name = torch.cuda.get_device_name() if CUDA else "cpu"
            rows = [{**asdict(r), "ok": r.ok} for r in self]
            whole = {"device": name, "torch": torch.__version__, "rows": rows}
            self.out.write_text(json.dumps(whole, indent=1) + "\n")


class Block(nn.Module):
    """A pre-norm Transformer block in PyTorch's plain calls, without the one fused call that `nn.TransformerEncoder` has."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, D]."""
        b, s, d = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, s, 3, self.heads, d // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


def blocks(layers: int, d: int = 768, heads: int = 12) -> nn.Module:
    """A Transformer."""
    return nn.Sequential(*(Block(d, heads) for _ in range(layers)), nn.LayerNorm(d)).eval()


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call gives, and the seconds until the device is done with it."""
    begin = time.perf_counter()
    out = call()
    timer.synchronize(DEVICE)
    return out, time.perf_counter() - begin


def kind(fast: nn.Module) -> str:
    """What came out of `optimize`."""
    report: Any = fast.report
    return f"{report.outcome} {report.reason} {'; '.join(report.notes)}".strip()[:90]


def host(t: Table, small: bool) -> None:
    """Microseconds of host time of replayed calls."""
    rows = host_table()
    for name, us in rows.items():
        t.put("host", name, us, "us", aim=4.0 if name == "beyond the copy" else None)


@torch.no_grad()
def ready(t: Table, small: bool) -> None:
    """Seconds until a model answers at its speed: ours, torch.compile's, and ours once plans are stored."""
    image, words = torch.randn(1, 3, 224, 224), torch.randn(1, 128, 768)
    cases = {
        "transformer": (blocks(2 if small else 12), words),
        "resnet": (resnet((1, 1, 1, 1) if small else (3, 4, 6, 3)), image),
    }
    for name, (model, given) in cases.items():
        model, x = model.to(DEVICE, HALF), given.to(DEVICE, HALF)
        torch._dynamo.reset()

        def ours(model: nn.Module = model, x: Tensor = x) -> nn.Module:
            fast = tensorlogic.optimize(copy.deepcopy(model), x)
            fast(x)
            return fast

        def theirs(model: nn.Module = model, x: Tensor = x) -> Any:
            compiled = torch.compile(copy.deepcopy(model), dynamic=False, mode=MODE)
            compiled(x)
            compiled(x)
            return compiled

        fast, first = timed(ours)
        compiled, peer = timed(theirs)
        _, again = timed(ours)
        t.put("ready", f"{name}: seconds", first, "s", note=kind(fast))
        t.put("ready", f"{name}: torch.compile's seconds", peer, "s")
        t.put("ready", f"{name}: over torch.compile's", first / peer, aim=0.5)
        t.put("ready", f"{name}: with stored plans, over torch.compile's", again / peer, aim=0.2)
        calls = {"ours": lambda f=fast, x=x: f(x), "compile": lambda f=compiled, x=x: f(x)}  # type: ignore[misc]
        ratio = timer.wall_samples(calls, DEVICE, 0.5).ratio("ours", "compile")[0]
        t.put("ready", f"{name}: time of a call over torch.compile's", ratio, aim=1.03)


@torch.no_grad()
def dynamic(t: Table, small: bool) -> None:
    """Sizes that vary, without capture: errors and times beside eager, over batches that were and were not seen before."""
    model = blocks(2 if small else 6).to(DEVICE, HALF)
    xs = [torch.randn(b, s, 768, device=DEVICE, dtype=HALF) for b, s in ((4, 64), (3, 50), (9, 33))]
    fast, seconds = timed(lambda: tensorlogic.optimize(model, xs[0], dynamic=True))
    t.put("dynamic", "seconds to ready", seconds, "s", note=kind(fast))
    wide = copy.deepcopy(model).double()
    for x in xs:
        shape = "x".join(map(str, x.shape[:2]))
        ref = wide(x.double())
        base = max(error(model(x), ref), 1e-7)
        t.put("dynamic", f"{shape}: error over eager's", error(fast(x), ref) / base, aim=1.5)
        calls = {"ours": lambda x=x: fast(x), "eager": lambda x=x: model(x)}  # type: ignore[misc]
        ratio = timer.wall_samples(calls, DEVICE, 0.3).ratio("ours", "eager")[0]
        t.put("dynamic", f"{shape}: time over eager's", ratio, aim=1.03)


def gradients(model: nn.Module, x: Tensor, times: int = 1) -> Tensor:
    """All gradients after `times` backward passes that add up."""
    model.zero_grad(set_to_none=True)
    for _ in range(times):
        model(x).float().square().mean().backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def stepper(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """One step of forward, backward and fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def learn(t: Table, part: str, model: nn.Module, x: Tensor) -> None:
    """Gradients, sums of gradients, frozen layers, statistics, five steps and the time of one, beside eager."""
    plain = copy.deepcopy(model)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    fast, seconds = timed(lambda: tensorlogic.optimize(model, x, training=True))
    t.put(part, "seconds to ready", seconds, "s", note=kind(fast))
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    t.put(part, "parameters moved by optimize", error(after, before), aim=0.0)
    wide = copy.deepcopy(plain).double()
    for times in (1, 2):
        ref = gradients(wide, x.double(), times)
        base = max(error(gradients(plain, x, times), ref), 1e-7)
        what = "gradients' error over eager's" if times == 1 else "the same, two passes added up"
        t.put(part, what, error(gradients(fast, x, times), ref) / base, aim=1.5)
    first = next(m for m in fast.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))
    first.weight.requires_grad_(False)
    fast.zero_grad(set_to_none=True)
    fast(x).float().square().mean().backward()
    t.put(part, "frozen weight got a gradient", float(first.weight.grad is not None), aim=0.0)
    first.weight.requires_grad_(True)
    fast(x).float().square().mean().backward()
    t.put(part, "unfrozen weight got none", float(first.weight.grad is None), aim=0.0)
    fast = tensorlogic.optimize(copy.deepcopy(plain), x, training=True)
    steps = {"ours": stepper(fast, x), "eager": stepper(plain, x)}
    losses = {name: [step().item() for _ in range(5)][-1] for name, step in steps.items()}
    t.put(part, "loss after five steps", abs(losses["ours"] / losses["eager"] - 1), aim=0.02)
    for (name, ours), theirs in zip(fast.named_buffers(), plain.buffers(), strict=True):
        if ours.is_floating_point() and name.endswith("running_mean"):
            t.put(part, "running mean of the first norm", error(ours, theirs), aim=0.05)
            break
    ratio = timer.wall_samples(steps, DEVICE, 1.0).ratio("ours", "eager")[0]
    t.put(part, "speed of a step over eager's", 1 / ratio, "x", aim=-0.97)


def training(t: Table, small: bool) -> None:
    """A Transformer whose forward and backward are captured through leaves that stand in for its parameters."""
    x = torch.randn(2 if small else 8, 32 if small else 256, 768, device=DEVICE)
    dtype = torch.bfloat16 if CUDA else torch.float32
    learn(t, "training", blocks(1 if small else 6).to(DEVICE, dtype).train(), x.to(dtype))


def convolutions(t: Table, small: bool) -> None:
    """A ResNet with batch statistics, in float32 and in bfloat16."""
    x = torch.randn(4 if small else 32, 3, 64 if small else 128, 64 if small else 128).to(DEVICE)
    for dtype in (torch.float32, torch.bfloat16) if CUDA else (torch.float32,):
        part = f"conv {str(dtype)[6:]}"
        learn(t, part, resnet((1, 1, 1, 1)).to(DEVICE, dtype).train(), x.to(dtype))


PARTS = {f.__name__: f for f in (host, ready, dynamic, training, convolutions)}


def main() -> None:
    """Run the parts that were asked for while time is left; leave with 1 where an aim was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    t, begin = Table(chosen.out), time.perf_counter()
    torch.compile(lambda v: v.sin() + 1)(torch.ones(8, device=DEVICE))  # Inductor's own import
    for name in chosen.parts or PARTS:
        spent = time.perf_counter() - begin
        if spent > chosen.seconds:
            print(f"     {name}: not run, {spent:.0f} s are spent")
            continue
        torch.manual_seed(0)
        PARTS[name](t, chosen.small)
        print(f"     {name} took {time.perf_counter() - begin - spent:.0f} s", flush=True)
    missed = [f"{r.part}: {r.what}" for r in t if not r.ok]
    print(f"{len(missed)} missed" + "".join(f"; {m}" for m in missed))
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
