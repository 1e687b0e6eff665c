"""Independent branches on streams of their own: what `optimize` decides about them, and that every replay gives the same bits.

python benchmarks/device/branches.py [model ...]   models: two, four, heads, inception, resnet (all by default)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from models import DEVICE, error, resnet
from torch import Tensor, nn

import tensorlogic

REPLAYS = 300


class Towers(nn.Module):
    """Networks beside each other that meet at the end."""

    def __init__(self, count: int, d: int, depth: int) -> None:
        super().__init__()

        def tower() -> nn.Sequential:
            return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(d, d), nn.GELU())))

        self.towers = nn.ModuleList(tower() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.normalize(t(x), dim=-1) for t in self.towers], -1)


class Heads(nn.Module):
    """Queries, keys and values by products of their own, layer after layer."""

    def __init__(self, layers: int = 6, d: int = 768) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(d, d) for _ in range(4)) for _ in range(layers))  # fmt: skip
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = norm(x)
            q, k, v = (f(y).view(b, s, 12, d // 12).transpose(1, 2) for f in list(layer)[:3])
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d)
            x = x + layer[3](y)
        return x


class Inception(nn.Module):
    """Convolutions of three sizes beside pooling, block after block."""

    def __init__(self, blocks: int = 4, c: int = 192) -> None:
        super().__init__()

        def unit(i: int, o: int, k: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(i, o, k, padding=k // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU()
            )

        def block() -> nn.ModuleList:
            q = c // 4
            two, three = nn.Sequential(unit(c, q, 1), unit(q, q, 3)), (unit(c, q, 1), unit(q, q, 3))
            return nn.ModuleList(
                [unit(c, q, 1), two, nn.Sequential(*three, unit(q, q, 3)), unit(c, q, 1)]
            )

        self.blocks = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for a, b, c, d in self.blocks:  # type: ignore[misc]
            x = torch.cat([a(x), b(x), c(x), d(F.max_pool2d(x, 3, 1, 1))], 1)
        return x


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "two": (lambda: Towers(2, 512, 4), (32, 512)),
    "four": (lambda: Towers(4, 1024, 4), (64, 1024)),
    "heads": (Heads, (1, 128, 768)),
    "inception": (Inception, (1, 192, 28, 28)),
    "resnet": (resnet, (1, 3, 224, 224)),
}


@torch.no_grad()
def case(name: str) -> None:
    """Optimise, replay, change a weight."""
    torch.manual_seed(0)
    make, shape = CASES[name]
    model = make().to(DEVICE, torch.half).eval()
    inputs = [torch.randn(shape, device=DEVICE, dtype=torch.half) for _ in range(3)]
    begin = time.perf_counter()
    fast = tensorlogic.optimize(model, (inputs[0],))
    ready, report = time.perf_counter() - begin, fast.report
    rows = [r for r in report.rows if r.op == "streams"]
    said = "no branches"
    for r in rows:
        said = f"{r.count} sections, {r.candidate}: {r.refused or 'kept'}"
        if r.ratio is not None:
            said += f", {r.before_us:.1f} -> {r.after_us:.1f} us, {r.ratio[0]:.3f} [{r.ratio[1]:.3f}, {r.ratio[2]:.3f}]"
    print(f"{name}: {report.outcome}, ready {ready:.1f} s; {said}", flush=True)
    first = [fast(x) for x in inputs]
    same = all(fast(inputs[i % 3]).equal(first[i % 3]) for i in range(REPLAYS))
    wide = make().to(DEVICE, torch.double).eval()
    wide.load_state_dict(model.state_dict())
    errors = [error(fast(x), wide(x.double())) for x in inputs]
    plain = [error(model(x), wide(x.double())) for x in inputs]
    weight = next(p for n, p in fast.named_parameters() if n.endswith("weight"))
    weight.mul_(0.5)
    changed = error(fast(inputs[0]), model(inputs[0]))
    print(
        f"   {REPLAYS} replays the same: {same}; error {max(errors):.2e}, eager's {max(plain):.2e}; "
        f"after a changed weight {changed:.2e} from eager's"
    )


if __name__ == "__main__":
    for asked in sys.argv[1:] or CASES:
        case(asked)
