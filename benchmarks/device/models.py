"""Whole models on a GPU: reports of `optimize`, captured latency, models of timm and transformers where they are installed.

python benchmarks/device/models.py [part ...]   parts: resnet, transformer, training, latency, zoo (all of them by default)
"""

from __future__ import annotations

import copy
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic
from tensorlogic.measure import timer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Residual(nn.Module):
    """1×1, 3×3, 1×1 convolutions with batch norm beside a skip connection."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width

        def unit(i: int, o: int, k: int, s: int = 1) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o))

        self.a, self.b = unit(inputs, width, 1), unit(width, width, 3, stride)
        self.c, self.skip = unit(width, outputs, 1), nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = unit(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))) + self.skip(x))


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """ResNet-50 by default."""
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate(blocks):
        for i in range(count):
            layers.append(Residual(inputs, 64 << stage, 2 if i == 0 and stage else 1))
            inputs = 4 * (64 << stage)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)
    ).eval()


def transformer(layers: int = 12, d: int = 768, heads: int = 12) -> nn.Module:
    """PyTorch's own pre-norm encoder."""
    layer = nn.TransformerEncoderLayer(
        d, heads, 4 * d, 0.0, "gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def report(name: str, model: nn.Module, inputs: Any, training: bool = False) -> nn.Module:
    """Optimise and say what came out."""
    begin = time.perf_counter()
    fast = tensorlogic.optimize(model, inputs, training=training)
    print(f"\n== {name} ({time.perf_counter() - begin:.1f} s)\n{fast.report}", flush=True)
    return fast


def error(out: Tensor, ref: Tensor) -> float:
    """‖out − ref‖ / ‖ref‖ in float64."""
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def latency() -> None:
    """p50, p99, p99.9 and worst of 10,000 synchronised calls of a small network."""
    model = nn.Sequential(
        nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)
    )
    model = model.to(DEVICE, torch.float16 if DEVICE.type == "cuda" else torch.float32).eval()
    x = torch.randn(8, 256, device=DEVICE, dtype=next(model.parameters()).dtype)
    fast = tensorlogic.capture(model)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "eager": model,
        "capture": fast,
        "optimize": tensorlogic.optimize(model, x),
        "compile": torch.compile(copy.deepcopy(model), mode="reduce-overhead", dynamic=False),
    }
    for name, call in ways.items():
        for _ in range(20):
            call(x)
        times = sorted(timer.once(lambda call=call: call(x), DEVICE) for _ in range(10_000))
        at = [times[int(q * len(times))] for q in (0.5, 0.99, 0.999)]
        print(
            f"latency {name:9s} p50 {at[0]:.1f} p99 {at[1]:.1f} p99.9 {at[2]:.1f} worst {times[-1]:.1f} us",
            flush=True,
        )
    steps = tensorlogic.capture(chain, unsafe_views=True)
    for _ in range(5):
        steps(x)
    host = statistics.median(
        timer.host_samples({"one": [lambda: steps(x)]}, DEVICE, 0.2).values["one"]
    )
    print(
        f"host time of a captured call of 50 kernels: {host:.2f} us, reason {steps.reason}",
        flush=True,
    )


def chain(x: Tensor) -> Tensor:
    """50 kernels."""
    for _ in range(50):
        x = x + 1
    return x


def zoo() -> None:
    """Models of timm and transformers with random weights."""
    found: list[tuple[str, Callable[[], tuple[nn.Module, Any]]]] = []
    if importlib.util.find_spec("timm"):
        import timm

        image = torch.randn(8, 3, 224, 224, device=DEVICE, dtype=torch.float16)
        for name in ("resnet18", "vit_tiny_patch16_224", "convnext_atto", "mobilenetv3_small_100"):
            found.append((name, lambda name=name: (timm.create_model(name), image)))
    if importlib.util.find_spec("transformers"):
        import transformers as hf

        ids = {"input_ids": torch.randint(0, 1000, (4, 64), device=DEVICE)}
        small = {"vocab_size": 1000}
        for config, kind in (
            (hf.BertConfig(num_hidden_layers=4, **small), hf.BertModel),
            (hf.GPT2Config(n_layer=4, **small), hf.GPT2LMHeadModel),
            (
                hf.LlamaConfig(
                    num_hidden_layers=4,
                    hidden_size=512,
                    intermediate_size=1024,
                    num_attention_heads=8,
                    **small,
                ),
                hf.LlamaForCausalLM,
            ),
            (hf.T5Config(num_layers=2, **small), hf.T5EncoderModel),
        ):
            found.append((kind.__name__, lambda config=config, kind=kind: (kind(config), ids)))
    for name, make in found:
        model, inputs = make()
        model = model.to(DEVICE, torch.float16).eval()
        fast = report(name, model, inputs)
        out, plain = (first(called(m, inputs)) for m in (fast, model))
        print(f"zoo {name}: difference from eager {error(out, plain):.1e}", flush=True)


def called(model: nn.Module, inputs: Any) -> Any:
    """The model's output for a tensor or for keyword arguments."""
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def first(out: Any) -> Tensor:
    """The first tensor of an output."""
    return (
        out
        if isinstance(out, Tensor)
        else next(v for v in torch.utils._pytree.tree_leaves(out) if isinstance(v, Tensor))
    )


def main(parts: list[str]) -> None:
    """Run the parts that were asked for."""
    half = torch.float16
    with torch.no_grad():
        for batch in (1, 32):
            if "resnet" in parts:
                report(
                    f"resnet batch {batch}",
                    resnet().to(DEVICE, half),
                    torch.randn(batch, 3, 224, 224, device=DEVICE, dtype=half),
                )
            if "transformer" in parts:
                report(
                    f"transformer batch {batch}",
                    transformer().to(DEVICE, half),
                    torch.randn(batch, 128, 768, device=DEVICE, dtype=half),
                )
        if "latency" in parts:
            latency()
        if "zoo" in parts:
            zoo()
    if "training" in parts:
        x = torch.randn(8, 256, 768, device=DEVICE, dtype=torch.bfloat16)
        report("training", transformer(6).to(DEVICE, torch.bfloat16).train(), x, training=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["resnet", "transformer", "training", "latency", "zoo"])
