"""A float16 Transformer on the CPU that knows nothing but torch: run it as it is, then with TENSORLOGIC_ENABLE=1.

    python examples/half_transformer.py
    TENSORLOGIC_ENABLE=1 python examples/half_transformer.py

The answers are the same; the times are what `tensorlogic.enable()` changes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """Tokens [B, S] -> logits [B, classes] by an encoder of plain torch.nn layers."""

    def __init__(self, width: int, layers: int, words: int = 1000, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encode = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decide = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decide(self.encode(self.embed(tokens)).mean(1))


def median_ms(call: Callable[[], object], seconds: float) -> float:
    """Median time of calls within about `seconds`, after a first one."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Classifier(options.width, options.layers).half()
    for batch in options.batches:
        tokens = torch.randint(1000, (batch, options.length))
        target = torch.randint(10, (batch,))

        def step(tokens: Tensor = tokens, target: Tensor = target) -> Tensor:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).float(), target)
            loss.backward()
            return loss.detach()

        model.train()
        loss = step()
        gradient = torch.cat(
            [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
        )
        training = median_ms(step, options.seconds)
        model.eval()
        with torch.no_grad():
            logits = model(tokens)
            inference = median_ms(lambda tokens=tokens: model(tokens), options.seconds)  # type: ignore[misc]
        print(f"batch {batch} classes {' '.join(map(str, logits.argmax(1).tolist()))}")
        print(f"batch {batch} loss {loss:.3f} gradient norm {gradient.norm():.3f}")
        print(
            f"batch {batch} inference {inference:.1f} ms, training step {training:.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
