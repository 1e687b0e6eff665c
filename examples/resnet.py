"""A small residual network, optimised: batch norm folded, convolutions fused, weights packed (CPU) or calls captured (GPU).

python examples/resnet.py [--size 96] [--batch 1]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic


class Residual(nn.Module):
    """Two 3×3 convolutions with batch norm beside a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.b = nn.Sequential(
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.skip = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.b(F.relu(self.a(x))) + self.skip(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    widths = (32, 64, 128)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1),
        *(Residual(i, o, 2) for i, o in zip((32, *widths), widths, strict=False)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    model = model.to(device, dtype).eval()
    x = torch.randn(options.batch, 3, options.size, options.size, device=device, dtype=dtype)
    with torch.no_grad():
        fast = tensorlogic.optimize(model, x)
        print(fast.report)
        report = fast.report
        if report.before_us is not None and report.after_us is not None:
            print(
                f"before {report.before_us / 1e3:.2f} ms, after {report.after_us / 1e3:.2f} ms: {report.outcome}"
            )
        difference = (fast(x) - model(x)).norm() / model(x).norm()
        print(f"difference from eager {difference.item():.1e}")


if __name__ == "__main__":
    main()
