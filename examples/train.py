"""Training through `optimize`: a character model on the text of Python's own licence, before and after.

python examples/train.py [--steps 60]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic

CONTEXT = 16


class Characters(nn.Module):
    """The last characters [B, CONTEXT] -> logits of the next [B, 128]."""

    def __init__(self, width: int = 32, hidden: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.up, self.mid, self.out = (
            nn.Linear(CONTEXT * width, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, 128),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.up(self.embed(x).flatten(1)))
        return self.out(F.relu(y + self.mid(y)))


def licence(device: str) -> tuple[Tensor, Tensor]:
    """Every window of the licence and the character that follows it."""
    import _sitebuiltins
    import site  # noqa: F401  which puts `license` among the builtins

    printer = next(
        v
        for v in vars(__import__("builtins")).values()
        if isinstance(v, _sitebuiltins._Printer) and "license" in repr(v)
    )
    printer._Printer__setup()  # type: ignore[attr-defined]
    text = "\n".join(printer._Printer__lines)  # type: ignore[attr-defined]
    codes = torch.tensor([min(ord(c), 127) for c in text], device=device)
    return codes.unfold(0, CONTEXT, 1)[:-1], codes[CONTEXT:]


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> tuple[float, float]:
    """(last loss, median milliseconds a step)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    picks = torch.Generator(x.device).manual_seed(0)
    times, loss = [], torch.zeros(())
    wait: Callable[[], None] = torch.cuda.synchronize if x.is_cuda else lambda: None
    for _ in range(steps):
        at = torch.randint(len(x), (256,), generator=picks, device=x.device)
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x[at]), y[at])
        loss.backward()
        optimizer.step()
        wait()
        times.append(time.perf_counter() - begin)
    return loss.item(), 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x, y = licence(device)
    model = Characters().to(device)
    twin = copy.deepcopy(model)
    fast = tensorlogic.optimize(model, x[:256], training=True)
    print(fast.report)
    before, after = train(twin, x, y, options.steps), train(fast, x, y, options.steps)
    print(f"before: loss {before[0]:.3f}, {before[1]:.2f} ms a step")
    print(f"after:  loss {after[0]:.3f}, {after[1]:.2f} ms a step ({fast.report.outcome})")


if __name__ == "__main__":
    main()
