"""Host time of warm eager calls on a GPU at 128, in µs: `python benchmarks/host_calls.py [--python] [OP ...]`.

Every fused op with and without gradients beside PyTorch's own ops, float16 [128, 128], by the plans at hand: nothing is measured for them.
`--python`: without the compiled calls.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import tensorlogic
from tensorlogic.native import call_extension, cuda_driver

CALLS, ROUNDS = 200, 5


def host_us(fn: Callable[..., Any], *args: Any) -> float:
    """The fastest round of calls that are queued, nothing waited for."""
    for _ in range(20):
        fn(*args)
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            fn(*args)
        best = min(best, time.perf_counter() - begin)
    torch.cuda.synchronize()
    return best / CALLS * 1e6


def ops() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Name -> ours and PyTorch's, of x [128, 128]."""
    torch.manual_seed(0)
    n, about = 128, {"device": "cuda", "dtype": torch.float16}
    w, res, b = torch.randn(n, n, **about), torch.randn(n, n, **about), torch.randn(n, **about)
    one, mean, var = torch.ones(n, **about), torch.zeros(n, **about), torch.ones(n, **about)
    target = torch.randint(n, (n,), device="cuda")
    k = torch.randn(1, 2, n, 64, **about)
    t = tensorlogic
    return {
        "linear_residual_relu": (
            lambda x: t.linear_residual_relu(x, w, b, res),
            lambda x: torch.relu(F.linear(x, w, b) + res),
        ),
        "linear": (lambda x: t.linear(x, w, b), lambda x: F.linear(x, w, b)),
        "gelu_linear": (lambda x: t.gelu_linear(x, w, b), lambda x: F.linear(F.gelu(x), w, b)),
        "dropout_linear": (
            lambda x: t.dropout_linear(x, w, b, 0.1, True),
            lambda x: F.linear(F.dropout(x, 0.1), w, b),
        ),
        "layer_norm_linear": (
            lambda x: t.layer_norm_linear(x, one, b, w, b),
            lambda x: F.linear(F.layer_norm(x, (n,), one, b), w, b),
        ),
        "linear_batch_norm_relu": (
            lambda x: t.linear_batch_norm_relu(x, w, b, mean, var, one, b),
            lambda x: torch.relu(F.batch_norm(F.linear(x, w, b), mean, var, one, b)),
        ),
        "matmul": (lambda x: t.matmul(x, w), lambda x: x @ w),
        "add_relu": (lambda x: t.add_relu(x, res), lambda x: torch.relu(x + res)),
        "softmax": (lambda x: t.softmax(x, -1), lambda x: torch.softmax(x, -1)),
        "sum": (lambda x: t.sum(x), lambda x: x.sum()),
        "softmax_cross_entropy": (
            lambda x: t.softmax_cross_entropy(x, target),
            lambda x: F.cross_entropy(x, target),
        ),
        "attention_scores": (
            lambda x: t.attention_scores(x.view(1, 2, n, 64), k, 0.125),
            lambda x: torch.softmax(x.view(1, 2, n, 64) @ k.transpose(-1, -2) * 0.125, -1),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="store_true", help="without the compiled calls")
    parser.add_argument("ops", nargs="*", help="which; all unless said")
    options = parser.parse_args()
    if options.python:
        call_extension._state.append("left out")
    x = torch.randn(128, 128, device="cuda", dtype=torch.float16)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    print(f"driver: {cuda_driver.driver(x.device)}; calls: {call_extension._state}")
    print(
        f"{'op':<24}{'ours':>8}{'eager':>8}{'recorded':>10}{'eager':>8}{'both ways':>11}{'eager':>8}"
    )
    for name, (ours, eager) in ops().items():
        if options.ops and name not in options.ops:
            continue
        print(f"{name:<24}{row(ours, eager, x)}", flush=True)


def both_ways(fn: Callable[..., Any], x: torch.Tensor, dy: torch.Tensor) -> Any:
    """Forward and backward."""
    return torch.autograd.grad(fn(x), x, dy)


def row(ours: Callable[..., Any], eager: Callable[..., Any], x: torch.Tensor) -> str:
    """Without gradients, recorded, recorded and run backward: ours and PyTorch's."""
    with torch.no_grad():
        plain = [host_us(fn, x) for fn in (ours, eager)]
    leaf = x.clone().requires_grad_()
    recorded = [host_us(fn, leaf) for fn in (ours, eager)]
    seed = torch.ones_like(eager(leaf))
    both = [host_us(both_ways, fn, leaf, seed) for fn in (ours, eager)]
    return (
        f"{plain[0]:8.2f}{plain[1]:8.2f}{recorded[0]:10.2f}{recorded[1]:8.2f}"
        f"{both[0]:11.2f}{both[1]:8.2f}"
    )


if __name__ == "__main__":
    with tensorlogic.policy(tune="off"):
        main()
