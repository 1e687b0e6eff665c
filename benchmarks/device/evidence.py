"""What every candidate of the linear family takes on this GPU, forward and backward, and what was chosen.

python benchmarks/device/evidence.py [sizes, default 256 1024 4096]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

import tensorlogic
from tensorlogic.autotune import tune

GELU = "gelu_tanh"


def inputs(n: int) -> dict[str, torch.Tensor]:
    """Square problems in float16; everything but the running statistics wants a gradient."""
    made = {
        "x": torch.randn(n, n),
        "w": torch.randn(n, n) * n**-0.5,
        "residual": torch.randn(n, n),
        "bias": torch.randn(n),
        "gamma": 1 + 0.1 * torch.randn(n),
        "beta": 0.1 * torch.randn(n),
        "mean": 0.1 * torch.randn(n),
        "var": 1 + 0.1 * torch.randn(n).abs(),
    }
    fixed = ("mean", "var")
    return {k: t.cuda().half().requires_grad_(k not in fixed) for k, t in made.items()}


OPS: dict[str, Callable[[Mapping[str, torch.Tensor]], torch.Tensor]] = {
    "linear_residual_relu": lambda t: tensorlogic.linear_residual_relu(
        t["x"], t["w"], t["bias"], t["residual"]
    ),
    "linear_gelu": lambda t: tensorlogic.linear(t["x"], t["w"], t["bias"], activation=GELU),
    "gelu_linear": lambda t: tensorlogic.gelu_linear(t["x"], t["w"], t["bias"]),
    "layer_norm_linear": lambda t: tensorlogic.layer_norm_linear(
        t["x"], t["gamma"], t["beta"], t["w"], t["bias"]
    ),
    "linear_batch_norm_relu": lambda t: tensorlogic.linear_batch_norm_relu(
        t["x"], t["w"], t["bias"], t["mean"], t["var"], t["gamma"], t["beta"]
    ),
    "matmul": lambda t: tensorlogic.matmul(t["x"], t["w"].t()),
}


def brief(config: Mapping[str, Any]) -> str:
    """A configuration in a few characters."""
    parts = config.get("products", [config])
    return " | ".join(",".join(str(v) for v in part.values()) for part in parts)


def main() -> None:
    """Tune each op at each size without and with gradients; print the evidence of every plan."""
    for n in [int(a) for a in sys.argv[1:]] or [256, 1024, 4096]:
        tensors = inputs(n)
        for name, fn in OPS.items():
            with torch.no_grad():
                plans = tune.whole(fn, tensors).plans
            plans += tune.whole(fn, tensors).plans
            for plan in plans:
                print(f"{name} {n} {plan.key.direction}: {plan.eager}, captured {plan.captured}")
                for e in plan.evidence:
                    if e.status == "measured":
                        times = f"{e.device_us:9.2f} us device {e.host_us:8.2f} us host"
                        print(f"    {e.candidate:24s} {times}  {brief(e.config)}")
                    elif plan.key.device not in e.reason.lower():
                        print(f"    {e.candidate:24s} {e.reason[:100]}")


if __name__ == "__main__":
    main()
