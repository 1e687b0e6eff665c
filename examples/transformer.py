"""A Transformer encoder of plain torch.nn layers, optimised; its weights may change afterwards.

python examples/transformer.py [--layers 2] [--width 256] [--length 64]
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import tensorlogic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        options.width,
        options.width // 64,
        4 * options.width,
        0.0,
        "gelu",
        batch_first=True,
        norm_first=True,
    )
    model = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)
    model = model.to(device, torch.float16).eval()
    x = torch.randn(1, options.length, options.width, device=device, dtype=torch.float16)
    with torch.no_grad():
        fast = tensorlogic.optimize(model, x)
        print(fast.report)
        report = fast.report
        if report.before_us is not None and report.after_us is not None:
            print(
                f"before {report.before_us / 1e3:.2f} ms, after {report.after_us / 1e3:.2f} ms: {report.outcome}"
            )
        for (
            p
        ) in fast.parameters():  # an update in place, as an optimizer or load_state_dict makes it
            p.mul_(0.9)
        difference = (fast(x).float() - model(x).float()).norm() / model(x).float().norm()
        print(f"difference from eager {difference.item():.1e}")


if __name__ == "__main__":
    main()
