"""oneDNN's products are offered for the layouts of a weight that it multiplies fast, and for no other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS
from tensorlogic.kernels.cpu import onednn
from tensorlogic.measure.verification import InputSet

CPU = torch.device("cpu")
N, K, ROWS = 458, 569, 136
LAYOUTS: dict[str, tuple[Callable[[], torch.Tensor], bool]] = {
    "as it lies": (lambda: torch.randn(N, K), True),
    "transposed": (lambda: torch.randn(K, N).t(), True),
    "padded": (lambda: torch.randn(N, K + 64)[:, :K], False),
    "transposed, padded": (lambda: torch.randn(K, N + 8).t()[:N], False),
    "stepped": (lambda: torch.randn(N, 2 * K)[:, ::2], False),
    "repeated": (lambda: torch.randn(1, K).expand(N, K), False),
    "a padded column": (lambda: torch.randn(N, 64)[:, :1], False),
}
pytestmark = pytest.mark.skipif(
    onednn.onednn_available("cpu") is not None, reason="needs PyTorch's oneDNN"
)


def arguments(op: str, weight: torch.Tensor) -> tuple[Any, ...]:
    x, bias = torch.randn(ROWS, weight.shape[1]), torch.randn(len(weight))
    ones = torch.ones(weight.shape[1])
    return {
        "linear": (x, weight, bias, None, "relu", False),
        "gelu_linear": (x, weight, bias, "none", False),
        "layer_norm_linear": (x, ones, ones, weight, bias, 1e-5, False),
        "matmul": (x, weight.t(), "none", False),
    }[op]


def least_us(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        begin = time.thread_time()
        call()
        times.append(1e6 * (time.thread_time() - begin))
    return min(times)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("op", ["linear", "gelu_linear", "layer_norm_linear", "matmul"])
def test_what_is_offered_is_fast(op: str, name: str, one_thread: None) -> None:
    """A weight with gaps goes to a kernel of oneDNN's that takes 600 to 900 times as long as PyTorch's product. By the work of one
    thread."""
    make, fast = LAYOUTS[name]
    args = arguments(op, make())
    key = OPS[op].key(args, "inference")
    candidate = OPS[op].candidates["onednn.linear"]
    assert (candidate.unfit(key) is None) == fast
    given = InputSet(OPS[op], key, CPU, seed=0).dynamic
    plain = OPS[op].candidates[EAGER].bind(key, {}, CPU)
    with torch.no_grad():
        most_us = 1000 + 40 * least_us(lambda: plain(*given))
        own = {id: c for id, c in OPS[op].candidates.items() if id.startswith(("onednn.", "cpu."))}
        for id, found in own.items():
            for config in found.configs(key) if found.unfit(key) is None else ():
                launch = found.bind(key, config, CPU)
                took_us = least_us(lambda run=launch: run(*given))  # type: ignore[misc]
                assert took_us < most_us, (id, config)
